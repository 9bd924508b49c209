"""A sample in slices gives what it gives as a whole."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_flex.data.microbatch import Slice
from megatron_flex.model import attention_cpu, attention_cuda
from megatron_flex.model.config import ModelConfig
from megatron_flex.model.prefix import PrefixStore
from tests.close import assert_close, distance
from tests.unit.model.slices import Found, packed, sliced, train, two_chains
from tests.unit.model.support import build_model, make_bert, make_config, run

pytestmark = pytest.mark.usefixtures("cpu_level")

PLAIN = make_config(max_position_embeddings=256)
GROUPED = make_config(
    num_query_groups=2, position_embedding_type="rope", swiglu=True, normalization="RMSNorm",
    add_bias_linear=False, attention_dropout=0.1, hidden_dropout=0.1,
)  # fmt: skip
MODELS = {
    "plain": PLAIN,
    "dropout": replace(PLAIN, attention_dropout=0.2, hidden_dropout=0.1),
    "grouped, rope, gated, dropout": GROUPED,
    "normed heads": replace(PLAIN, qk_layernorm=True),
    "grouped, normed heads, part rotary": replace(GROUPED, qk_layernorm=True, rotary_percent=0.5),
    "odd head size": replace(PLAIN, kv_channels=20),
    "bf16": replace(PLAIN, params_dtype="bfloat16", attention_dropout=0.1),
    "grouped, rope, gated, bf16": replace(GROUPED, params_dtype="bfloat16"),
}
LENGTHS = (150, 141, 9, 5, 30)
FEW = (23, 17, 9, 5, 3)


def whole(config: ModelConfig, lengths: tuple[int, ...]) -> Found:
    batches = [packed([Slice.all_of(s, n)], config) for s, n in enumerate(lengths)]
    return train(build_model(config), batches)


def compare(found: Found, expected: Found, config: ModelConfig) -> None:
    narrow = config.params_dtype == "bfloat16"
    assert_close(found.losses, expected.losses, 2e-3 if narrow else 1e-6, "losses")
    near = 3e-2 if narrow else 5e-6
    for sample, gradient in expected.inputs.items():
        assert_close(found.inputs[sample], gradient, near, f"input gradient of sample {sample}")
    assert found.parameters.keys() == expected.parameters.keys()
    most = max(g.norm().item() for g in expected.parameters.values())
    for name, gradient in expected.parameters.items():
        # Softmax doesn't see a shift of all keys: the gradient of their bias is rounding.
        assert_close(found.parameters[name], gradient, near, name, least=1e-2 * most)


@pytest.mark.parametrize("again", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("tokens", [1, 7, 64, 1000])
@pytest.mark.parametrize("name", MODELS)
def test_slices_give_what_whole_samples_give(name: str, tokens: int, again: bool) -> None:
    config, lengths = MODELS[name], FEW if tokens == 1 else LENGTHS
    batches = [packed(parts, config) for parts in two_chains(lengths, tokens)]
    found = train(build_model(config), batches, again=again, split=tokens == 7 and not again)
    compare(found, whole(config, lengths), config)


@pytest.mark.parametrize("again", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("name", ["plain", "grouped, rope, gated, dropout", "normed heads"])
def test_the_form_for_float32_on_cuda_does_the_same(
    name: str, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(MODELS[name], attention_dropout=0.0)
    expected = whole(config, LENGTHS)
    monkeypatch.setattr(attention_cpu, "attend", attention_cuda.attend)
    batches = [packed(parts, config) for parts in two_chains(LENGTHS, 33)]
    compare(train(build_model(config), batches, again=again), expected, config)


def test_another_sample_changes_no_bit_of_a_sliced_one() -> None:
    parts, blocks = two_chains(LENGTHS, 32), build_model(GROUPED)
    before, after = (
        train(blocks, [packed(p, GROUPED, spoilt=spoilt) for p in parts])
        for spoilt in ((), (1, 2, 3, 4))
    )
    assert torch.equal(before.states[0], after.states[0])
    assert torch.equal(before.inputs[0], after.inputs[0])
    assert distance(before.states[1], after.states[1]) > 0.1


def test_faults_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    config = GROUPED
    batches = [packed(parts, config) for parts in two_chains(LENGTHS, 32)]
    expected = whole(config, LENGTHS)

    def fails() -> None:
        with pytest.raises(AssertionError, match="differs by"):
            compare(train(build_model(config), batches), expected, config)

    compare(train(build_model(config), batches), expected, config)
    write, gone_back = PrefixStore.write, PrefixStore.gone_back

    def last_row_lost(self: PrefixStore, unit: int, cut: Slice, *rows: torch.Tensor) -> object:
        prefix = write(self, unit, cut, *rows)
        prefix.keys[max(0, cut.start - 1)] = 0.0
        return prefix

    def not_added(self: PrefixStore, unit: int, cut: Slice) -> None:
        prefix = self.going_back(unit, cut)
        prefix.gradients = None
        gone_back(self, unit, cut)

    with monkeypatch.context() as patch:
        patch.setattr(PrefixStore, "write", last_row_lost)
        fails()
    with monkeypatch.context() as patch:
        patch.setattr(PrefixStore, "gone_back", not_added)
        fails()


def test_slices_out_of_order_are_refused_by_name() -> None:
    blocks = build_model(PLAIN)
    parts = sliced(3, 20, 8)
    batches = [packed([p], PLAIN) for p in parts]
    with pytest.raises(RuntimeError, match="micro-batch 1: forward of tokens 16 to 20 of sample 3"):
        train(blocks, [batches[0], batches[2]])
    with pytest.raises(RuntimeError, match="micro-batch 1: backward of tokens 8 to 16 of sample 3"):
        train(blocks, batches, order=[1, 2, 0])
    with pytest.raises(RuntimeError, match="not all slices have gone forward"):
        train(blocks, batches[:2])
    with pytest.raises(RuntimeError, match="not all slices of sample 3 ran backward"):
        train(blocks, batches, order=[2, 1])
    # Attention units see to it themselves too.
    store = PrefixStore(training=True)
    with pytest.raises(RuntimeError, match="attention unit 0 does not have"):
        blocks[1](torch.zeros(8, 1, PLAIN.hidden_size), replace(batches[1], prefixes=store))


def test_a_slice_is_refused_without_a_run_beside_another_and_in_both_directions() -> None:
    blocks = build_model(PLAIN)
    first, second, _ = sliced(3, 20, 8)
    with pytest.raises(ValueError, match="whole samples"):
        blocks[1](torch.zeros(8, 1, PLAIN.hidden_size), packed([first], PLAIN))
    with pytest.raises(ValueError, match="only the first may be a slice"):
        packed([Slice.all_of(0, 4), second], PLAIN).cut  # noqa: B018
    config = make_bert()
    store = PrefixStore(training=True)
    batch = replace(packed([first], config), prefixes=store)
    with pytest.raises(ValueError, match="causal"):
        build_model(config)[1](torch.zeros(8, 1, config.hidden_size), batch)


def test_a_pass_without_backward_keeps_nothing_after_the_last_slice() -> None:
    config = GROUPED
    blocks, store = build_model(config), PrefixStore(training=False)
    for block in blocks:
        block.eval()
    total, expected = (torch.zeros(1, dtype=torch.float64) for _ in range(2))
    with torch.no_grad():
        for number, parts in enumerate(two_chains(LENGTHS, 64)):
            batch = replace(packed(parts, config), prefixes=store)
            store.forward(0, number, batch)
            total += run(blocks, batch)
        store.finish()
        for sample, length in enumerate(LENGTHS):
            expected += run(blocks, packed([Slice.all_of(sample, length)], config))
    assert_close(total, expected, 1e-6)
