"""Time a given order of operations, under the rules of :mod:`engine`."""

from __future__ import annotations

from megatron_flex.schedule.costs import OpCosts
from megatron_flex.schedule.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Forward,
    Instruction,
    Program,
)
from megatron_flex.schedule.native_engine import NativePass, available
from megatron_flex.schedule.placement import OpKind, Placement, Problem, positions
from megatron_flex.schedule.policies.policy import Orders
from megatron_flex.schedule.routing import check_route

FORWARD, BACKWARD, WEIGHT = map(int, OpKind)


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
    )
    check_route(program.plan, program.route, costs.num_micro_batches)
    orders = tuple(
        tuple(
            problem.encode(_KINDS[type(step)], step.stage, step.micro_batch)
            for step in steps
            if isinstance(step, Compute)
        )
        for steps in program.instructions[: problem.num_devices]
    )
    return replay(problem, orders)


def replay(problem: Problem, orders: Orders) -> Placement:
    """Place every operation at the earliest time that its device's order allows.

    Raises :class:`ScheduleError` when an operation is missing, or the orders wait for each other.
    """
    if available():
        run = NativePass(problem, orders=orders)
        if run.replay():
            return run.placement(by_start=True)
    # Without the library, or to say what is wrong with the orders.
    return _Replay(problem, orders).run()


class _Replay:
    def __init__(self, problem: Problem, orders: Orders) -> None:
        self.problem, self.orders = problem, orders
        self.M, self.S = problem.costs.num_micro_batches, problem.costs.num_stages
        self.duration: list[float] = problem.durations.tolist()
        total = len(self.duration)
        self.start, self.finish = [0.0] * total, [0.0] * total
        self.input = [-1.0] * total  # arrival of what the operation needs; -1: not yet
        self.input[: self.M] = [0.0] * self.M
        D = problem.num_devices
        self.at, self.free = [0] * D, [0.0] * D
        self.used, self.peak = [0.0] * D, [0.0] * D
        self.link_free: dict[tuple[int, int], float] = {}
        self.topological: list[int] = []

    def run(self) -> Placement:
        work = list(self.problem.plan.devices)
        while work:
            device = work.pop()
            queue = self.orders[device]
            while self.at[device] < len(queue) and self.input[queue[self.at[device]]] >= 0:
                target = self.step(device, queue[self.at[device]])
                self.at[device] += 1
                if target >= 0 and target not in work:
                    work.append(target)
        if len(self.topological) != len(self.duration):
            self.stuck()
        index = positions(self.topological)
        start = self.start
        sequence = sorted(self.topological, key=lambda code: (start[code], index[code]))
        return Placement(
            self.problem,
            self.orders,
            tuple(self.start),
            tuple(self.finish),
            positions(sequence),
            max(self.finish),
            tuple(self.peak),
        )

    def step(self, device: int, code: int) -> int:
        """Run one operation; returns the device that its result went to, or -1."""
        problem, M, S = self.problem, self.M, self.S
        begin = self.start[code] = max(self.free[device], self.input[code])
        end = self.finish[code] = self.free[device] = begin + self.duration[code]
        self.topological.append(code)
        rest, micro_batch = divmod(code, M)
        kind, stage = divmod(rest, S)
        target = -1
        if kind == FORWARD:
            if stage + 1 < S:
                target = self.send(device, code + M, stage, micro_batch, end)
            elif not problem.forward_only:
                self.input[code + S * M] = end
            if not problem.forward_only:
                self.used[device] += problem.costs.activation[stage][micro_batch]
                self.peak[device] = max(self.peak[device], self.used[device])
            return target
        if kind == BACKWARD:
            if stage:
                target = self.send(device, code - M, stage - 1, micro_batch, end)
            if problem.split:
                self.input[code + S * M] = end
                return target
        self.used[device] -= problem.costs.activation[stage][micro_batch]
        return target

    def send(self, source: int, code: int, boundary: int, micro_batch: int, now: float) -> int:
        """The input of ``code`` leaves ``source``; returns where it goes."""
        target = self.problem.route[code // self.M % self.S][micro_batch]
        if target != source:
            link = (source, target)
            wire = self.problem.costs.transfer[boundary][micro_batch]
            now = self.link_free[link] = max(now, self.link_free.get(link, 0.0)) + wire
        self.input[code] = now
        return target

    def stuck(self) -> None:
        for device, order in enumerate(self.orders):
            if self.at[device] < len(order):
                kind, stage, micro_batch = self.problem.decode(order[self.at[device]])
                raise ScheduleError(
                    f"device {device} waits at its operation {self.at[device]}"
                    f" ({kind.name.lower()} of micro-batch {micro_batch} on stage {stage}) for an"
                    " input that the given orders never produce before it"
                )
        raise ScheduleError(
            f"the given orders hold {len(self.topological)} of {len(self.duration)} operations"
        )
