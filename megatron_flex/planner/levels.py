"""Bytes of the passes of a stage, from those of its units.

What one unit takes while it runs is a list of levels (:mod:`megatron_flex.planner.passes`). In a
stage each stands on what its other units keep, on gradients on their way, and on what a split
backward owes; here are the highest of them, as functions of a micro-batch's tokens.
:mod:`megatron_flex.planner.footprint` goes through programs with them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from operator import ge

from megatron_flex.model.config import ModelConfig
from megatron_flex.model.layers import Kind, Unit
from megatron_flex.planner.memory import boundary_bytes
from megatron_flex.planner.passes import Level, Passes, slice_head
from megatron_flex.planner.plan import OPlan
from megatron_flex.planner.tensor import ALONE, TensorParallel
from megatron_flex.schedule.residency import at_once

Lines = tuple[tuple[float, float], ...]
"""Bytes as the highest of some lines in the tokens: (fixed, token) of each."""


def envelope(levels: Sequence[Level]) -> Lines:
    """The levels that are the highest for some number of tokens."""
    kept: list[tuple[float, float]] = []
    for fixed, token in sorted({(x.fixed, x.token) for x in levels}, key=lambda x: (x[1], x[0])):
        # Steeper lines come later: one that lies below at 0 tokens may still be overtaken.
        while kept and kept[-1][0] <= fixed:
            kept.pop()
        while len(kept) > 1:
            (f0, t0), (f1, t1) = kept[-2:]
            # The last one is never highest if the new one overtakes the one before it no later.
            if (f0 - fixed) * (t1 - t0) > (f0 - f1) * (token - t0):
                break
            kept.pop()
        kept.append((fixed, token))
    return tuple(kept)


@dataclass(frozen=True)
class SliceLine:
    """Bytes at one moment of a pass whose micro-batch holds a slice.

    ``before`` and ``own`` are the attention units of the stage that have run in this pass, and
    those that have begun: each that begins takes some bytes, and gives up some in the end.
    """

    level: Level
    before: int
    own: int


SliceLines = tuple[SliceLine, ...]


def pruned(lines: Sequence[SliceLine]) -> SliceLines:
    """The lines without those that lie below another one whatever the micro-batch."""

    def corners(line: SliceLine) -> tuple[float, ...]:
        x = line.level
        # A slice has no more tokens than its micro-batch.
        return x.fixed, x.token, x.token + x.sliced, line.own, -line.before

    kept: list[SliceLine] = []
    for line in sorted(set(lines), key=corners, reverse=True):
        own = corners(line)
        if not any(all(map(ge, corners(other), own)) for other in kept):
            kept.append(line)
    return tuple(kept)


@dataclass(frozen=True)
class StagePasses:
    """Bytes of the passes of one stage.

    A token: ``left`` from a forward to its backward, ``travels`` of it to the host if there is time
    between them, ``output`` that the forward gives, ``context`` that belongs to the micro-batch,
    ``owed`` between the halves of a split backward.
    """

    left: float
    travels: float
    output: float
    context: float
    owed: float
    forward: Lines
    backward: Lines
    backward_input: Lines
    backward_weight: Lines


@dataclass(frozen=True)
class SlicePasses:
    """The same of a stage's passes where the micro-batch holds a slice; the rest is as it was.

    ``units`` of the stage are attention: each has buffers of its own.
    """

    left: Level
    travels: Level
    units: int
    forward: SliceLines
    backward: SliceLines
    backward_input: SliceLines
    owed: float
    backward_weight: Lines


def rotary_bytes(config: ModelConfig) -> float:
    """Bytes a token that the blocks of one micro-batch share: rotary tables."""
    if config.position_embedding_type != "rope":
        return 0.0
    return 4.0 * int(config.kv_channels * config.rotary_percent)


def stage_passes(
    passes: Mapping[Kind, Passes],
    units: Sequence[Unit],
    o: OPlan,
    config: ModelConfig,
    tensor: TensorParallel = ALONE,
) -> StagePasses:
    """Passes of the ``units`` of a stage with micro-batches of whole samples."""
    levels = _StageLevels(passes, units, o, config, tensor)
    attends = any(unit.kind is Kind.ATTENTION for unit in units)
    output = 0.0 if units[-1].kind is Kind.HEAD else boundary_bytes(config, tensor)
    lists = (levels.forward, levels.backward, levels.first, levels.second)
    lines = [envelope([level for _, level in found]) for found in lists]
    context = rotary_bytes(config) if attends else 0.0
    return StagePasses(levels.left.token, levels.away.token, output, context, levels.owed, *lines)


def slice_stage(
    passes: Mapping[Kind, Passes],
    units: Sequence[Unit],
    o: OPlan,
    config: ModelConfig,
    tensor: TensorParallel = ALONE,
) -> SlicePasses:
    """Passes of the ``units`` of a stage where the micro-batch holds a slice.

    ``passes`` are those with slices; that of the head is made here.
    """
    # What a head keeps of a slice is no activation that could travel.
    heads = {unit.index for unit in units if unit.kind is Kind.HEAD}
    o = replace(o, activations=tuple(u for u in o.activations if u not in heads))
    head = slice_head(config, tensor, alone=len(units) == 1)
    levels = _StageLevels({**passes, Kind.HEAD: head}, units, o, config, tensor)
    places = [i for i, unit in enumerate(units) if unit.kind is Kind.ATTENTION]

    def lines(found: Sequence[tuple[int, Level]], *, back: bool) -> SliceLines:
        made = []
        for place, level in found:
            before = sum(p > place if back else p < place for p in places)
            made.append(SliceLine(level, before, before + (place in places)))
        return pruned(made)

    return SlicePasses(
        levels.left,
        levels.away,
        len(places),
        lines(levels.forward, back=False),
        lines(levels.backward, back=True),
        lines(levels.first, back=True),
        levels.owed,
        envelope([level for _, level in levels.second]),
    )


class _StageLevels:
    """Levels of the passes of one stage, each with its unit's place in it.

    Attributes:
        left: what a forward leaves to its backward, the inputs of units included.
        away: what of it may travel to the host.
        owed: bytes a token between the halves of a split backward.
        forward, backward, first, second: levels of the passes; the last two are the halves.
    """

    def __init__(
        self,
        passes: Mapping[Kind, Passes],
        units: Sequence[Unit],
        o: OPlan,
        config: ModelConfig,
        tensor: TensorParallel,
    ) -> None:
        hidden = boundary_bytes(config, tensor)
        last = units[-1].kind is Kind.HEAD
        self.forward: list[tuple[int, Level]] = []
        self.backward: list[tuple[int, Level]] = []
        self.left = self.away = Level(0.0, 0.0)
        begun: list[tuple[Passes, Level, Sequence[Level]]] = []
        for number, unit in enumerate(units):
            p = passes[unit.kind]
            again = unit.index in o.recompute and unit.kind is not Kind.EMBEDDING
            if unit.kind is not Kind.EMBEDDING:
                self.left += Level(0.0, hidden)  # its input
            for level in p.unkept if again else p.forward:
                self.forward.append((number, level + self.left))
            full = Level(0.0, p.kept, p.kept_sliced)
            kept = Level(0.0, 0.0) if again else full
            final = number + 1 == len(units)
            # The gradient that the backward began with stays to its end, besides the one of this
            # unit's output.
            grads = 0.0 if last and final else hidden
            if not final:
                grads = hidden if last else 2 * hidden
            levels = list(p.backward)
            if again:
                levels = [*p.forward, *(level + full for level in p.backward)]
            above = self.left + kept + Level(0.0, grads)
            self.backward += [(number, level + above) for level in levels]
            begun.append((p, above, levels))
            self.left += kept
            self.away += kept if unit.index in o.activations else Level(0.0, 0.0)
        self._halves(
            units, begun, at_once(o), hidden, config.hidden_dropout > 0.0 or tensor.shards > 1
        )

    def _halves(
        self,
        units: Sequence[Unit],
        begun: Sequence[tuple[Passes, Level, Sequence[Level]]],
        whole: Set[int],
        hidden: float,
        owes_apart: bool,
    ) -> None:
        """A split backward: what is owed between the halves, and the levels of both.

        Args:
            units: of the stage.
            begun: for each, what is in use when its backward begins, and the levels of a fused one.
            whole: units that owe nothing.
            hidden: bytes of a token between units.
            owes_apart: the last unit owes another gradient than the backward begins with:
                dropout was applied to it, or it was gathered.
        """
        self.owed = 0.0
        self.first: list[tuple[int, Level]] = []
        second: list[tuple[int, Level]] = []
        final = units[-1]
        # Else the last unit owes the very gradient that the backward began with.
        apart = owes_apart or final.kind is Kind.HEAD or final.index in whole
        shared = 0.0 if apart else hidden
        for number, unit in reversed(list(enumerate(units))):
            p, above, fused = begun[number]
            above += Level(0.0, self.owed - (0.0 if unit is final else shared))
            if unit.index in whole:
                self.first += [(number, level + above) for level in fused]
                continue
            self.first += [(number, level + above) for level in p.backward_input]
            second += [(number, _above(level, -self.owed)) for level in p.backward_weight]
            self.owed += p.owed
        # Weight halves free in the same order.
        self.second = [(number, _above(level, self.owed)) for number, level in second]


def _above(level: Level, token: float) -> Level:
    return Level(level.fixed, level.token + token)
