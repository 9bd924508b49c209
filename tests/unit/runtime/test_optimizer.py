"""Clipping and AdamW on a slab equal PyTorch's on the parameters one by one."""

from __future__ import annotations

import pytest
import torch

from megatron_flex.runtime.optimizer import OptimizerConfig, StepSize, clip_coefficient, update
from megatron_flex.runtime.slab import Slab
from tests.close import assert_close, assert_numbers_close, distance
from tests.unit.runtime.slabs import make_slab

SHAPES = ((33, 17), (17,), (8, 8), (5,), (1, 40))
CONFIG = OptimizerConfig(adam_beta1=0.8, adam_beta2=0.97, adam_eps=1e-6, clip_grad=0.5)


def fresh(dtype: torch.dtype = torch.float32) -> Slab:
    """Random weights, no moments yet."""
    slab = make_slab(*SHAPES, dtype=dtype)
    slab.exp_avg.zero_()
    slab.exp_avg_sq.zero_()
    slab.grads.zero_()
    return slab


def copies(slab: Slab) -> dict[str, torch.nn.Parameter]:
    """The master weights as separate parameters."""
    return {
        e.name: torch.nn.Parameter(slab.view(slab.master, e).clone()) for e in slab.layout.entries
    }


def adamw(parameters: dict[str, torch.nn.Parameter], decay: float) -> torch.optim.AdamW:
    groups = [
        {"params": [p for p in parameters.values() if p.dim() > 1], "weight_decay": decay},
        {"params": [p for p in parameters.values() if p.dim() == 1], "weight_decay": 0.0},
    ]
    betas = (CONFIG.adam_beta1, CONFIG.adam_beta2)
    return torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=CONFIG.adam_eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_five_steps_equal_adamw_on_separate_parameters(dtype: torch.dtype) -> None:
    slab, decay = fresh(dtype), 0.3
    parameters = copies(slab)
    optimizer = adamw(parameters, decay)
    clipped = 0
    for step in range(5):
        rate = 1e-2 * (step + 1)
        for group in optimizer.param_groups:
            group["lr"] = rate
        scale = (0.001, 0.1, 1.0)[step % 3]
        for number, entry in enumerate(slab.layout.entries):
            generator = torch.Generator().manual_seed(10 * step + number)
            gradient = torch.randn(entry.shape, generator=generator) * scale
            slab.view(slab.grads, entry).copy_(gradient)
            parameters[entry.name].grad = gradient
        expected = torch.nn.utils.clip_grad_norm_(parameters.values(), CONFIG.clip_grad)
        optimizer.step()
        norm = slab.squared_norm().sqrt().item()
        assert_numbers_close(norm, expected.item(), 3e-7)
        coefficient = clip_coefficient(norm, CONFIG.clip_grad)
        clipped += coefficient < 1.0
        update(slab, CONFIG, StepSize(rate, decay), coefficient, step)
    assert 0 < clipped < 5, "some steps clip, some do not"
    for entry in slab.layout.entries:
        parameter = parameters[entry.name]
        for ours, theirs in (
            (slab.master, parameter.data),
            (slab.exp_avg, optimizer.state[parameter]["exp_avg"]),
            (slab.exp_avg_sq, optimizer.state[parameter]["exp_avg_sq"]),
        ):
            assert_close(slab.view(ours, entry), theirs, 1e-7, entry.name)
    assert torch.equal(slab.params, slab.master.to(dtype))


def test_only_the_decayed_part_decays() -> None:
    slab = fresh()
    before = {e.name: slab.view(slab.master, e).clone() for e in slab.layout.entries}
    update(slab, CONFIG, StepSize(0.1, 0.5), 1.0, 0)  # no gradient: decay is all there is
    for entry in slab.layout.entries:
        factor = 1.0 - 0.1 * 0.5 if len(entry.shape) > 1 else 1.0
        expected = before[entry.name] * factor
        assert_close(slab.view(slab.master, entry), expected, 3e-7, entry.name)


def test_padding_stays_zero() -> None:
    slab = fresh()
    for step in range(3):
        slab.parameters["p0"].grad.fill_(1.0)  # type: ignore[union-attr]
        update(slab, CONFIG, StepSize(0.1, 0.5), 0.3, step)
    inside = torch.zeros(slab.layout.numel, dtype=torch.bool)
    for entry in slab.layout.entries:
        slab.view(inside, entry).fill_(True)
    for buffer in (slab.master, slab.exp_avg, slab.exp_avg_sq):
        assert not buffer[~inside].any()


def test_the_step_count_decides_the_bias_correction() -> None:
    first, second = fresh(), fresh()
    for slab in (first, second):
        slab.grads.copy_(make_slab(*SHAPES, seed=9).grads)
    update(first, CONFIG, StepSize(0.1, 0.0), 1.0, 0)
    update(second, CONFIG, StepSize(0.1, 0.0), 1.0, 100)
    assert distance(first.master, second.master) > 1e-3
    # The first step of Adam moves every weight by the learning rate.
    moved = (fresh().master - first.master)[first.grads != 0].abs()
    assert_close(moved, torch.full_like(moved, 0.1), 3e-4)


@pytest.mark.parametrize(
    ("norm", "clip", "expected"),
    [(0.5, 1.0, 1.0), (4.0, 1.0, 0.25), (4.0, 0.0, 1.0), (0.0, 1.0, 1.0), (2.0, 3.0, 1.0)],
)
def test_the_clip_coefficient(norm: float, clip: float, expected: float) -> None:
    assert clip_coefficient(norm, clip) == pytest.approx(expected, rel=1e-5)
    assert clip_coefficient(norm, clip) <= 1.0


def test_a_slab_of_one_kind_of_parameters_is_updated() -> None:
    for shapes in ([(6, 7)], [(9,)]):
        slab = make_slab(*shapes)
        before = slab.master.clone()
        update(slab, CONFIG, StepSize(0.1, 0.0), 1.0, 1)
        for entry in slab.layout.entries:
            assert (slab.view(slab.master, entry) != slab.view(before, entry)).all()


def test_a_slab_without_parameters_needs_no_update() -> None:
    slab = make_slab()
    update(slab, CONFIG, StepSize(0.1, 0.1), 0.5, 1)
    assert slab.master.numel() == 0
