"""What a policy is: the priority rule of the list scheduler, and its limits.

A policy is a value. It says whether the backward is split, how much may be in flight, and what a
free device does first among what it could do. Each textbook schedule is one short file that
builds a policy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from megatron_flex.schedule.operations import OpKind
from megatron_flex.schedule.placement import Problem

#: Order in which a device looks at its queues: pairs of kind and stage, most urgent first.
Ranking = tuple[tuple[OpKind, int], ...]
#: A given order of operation codes for each device, instead of a rule.
Orders = Sequence[Sequence[int] | NDArray[np.int64]]


@dataclass(frozen=True)
class Limits:
    """How much may be in flight. Infinite means no limit.

    Attributes:
        in_flight: for each stage, the forwards on one replica whose backward has not finished.
        memory: bytes of activations on each device. A limit below what one micro-batch needs is
            exceeded (the predicted peak then says so), for a pass must always end.
    """

    in_flight: tuple[float, ...]
    memory: tuple[float, ...]

    @classmethod
    def none(cls, problem: Problem) -> Limits:
        """No limit at all."""
        return cls((math.inf,) * len(problem.plan.stages), (math.inf,) * problem.num_devices)


def _no_order(problem: Problem, turn: Sequence[int]) -> Orders | None:
    return None


class Shape(Enum):
    """How the stages of a plan lie on its groups of devices, where a policy has an opinion."""

    STRAIGHT = "straight"  # one stage on each
    V = "v"  # two: the first and the last, the second and the last but one, ...
    INTERLEAVED = "interleaved"  # several: each group's turn comes again and again
    ANY = "any"


@dataclass(frozen=True)
class Policy:
    """A named rule.

    Attributes:
        name: as users write it.
        split: the backward is split into an input and a weight half.
        rank: ``rank(problem, device)`` orders the device's queues: alike on all devices that hold
            the same stages.
        limits: ``limits(problem)``.
        forwards_first: a device begins its first backward only after its last forward.
        alternate: after a backward a device looks at its forwards first.
        placement: the shape of plan that it is meant for.
        order: ``order(problem, turn)`` gives the textbook order where the plan is of the
            textbook's shape, else ``None``, and the rule decides.
        chains: that order knows the slices of samples.
    """

    name: str
    split: bool
    rank: Callable[[Problem, int], Ranking]
    limits: Callable[[Problem], Limits]
    forwards_first: bool = False
    alternate: bool = False
    placement: Shape = Shape.STRAIGHT
    order: Callable[[Problem, Sequence[int]], Orders | None] = _no_order
    chains: bool = False


def backward_first(problem: Problem, device: int) -> Ranking:
    """Backward before forward before weight gradient; the later stage first in each."""
    stages = problem.plan.stages_of(device)[::-1]
    kinds = (OpKind.BACKWARD, OpKind.FORWARD, OpKind.WEIGHT)
    return tuple((kind, s) for kind in kinds for s in stages)


def forward_first(problem: Problem, device: int) -> Ranking:
    """Forward before backward before weight gradient; the later stage first in each."""
    stages = problem.plan.stages_of(device)[::-1]
    return tuple((kind, s) for kind in OpKind for s in stages)


def in_flight_cap(share: float, devices: int, degree: int, out_of_step: int = 0) -> int:
    """Forwards in flight on one replica of a stage that keep the pipeline full.

    ``K = ceil((share * devices + out_of_step) / degree)``. At full speed all devices together begin
    one micro-batch a beat, and one that never waits is under way for ``share * devices`` beats.
    With ``out_of_step`` 0 it is ``stages - s`` for stage s where stages and degrees are even. (That
    number itself is up to 1.6 times slower for uneven data-parallel degrees.)

    Args:
        share: work from the stage to the end, as a part of all work.
        devices: devices in use.
        degree: replicas of the stage.
        out_of_step: beats that a micro-batch may wait, see :func:`out_of_step`.
    """
    # The small number keeps an exact integer from being rounded up.
    return max(1, math.ceil((share * devices + out_of_step) / degree - 1e-9))


def out_of_step(degrees: Sequence[int], stage: int) -> int:
    """Beats that a micro-batch may wait between its forward on a stage and its backward there.

    One of d replicas takes a micro-batch every d beats. Where neighbouring stages have as many
    replicas, their rhythms lock and nothing waits; else a micro-batch may reach a replica just
    after that has begun another one: up to one period of the slower side, ``max(d, d')`` beats at
    each such boundary.
    """
    behind = degrees[stage:]
    return sum(max(a, b) for a, b in pairwise(behind) if a != b)


def in_flight_caps(problem: Problem) -> tuple[int, ...]:
    """:func:`in_flight_cap` of every stage; a lean plan lets nothing wait."""
    plan = problem.plan
    work = [sum(problem.costs.stage_work(s)) for s in range(len(plan.stages))]
    total = sum(work)
    caps = []
    for number, degree in enumerate(plan.degrees):
        share = sum(work[number:]) / total if total > 0 else 1.0
        late = 0 if plan.o_plan.lean else out_of_step(plan.degrees, number)
        caps.append(in_flight_cap(share, len(plan.devices), degree, late))
    return tuple(caps)


def pipeline_memory(problem: Problem) -> tuple[float, ...]:
    """Activation bytes of one pipeline's worth of micro-batches on each device.

    For each stage that a device holds: as many micro-batches as there are devices in use for one
    replica of it, at their mean size; at least the largest micro-batch. On an even straight plan
    this is the peak of 1F1B's first device.
    """
    plan, activation = problem.plan, problem.costs.activation
    devices = problem.num_devices
    sizes = np.zeros(devices)
    whole = np.zeros((devices, problem.costs.num_micro_batches))
    columns = np.arange(whole.shape[1])
    for stage, row, size in zip(plan.stages, problem.route_array, activation, strict=True):
        whole[row, columns] += size
        total = np.bincount(row, weights=size, minlength=devices)
        count = np.maximum(np.bincount(row, minlength=devices), 1)
        sizes += len(plan.devices) / len(stage.group) * total / count
    return tuple(np.maximum(sizes, whole.max(axis=1)).tolist())
