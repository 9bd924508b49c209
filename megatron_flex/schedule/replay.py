"""Time a given order of operations, under the rules of :mod:`engine`."""

from __future__ import annotations

from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from megatron_flex.schedule.costs import OpCosts
from megatron_flex.schedule.engine import NativePass
from megatron_flex.schedule.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Forward,
    Instruction,
    Program,
)
from megatron_flex.schedule.operations import OpKind
from megatron_flex.schedule.placement import Placement, Problem
from megatron_flex.schedule.policies.policy import Orders
from megatron_flex.schedule.routing import check_route


class ScheduleError(ValueError):
    """An order that cannot be run: the message says which device waits for what."""


_KINDS: dict[type[Instruction], OpKind] = {
    Forward: OpKind.FORWARD,
    Backward: OpKind.BACKWARD,
    BackwardInput: OpKind.BACKWARD,
    BackwardWeight: OpKind.WEIGHT,
}


def replay_program(program: Program, costs: OpCosts) -> Placement:
    """Time a program's own order: what an iteration takes at other costs than it was made for.

    Raises :class:`ScheduleError` as :func:`replay`, ``ValueError`` for costs of another shape.
    """
    kinds = {type(step) for steps in program.instructions for step in steps}
    problem = Problem(
        program.plan,
        costs,
        program.route,
        split=BackwardInput in kinds,
        forward_only=not kinds & {Backward, BackwardInput},
        chains=program.chains,
    )
    check_route(program.plan, program.route, costs.num_micro_batches)
    orders = tuple(
        np.array(
            [
                problem.encode(_KINDS[type(step)], step.stage, step.micro_batch)
                for step in steps
                if isinstance(step, Compute)
            ],
            dtype=np.int64,
        )
        for steps in program.instructions[: problem.num_devices]
    )
    return replay(problem, orders)


def replay(problem: Problem, orders: Orders) -> Placement:
    """Place every operation at the earliest time that its device's order allows.

    Raises :class:`ScheduleError` when an operation is missing, or the orders wait for each other.
    """
    ops = problem.operations
    order = np.concatenate([np.asarray(o, dtype=np.int64) for o in orders])
    devices = np.repeat(np.arange(len(orders)), [len(o) for o in orders])
    total = len(ops.seconds)
    # The native side trusts the order: each operation once, on its own device.
    inside = order[(order >= 0) & (order < total)]
    once = np.bincount(inside, minlength=total)
    if len(order) != total or not (once == 1).all() or (ops.device[order] != devices).any():
        _misplaced(problem, once)
    run = NativePass(problem, orders=orders)
    if not run.replay():
        _stuck(problem, orders, run.reached.tolist())
    return run.placement(replayed=True)


def _misplaced(problem: Problem, once: NDArray[np.int_]) -> NoReturn:
    wrong = np.flatnonzero(once != 1)
    if len(wrong):
        kind, stage, micro_batch = problem.decode(wrong[0])
        times = "never" if once[wrong[0]] == 0 else f"{once[wrong[0]]} times"
        raise ScheduleError(
            f"the given orders hold the {kind.name.lower()} of micro-batch {micro_batch} on stage"
            f" {stage} {times}"
        )
    raise ScheduleError("the given orders hold operations on devices that do not run them")


def _stuck(problem: Problem, orders: Orders, reached: list[int]) -> NoReturn:
    for device, order in enumerate(orders):
        at = reached[device]
        if at < len(order):
            kind, stage, micro_batch = problem.decode(order[at])
            raise ScheduleError(
                f"device {device} waits at its operation {at}"
                f" ({kind.name.lower()} of micro-batch {micro_batch} on stage {stage}) for an"
                " input that the given orders never produce before it"
            )
    raise AssertionError("nothing waits")
