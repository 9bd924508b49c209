"""The passes of :mod:`engine` and :mod:`replay` in the native library: same results, much faster.

``kernels/src/schedule.cpp`` repeats the Python rules operation by operation. Where the library is
not built, the Python passes are used, so schedules can be drawn and studied without a compiler.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from enum import IntEnum
from functools import cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from megatron_flex.native import NativeError, function
from megatron_flex.schedule.placement import Placement, Problem
from megatron_flex.schedule.policies.policy import Limits, Orders, Policy

_LONG, _DOUBLE, _POINTER = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p
_INTEGERS = [
    "stages",
    "batches",
    "devices",
    "kinds",
    "split",
    "train",
    "forwards_first",
    "alternate",
    "lender",
]
_ARRAYS = [
    "duration",
    "transfer",
    "activation",
    "route",
    "turn",
    "cap",
    "memory",
    "queue_offset",
    "queue",
    "order_offset",
    "start",
    "finish",
    "peak",
    "order",
    "sequence",
]


class _Problem(ctypes.Structure):
    """``mflex_schedule_problem`` of ``kernels/src/schedule.cpp``, field by field."""

    _fields_ = [
        *((name, _LONG) for name in _INTEGERS),
        ("tolerance", _DOUBLE),
        ("stop", _DOUBLE),
        *((name, _POINTER) for name in _ARRAYS),
    ]


class Lend(IntEnum):
    """Who admits forwards to memory."""

    NOBODY = 0
    BANKER = 1
    TICKET = 2


class Verdict(IntEnum):
    """How a pass ended."""

    PLACED = 0
    GAVE_UP = 1
    STUCK = 2


@cache
def available() -> bool:
    """Whether the native library is built and has the passes."""
    try:
        function("mflex_schedule_place")
        function("mflex_schedule_replay")
    except NativeError:
        return False
    return True


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
        costs = problem.costs
        stages, devices = costs.num_stages, problem.num_devices
        total = len(problem.durations)
        queues: list[list[int]] = [[] for _ in range(devices)]
        if policy is not None:
            for device in problem.plan.devices:
                ranking = policy.rank(problem, device)
                kinds = len(problem.kinds)
                queues[device] = [kind * stages + s for kind, s in ranking if kind < kinds]
        route = problem.route_array
        counts = np.bincount(route.ravel(), minlength=devices) * len(problem.kinds)
        flat = [] if orders is None else [code for order in orders for code in order]
        self._problem = problem
        self._arrays: dict[str, NDArray[np.float64] | NDArray[np.int64]] = {
            "duration": np.ascontiguousarray(problem.durations),
            "transfer": costs.arrays["transfer"],
            "activation": costs.arrays["activation"],
            "route": route,
            "turn": np.array(turn, dtype=np.int64),
            "cap": np.array(limits.in_flight if limits else (), dtype=np.float64),
            "memory": np.array(limits.memory[:devices] if limits else (), dtype=np.float64),
            "queue_offset": _offsets([len(q) for q in queues]),
            "queue": np.array([q for queue in queues for q in queue], dtype=np.int64),
            "order_offset": _offsets(counts),
            "start": np.zeros(total),
            "finish": np.zeros(total),
            "peak": np.zeros(devices),
            "order": np.array(flat, dtype=np.int64) if flat else np.zeros(total, dtype=np.int64),
            "sequence": np.zeros(total, dtype=np.int64),
        }
        self._structure = _Problem(
            stages=stages,
            batches=costs.num_micro_batches,
            devices=devices,
            kinds=len(problem.kinds),
            split=problem.split,
            train=not problem.forward_only,
            forwards_first=policy.forwards_first if policy else 0,
            alternate=policy.alternate if policy else 0,
            lender=Lend.NOBODY,
            tolerance=problem.tolerance,
            stop=math.inf,
            # The structure holds addresses: self._arrays keeps what they point to.
            **{name: array.ctypes.data for name, array in self._arrays.items()},
        )

    def place(self, lend: Lend, stop: float) -> Verdict:
        """List scheduling; the result is in :meth:`placement` if the verdict is ``PLACED``."""
        self._structure.lender = lend
        self._structure.stop = stop
        return Verdict(function("mflex_schedule_place")(ctypes.addressof(self._structure)))

    def replay(self) -> bool:
        """Time the given order; whether all of it could be run."""
        order = self._arrays["order"]
        total = len(order)
        # The native side trusts the order: each operation once, on its own device.
        if total != len(self._arrays["sequence"]) or total == 0:
            return False
        devices = np.repeat(
            np.arange(self._problem.num_devices), np.diff(self._arrays["order_offset"])
        )
        route = self._problem.route_array.ravel()
        once = np.bincount(np.clip(order, 0, total), minlength=total + 1)[:total]
        if order.min() < 0 or not once.all() or (route[order % len(route)] != devices).any():
            return False
        done = function("mflex_schedule_replay")(ctypes.addressof(self._structure))
        return int(done) == total

    def placement(self, by_start: bool = False) -> Placement:
        """The result. ``by_start``: the operations were not run in the order of their start."""
        arrays = self._arrays
        sequence, start = arrays["sequence"], arrays["start"]
        if by_start:
            sequence = sequence[np.argsort(start[sequence], kind="stable")]
        positions = np.empty_like(sequence)
        positions[sequence] = np.arange(len(sequence))
        offset: list[int] = arrays["order_offset"].tolist()
        order: list[int] = arrays["order"].tolist()
        return Placement(
            self._problem,
            tuple(tuple(order[a:b]) for a, b in pairwise(offset)),
            tuple(start.tolist()),
            tuple(arrays["finish"].tolist()),
            tuple(positions.tolist()),
            float(arrays["finish"].max()),
            tuple(arrays["peak"].tolist()),
        )


def _offsets(counts: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    """Starts of consecutive runs of these lengths, and the end of the last."""
    found = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=found[1:])
    return found
