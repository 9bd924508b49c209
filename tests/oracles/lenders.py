"""When a device with a memory budget may start a forward without stopping the pipeline later.

The rules of ``kernels/src/schedule.cpp`` in Python. A device that holds several stages (a V) needs
memory for a micro-batch more than once. If forwards of the first stage took all of it, none could
go on to the later stage, and nothing would ever be freed. Both classes lend memory so that this
does not happen. A chain counts as one: its first slice takes what all of it will need.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_flex.schedule.placement import Problem


def taken(problem: Problem) -> list[list[float]]:
    """Bytes that each forward takes, ``[stage][micro_batch]``."""
    shape = len(problem.route), problem.costs.num_micro_batches
    found: list[list[float]] = (
        problem.operations.takes[: shape[0] * shape[1]].reshape(shape).tolist()
    )
    return found


class Banker:
    """Lends as a careful banker does (Dijkstra), each device by itself.

    A forward that is not the micro-batch's last on this device is admitted only if afterwards
    every micro-batch on the way could still, alone, get all that it will need here. That is
    enough for straight plans and for a V, where the stage that comes next is never on a device
    that waits for this one; other plans can still stop, and :class:`Ticket` takes over.
    """

    def __init__(self, problem: Problem, memory: Sequence[float]) -> None:
        self.takes = taken(problem)
        self.memory = [m * (1 + 1e-12) for m in memory]
        devices = problem.num_devices
        #: Bytes that are not held by micro-batches with forwards still to come on the device.
        self.spare = list(self.memory)
        #: For those micro-batches: bytes that they hold and that they will still need there.
        self.held: list[dict[int, float]] = [{} for _ in range(devices)]
        self.need: list[dict[int, float]] = [{} for _ in range(devices)]
        stages, batches = len(problem.route), problem.costs.num_micro_batches
        self.later = [[0.0] * batches for _ in range(stages)]
        if len(problem.plan.devices) < sum(problem.plan.degrees):
            after: list[dict[int, float]] = [{} for _ in range(batches)]
            for stage in reversed(range(stages)):
                row, later = problem.route[stage], self.later[stage]
                for m, size in enumerate(self.takes[stage]):
                    later[m] = after[m].get(row[m], 0.0)
                    after[m][row[m]] = later[m] + size

    def admits(self, device: int, stage: int, micro_batch: int, used: float) -> bool:
        """Whether the forward may start, with ``used`` bytes held on the device now."""
        size = self.takes[stage][micro_batch]
        if used + size > self.memory[device]:
            return False
        later = self.later[stage][micro_batch]
        if not later:
            return True
        largest = max(self.need[device].values(), default=0.0)
        return self.spare[device] - size >= max(largest, later)

    def admit(self, device: int, stage: int, micro_batch: int) -> None:
        """Account for a forward that starts."""
        later = self.later[stage][micro_batch]
        held = self.held[device]
        if later:
            size = self.takes[stage][micro_batch]
            held[micro_batch] = held.get(micro_batch, 0.0) + size
            self.need[device][micro_batch] = later
            self.spare[device] -= size
        elif micro_batch in held:
            self.spare[device] += held.pop(micro_batch)
            del self.need[device][micro_batch]


class Ticket:
    """Keeps room on every device for one whole micro-batch: slower, but safe on any plan.

    The first micro-batch (in the order of entry) whose forwards are not all done has the ticket:
    it alone may use the room kept for the largest one. So it always reaches the last stage, its
    backward needs no memory, and all that it held is free for the next.
    """

    def __init__(self, problem: Problem, memory: Sequence[float], turn: Sequence[int]) -> None:
        self.takes = taken(problem)
        self.memory = [m * (1 + 1e-12) for m in memory]
        lead = problem.operations.lead
        self.turn = [m for m in turn if lead[m] == m]
        self.first = 0
        self.last_stage = len(problem.route) - 1
        self.complete = [False] * len(turn)
        #: Bytes held on each device by micro-batches with forwards still to come anywhere.
        self.under_way = [0.0] * problem.num_devices
        self.held: list[dict[int, float]] = [{} for _ in turn]
        self.room = [0.0] * problem.num_devices
        for micro_batch in self.turn:
            whole: dict[int, float] = {}
            for row, sizes in zip(problem.route, self.takes, strict=True):
                device = row[micro_batch]
                whole[device] = whole.get(device, 0.0) + sizes[micro_batch]
            for device, size in whole.items():
                self.room[device] = max(self.room[device], size)

    def admits(self, device: int, stage: int, micro_batch: int, used: float) -> bool:
        """Whether the forward may start, with ``used`` bytes held on the device now."""
        size = self.takes[stage][micro_batch]
        if used + size > self.memory[device]:
            return False
        holder = self.turn[self.first]
        if micro_batch == holder or stage == self.last_stage:
            return True
        others = self.under_way[device] - self.held[holder].get(device, 0.0)
        return others + size <= self.memory[device] - self.room[device]

    def admit(self, device: int, stage: int, micro_batch: int) -> None:
        """Account for a forward that starts."""
        held = self.held[micro_batch]
        if stage < self.last_stage:
            size = self.takes[stage][micro_batch]
            held[device] = held.get(device, 0.0) + size
            self.under_way[device] += size
            return
        for at, size in held.items():
            self.under_way[at] -= size
        held.clear()
        self.complete[micro_batch] = True
        while self.first < len(self.turn) - 1 and self.complete[self.turn[self.first]]:
            self.first += 1
