"""List scheduling and replay in plain Python: what ``kernels/src/schedule.cpp`` must equal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heappop, heappush

import numpy as np

from megatron_flex.schedule.engine import Lend, Stuck, attempts
from megatron_flex.schedule.operations import OpKind
from megatron_flex.schedule.placement import Placement, Problem, positions
from megatron_flex.schedule.policies.policy import Limits, Orders, Policy
from tests.oracles.lenders import Banker, Ticket

FORWARD, BACKWARD, WEIGHT = map(int, OpKind)


def place(
    problem: Problem, policy: Policy, turn: Sequence[int], limits: Limits, stop: float = math.inf
) -> Placement | None:
    """As :func:`megatron_flex.schedule.engine.place`."""

    def run(lend: Lend) -> Placement | None:
        lender: Banker | Ticket | None = None
        if lend is Lend.BANKER:
            lender = Banker(problem, limits.memory)
        elif lend is Lend.TICKET:
            lender = Ticket(problem, limits.memory, turn)
        return _Pass(problem, policy, turn, limits.in_flight, lender).run(stop)

    return attempts(problem, limits, run)


class _Edges:
    """The edges of each operation, as lists."""

    def __init__(self, problem: Problem) -> None:
        ops = problem.operations
        offset, target = ops.offset.tolist(), ops.target.tolist()
        wire = ops.wire.tolist()
        self.of = [
            [(target[e], wire[e]) for e in range(offset[c], offset[c + 1])]
            for c in range(len(offset) - 1)
        ]


class _Pass:
    """State of one pass."""

    def __init__(
        self,
        problem: Problem,
        policy: Policy,
        turn: Sequence[int],
        cap: Sequence[float],
        lender: Banker | Ticket | None,
    ) -> None:
        self.problem, self.policy, self.turn = problem, policy, turn
        ops = self.ops = problem.operations
        self.S, self.M = ops.stages, ops.batches
        self.train = not problem.forward_only
        self.duration: list[float] = ops.seconds.tolist()
        self.takes, self.frees = ops.takes.tolist(), ops.frees.tolist()
        self.device, self.needs = ops.device.tolist(), ops.needs.tolist()
        self.lead = ops.lead.tolist()
        self.edges = _Edges(problem).of
        self.rank = [0] * self.M  # position in the order of entry
        for position, micro_batch in enumerate(turn):
            self.rank[micro_batch] = position
        D = problem.num_devices
        self.cap, self.lender = cap, lender
        # Heaps of ranks for each (kind, stage) of a device, looked at in the policy's order: of
        # those that must be admitted, and of slices of chains that were.
        self.queues: list[list[tuple[int, int, list[int], list[int]]]] = [[] for _ in range(D)]
        self.heaps_of: list[dict[int, tuple[list[int], list[int]]]] = [{} for _ in range(D)]
        for device in problem.plan.devices:
            for kind, stage in policy.rank(problem, device):
                heaps: tuple[list[int], list[int]] = ([], [])
                self.queues[device].append((int(kind), stage, *heaps))
                self.heaps_of[device][kind * self.S + stage] = heaps
        self.in_flight = [[0] * self.S for _ in range(D)]
        self.used, self.peak = [0.0] * D, [0.0] * D
        self.forwards_left, self.work_left = [0] * D, [0.0] * D
        for code, device in enumerate(self.device):
            self.work_left[device] += self.duration[code]
            self.forwards_left[device] += code < self.S * self.M
        self.start, self.finish = [0.0] * len(self.duration), [0.0] * len(self.duration)
        self.order: list[list[int]] = [[] for _ in range(D)]
        self.sequence: list[int] = []
        self.idle, self.after_backward = [True] * D, [False] * D
        self.link_free: dict[tuple[int, int], float] = {}
        #: (time, operation): a finish, or, with the operation negated less one, an arrival.
        self.events: list[tuple[float, int]] = []
        self.touched: set[int] = set()

    def run(self, stop: float) -> Placement | None:
        events, touched, idle = self.events, self.touched, self.idle
        tolerance = self.problem.tolerance
        for code, needs in enumerate(self.needs):
            if not needs:
                self.ready(code)
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
                    raise Stuck
                self.start_anyway(now)
                continue
            horizon = events[0][0] + tolerance
            while events and events[0][0] <= horizon:
                now, code = heappop(events)
                if code < 0:
                    self.arrive(-1 - code)
                else:
                    self.ended(code, now)

    def ended(self, code: int, now: float) -> None:
        rest, micro_batch = divmod(code, self.M)
        kind, stage = divmod(rest, self.S)
        device = self.device[code]
        self.touched.add(device)
        self.idle[device] = True
        if kind == BACKWARD and self.lead[micro_batch] == micro_batch:
            self.in_flight[device][stage] -= 1
        self.used[device] -= self.frees[code]
        for target, wire in self.edges[code]:
            to = self.device[target]
            if to != device:
                link = (device, to)
                arrival = max(now, self.link_free.get(link, 0.0)) + wire
                self.link_free[link] = arrival
                if arrival > now:
                    heappush(self.events, (arrival, -1 - target))
                    continue
            self.arrive(target)

    def arrive(self, code: int) -> None:
        self.needs[code] -= 1
        if not self.needs[code]:
            self.ready(code)

    def ready(self, code: int) -> None:
        rest, micro_batch = divmod(code, self.M)
        device = self.device[code]
        admitted = rest < self.S and self.lead[micro_batch] != micro_batch
        heappush(self.heaps_of[device][rest][admitted], self.rank[micro_batch])
        self.touched.add(device)

    def dispatch(self, device: int, now: float) -> None:
        """Start the most urgent operation that a free device may run, if any."""
        lender, used = self.lender, self.used[device]
        hold = self.policy.forwards_first and self.train and self.forwards_left[device] > 0
        starved = False
        queues = self.queues[device]
        if self.policy.alternate and self.after_backward[device]:
            queues = [queue for queue in queues if queue[0] == FORWARD] + queues
        for kind, stage, heap, admitted in queues:
            if admitted:
                self.begin(device, kind, stage, self.turn[heappop(admitted)], now)
                return
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
        used = self.used[device] = self.used[device] + self.takes[code]
        self.peak[device] = max(self.peak[device], used)
        if kind == FORWARD and self.train:
            self.forwards_left[device] -= 1
            if self.lead[micro_batch] == micro_batch:
                self.in_flight[device][stage] += 1
                if self.lender:
                    self.lender.admit(device, stage, micro_batch)
        heappush(self.events, (now + seconds, code))

    def start_anyway(self, now: float) -> None:
        """A device is too small for one micro-batch: start the first one, whatever it takes."""
        _, _, device, stage, heap = min(
            (heap[0], -stage, device, stage, heap)
            for device, queue in enumerate(self.queues)
            for kind, stage, heap, _ in queue
            if heap and kind == FORWARD
        )
        self.begin(device, FORWARD, stage, self.turn[heappop(heap)], now)

    def result(self) -> Placement:
        return _placement(
            self.problem, self.order, self.start, self.finish, self.sequence, self.peak
        )


def _placement(
    problem: Problem,
    order: Orders,
    start: Sequence[float],
    finish: Sequence[float],
    sequence: Sequence[int],
    peak: Sequence[float],
) -> Placement:
    return Placement(
        problem,
        tuple(np.array(o, dtype=np.int64) for o in order),
        np.array(start),
        np.array(finish),
        positions(np.array(sequence)),
        max(finish),
        tuple(peak),
    )


def replay(problem: Problem, orders: Orders) -> Placement:
    """As :func:`megatron_flex.schedule.replay.replay`, for an order that can be run."""
    ops, edges = problem.operations, _Edges(problem).of
    device_of, needs = ops.device.tolist(), ops.needs.tolist()
    duration, takes, frees = ops.seconds.tolist(), ops.takes.tolist(), ops.frees.tolist()
    total, D = len(duration), problem.num_devices
    start, finish, arrived = [0.0] * total, [0.0] * total, [0.0] * total
    at, free, used, peak = [0] * D, [0.0] * D, [0.0] * D, [0.0] * D
    link_free: dict[tuple[int, int], float] = {}
    done: list[int] = []
    work = list(problem.plan.devices)
    while work:
        device = work.pop()
        queue = [int(c) for c in orders[device]]
        while at[device] < len(queue) and not needs[queue[at[device]]]:
            code = queue[at[device]]
            at[device] += 1
            start[code] = max(free[device], arrived[code])
            end = finish[code] = free[device] = start[code] + duration[code]
            done.append(code)
            used[device] += takes[code]
            peak[device] = max(peak[device], used[device])
            used[device] -= frees[code]
            for target, wire in edges[code]:
                to, arrival = device_of[target], end
                if to != device:
                    link = (device, to)
                    arrival = link_free[link] = max(end, link_free.get(link, 0.0)) + wire
                    if to not in work:
                        work.append(to)
                arrived[target] = max(arrived[target], arrival)
                needs[target] -= 1
    assert len(done) == total, "the order cannot be run"
    index = positions(np.array(done)).tolist()
    sequence = sorted(done, key=lambda code: (start[code], index[code]))
    return _placement(problem, orders, start, finish, sequence, peak)
