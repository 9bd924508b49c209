"""When a device with a memory budget may start a forward without stopping the pipeline later.

A device that holds several stages (a V) needs memory for a micro-batch more than once. If
forwards of the first stage took all of it, none could go on to the later stage, and nothing would
ever be freed. So memory is lent as a careful banker does (Dijkstra): a forward that is not the
micro-batch's last on this device is admitted only if afterwards every micro-batch on the way
could still, alone, get all that it will need here.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_flex.schedule.placement import Problem


class Budget:
    """Admission to the memory of the devices that have a limit."""

    def __init__(self, problem: Problem, memory: Sequence[float], tight: Sequence[bool]) -> None:
        self.activation = problem.costs.activation
        self.memory = [m * (1 + 1e-12) for m in memory]
        devices = problem.num_devices
        #: Bytes that are not held by micro-batches with forwards still to come on the device.
        self.spare = list(self.memory)
        #: For those micro-batches: bytes that they hold and that they will still need there.
        self.held: list[dict[int, float]] = [{} for _ in range(devices)]
        self.need: list[dict[int, float]] = [{} for _ in range(devices)]
        stages, batches = len(problem.route), problem.costs.num_micro_batches
        self.later = [[0.0] * batches for _ in range(stages)]
        if any(len(problem.plan.stages_of(d)) > 1 for d in problem.plan.devices if tight[d]):
            after: list[dict[int, float]] = [{} for _ in range(batches)]
            for stage in reversed(range(stages)):
                row, later = problem.route[stage], self.later[stage]
                for m, size in enumerate(self.activation[stage]):
                    later[m] = after[m].get(row[m], 0.0)
                    after[m][row[m]] = later[m] + size

    def admits(self, device: int, stage: int, micro_batch: int, used: float) -> bool:
        """Whether the forward may start, with ``used`` bytes held on the device now."""
        size = self.activation[stage][micro_batch]
        if used + size > self.memory[device]:
            return False
        later = self.later[stage][micro_batch]
        if not later:
            return True
        needs = self.need[device]
        largest = max(needs.values(), default=0.0)
        return self.spare[device] - size >= max(largest, later)

    def admit(self, device: int, stage: int, micro_batch: int) -> None:
        """Account for a forward that starts."""
        later = self.later[stage][micro_batch]
        held = self.held[device]
        if later:
            size = self.activation[stage][micro_batch]
            held[micro_batch] = held.get(micro_batch, 0.0) + size
            self.need[device][micro_batch] = later
            self.spare[device] -= size
        elif micro_batch in held:
            self.spare[device] += held.pop(micro_batch)
            del self.need[device][micro_batch]
