"""The plan of an iteration: which units form each stage and which devices hold it.

A plan has a text form, one field a stage, separated by ``|``: ``0:5@0,1 | 5:9@2`` puts units
0 to 4 on devices 0 and 1 (two data-parallel replicas) and units 5 to 8 on device 2. Memory
optimisation follows after semicolons, ``; recompute 1-3 ; optimizer 5,6 ; activations 4 ; shard
0-2``: the units whose activations are recomputed, whose optimizer state lives on the host, whose
saved activations travel to the host and back, and whose optimizer state is split over the replicas;
and ``; lean`` for fewer micro-batches in flight. ``; schedule zb-v`` names the order of operations,
``; spare 1000000`` the bytes of a device that it must leave free, ``; cut 4096`` how the batch is
cut: micro-batches that cost as much as one sample of so many tokens.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import groupby

_STAGE = re.compile(
    r"\s*(\d+)\s*:\s*(\d+)\s*@\s*(\d+(?:\s*-\s*\d+)?(?:\s*,\s*\d+(?:\s*-\s*\d+)?)*)\s*"
)


_UNITS = re.compile(r"\d+(?:\s*-\s*\d+)?(?:\s*,\s*\d+(?:\s*-\s*\d+)?)*")
_LARGEST = 1_000_000
"""No unit or device has a larger number: a text with one is refused before its ranges are made."""
_SCHEDULE = re.compile(r"[a-z0-9][a-z0-9-]*")
_ALIKE = 8
"""Degrees in a row that a shape says one by one."""
_NAMES = ("recompute", "optimizer", "activations", "shard")


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

    def __hash__(self) -> int:
        return self._hash  # layouts are looked up often

    @cached_property
    def _hash(self) -> int:
        return hash((self.start, self.stop, self.group))


@dataclass(frozen=True)
class OPlan:
    """Memory optimisation (the paper's O_plan): what each unit does on all its holders.

    Attributes:
        recompute: units whose activations are dropped but for their input, and computed again.
        optimizer: units whose own slab's optimizer state lives on the host between updates.
        activations: units whose saved activations go to the host until their backward.
        lean: no more forwards in flight than micro-batches that never wait would need, where
            1F1B's stages have different degrees (``schedule/policies/policy.py``).
        shard: units whose own slab's optimizer state is split over the slab's holders; with one
            holder it stays whole.
    """

    recompute: tuple[int, ...] = ()
    optimizer: tuple[int, ...] = ()
    activations: tuple[int, ...] = ()
    lean: bool = False
    shard: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in _NAMES:
            units = getattr(self, name)
            if any(b <= a for a, b in zip((-1, *units), units, strict=False)):
                raise PlanError(f"the units of '{name}' must ascend, each once: {units}")
        both = sorted(set(self.recompute) & set(self.activations))
        if both:
            raise PlanError(
                f"unit {both[0]} is recomputed and its activations go to the host: choose one"
            )
        both = sorted(set(self.optimizer) & set(self.shard))
        if both:
            raise PlanError(
                f"the optimizer state of unit {both[0]} is split over its replicas and goes to the"
                " host: choose one"
            )

    def __bool__(self) -> bool:
        return self.lean or any(getattr(self, name) for name in _NAMES)

    @property
    def saves(self) -> bool:
        """Whether it takes time for memory: something is recomputed or goes to the host."""
        return bool(self.recompute or self.optimizer or self.activations)

    def __str__(self) -> str:
        """As in a plan's text form, without the leading semicolon; empty for none."""
        parts = [f"{name} {_ranges(getattr(self, name))}" for name in _NAMES if getattr(self, name)]
        return " ; ".join([*parts, "lean"] if self.lean else parts)

    @classmethod
    def parse(cls, text: str) -> OPlan:
        """Read the text form."""
        found: dict[str, tuple[int, ...]] = {}
        fields = [f.strip() for f in text.split(";")]
        lean = "lean" in fields
        for field in (f for f in fields if f and f != "lean"):
            name, _, units = field.partition(" ")
            units = units.strip()
            if name not in _NAMES or name in found:
                raise PlanError(
                    f"'{field}' in a plan: expected each of {', '.join(_NAMES)} at most once, with"
                    " units, such as 'recompute 1-3,6', or 'lean'"
                )
            if not _UNITS.fullmatch(units):
                raise PlanError(f"'{field}' in a plan: '{units}' are not units, such as 1-3,6")
            found[name] = _numbers(units)
        return cls(**found, lean=lean)


@dataclass(frozen=True)
class Plan:
    """Stages in pipeline order. A device may hold several stages; some devices may be idle.

    ``o_plan`` and ``schedule`` are part of the plan, but not of its layout: compare ``stages`` for
    that. ``schedule``: name of the policy that orders its operations; empty: as the flags say.
    ``spare``: bytes of every device's budget into which that must place no activations.
    ``cut``: the target of cutting its batch (:class:`megatron_flex.data.cut.Cut`); 0: as the flags
    say.
    """

    stages: tuple[Stage, ...]
    o_plan: OPlan = OPlan()
    schedule: str = ""
    spare: int = 0
    cut: int = 0

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
        if self.schedule and not _SCHEDULE.fullmatch(self.schedule):
            raise PlanError(f"'{self.schedule}' is no name of a schedule, such as zb-v")
        if self.spare < 0:
            raise PlanError(f"a plan cannot leave {self.spare} bytes free")
        if self.cut < 0:
            raise PlanError(f"a batch cannot be cut by {self.cut} tokens")
        for name in _NAMES:
            units = getattr(self.o_plan, name)
            if units and units[-1] >= expected:
                raise PlanError(
                    f"the plan has units 0 to {expected - 1}, but memory optimisation names unit"
                    f" {units[-1]}"
                )

    @property
    def num_units(self) -> int:
        """Number of units that the stages cover."""
        return self.stages[-1].stop

    @cached_property
    def devices(self) -> tuple[int, ...]:
        """All devices that hold a stage, ascending."""
        return tuple(sorted({d for s in self.stages for d in s.group}))

    @cached_property
    def degrees(self) -> tuple[int, ...]:
        """The data-parallel degree of each stage."""
        return tuple(len(s.group) for s in self.stages)

    @property
    def shape(self) -> str:
        """The degrees, such as ``(2,1,1)``; with the devices where one holds several stages.

        ``(1,1,1) on 2``: three stages on two devices. Of many alike: ``(2,60×1,2)``.
        """
        runs = [(degree, len(list(some))) for degree, some in groupby(self.degrees)]
        words = (f"{n}×{d}" if n > _ALIKE else ",".join([str(d)] * n) for d, n in runs)
        text = f"({','.join(words)})"
        once = len(self.devices) == sum(self.degrees)
        return text if once else f"{text} on {len(self.devices)}"

    def stages_of(self, device: int) -> tuple[int, ...]:
        """Numbers of the stages that ``device`` holds, in pipeline order."""
        return self._held.get(device, ())

    @cached_property
    def _held(self) -> dict[int, tuple[int, ...]]:
        held: dict[int, list[int]] = {}
        for number, stage in enumerate(self.stages):
            for device in stage.group:
                held.setdefault(device, []).append(number)
        return {device: tuple(numbers) for device, numbers in held.items()}

    def keeps(self, other: Plan) -> bool:
        """Whether all slabs and parts of optimizer state are where ``other`` has them."""
        return self.stages == other.stages and self.o_plan.shard == other.o_plan.shard

    def sharded(self) -> Plan:
        """With the optimizer state of all units of several holders split over them.

        But for those whose state lives on the host.
        """
        o = self.o_plan
        several = (s for s in self.stages if len(s.group) > 1)
        units = {u for s in several for u in range(s.start, s.stop)} - set(o.optimizer)
        return replace(self, o_plan=replace(o, shard=tuple(sorted(units))))

    def check(self, num_units: int, num_devices: int) -> None:
        """Raise :class:`PlanError` unless the plan fits a model and a world size."""
        if self.num_units != num_units:
            raise PlanError(
                f"the plan '{self._shown}' covers {self.num_units} units, the model has {num_units}"
                " (embedding, attention and MLP of each layer, head)"
            )
        if self.devices[-1] >= num_devices:
            raise PlanError(
                f"the plan '{self._shown}' names device {self.devices[-1]}, but there are"
                f" {num_devices} workers (0 to {num_devices - 1})"
            )

    @cached_property
    def _text(self) -> str:
        parts = [" | ".join(map(str, self.stages))]
        if self.o_plan:
            parts.append(str(self.o_plan))
        if self.schedule:
            parts.append(f"schedule {self.schedule}")
        if self.spare:
            parts.append(f"spare {self.spare}")
        if self.cut:
            parts.append(f"cut {self.cut}")
        return " ; ".join(parts)

    @property
    def _shown(self) -> str:
        """The text form, or its begin where it would fill a screen."""
        return self._text if len(self._text) <= 500 else f"{self._text[:500]}..."

    def __str__(self) -> str:
        return self._text

    @classmethod
    def parse(cls, text: str) -> Plan:
        """Read the text form. Devices may be ranges: ``0:5@0-3``."""
        return _parsed(text)


@lru_cache(maxsize=64)
def _parsed(text: str) -> Plan:
    layout, _, optimisation = text.partition(";")
    stages = []
    for number, field in enumerate(layout.split("|")):
        match = _STAGE.fullmatch(field)
        if match is None:
            raise PlanError(
                f"stage {number} of the plan is '{field.strip()}'; expected START:STOP@DEVICES,"
                " such as 0:5@0,1"
            )
        stages.append(Stage(int(match[1]), int(match[2]), _numbers(match[3])))
    fields: list[str] = []
    named: dict[str, str] = {}
    for field in optimisation.split(";"):
        word, _, value = field.strip().partition(" ")
        if word not in ("schedule", "spare", "cut"):
            fields.append(field)
        elif word in named or not value.strip():
            raise PlanError(
                f"'{field.strip()}' in a plan: expected one schedule, such as 'schedule zb-v',"
                " and at most one number of spare bytes and one of tokens to cut by"
            )
        else:
            named[word] = value.strip()
    spare, cut = (_whole(name, named.get(name, "0")) for name in ("spare", "cut"))
    o_plan = OPlan.parse(";".join(fields))
    return Plan(tuple(stages), o_plan, named.get("schedule", ""), spare, cut)


def _whole(name: str, text: str) -> int:
    if not re.fullmatch(r"\d{1,18}", text):
        unit = "bytes" if name == "spare" else "tokens"
        raise PlanError(f"'{name} {text}' in a plan: expected a number of {unit}")
    return int(text)


def _numbers(text: str) -> tuple[int, ...]:
    """``1-3,6`` as numbers."""
    numbers: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if max(int(first), int(last or first)) > _LARGEST:
            raise PlanError(f"'{part}' in a plan: no unit or device has such a number")
        if int(last or first) < int(first):
            raise PlanError(f"'{part}' in a plan is empty: write the lower number first")
        numbers.extend(range(int(first), int(last or first) + 1))
    return tuple(numbers)


def _ranges(numbers: tuple[int, ...]) -> str:
    """Ascending numbers as ``1-3,6``."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)
