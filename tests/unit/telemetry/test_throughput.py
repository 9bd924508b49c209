"""Floating-point operations of batches of any lengths."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_flex.data.microbatch import MicroBatch, Slice
from megatron_flex.model.config import ModelConfig
from megatron_flex.planner.flops import iteration_flops
from megatron_flex.telemetry.throughput import known_peak_flops
from tests.unit.config.commands import config

LENGTHS = st.lists(st.integers(1, 5000), min_size=1, max_size=12)


def batch(*lengths: int) -> MicroBatch:
    return MicroBatch(tuple(Slice.all_of(i, n) for i, n in enumerate(lengths)))


def batch_flops(model: ModelConfig, micro_batches: list[MicroBatch]) -> float:
    """What the loop records for a global batch."""
    tokens = sum(m.tokens for m in micro_batches)
    return iteration_flops(model, tokens, sum(m.squares for m in micro_batches))


@pytest.mark.parametrize("flags", ["", "--swiglu", "--group-query-attention --num-query-groups 2"])
def test_equal_lengths_give_megatrons_number(flags: str) -> None:
    model = config(flags).model_config(1024)  # without padded rows, which Megatron-LM counts
    samples, length = 8, 512
    # Megatron-LM's num_floating_point_operations for a dense model.
    query = model.kv_channels * model.num_attention_heads
    key = model.kv_channels * model.num_query_groups
    attention = model.hidden_size * (query + 2 * key) + query * length + query * model.hidden_size
    mlp = model.hidden_size * model.ffn_hidden_size * (3 if model.swiglu else 2)
    logits = model.hidden_size * model.padded_vocab_size
    theirs = samples * length * 6 * (model.num_layers * (attention + mlp) + logits)
    assert batch_flops(model, [batch(*[length] * samples)]) == pytest.approx(theirs, rel=1e-12)


@given(LENGTHS, st.integers(1, 5))
def test_the_number_does_not_depend_on_how_samples_are_packed(lengths: list[int], cut: int) -> None:
    model = config().model_config(1000)
    parts = [lengths[i : i + cut] for i in range(0, len(lengths), cut)]
    together = batch_flops(model, [batch(*lengths)])
    assert batch_flops(model, [batch(*part) for part in parts]) == pytest.approx(together)


def test_one_long_sample_is_more_work_than_many_short_ones() -> None:
    model = config().model_config(1000)
    assert batch_flops(model, [batch(2048)]) > 1.5 * batch_flops(model, [batch(*[32] * 64)])


def test_attention_in_both_directions_is_twice_the_work() -> None:
    gpt = config().model_config(1000)
    bert = config(architecture="bert").model_config(1000)
    pairs = 2048 * 2048 * gpt.num_layers * gpt.kv_channels * gpt.num_attention_heads
    head = 2048 * gpt.hidden_size**2  # the dense layer in front of BERT's vocabulary
    more = batch_flops(bert, [batch(2048)]) - batch_flops(gpt, [batch(2048)])
    assert more == pytest.approx(6 * (pairs + head))


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H200", 989.4),
        ("NVIDIA H20", 148.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA L40", 181.0),
        ("NVIDIA L4", 121.0),
    ],
)
def test_peaks_of_common_devices_are_known(name: str, tflops: float) -> None:
    assert known_peak_flops(name, bf16=True) == tflops * 1e12
    assert known_peak_flops(name, bf16=False) is None


def test_the_peak_of_an_unknown_device_is_not_guessed() -> None:
    assert known_peak_flops("Some GPU", bf16=True) is None
