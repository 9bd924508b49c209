"""The event-driven pass that decides: list scheduling of one iteration.

A free device takes the most urgent operation that is ready and within its limits. A device runs
one operation at a time; a message leaves when its operation finishes and occupies its link (one
for each ordered pair of devices, first in first out) for its transfer time; computing goes on
meanwhile. :mod:`replay` times a given order under the same rules.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heappop, heappush

from megatron_flex.schedule.budget import Banker, Ticket, in_one_direction
from megatron_flex.schedule.native_engine import Lend, NativePass, Verdict, available
from megatron_flex.schedule.placement import OpKind, Placement, Problem, positions
from megatron_flex.schedule.policies.policy import Limits, Policy

FORWARD, BACKWARD, WEIGHT = map(int, OpKind)


def place(
    problem: Problem, policy: Policy, turn: Sequence[int], limits: Limits, stop: float = math.inf
) -> Placement | None:
    """Place every operation of an iteration.

    Args:
        problem: what to place; ``problem.split`` must be ``policy.split`` unless forward only.
        policy: the priority rule.
        turn: the micro-batches in the order in which they should enter.
        limits: what may be in flight.
        stop: give up (``None``) as soon as the makespan is sure to reach this many seconds.

    Every operation is placed. Where the memory of a device is less than one micro-batch needs
    there, the earliest waiting forward goes on regardless, and the predicted peak shows it.
    """
    run = _native if available() else _python
    if problem.forward_only or min(limits.memory) == math.inf:
        return run(problem, policy, turn, limits, Lend.NOBODY, stop)
    try:
        found = run(problem, policy, turn, limits, Lend.BANKER, stop)
    except _Stuck:
        found = None
    else:
        # Giving up may have been due to a pass that was about to get stuck.
        if found is not None or in_one_direction(problem.plan):
            return found
    return run(problem, policy, turn, limits, Lend.TICKET, stop)


def _native(
    problem: Problem, policy: Policy, turn: Sequence[int], limits: Limits, lend: Lend, stop: float
) -> Placement | None:
    """One pass in the native library; raises :class:`_Stuck`."""
    run = NativePass(problem, policy, turn, limits)
    verdict = run.place(lend, stop)
    if verdict is Verdict.STUCK:
        raise _Stuck
    return run.placement() if verdict is Verdict.PLACED else None


def _python(
    problem: Problem, policy: Policy, turn: Sequence[int], limits: Limits, lend: Lend, stop: float
) -> Placement | None:
    """The same pass in Python."""
    lender: Banker | Ticket | None = None
    if lend is Lend.BANKER:
        lender = Banker(problem, limits.memory)
    elif lend is Lend.TICKET:
        lender = Ticket(problem, limits.memory, turn)
    return _Pass(problem, policy, turn, limits.in_flight, lender).run(stop)


class _Stuck(Exception):
    """The banker's rule stopped the pipeline."""


