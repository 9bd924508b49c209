"""The plan of an iteration: which units form each stage and which devices hold it.

A plan has a text form, one field a stage, separated by ``|``: ``0:5@0,1 | 5:9@2`` puts units
0 to 4 on devices 0 and 1 (two data-parallel replicas) and units 5 to 8 on device 2.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

_STAGE = re.compile(r"\s*(\d+)\s*:\s*(\d+)\s*@\s*(\d+(?:\s*-\s*\d+)?(?:\s*,\s*\d+(?:\s*-\s*\d+)?)*)\s*")


class PlanError(ValueError):
    """A plan that cannot be: the message says which stage and what to change."""


@dataclass(frozen=True)
class Stage:
    """Units ``[start, stop)`` on each device of ``group`` (its size is the stage's DP degree)."""

    start: int
    stop: int
    group: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.start}:{self.stop}@{','.join(map(str, self.group))}"


@dataclass(frozen=True)
class Plan:
    """Stages in pipeline order. A device may hold several stages; some devices may be idle."""

    stages: tuple[Stage, ...]

    def __post_init__(self) -> None:
        if not self.stages:
            raise PlanError("a plan needs at least one stage")
        expected = 0
        for number, stage in enumerate(self.stages):
            if stage.start != expected or stage.stop <= stage.start:
                raise PlanError(
                    f"stage {number} ({stage}) must start at unit {expected} and hold at least one"
                    " unit: stages cover the units in order, each once"
                )
            if not stage.group or len(set(stage.group)) != len(stage.group) or min(stage.group) < 0:
                raise PlanError(f"stage {number} ({stage}) needs devices, each named once")
            expected = stage.stop

    @property
    def num_units(self) -> int:
        """Number of units that the stages cover."""
        return self.stages[-1].stop

    @cached_property
    def devices(self) -> tuple[int, ...]:
        """All devices that hold a stage, ascending."""
        return tuple(sorted({d for s in self.stages for d in s.group}))

    @property
    def degrees(self) -> tuple[int, ...]:
        """The data-parallel degree of each stage."""
        return tuple(len(s.group) for s in self.stages)

    def stages_of(self, device: int) -> tuple[int, ...]:
        """Numbers of the stages that ``device`` holds, in pipeline order."""
        return tuple(i for i, s in enumerate(self.stages) if device in s.group)

    def holders(self, unit: int) -> tuple[int, ...]:
        """Devices that hold ``unit``, ascending."""
        for stage in self.stages:
            if stage.start <= unit < stage.stop:
                return tuple(sorted(stage.group))
        raise PlanError(f"unit {unit} is in no stage of {self}")

    def check(self, num_units: int, num_devices: int) -> None:
        """Raise :class:`PlanError` unless the plan fits a model and a world size."""
        if self.num_units != num_units:
            raise PlanError(
                f"the plan '{self}' covers {self.num_units} units, the model has {num_units}"
                " (embedding, attention and MLP of each layer, head)"
            )
        if self.devices[-1] >= num_devices:
            raise PlanError(
                f"the plan '{self}' names device {self.devices[-1]}, but there are {num_devices}"
                f" workers (0 to {num_devices - 1})"
            )

    def __str__(self) -> str:
        return " | ".join(map(str, self.stages))

    @classmethod
    def parse(cls, text: str) -> Plan:
        """Read the text form. Devices may be ranges: ``0:5@0-3``."""
        stages = []
        for number, field in enumerate(text.split("|")):
            match = _STAGE.fullmatch(field)
            if match is None:
                raise PlanError(
                    f"stage {number} of the plan is '{field.strip()}'; expected START:STOP@DEVICES,"
                    " such as 0:5@0,1"
                )
            group: list[int] = []
            for part in match[3].split(","):
                first, _, last = part.partition("-")
                group.extend(range(int(first), int(last or first) + 1))
            stages.append(Stage(int(match[1]), int(match[2]), tuple(group)))
        return cls(tuple(stages))
