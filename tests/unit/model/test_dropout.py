"""Hidden dropout: the same bits in any packing and slicing, native and in torch operations."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_flex.data.packed import PackedBatch
from megatron_flex.model.context import PackedContext, context_of
from megatron_flex.model.dropout import (
    KeyedBiasDropoutAdd,
    keyed_dropout,
    masked_scale,
    masked_scale_torch,
)
from megatron_flex.model.keys import keep_mask, site_key, threshold, token_keys
from megatron_flex.native import function
from tests.close import assert_close
from tests.unit.model.support import make_config

pytestmark = pytest.mark.usefixtures("cpu_level")
CONFIG = make_config(hidden_dropout=0.3)
TYPES = st.sampled_from([torch.float32, torch.bfloat16])


def context(lengths: list[int], samples: list[int], starts: list[int]) -> PackedContext:
    batch = PackedBatch(tuple(lengths), tuple(samples), tuple(starts))
    return context_of(batch, CONFIG, torch.device("cpu"))


def kept(
    lengths: list[int], samples: list[int], starts: list[int], width: int = 40
) -> torch.Tensor:
    """``[T, width]`` dropout of ones at site 5."""
    ones = torch.ones(sum(lengths), 1, width)
    return keyed_dropout(ones, context(lengths, samples, starts), 5, 0.3).squeeze(1)


@given(
    rows=st.integers(1, 20),
    columns=st.integers(1, 70),
    dtype=TYPES,
    bias=st.booleans(),
    residual=st.booleans(),
    probability=st.floats(0.01, 0.9),
    seed=st.integers(0, 1000),
)
def test_the_native_kernel_equals_torch_operations_bit_for_bit(
    rows: int,
    columns: int,
    dtype: torch.dtype,
    bias: bool,
    residual: bool,
    probability: float,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, r = torch.randn(2, rows, columns, generator=generator).to(dtype)
    b = torch.randn(columns, generator=generator).to(dtype)
    tokens = token_keys(seed, [3], [0], [rows])
    arguments = (x, b if bias else None, r if residual else None, tokens, 4, probability)
    assert torch.equal(masked_scale(*arguments), masked_scale_torch(*arguments))


@given(
    rows=st.integers(1, 9),
    columns=st.integers(1, 5).map(lambda n: 8 * n) | st.integers(1, 40),
    dtype=TYPES,
    bias=st.booleans(),
    residual=st.booleans(),
    blocks=st.integers(1, 4),
    threads=st.integers(1, 5),
)
def test_the_cuda_kernels_indexing_equals_the_cpu_kernel(
    rows: int,
    columns: int,
    dtype: torch.dtype,
    bias: bool,
    residual: bool,
    blocks: int,
    threads: int,
) -> None:
    x, r = torch.randn(2, rows, columns).to(dtype)
    b = torch.randn(columns).to(dtype)
    tokens = token_keys(1, [3], [0], [rows])
    out = torch.empty_like(x)
    function("mflex_bias_dropout_add_by_lanes")(
        x.data_ptr(), b.data_ptr() if bias else None, r.data_ptr() if residual else None,
        tokens.data_ptr(), site_key(4), rows, columns, threshold(0.3), 1 / 0.7,
        0 if dtype is torch.float32 else 1, out.data_ptr(), blocks, threads,
    )  # fmt: skip
    expected = masked_scale(x, b if bias else None, r if residual else None, tokens, 4, 0.3)
    assert torch.equal(out, expected)


def test_many_rows_on_several_threads_equal_one_thread() -> None:
    x = torch.randn(700, 300)
    tokens = token_keys(1, [0, 1], [0, 0], [300, 400])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        many = masked_scale(x, None, None, tokens, 1, 0.2)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(many, masked_scale(x, None, None, tokens, 1, 0.2))


@settings(max_examples=50)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=6),
    order=st.randoms(use_true_random=False),
    cut=st.integers(1, 19),
)
def test_a_sample_keeps_the_same_elements_in_any_packing_and_slicing(
    lengths: list[int], order: object, cut: int
) -> None:
    samples = [10 * i + 3 for i in range(len(lengths))]
    zeros = [0] * len(lengths)
    packed = dict(zip(samples, kept(lengths, samples, zeros).split(lengths), strict=True))
    shuffled = list(zip(samples, lengths, strict=True))
    order.shuffle(shuffled)  # type: ignore[attr-defined]
    moved = kept([n for _, n in shuffled], [s for s, _ in shuffled], zeros)
    for (sample, _), rows in zip(shuffled, moved.split([n for _, n in shuffled]), strict=True):
        assert torch.equal(rows, packed[sample])
    for sample, length in shuffled:
        assert torch.equal(kept([length], [sample], [0]), packed[sample])
        if cut < length:
            slices = kept([length - cut, cut], [sample, sample], [cut, 0])
            assert torch.equal(slices, packed[sample].roll(-cut, 0))


def test_the_mask_is_the_one_of_the_keys() -> None:
    tokens = token_keys(CONFIG.seed, [4, 9], [0, 7], [3, 5])
    keep = keep_mask(tokens, site_key(5), torch.arange(40, dtype=torch.int32), 0.3)
    out = kept([3, 5], [4, 9], [0, 7])
    assert_close(out, keep * (1 / 0.7), 5e-7)


@pytest.mark.parametrize("bias", [True, False])
def test_bias_dropout_add_has_the_gradients_of_its_formula(bias: bool) -> None:
    here = context([6, 3], [0, 1], [0, 0])
    module = KeyedBiasDropoutAdd(site=2)
    module.context = here
    x, residual = (torch.randn(9, 1, 16, requires_grad=True) for _ in range(2))
    b = torch.randn(16, requires_grad=True) if bias else None
    keep = keep_mask(here.token_keys, site_key(2), torch.arange(16, dtype=torch.int32), 0.25)
    inputs = (x, residual) if b is None else (x, residual, b)
    expected = residual + (x if b is None else x + b) * keep.view(9, 1, 16) / 0.75
    grad = torch.randn(9, 1, 16)
    expected_grads = torch.autograd.grad(expected, inputs, grad)
    out = module(True, False)((x, b), residual, 0.25)
    assert_close(out, expected, 5e-7)
    assert_close(torch.autograd.grad(out, inputs, grad), expected_grads, 5e-7)


def test_nothing_is_dropped_in_evaluation() -> None:
    module = KeyedBiasDropoutAdd(site=2)
    module.context = context([4], [0], [0])
    x, residual, b = torch.randn(4, 1, 8), torch.randn(4, 1, 8), torch.randn(8)
    assert torch.equal(module(False, False)((x.clone(), b), residual, 0.5), residual + (x + b))


def test_a_layer_without_its_context_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="context of the micro-batch"):
        KeyedBiasDropoutAdd(site=1)(True, False)
