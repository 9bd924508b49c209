"""AdamW on slabs: one fused call for the weight-decayed part, one for the rest."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.optim.adamw import adamw

from megatron_flex.runtime.slab import Slab


@dataclass(frozen=True)
class OptimizerConfig:
    """Constants of AdamW; names as Megatron's flags. ``clip_grad`` of 0 clips nothing."""

    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8
    clip_grad: float = 1.0


@dataclass(frozen=True)
class StepSize:
    """What the learning-rate scheduler says for one iteration."""

    learning_rate: float
    weight_decay: float


def clip_coefficient(norm: float, clip_grad: float) -> float:
    """Factor for all gradients (megatron/core/optimizer/clip_grads.py): at most 1."""
    return min(1.0, clip_grad / (norm + 1.0e-6)) if clip_grad > 0.0 else 1.0


@torch.no_grad()
def update(
    slab: Slab,
    config: OptimizerConfig,
    size: StepSize,
    coefficient: float,
    updates: int,
    brought: torch.Tensor | None = None,
) -> None:
    """Scale the gradient of ``slab`` by ``coefficient`` and apply one step of AdamW.

    To this device's part, if the slab is sharded.

    Args:
        updates: the number of updates that were applied before this one.
        brought: of an offloaded slab, its ``swapped`` part, copied to the device; it is
            changed there.
    """
    start, stop = slab.part
    if start == stop:
        return
    grads = slab.grads[start:stop]
    if coefficient != 1.0:
        grads.mul_(coefficient)
    master, exp_avg, exp_avg_sq = slab.master, slab.exp_avg, slab.exp_avg_sq
    if brought is not None:
        *weights, exp_avg, exp_avg_sq = brought.split(slab.layout.numel)
        master = weights[0] if weights else slab.params
    split = min(max(slab.layout.decayed - start, 0), stop - start)
    for part, decay in ((slice(0, split), size.weight_decay), (slice(split, None), 0.0)):
        if master[part].numel() == 0:
            continue
        adamw(
            [master[part]],
            [grads[part]],
            [exp_avg[part]],
            [exp_avg_sq[part]],
            [],
            [torch.tensor(float(updates), device=slab.grads.device)],
            fused=True,
            amsgrad=False,
            beta1=config.adam_beta1,
            beta2=config.adam_beta2,
            lr=size.learning_rate,
            weight_decay=decay,
            eps=config.adam_eps,
            maximize=False,
        )
    if brought is None:
        slab.params_from_masters()
    elif slab.mixed:
        slab.params.copy_(master)
    else:
        slab.updated = True
