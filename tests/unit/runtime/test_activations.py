"""Saved activations on the host: memory goes and comes back, values stay."""

from __future__ import annotations

import pytest
import torch
from torch.autograd.graph import get_gradient_edge

from megatron_flex.model.blocks import Block, build_block
from megatron_flex.runtime.activations import SMALLEST, ActivationOffload
from megatron_flex.runtime.memory import MemoryMeter
from tests.unit.model.support import make_batch, make_config
from tests.unit.runtime.slabs import CPU

CONFIG = make_config(hidden_dropout=0.1)
BATCH = make_batch([400, 300], CONFIG)
KEY = (0, 0)


def block(unit: int = 2) -> Block:
    return build_block(CONFIG.layers.units[unit], CONFIG).train()


def hidden() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(700, 1, CONFIG.hidden_size, generator=generator).requires_grad_()


def gradients(unit: int, prefetch: bool | None) -> list[torch.Tensor]:
    """Of input and weights; ``None``: nothing travels."""
    module, x = block(unit), hidden()
    offload = ActivationOffload(CPU)
    stay = [*module.parameters(), x]
    if prefetch is None:
        output = module(x, BATCH)
    else:
        with offload.saving(KEY, stay):
            output = module(x, BATCH)
        offload.away(KEY)
        if prefetch:
            offload.back(KEY)
    output.sum().backward()
    offload.done(KEY)
    assert x.grad is not None
    return [x.grad, *(p.grad for p in module.parameters() if p.grad is not None)]


@pytest.mark.parametrize("unit", [1, 2])
@pytest.mark.parametrize("prefetch", [False, True])
def test_gradients_have_the_same_bits(unit: int, prefetch: bool) -> None:
    expected, got = gradients(unit, None), gradients(unit, prefetch)
    assert len(got) == len(expected) > 3
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_the_memory_is_free_while_they_are_away() -> None:
    module, x, meter, offload = block(), hidden(), MemoryMeter(CPU), ActivationOffload(CPU)
    module(x, BATCH)  # the context of the batch is made
    begin = meter.current
    with offload.saving(KEY, [*module.parameters(), x]):
        output = module(x, BATCH)
    edge, size = get_gradient_edge(output), output.nbytes
    del output
    kept = meter.current - begin
    assert kept > 3 * size
    offload.away(KEY)
    assert meter.current - begin < SMALLEST * 10
    offload.back(KEY)
    assert meter.current - begin == pytest.approx(kept, rel=1e-3)
    torch.autograd.backward(edge, torch.ones(700, 1, CONFIG.hidden_size))
    del edge
    offload.done(KEY)
    assert x.grad is not None
    grads = sum(p.grad.nbytes for p in module.parameters() if p.grad is not None)
    assert meter.current - begin == x.grad.nbytes + grads


def test_weights_and_the_input_stay() -> None:
    module, x, offload = block(), hidden(), ActivationOffload(CPU)
    with offload.saving(KEY, [*module.parameters(), x]):
        output = module(x, BATCH)
    addresses = [p.untyped_storage().data_ptr() for p in (*module.parameters(), x)]
    saved = offload._groups[KEY].storages
    # Normed input with its mean and scale, and both sides of the activation function.
    assert len(saved) == 5
    assert not set(addresses) & set(saved)
    offload.away(KEY)
    assert [p.untyped_storage().data_ptr() for p in (*module.parameters(), x)] == addresses
    output.sum().backward()


def test_host_buffers_are_used_again() -> None:
    offload = ActivationOffload(CPU)
    used = set()
    for micro_batch in range(3):
        module, x = block(), hidden()
        with offload.saving((0, micro_batch), [*module.parameters(), x]):
            output = module(x, BATCH)
        offload.away((0, micro_batch))
        buffer = offload._groups[0, micro_batch].buffer
        assert buffer is not None
        used.add(buffer.data_ptr())
        output.sum().backward()
        offload.done((0, micro_batch))
    assert len(used) == 1
