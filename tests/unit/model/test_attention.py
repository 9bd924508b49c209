"""Variable-length attention on the CPU against the textbook formula."""

from __future__ import annotations

import resource

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_flex.data.packed import PackedBatch
from megatron_flex.model import attention_cpu
from megatron_flex.model.attention import check_attention
from megatron_flex.model.attention_cuda import attend_padded, attend_per_sample, rotate
from megatron_flex.model.attention_options import AttentionOptions
from megatron_flex.model.context import PackedContext, context_of
from megatron_flex.model.keys import attention_site, keep_mask, site_key
from tests.close import assert_close
from tests.unit.model.support import make_config

pytestmark = pytest.mark.usefixtures("cpu_level")


def make_context(lengths: list[int], depth: int, samples: list[int] | None = None) -> PackedContext:
    config = make_config(kv_channels=depth)
    numbers = tuple(samples or range(len(lengths)))
    batch = PackedBatch(tuple(lengths), numbers, (0,) * len(lengths))
    return context_of(batch, config, torch.device("cpu"))


def textbook(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    context: PackedContext,
    options: AttentionOptions,
) -> torch.Tensor:
    """Sample by sample with full score matrices, in the inputs' type."""
    heads, share = query.shape[1], query.shape[1] // key.shape[1]
    if options.rotary:
        query, key = rotate(query, *context.rotary), rotate(key, *context.rotary)
    outputs = []
    for first, stop in zip(context.offsets, context.offsets[1:], strict=False):
        rows, length = slice(first, stop), stop - first
        k, v = (t[rows].repeat_interleave(share, 1) for t in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query[rows], k) * options.scale
        if options.causal:
            future = torch.ones(length, length, dtype=torch.bool).triu(1)
            scores = scores.masked_fill(future, -torch.inf)
        weights = scores.softmax(-1)
        if options.dropout:
            keys, channels = context.token_keys[rows], torch.arange(length)
            keep = torch.stack(
                [
                    keep_mask(
                        keys,
                        site_key(attention_site(options.layer), head),
                        channels,
                        options.dropout,
                    )
                    for head in range(heads)
                ]
            )
            weights = weights * keep / (1 - options.dropout)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, v))
    return torch.cat(outputs)


def make_inputs(
    lengths: list[int], heads: int, groups: int, depth: int, seed: int = 0
) -> list[torch.Tensor]:
    """Query, key and value as views of one tensor, as they come from megatron-core."""
    generator = torch.Generator().manual_seed(seed)
    sizes = (heads * depth, groups * depth, groups * depth)
    mixed = torch.randn(sum(lengths), sum(sizes), generator=generator)
    return [t.unflatten(1, (-1, depth)) for t in mixed.split(sizes, dim=1)]


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40) | st.integers(120, 140), min_size=1, max_size=5),
    groups=st.integers(1, 3),
    share=st.integers(1, 3),
    depth=st.sampled_from([4, 8, 20, 64]),
    causal=st.booleans(),
    dropout=st.sampled_from([0.0, 0.1, 0.6]),
    rotary=st.booleans(),
    seed=st.integers(0, 100),
)
def test_output_and_gradients_equal_the_textbook_formula(
    lengths: list[int],
    groups: int,
    share: int,
    depth: int,
    causal: bool,
    dropout: float,
    rotary: bool,
    seed: int,
) -> None:
    options = AttentionOptions(3, causal, depth**-0.5, dropout, rotary)
    context = make_context(lengths, depth)
    inputs = make_inputs(lengths, groups * share, groups, depth, seed)
    ours = [t.clone().requires_grad_() for t in inputs]
    theirs = [t.double().requires_grad_() for t in inputs]
    out = attention_cpu.attend(ours[0], ours[1], ours[2], context, options)
    expected = textbook(theirs[0], theirs[1], theirs[2], context, options)
    assert_close(out, expected, 2e-6)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed))
    out.backward(grad)
    expected.backward(grad.double())
    for name, a, b in zip("qkv", ours, theirs, strict=True):
        assert a.grad is not None
        assert b.grad is not None
        # A sample of one token has no gradient of query and key.
        assert_close(a.grad, b.grad, 2e-6, name, least=grad.norm().item())


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_bfloat16_is_accumulated_in_float32(dropout: float) -> None:
    lengths, depth = [33, 150, 7], 16
    options = AttentionOptions(0, True, depth**-0.5, dropout, False)
    context = make_context(lengths, depth)
    inputs = [t.bfloat16() for t in make_inputs(lengths, 4, 2, depth)]
    ours = [t.clone().requires_grad_() for t in inputs]
    theirs = [t.double().requires_grad_() for t in inputs]
    out = attention_cpu.attend(ours[0], ours[1], ours[2], context, options)
    expected = textbook(theirs[0], theirs[1], theirs[2], context, options)
    assert out.dtype is torch.bfloat16
    # One rounding of the result: half a unit in its 8 bits.
    assert_close(out, expected, 2**-8)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).bfloat16()
    out.backward(grad)
    expected.backward(grad.double())
    for a, b in zip(ours, theirs, strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert_close(a.grad, b.grad, 1e-2)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("causal", [True, False])
def test_a_sample_has_the_same_bits_in_any_packing_and_on_any_number_of_threads(
    dropout: float, causal: bool
) -> None:
    lengths, depth = [40, 130, 1, 60, 60], 16
    options = AttentionOptions(1, causal, depth**-0.5, dropout, True)
    inputs = make_inputs(lengths, 4, 2, depth)
    grad = torch.randn(sum(lengths), 4, depth)

    def run(
        parts: list[torch.Tensor], g: torch.Tensor, context: PackedContext
    ) -> list[torch.Tensor]:
        leaves = [t.clone().requires_grad_() for t in parts]
        out = attention_cpu.attend(leaves[0], leaves[1], leaves[2], context, options)
        return [out.detach(), *torch.autograd.grad(out, leaves, g)]

    packed = run(inputs, grad, make_context(lengths, depth))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        for a, b in zip(packed, run(inputs, grad, make_context(lengths, depth)), strict=True):
            assert torch.equal(a, b)
    finally:
        torch.set_num_threads(threads)
    first = 0
    for sample, length in enumerate(lengths):
        rows = slice(first, first + length)
        alone = run([t[rows] for t in inputs], grad[rows], make_context([length], depth, [sample]))
        for a, b in zip(packed, alone, strict=True):
            assert torch.equal(a[rows], b)
        first += length


def test_large_scores_do_not_overflow_and_nan_is_not_hidden() -> None:
    depth = 8
    options = AttentionOptions(0, True, 1.0, 0.0, False)
    query, key, value = (1000.0 * t for t in make_inputs([50, 20], 2, 2, depth))
    context = make_context([50, 20], depth)
    out = attention_cpu.attend(query, key, value, context, options)
    expected = textbook(query.double(), key.double(), value.double(), context, options)
    assert_close(out, expected, 1e-6)
    key = key.clone()
    key[10] = torch.nan
    out = attention_cpu.attend(query, key, value, context, options)
    assert out[10:50].isnan().all()
    assert out[:10].isfinite().all()
    assert out[50:].isfinite().all()


def test_a_sample_of_34000_tokens_needs_memory_linear_in_its_length() -> None:
    length, depth = 34_000, 4
    options = AttentionOptions(0, True, depth**-0.5, 0.1, False)
    inputs = [t.requires_grad_() for t in make_inputs([length], 1, 1, depth)]
    context = make_context([length], depth)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    out = attention_cpu.attend(inputs[0], inputs[1], inputs[2], context, options)
    out.sum().backward()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    # The scores of one head alone would be 4.6 GB.
    assert grown < 200 * 1024**2


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    causal=st.booleans(),
    share=st.integers(1, 2),
)
@settings(max_examples=20, deadline=None)
def test_the_form_for_float32_on_cuda_equals_the_native_kernel(
    lengths: list[int], causal: bool, share: int
) -> None:
    options = AttentionOptions(0, causal, 0.3, 0.0, False)
    context = make_context(lengths, 8)
    query, key, value = make_inputs(lengths, 2 * share, 2, 8)
    assert_close(
        attend_per_sample(query, key, value, context, options),
        attention_cpu.attend(query, key, value, context, options),
        1e-6,
    )