class _Pass:
    """State of one pass. Operations are codes, as :mod:`placement` says."""

    def __init__(
        self,
        problem: Problem,
        policy: Policy,
        turn: Sequence[int],
        cap: Sequence[float],
        lender: Banker | Ticket | None,
    ) -> None:
        self.problem, self.policy, self.turn = problem, policy, turn
        costs = problem.costs
        self.S, self.M = costs.num_stages, costs.num_micro_batches
        self.train = not problem.forward_only
        self.duration: list[float] = problem.durations.tolist()
        self.rank = [0] * self.M  # position in the order of entry
        for position, micro_batch in enumerate(turn):
            self.rank[micro_batch] = position
        D = problem.num_devices
        self.cap, self.lender = cap, lender
        # One heap of ranks for each (kind, stage) of a device, looked at in the policy's order.
        self.queues: list[list[tuple[int, int, list[int]]]] = [[] for _ in range(D)]
        self.heap_of: list[dict[int, list[int]]] = [{} for _ in range(D)]  # by kind * S + stage
        for device in problem.plan.devices:
            for kind, stage in policy.rank(problem, device):
                heap: list[int] = []
                self.queues[device].append((int(kind), stage, heap))
                self.heap_of[device][kind * self.S + stage] = heap
        self.in_flight = [[0] * self.S for _ in range(D)]
        self.used, self.peak = [0.0] * D, [0.0] * D
        self.forwards_left, self.work_left = [0] * D, [0.0] * D
        for kind in problem.kinds:
            for stage, row in enumerate(problem.route):
                base = (kind * self.S + stage) * self.M
                for micro_batch, device in enumerate(row):
                    self.work_left[device] += self.duration[base + micro_batch]
                    self.forwards_left[device] += kind == FORWARD
        self.start, self.finish = [0.0] * len(self.duration), [0.0] * len(self.duration)
        self.order: list[list[int]] = [[] for _ in range(D)]
        self.sequence: list[int] = []
        self.idle, self.after_backward = [True] * D, [False] * D
        self.link_free: dict[tuple[int, int], float] = {}
        #: (time, operation): a finish, or, with the operation negated less one, an arrival.
        self.events: list[tuple[float, int]] = []
        self.touched: set[int] = set()

    def run(self, stop: float) -> Placement | None:
        M, S, route, rank = self.M, self.S, self.problem.route, self.rank
        events, touched, idle = self.events, self.touched, self.idle
        activation, split = self.problem.costs.activation, self.problem.split
        tolerance = self.problem.tolerance
        for micro_batch in range(M):
            self.ready(FORWARD, 0, micro_batch, route[0][micro_batch])
        now = 0.0
        while True:
            for device in sorted(touched):
                if idle[device]:
                    if now + self.work_left[device] >= stop:
                        return None
                    self.dispatch(device, now)
            touched.clear()
            if not events:
                if len(self.sequence) == len(self.duration):
                    return self.result()
                if not isinstance(self.lender, Ticket):
                    raise _Stuck
                self.start_anyway(now)
                continue
            horizon = events[0][0] + tolerance
            while events and events[0][0] <= horizon:
                now, code = heappop(events)
                arrival = code < 0
                if arrival:
                    code = -1 - code
                rest, micro_batch = divmod(code, M)
                kind, stage = divmod(rest, S)
                device = route[stage][micro_batch]
                touched.add(device)
                if arrival:
                    heappush(self.heap_of[device][rest], rank[micro_batch])
                    continue
                idle[device] = True
                if kind == FORWARD:
                    if stage + 1 < S:
                        self.deliver(FORWARD, stage + 1, micro_batch, device, now)
                    elif self.train:
                        self.ready(BACKWARD, stage, micro_batch, device)
                    continue
                if kind == BACKWARD:
                    self.in_flight[device][stage] -= 1
                    if stage:
                        self.deliver(BACKWARD, stage - 1, micro_batch, device, now)
                    if split:
                        self.ready(WEIGHT, stage, micro_batch, device)
                        continue
                self.used[device] -= activation[stage][micro_batch]

    def ready(self, kind: int, stage: int, micro_batch: int, device: int) -> None:
        heappush(self.heap_of[device][kind * self.S + stage], self.rank[micro_batch])
        self.touched.add(device)

    def deliver(self, kind: int, stage: int, micro_batch: int, source: int, now: float) -> None:
        """What a finished operation produced goes to the device of ``(kind, stage)``."""
        target = self.problem.route[stage][micro_batch]
        if source != target:
            boundary = stage - 1 if kind == FORWARD else stage
            wire = self.problem.costs.transfer[boundary][micro_batch]
            link = (source, target)
            arrival = max(now, self.link_free.get(link, 0.0)) + wire
            self.link_free[link] = arrival
            if arrival > now:
                code = (kind * self.S + stage) * self.M + micro_batch
                heappush(self.events, (arrival, -1 - code))
                return
        self.ready(kind, stage, micro_batch, target)

    def dispatch(self, device: int, now: float) -> None:
        """Start the most urgent operation that a free device may run, if any."""
        lender, used = self.lender, self.used[device]
        hold = self.policy.forwards_first and self.train and self.forwards_left[device] > 0
        starved = False
        queues = self.queues[device]
        if self.policy.alternate and self.after_backward[device]:
            queues = [queue for queue in queues if queue[0] == FORWARD] + queues
        for kind, stage, heap in queues:
            if not heap:
                continue
            micro_batch = self.turn[heap[0]]
            if kind == FORWARD:
                # Nothing less urgent may take the memory that a forward waits for.
                if starved or (self.train and self.in_flight[device][stage] >= self.cap[stage]):
                    continue
                if lender and not lender.admits(device, stage, micro_batch, used):
                    starved = True
                    continue
            elif hold:
                continue
            heappop(heap)
            self.begin(device, kind, stage, micro_batch, now)
            return

    def begin(self, device: int, kind: int, stage: int, micro_batch: int, now: float) -> None:
        code = (kind * self.S + stage) * self.M + micro_batch
        seconds = self.duration[code]
        self.start[code] = now
        self.finish[code] = now + seconds
        self.order[device].append(code)
        self.sequence.append(code)
        self.idle[device] = False
        self.after_backward[device] = kind != FORWARD
        self.work_left[device] -= seconds
        if kind == FORWARD and self.train:
            self.forwards_left[device] -= 1
            self.in_flight[device][stage] += 1
            used = self.used[device] = (
                self.used[device] + self.problem.costs.activation[stage][micro_batch]
            )
            if used > self.peak[device]:
                self.peak[device] = used
            if self.lender:
                self.lender.admit(device, stage, micro_batch)
        heappush(self.events, (now + seconds, code))

    def start_anyway(self, now: float) -> None:
        """A device is too small for one micro-batch: start the first one, whatever it takes."""
        _, _, device, stage, heap = min(
            (heap[0], -stage, device, stage, heap)
            for device, queue in enumerate(self.queues)
            for kind, stage, heap in queue
            if heap and kind == FORWARD
        )
        self.begin(device, FORWARD, stage, self.turn[heappop(heap)], now)

    def result(self) -> Placement:
        return Placement(
            self.problem,
            tuple(map(tuple, self.order)),
            tuple(self.start),
            tuple(self.finish),
            positions(self.sequence),
            max(self.finish),
            tuple(self.peak),
        )
