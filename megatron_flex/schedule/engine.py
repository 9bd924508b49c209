"""The event-driven pass that decides: list scheduling of one iteration.

A free device takes the most urgent operation that is ready and within its limits. A device runs
one operation at a time; a message leaves when its operation finishes and occupies its link (one
for each ordered pair of devices, first in first out) for its transfer time; computing goes on
meanwhile. Slices of a chain that has begun on a device pass forwards that wait for memory there:
what they need was reserved. :mod:`replay` times a given order under the same rules.

The passes are native (``kernels/src/schedule.cpp``); the tests have them in Python.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from enum import IntEnum
from itertools import pairwise

import numpy as np

from megatron_flex.native import Array, function, pointers, structure
from megatron_flex.planner.plan import Plan
from megatron_flex.schedule.compact import offsets, rows
from megatron_flex.schedule.operations import Integers
from megatron_flex.schedule.placement import Placement, Problem, positions
from megatron_flex.schedule.policies.policy import Limits, Orders, Policy


class Lend(IntEnum):
    """Who admits forwards to memory."""

    NOBODY = 0
    BANKER = 1
    TICKET = 2


class Stuck(Exception):
    """The banker's rule stopped the pipeline."""


def place(
    problem: Problem, policy: Policy, turn: Sequence[int], limits: Limits, stop: float = math.inf
) -> Placement | None:
    """Place every operation of an iteration.

    Args:
        problem: what to place; ``problem.split`` must be ``policy.split`` unless forward only.
        policy: the priority rule.
        turn: the micro-batches in the order in which they should enter.
        limits: what may be in flight; a chain counts as one forward.
        stop: give up (``None``) as soon as the makespan is sure to reach this many seconds.

    Every operation is placed. Where the memory of a device is less than one micro-batch needs
    there, the earliest waiting forward goes on regardless, and the predicted peak shows it.
    """

    def run(lend: Lend) -> Placement | None:
        passed = NativePass(problem, policy, turn, limits)
        verdict = passed.place(lend, stop)
        if verdict is Verdict.STUCK:
            raise Stuck
        return passed.placement() if verdict is Verdict.PLACED else None

    return attempts(problem, limits, run)


def attempts(
    problem: Problem, limits: Limits, run: Callable[[Lend], Placement | None]
) -> Placement | None:
    """The banker's pass where memory is limited; on general plans the ticket's where that stops."""
    if problem.forward_only or min(limits.memory) == math.inf:
        return run(Lend.NOBODY)
    try:
        found = run(Lend.BANKER)
    except Stuck:
        found = None
    else:
        # Giving up may have been due to a pass that was about to get stuck.
        if found is not None or in_one_direction(problem.plan):
            return found
    return run(Lend.TICKET)


def in_one_direction(plan: Plan) -> bool:
    """Whether the plan is straight or a V: no two micro-batches meet two devices in turn."""
    groups = [s.group for s in plan.stages]
    half = groups[: len(groups) // 2]
    straight = len(plan.devices) == sum(plan.degrees)
    return straight or (groups == half + half[::-1] and len(plan.devices) == sum(map(len, half)))


_OPERATIONS = "device seconds takes frees needs offset target wire lead"
_Problem = structure(
    "kinds stages batches devices train forwards_first alternate lender",
    "tolerance stop",
    f"{_OPERATIONS} turn cap memory queue_offset queue order_offset order start finish peak"
    " sequence reached",
)
"""``mflex_schedule_problem`` of ``kernels/src/schedule.cpp``, field by field."""


class Verdict(IntEnum):
    """How a pass ended."""

    PLACED = 0
    GAVE_UP = 1
    STUCK = 2


class NativePass:
    """One problem in the form that the native passes read."""

    def __init__(
        self,
        problem: Problem,
        policy: Policy | None = None,
        turn: Sequence[int] = (),
        limits: Limits | None = None,
        orders: Orders | None = None,
    ) -> None:
        ops = problem.operations
        total, devices = len(ops.seconds), ops.devices
        queues: list[Integers] = [np.zeros(0, dtype=np.int64)] * devices
        if policy is not None:
            ranked: dict[tuple[int, ...], Integers] = {}  # alike on devices of the same stages
            for device in problem.plan.devices:
                held = problem.plan.stages_of(device)
                if held not in ranked:
                    ranking = policy.rank(problem, device)
                    known = [k * ops.stages + s for k, s in ranking if k < ops.kinds]
                    ranked[held] = np.array(known, dtype=np.int64)
                queues[device] = ranked[held]
        queue_offset, queue = rows(queues)
        if orders is None:
            order_offset = offsets(np.bincount(ops.device, minlength=devices))
            order: Integers = np.zeros(total, dtype=np.int64)
        else:
            order_offset, order = rows(orders)
        self._problem = problem
        self._arrays: dict[str, Array] = {
            **{name: np.ascontiguousarray(getattr(ops, name)) for name in _OPERATIONS.split()},
            "turn": np.array(turn, dtype=np.int64),
            "cap": np.array(limits.in_flight if limits else (), dtype=np.float64),
            "memory": np.array(limits.memory[:devices] if limits else (), dtype=np.float64),
            "queue_offset": queue_offset,
            "queue": queue,
            "order_offset": order_offset,
            "order": order,
            "start": np.zeros(total),
            "finish": np.zeros(total),
            "peak": np.zeros(devices),
            "sequence": np.zeros(total, dtype=np.int64),
            "reached": np.zeros(devices, dtype=np.int64),
        }
        self._structure = _Problem(
            kinds=ops.kinds,
            stages=ops.stages,
            batches=ops.batches,
            devices=devices,
            train=not problem.forward_only,
            forwards_first=policy.forwards_first if policy else 0,
            alternate=policy.alternate if policy else 0,
            lender=Lend.NOBODY,
            tolerance=problem.tolerance,
            stop=math.inf,
            # The structure holds addresses: self._arrays keeps what they point to.
            **pointers(self._arrays),
        )

    def place(self, lend: Lend, stop: float) -> Verdict:
        """List scheduling; the result is in :meth:`placement` if the verdict is ``PLACED``."""
        self._structure.lender = lend
        self._structure.stop = stop
        return Verdict(function("mflex_schedule_place")(ctypes.addressof(self._structure)))

    def replay(self) -> bool:
        """Time the given order; whether all of it could be run.

        Each operation must be in it once, on its device: the native side trusts it.
        """
        done = function("mflex_schedule_replay")(ctypes.addressof(self._structure))
        return int(done) == len(self._arrays["sequence"])

    @property
    def reached(self) -> Integers:
        """Operations of its order that each device has run in a replay."""
        reached: Integers = self._arrays["reached"]  # type: ignore[assignment]
        return reached

    def placement(self, replayed: bool = False) -> Placement:
        """The result; ``replayed``: of :meth:`replay`, else of :meth:`place`."""
        arrays = self._arrays
        sequence, start = arrays["sequence"], arrays["start"]
        if replayed:  # operations were not run in the order of their start
            sequence = sequence[np.argsort(start[sequence], kind="stable")]
            sequence = positions(sequence)  # type: ignore[arg-type]
        order = arrays["order"]
        return Placement(
            self._problem,
            tuple(order[a:b] for a, b in pairwise(arrays["order_offset"].tolist())),  # type: ignore[misc]
            start,  # type: ignore[arg-type]
            arrays["finish"],  # type: ignore[arg-type]
            sequence,  # type: ignore[arg-type]
            float(arrays["finish"].max()),
            tuple(arrays["peak"].tolist()),
        )
