"""Slabs: where parameters lie, what views them, and what is copied with them."""

from __future__ import annotations

import gc
import weakref
from itertools import pairwise

import pytest
import torch
from hypothesis import given

from megatron_flex.model.block import decays
from megatron_flex.runtime.slab import ALIGNMENT, ROW, Buffers, Slab, SlabLayout
from tests.close import assert_numbers_close
from tests.unit.runtime.slabs import CPU, SHAPES, layout_of, make_slab

DTYPES = [torch.float32, torch.bfloat16]


# -- layout ------------------------------------------------------------------------------------


@given(SHAPES)
def test_every_parameter_has_its_own_aligned_place(shapes: list[tuple[str, torch.Size]]) -> None:
    layout = layout_of(shapes)
    assert sorted((e.name, e.shape) for e in layout.entries) == sorted(shapes)
    for a, b in pairwise(layout.entries):
        assert a.offset + a.numel <= b.offset
    for entry in layout.entries:
        assert entry.offset % ALIGNMENT == 0
        assert entry.offset + entry.numel <= layout.numel
    assert layout.numel % ROW == 0
    used = sum(-(-shape.numel() // ALIGNMENT) * ALIGNMENT for _, shape in shapes)
    assert used <= layout.numel < used + ROW, "no more padding than alignment asks for"


@given(SHAPES)
def test_decayed_parameters_come_first(shapes: list[tuple[str, torch.Size]]) -> None:
    layout = layout_of(shapes)
    for entry in layout.entries:
        assert (entry.offset < layout.decayed) is decays(entry.name, entry.shape)
    for group in (True, False):
        ours = [e.name for e in layout.entries if (e.offset < layout.decayed) is group]
        assert ours == [name for name, shape in shapes if decays(name, shape) is group]


def test_a_layout_in_numbers() -> None:
    shapes = [("bias", torch.Size([5])), ("w", torch.Size([3, 11])), ("v", torch.Size([2, 2]))]
    layout = SlabLayout.of(shapes, decays)
    assert [(e.name, e.offset) for e in layout.entries] == [("w", 0), ("v", 64), ("bias", 96)]
    assert (layout.decayed, layout.numel) == (96, 1024)


def test_a_slab_without_parameters_is_empty() -> None:
    layout = layout_of([])
    slab = Slab(0, layout, Buffers.allocate(layout.numel, torch.float32, CPU, False))
    assert (layout.numel, layout.decayed, layout.entries) == (0, 0, ())
    assert slab.squared_norm() == 0.0
    assert slab.zeros() == 0
    assert slab.named_state() == {}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("offloaded", [False, True])
def test_the_bytes_of_a_slab_are_those_that_it_takes(
    dtype: torch.dtype, exact: bool, offloaded: bool
) -> None:
    buffers = Buffers.allocate(2048, dtype, CPU, exact, offloaded)
    found = [t for t in vars(buffers).values() if isinstance(t, torch.Tensor)]
    tensors = {t.data_ptr(): t for t in found if not (offloaded and t is buffers.state)}
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors.values()}
    taken = sum(s.nbytes() for s in storages.values())
    assert taken == Buffers.nbytes(2048, dtype, exact, offloaded)
    assert not buffers.state.any()
    for tensor in tensors.values():
        assert tensor.data_ptr() % 64 == 0
        assert not tensor.any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_parameters_are_aligned_to_64_bytes(dtype: torch.dtype) -> None:
    slab = make_slab((3, 5), (7,), (1, 1), (33, 2), dtype=dtype)
    for parameter in slab.parameters.values():
        assert parameter.data_ptr() % 64 == 0
        assert parameter.grad is not None
        assert parameter.grad.data_ptr() % 64 == 0


# -- views -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_parameters_and_gradients_are_views_of_the_slab(dtype: torch.dtype) -> None:
    slab = make_slab((3, 5), (7,), dtype=dtype)
    for entry in slab.layout.entries:
        parameter = slab.parameters[entry.name]
        assert parameter.shape == entry.shape
        assert parameter.dtype == dtype
        slab.params[entry.offset] = 5.0
        assert parameter.flatten()[0] == 5.0
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float32
        slab.grads[entry.offset] = 7.0
        assert parameter.grad.flatten()[0] == 7.0


def test_a_float32_model_has_no_second_copy_of_its_weights() -> None:
    slab = make_slab((3, 5))
    assert slab.master.data_ptr() == slab.params.data_ptr()
    assert not slab.mixed


def test_weights_and_moments_travel_as_one_buffer() -> None:
    source, target = make_slab((3, 5), (7,)), make_slab((3, 5), (7,), seed=1)
    target.state.copy_(source.state)
    for name, tensor in source.named_state().items():
        assert torch.equal(target.named_state()[name], tensor), name
    assert len(source.state) == 3 * source.layout.numel


def test_float32_masters_travel_with_a_bfloat16_model() -> None:
    source = make_slab((3, 5), (7,), dtype=torch.bfloat16)
    target = make_slab((3, 5), (7,), dtype=torch.bfloat16, seed=1)
    source.master[0] = 1.0 + 2.0**-20  # lost in bfloat16
    source.params_from_masters()
    target.state.copy_(source.state)
    target.params_from_masters()
    assert torch.equal(target.master, source.master)
    assert torch.equal(target.params, source.params)
    assert target.master[0] != target.params[0].float()


def test_masters_start_from_the_parameters() -> None:
    slab = make_slab((3, 5), dtype=torch.bfloat16)
    with torch.no_grad():
        slab.parameters["p0"].fill_(0.5)
    slab.masters_from_params()
    assert (slab.view(slab.master, slab.layout.entries[0]) == 0.5).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_autograd_adds_into_the_slab_in_float32(dtype: torch.dtype) -> None:
    slab = make_slab((3, 5), (5,), dtype=dtype)
    slab.grads.zero_()
    weight, bias = slab.parameters["p0"], slab.parameters["p1"]
    small = 2.0**-10  # lost beside 1 in bfloat16
    for scale in (1.0, small):
        ((weight.sum() + bias.sum()) * scale).backward()
    for entry in slab.layout.entries:
        assert (slab.view(slab.grads, entry) == 1.0 + small).all()
    assert slab.grads.sum() == 20 * (1.0 + small), "padding has no gradient"
    assert weight.grad is not None
    assert weight.grad.data_ptr() == slab.grads.data_ptr()


def test_a_write_through_the_slab_is_seen_by_autograd() -> None:
    slab = make_slab((3, 5))
    output = slab.parameters["p0"].square().sum()
    slab.params.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.backward()


def test_the_buffers_are_free_when_the_slab_is() -> None:
    slab = make_slab((3, 5), (7,), exact=True)
    slab.parameters_of(0), slab.parameters_of(1)
    alive = [weakref.ref(p) for p in (*slab.parameters.values(), slab.state, slab.grads)]
    del slab
    gc.collect()
    assert [ref() for ref in alive] == [None] * len(alive)


# -- scratch for the gradients of several users ------------------------------------------------


def test_without_exact_sums_all_users_share_parameters_and_gradients() -> None:
    slab = make_slab((3, 5))
    assert slab.parameters_of(0) is slab.parameters_of(9) is slab.parameters
    assert slab.scratch(0) is slab.scratch(9) is slab.grads


def test_with_exact_sums_each_user_has_gradients_of_its_own() -> None:
    slab = make_slab((3, 5), exact=True)
    first, second = slab.parameters_of(0), slab.parameters_of(9)
    assert first is slab.parameters
    assert second["p0"].data_ptr() == first["p0"].data_ptr(), "the weights are shared"
    assert second["p0"].grad is not None
    assert second["p0"].grad.data_ptr() == slab.scratch(9).data_ptr() != slab.grads.data_ptr()
    assert slab.scratch(0) is slab.grads
    assert not slab.scratch(9).any()
    assert slab.scratch(9) is slab.scratch(9)


# -- what is said about a gradient -------------------------------------------------------------


def test_the_squared_norm_is_that_of_the_parameters_gradients() -> None:
    slab = make_slab((40, 50), (70,))
    parts = [p.grad.double().square().sum() for p in slab.parameters.values() if p.grad is not None]
    norm = slab.squared_norm()
    assert norm.dtype == torch.float64
    assert_numbers_close(norm.item(), sum(p.item() for p in parts), 2e-7)


def test_the_squared_norm_of_what_is_not_finite_is_not_finite() -> None:
    for value in (float("nan"), float("inf")):
        slab = make_slab((40, 50))
        slab.grads[77] = value
        assert not slab.squared_norm().isfinite()


def test_zeros_are_counted_in_parameters_alone() -> None:
    slab = make_slab((3, 5), (7,))
    assert slab.zeros() == 0
    slab.parameters["p1"].grad.zero_()  # type: ignore[union-attr]
    assert slab.zeros() == 7


# -- names -------------------------------------------------------------------------------------


def test_named_state_of_a_float32_model() -> None:
    slab = make_slab((3, 5), (7,))
    prefixes = ("", "optimizer.state.exp_avg.", "optimizer.state.exp_avg_sq.")
    state = slab.named_state()
    assert state.keys() == {p + n for p in prefixes for n in ("p0", "p1")}
    for prefix, buffer in zip(prefixes, (slab.params, slab.exp_avg, slab.exp_avg_sq), strict=True):
        for entry in slab.layout.entries:
            tensor = state[prefix + entry.name]
            assert tensor.shape == entry.shape
            assert tensor.data_ptr() == buffer[entry.offset :].data_ptr(), "a view, no copy"
    assert slab.named_state(optimizer=False).keys() == {"p0", "p1"}
    assert slab.named_state(model=False).keys() == state.keys() - {"p0", "p1"}


def test_named_state_of_a_bfloat16_model_has_the_masters() -> None:
    slab = make_slab((3, 5), dtype=torch.bfloat16)
    state = slab.named_state()
    assert state["p0"].dtype == torch.bfloat16
    master = state["optimizer.state.master.p0"]
    assert master.dtype == torch.float32
    assert master.data_ptr() == slab.master.data_ptr()
    assert "optimizer.state.master.p0" not in slab.named_state(optimizer=False)