@given(
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=4),
    more=st.integers(0, 90),
    share=st.integers(1, 2),
    dropout=st.sampled_from([0.0, 0.3]),
)
@settings(max_examples=20, deadline=None)
def test_nothing_attends_to_padding_where_tokens_look_both_ways(
    lengths: list[int], more: int, share: int, dropout: float
) -> None:
    options = AttentionOptions(0, False, 0.3, dropout, False)
    config, length = make_config(kv_channels=8), max(lengths) + more
    batch = PackedBatch(tuple(lengths), tuple(range(len(lengths))), (0,) * len(lengths))
    cpu = torch.device("cpu")
    packed, padded = (context_of(b, config, cpu) for b in (batch, batch.padded(length)))
    inputs = make_inputs([length] * len(lengths), 2 * share, 2, 8)
    real = torch.cat([torch.arange(n) + length * i for i, n in enumerate(lengths)])
    ours = [x.detach().requires_grad_() for x in inputs]
    out = attention_cpu.attend(ours[0], ours[1], ours[2], padded, options)
    alone = [x.detach()[real].requires_grad_() for x in inputs]
    expected = attention_cpu.attend(alone[0], alone[1], alone[2], packed, options)
    assert_close(out[real], expected, 1e-6)
    weight = torch.zeros_like(out)
    weight[real] = torch.randn_like(expected)
    out.backward(weight)
    expected.backward(weight[real])
    for a, b in zip(ours, alone, strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert_close(a.grad[real], b.grad, 1e-6)
        others = a.grad.clone()
        others[real] = 0.0
        assert not others.any()
    if not dropout:
        query, key, value = inputs
        again = attend_padded(query, key, value, padded, options)
        assert_close(again[real], expected.detach(), 1e-5)


def test_attention_dropout_on_cuda_is_refused_with_the_flag_to_change() -> None:
    config = make_config(attention_dropout=0.1)
    check_attention(config, torch.device("cpu"))
    check_attention(make_config(), torch.device("cuda"))
    with pytest.raises(ValueError, match="--attention-dropout 0"):
        check_attention(config, torch.device("cuda"))


def test_a_cut_sample_is_refused() -> None:
    context = context_of(PackedBatch((4,), (0,), (4,)), make_config(), torch.device("cpu"))
    with pytest.raises(ValueError, match="whole samples"):
        context.prefixes  # noqa: B018
