"""Peak bytes of a program on each device, found by going through its instructions.

The memory model of the searches (:mod:`megatron_flex.planner.cost`) is a bound: the largest
micro-batches together. Here is what an iteration takes as it is executed: which micro-batches are
in flight at every instruction, what each keeps, what the running pass needs, posted and unsent
messages, slabs that join early. Bytes are those of the device's allocator; what lives on the host
is not among them.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from operator import ge

from megatron_flex.model.config import ModelConfig
from megatron_flex.model.layers import Kind, Unit
from megatron_flex.planner.memory import (
    ChainBytes,
    boundary_bytes,
    chain_bytes,
    slab_elements,
    state_bytes,
)
from megatron_flex.planner.passes import Level, Passes, passes, slice_head, slice_passes
from megatron_flex.planner.plan import OPlan, Plan, Stage
from megatron_flex.schedule.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Drop,
    Forward,
    GlobalNorm,
    Instruction,
    Program,
    Recut,
    RecvActivation,
    RecvGradient,
    RecvState,
    SendActivation,
    SendGradient,
    SendState,
    Transfer,
    UpdateOrSkip,
)
from megatron_flex.schedule.residency import POSTED, WINDOW, at_once, travels
from megatron_flex.schedule.shards import Range, cuts, sharded_slabs, share
from megatron_flex.schedule.slabs import slab_holders

_REMEMBERED = 4096  # stages


Lines = tuple[tuple[float, float], ...]
"""Bytes as the highest of some lines in the tokens: (fixed, token) of each."""


def _envelope(levels: Sequence[Level]) -> Lines:
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


def _highest(lines: Lines, tokens: float) -> float:
    return max([fixed + token * tokens for fixed, token in lines])


@dataclass(frozen=True)
class _SliceLine:
    """Bytes at one moment of a pass whose micro-batch holds a slice.

    ``before`` and ``own`` are the attention units of the stage that have run in this pass, and
    those that have begun.
    """

    level: Level
    before: int
    own: int

    def __call__(self, tokens: float, sliced: float, begun: float, ended: float) -> float:
        """Bytes, where each unit that begins takes ``begun`` and then gives up ``ended``."""
        return self.level(tokens, sliced) + self.own * begun - self.before * ended


_SliceLines = tuple[_SliceLine, ...]


def _pruned(lines: Sequence[_SliceLine]) -> _SliceLines:
    """The lines without those that lie below another one whatever the micro-batch."""

    def corners(line: _SliceLine) -> tuple[float, ...]:
        x = line.level
        # A slice has no more tokens than its micro-batch.
        return x.fixed, x.token, x.token + x.sliced, line.own, -line.before

    kept: list[_SliceLine] = []
    for line in sorted(set(lines), key=corners, reverse=True):
        own = corners(line)
        if not any(all(map(ge, corners(other), own)) for other in kept):
            kept.append(line)
    return tuple(kept)


def _most(
    lines: _SliceLines, tokens: float, sliced: float, begun: float = 0.0, ended: float = 0.0
) -> float:
    return max(line(tokens, sliced, begun, ended) for line in lines)


@dataclass(frozen=True)
class _StagePasses:
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
class _SlicePasses:
    """The same of a stage's passes where the micro-batch holds a slice; the rest is as it was.

    ``units`` of the stage are attention: each has buffers of its own.
    """

    left: Level
    travels: Level
    units: int
    forward: _SliceLines
    backward: _SliceLines
    backward_input: _SliceLines
    owed: float
    backward_weight: Lines


class Footprint:
    """What programs of one model take.

    Args:
        config: the model.
        exact: gradients are summed exactly (``--flexpipe-bitwise``), in 8 more bytes a parameter.

    Attributes:
        elements: padded elements of every slab.
        chains: bytes a token of what an attention unit holds of a sample that is cut to slices.
    """

    def __init__(self, config: ModelConfig, *, exact: bool = False) -> None:
        self._config = config
        self._exact = exact
        self._layers = config.layers
        self._units = self._layers.units
        self._passes: Mapping[Kind, Passes] = passes(config)
        self._hidden = boundary_bytes(config)
        self.elements = slab_elements(config)
        self._stages: dict[tuple[int, int, OPlan], _StagePasses] = {}
        self._sliced: dict[tuple[int, int, OPlan], _SlicePasses] = {}
        self._slice_passes = {**self._passes, Kind.ATTENTION: slice_passes(config)}
        self.chains: ChainBytes = chain_bytes(config)
        # Of the last plan: holders of every slab, and which are sharded.
        self._holders: tuple[Plan, tuple[tuple[int, ...], ...], frozenset[int]] | None = None

    # ---- slabs -------------------------------------------------------------------------------

    @cached_property
    def _sizes(self) -> tuple[tuple[float, float], ...]:
        """Bytes of every slab: without optimizer state, and of that."""
        states = [state_bytes(self._config, elements) for elements in self.elements]
        sums = 2 if self._exact else 0
        return tuple(
            (float(s.parameters + (1 + sums) * s.gradients), float(s.optimizer)) for s in states
        )

    def slab(self, number: int, *, offloaded: bool = False, part: Range | None = None) -> float:
        """Bytes of a slab on a device that holds it, with the optimizer state of ``part``."""
        rest, optimizer = self._sizes[number]
        if part is not None:
            return rest + self.part(number, part)
        return rest if offloaded else rest + optimizer

    def part(self, number: int, part: Range) -> float:
        """Bytes of the optimizer state of elements ``[start, stop)`` of a slab."""
        return self._sizes[number][1] * (part[1] - part[0]) / max(1, self.elements[number])

    def window(self, number: int) -> float:
        """Bytes on the device while the offloaded optimizer state of a slab is worked on."""
        return self._sizes[number][1]

    @property
    def boundary(self) -> float:
        """Bytes of one token between units."""
        return self._hidden

    def windows(self, plan: Plan, device: int) -> float:
        """Most bytes on the device of offloaded states that are worked on at the same time."""
        away = (
            self.window(slab) for slab in self._held(plan, device) if slab in plan.o_plan.optimizer
        )
        return sum(sorted(away)[-WINDOW:])

    def held(self, plan: Plan, device: int) -> float:
        """Bytes of all slabs that a device holds under ``plan``."""
        return sum(self._held(plan, device).values()) + self._twice_tied(plan, device)

    def _held(self, plan: Plan, device: int) -> dict[int, float]:
        """Bytes of each slab that a device holds under ``plan``."""
        if self._holders is None or self._holders[0] != plan:
            holders = slab_holders(plan, self._layers)
            sharded = sharded_slabs(plan, self._layers)
            self._holders = (plan, holders, sharded)
        _, holders, sharded = self._holders
        away = plan.o_plan.optimizer
        found = {}
        for slab, group in enumerate(holders):
            if device in group:
                part = None
                if slab in sharded:
                    part = share(self.elements[slab], len(group), group.index(device))
                found[slab] = self.slab(slab, offloaded=slab in away, part=part)
        return found

    def handed_over(
        self, plan: Plan, following: Plan, late: Set[tuple[int, int]], devices: int
    ) -> tuple[float, ...]:
        """Bytes of slabs on every device while what is handed over after the update arrives.

        Args:
            late: (slab, device) pairs that are handed over; other slabs that come are there.
            devices: how many there are.
        """
        moving = {slab for slab, _ in late}  # whoever gives it up may be the one that sends it
        found = []
        for device in range(devices):
            now, then = self._held(plan, device), self._held(following, device)
            kept = sum(size for slab, size in now.items() if slab in then or slab in moving)
            found.append(kept + sum(size for slab, size in then.items() if slab not in now))
        return tuple(found)

    def cut_anew(self, plan: Plan, following: Plan, devices: int) -> list[float]:
        """Bytes on every device that slabs which are cut anew take before the update."""
        sharded = sharded_slabs(plan, self._layers)
        found = [0.0] * devices
        for slab, cut in cuts(plan, following, self._layers, self.elements).items():
            for device in cut.changed:
                holds = device in cut.before
                found[device] += self._recut(slab, cut.after[device], holds, slab in sharded)[0]
        return found

    def _recut(
        self, slab: int, part: Range, holds: bool, sharded: bool
    ) -> tuple[float, float, float]:
        """Bytes of another part of a slab: taken early, taken more by the update, and after it.

        Args:
            holds: whether the device has the slab now.
            sharded: whether its state is split now; a whole one is only cut by the update.
        """
        whole = part[1] - part[0] == self.elements[slab]
        after = self.slab(slab) if whole else self.slab(slab, part=part)
        if not holds:
            return after, 0.0, after
        if not sharded:
            return 0.0, after, after
        return after if whole else self.part(slab, part), 0.0, after

    def _twice_tied(self, plan: Plan, device: int) -> float:
        """Bytes of the second sum of a tied slab's gradient, where both its users are here."""
        tied = self._layers.tied_slab
        both = device in plan.stages[0].group and device in plan.stages[-1].group
        return 4.0 * self.elements[tied] if self._exact and tied is not None and both else 0.0

    # ---- passes ------------------------------------------------------------------------------

    def _stage(self, stage: Stage, o: OPlan) -> _StagePasses:
        key = (stage.start, stage.stop, o)
        if key not in self._stages:
            if len(self._stages) >= _REMEMBERED:
                self._stages.clear()
            self._stages[key] = self._stage_passes(self._units[stage.start : stage.stop], o)
        return self._stages[key]

    def _stage_passes(self, units: Sequence[Unit], o: OPlan) -> _StagePasses:
        levels = _StageLevels(self._passes, units, o, self._hidden, self._config)
        attends = any(unit.kind is Kind.ATTENTION for unit in units)
        output = 0.0 if units[-1].kind is Kind.HEAD else self._hidden
        lists = (levels.forward, levels.backward, levels.first, levels.second)
        lines = [_envelope([level for _, level in found]) for found in lists]
        context = self._context if attends else 0.0
        return _StagePasses(
            levels.left.token, levels.away.token, output, context, levels.owed, *lines
        )

    def _slices(self, stage: Stage, o: OPlan) -> _SlicePasses:
        key = (stage.start, stage.stop, o)
        if key not in self._sliced:
            if len(self._sliced) >= _REMEMBERED:
                self._sliced.clear()
            units = self._units[stage.start : stage.stop]
            # What a head keeps of a slice is no activation that could travel.
            stays = tuple(u for u in o.activations if self._units[u].kind is not Kind.HEAD)
            o = replace(o, activations=stays)
            head = slice_head(self._config, alone=len(units) == 1)
            kinds = {**self._slice_passes, Kind.HEAD: head}
            levels = _StageLevels(kinds, units, o, self._hidden, self._config)
            places = [i for i, unit in enumerate(units) if unit.kind is Kind.ATTENTION]

            def lines(found: Sequence[tuple[int, Level]], *, back: bool) -> _SliceLines:
                made = []
                for place, level in found:
                    before = sum(p > place if back else p < place for p in places)
                    made.append(_SliceLine(level, before, before + (place in places)))
                return _pruned(made)

            self._sliced[key] = _SlicePasses(
                levels.left,
                levels.away,
                len(places),
                lines(levels.forward, back=False),
                lines(levels.backward, back=True),
                lines(levels.first, back=True),
                levels.owed,
                _envelope([level for _, level in levels.second]),
            )
        return self._sliced[key]

    @cached_property
    def _context(self) -> float:
        """Bytes a token that the blocks of one micro-batch share: rotary tables."""
        c = self._config
        if c.position_embedding_type != "rope":
            return 0.0
        return 4.0 * int(c.kv_channels * c.rotary_percent)

    # ---- programs ----------------------------------------------------------------------------

    def peaks(self, program: Program, sliced: Sequence[int] = ()) -> tuple[float, ...]:
        """Peak bytes on every device of the world."""
        devices = range(len(program.instructions))
        return tuple(max(self.device(program, device, sliced)) for device in devices)

    def device(
        self, program: Program, device: int, sliced: Sequence[int] = ()
    ) -> tuple[float, float]:
        """Peak bytes on one device: up to the global norm, and in the updates after it.

        Args:
            program: with the chains of its micro-batches.
            device: one of its devices.
            sliced: tokens of the slice of a longer sample in each micro-batch; 0: there is none.
                Without it the program's chains are counted as if they were whole samples.
        """
        return _Replay(self, program, device, sliced).run()


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
        hidden: float,
        config: ModelConfig,
    ) -> None:
        """``hidden`` is the size of a token between units."""
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
        self._halves(units, begun, at_once(o), hidden, config)

    def _halves(
        self,
        units: Sequence[Unit],
        begun: Sequence[tuple[Passes, Level, Sequence[Level]]],
        whole: Set[int],
        hidden: float,
        config: ModelConfig,
    ) -> None:
        """A split backward: what is owed between the halves, and the levels of both.

        Args:
            units: of the stage.
            begun: for each, what is in use when its backward begins, and the levels of a fused one.
            whole: units that owe nothing.
            hidden: bytes of a token between units.
            config: the model.
        """
        self.owed = 0.0
        self.first: list[tuple[int, Level]] = []
        second: list[tuple[int, Level]] = []
        final = units[-1]
        # Without dropout the last unit owes the very gradient that the backward began with.
        apart = config.hidden_dropout > 0.0 or final.kind is Kind.HEAD or final.index in whole
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


class _Chain:
    """What a device holds of one sample that is cut.

    ``held`` are the stages whose units have its keys; ``tables`` the bytes of its rotary tables.
    """

    def __init__(self, chain: Sequence[int], tokens: float) -> None:
        self.first, self.last = chain[0], chain[-1]
        self.tokens = tokens
        self.held: set[int] = set()
        self.tables = 0.0


class _Replay:
    """Goes through the instructions of one device."""

    def __init__(
        self, footprint: Footprint, program: Program, device: int, sliced: Sequence[int]
    ) -> None:
        self.f = footprint
        self.sliced = sliced
        self.chain = {
            m: found
            for chain in (program.chains if len(sliced) else ())
            for found in [_Chain(chain, sum(sliced[m] for m in chain))]
            for m in chain
        }
        self.tokens = program.tokens
        self.instructions = program.instructions[device]
        o, plan = program.plan.o_plan, program.plan
        held = program.held or plan
        self.slabs = footprint._held(held, device)
        self.used = sum(self.slabs.values()) + footprint._twice_tied(held, device)
        self.peak = self.used
        self.swapped = set(self.slabs) & set(o.optimizer)
        after = program.next_plan
        self.later = frozenset(after.o_plan.optimizer if after is not None else ())
        self.sharded = sharded_slabs(held, footprint._layers)
        # Bytes that the update takes before it gives up the present state, and the change in all.
        self.cut: dict[int, tuple[float, float]] = {}
        stages = plan.stages_of(device)
        self.passes = {n: footprint._stage(plan.stages[n], o) for n in stages}
        self.slices = {n: footprint._slices(plan.stages[n], o) for n in stages if self.chain}
        whole = (Backward, BackwardInput)
        self.evaluates = not any(isinstance(i, whole) for i in self.instructions)
        self.sent = 0.0
        receives = (RecvActivation, RecvGradient)
        self.expected = [i.tokens for i in self.instructions if isinstance(i, receives)]
        self.expected.reverse()
        self.posted = 0
        self.left = Counter(i.micro_batch for i in self.instructions if isinstance(i, Compute))
        self.contexts: dict[int, float] = {}
        self.travels = travels(self.instructions, plan)
        self.leaving = 0.0

    def run(self) -> tuple[float, float]:
        """Both peaks."""
        self._post()
        for number, op in enumerate(self.instructions):
            if isinstance(op, Compute):
                if self.travels.passes:
                    self._travel(op)
                if isinstance(op, Forward):
                    self._forward(op)
                elif isinstance(op, BackwardWeight):
                    self._backward_weight(op)
                else:
                    self._backward(op)
            elif isinstance(op, Transfer):
                self._transfer(op)
            elif isinstance(op, RecvState):
                self._join(op)
            elif isinstance(op, Recut):
                self._recut(op)
            elif isinstance(op, GlobalNorm):
                rest = self.instructions[number + 1 :]
                updated = [i.slab for i in rest if isinstance(i, UpdateOrSkip)]
                self.swapped -= self.cut.keys()
                first = [slab for slab in updated if slab in self.swapped][:WINDOW]
                window = sum(map(self.f.window, first))
                return max(self.peak, self.used + window), self._updates(rest)
        return self.peak, self.used

    def _take(self, size: float) -> None:
        self.used += size
        self.peak = max(self.peak, self.used)

    def _post(self) -> None:
        while self.expected and self.posted < POSTED:
            self._take(self.f.boundary * self.expected.pop())
            self.posted += 1

    def _transfer(self, op: Transfer) -> None:
        self.used -= self.sent  # what was sent before has gone by now
        self.sent = 0.0
        if isinstance(op, (SendActivation, SendGradient)):
            self.sent = self.f.boundary * op.tokens
        else:
            self.posted -= 1  # its buffer goes on as an activation or a gradient
            self._post()

    def _travel(self, op: Compute) -> None:
        """What the pass before saved has left, and what the next one needs comes back."""
        self.used -= self.leaving
        self.leaving = 0.0
        key = self.travels.back.get(op)
        if key is not None:
            self._take(self._travels(*key))

    def _travels(self, stage: int, micro_batch: int) -> float:
        """Bytes that a pass's activations on their way to the host free."""
        tokens = self.tokens[micro_batch]
        if micro_batch in self.chain:
            return self.slices[stage].travels(tokens, self.sliced[micro_batch])
        return self.passes[stage].travels * tokens

    def _left(self, op: Compute) -> float:
        """Bytes that a forward leaves to its backward, with its output."""
        tokens, p = self.tokens[op.micro_batch], self.passes[op.stage]
        if op.micro_batch in self.chain:
            left = self.slices[op.stage].left(tokens, self.sliced[op.micro_batch])
            return left + p.output * tokens
        return (p.left + p.output) * tokens

    def _forward(self, op: Forward) -> None:
        tokens, p = self.tokens[op.micro_batch], self.passes[op.stage]
        if p.context and op.micro_batch not in self.contexts:
            self.contexts[op.micro_batch] = p.context * tokens
            self._take(self.contexts[op.micro_batch])
        source = self.f.boundary * tokens if op.stage else 0.0  # in use already
        base = self.used - source
        if op.micro_batch in self.chain:
            self._forward_slice(op, base)
        else:
            self.peak = max(self.peak, base + _highest(p.forward, tokens))
        self.used += self._left(op) - source
        if (op.stage, op.micro_batch) in self.travels.passes:
            self.leaving = self._travels(op.stage, op.micro_batch)
        self._done(op)

    def _forward_slice(self, op: Forward, base: float) -> None:
        """The peak of the pass, and the buffers: the first slice makes them."""
        q, chain = self.slices[op.stage], self.chain[op.micro_batch]
        keys = self.f.chains.keys_values * chain.tokens
        makes = keys if op.micro_batch == chain.first else 0.0
        if makes and q.units and not chain.held:
            chain.tables = self.f._context * chain.tokens
            self.used += chain.tables
            base += chain.tables
        frees = keys if self.evaluates and op.micro_batch == chain.last else 0.0
        most = _most(q.forward, self.tokens[op.micro_batch], self.sliced[op.micro_batch], makes)
        self.peak = max(self.peak, base + most)
        self.used += q.units * (makes - frees)
        if q.units:
            chain.held.add(op.stage)
        if frees:
            self._freed(op, chain)

    def _freed(self, op: Compute, chain: _Chain) -> None:
        """A stage has given up its buffers; the last one also the rotary tables."""
        chain.held.discard(op.stage)
        if not chain.held:
            self.used -= chain.tables
            chain.tables = 0.0

    def _backward_slice(self, op: Compute, base: float) -> None:
        """The peak of the pass; the last slice makes the gradients' buffers, the first frees all.

        ``base`` is what is in use besides what the forward left.
        """
        q, chain, m = self.slices[op.stage], self.chain[op.micro_batch], op.micro_batch
        gradients = self.f.chains.gradients * chain.tokens
        makes = gradients if m == chain.last else 0.0
        frees = gradients + self.f.chains.keys_values * chain.tokens if m == chain.first else 0.0
        lines = q.backward_input if isinstance(op, BackwardInput) else q.backward
        most = _most(lines, self.tokens[m], self.sliced[m], makes, frees)
        self.peak = max(self.peak, base + most)
        self.used += q.units * (makes - frees)
        if frees:
            self._freed(op, chain)

    def _backward(self, op: Compute) -> None:
        tokens, p = self.tokens[op.micro_batch], self.passes[op.stage]
        # What the forward left, and the gradient of its output, are in use already.
        left, split = self._left(op), isinstance(op, BackwardInput)
        if op.micro_batch in self.chain:
            self._backward_slice(op, self.used - left)
        else:
            lines = p.backward_input if split else p.backward
            self.peak = max(self.peak, self.used - left + _highest(lines, tokens))
        self.used += (self.f.boundary * tokens if op.stage else 0.0) - left
        self.used += self._halves(op).owed * tokens if split else 0.0
        self._done(op)

    def _halves(self, op: Compute) -> _StagePasses | _SlicePasses:
        """What is owed between the halves of a pass."""
        cut = op.micro_batch in self.chain
        return self.slices[op.stage] if cut else self.passes[op.stage]

    def _backward_weight(self, op: Compute) -> None:
        tokens, p = self.tokens[op.micro_batch], self._halves(op)
        self.used -= p.owed * tokens
        if p.backward_weight:
            self.peak = max(self.peak, self.used + _highest(p.backward_weight, tokens))
        self._done(op)

    def _done(self, op: Compute) -> None:
        self.left[op.micro_batch] -= 1
        if not self.left[op.micro_batch]:
            self.used -= self.contexts.pop(op.micro_batch, 0.0)

    def _join(self, op: RecvState) -> None:
        self._take(self._joined(op.slab))

    def _joined(self, slab: int) -> float:
        """Bytes of a slab that comes for the next plan, where its optimizer state is then."""
        offloaded = slab in self.later
        if offloaded:
            self.swapped.add(slab)
        self.slabs[slab] = self.f.slab(slab, offloaded=offloaded)
        return self.slabs[slab]

    def _recut(self, op: Recut) -> None:
        """Room for another part; where the whole state is here, only at the update."""
        now = self.slabs.get(op.slab)
        early, more, after = self.f._recut(
            op.slab, (op.start, op.stop), now is not None, op.slab in self.sharded
        )
        self._take(early)
        self.slabs[op.slab] = after
        if now is not None:
            self.cut[op.slab] = (more, after - early - now)

    def _updates(self, instructions: Sequence[Instruction]) -> float:
        """Peak after the global norm."""
        used = peak = self.used - self.sent
        updates = [i.slab for i in instructions if isinstance(i, UpdateOrSkip)]
        coming = deque(self.f.window(slab) for slab in updates if slab in self.swapped)
        # States from the host: one goes when the next comes, the last ones when all must be back.
        window = deque(coming.popleft() for _ in range(min(WINDOW, len(coming))))
        for op in instructions:
            if isinstance(op, (SendState, Drop)):
                window.clear()
            peak = max(peak, used + sum(window))
            if isinstance(op, UpdateOrSkip) and op.slab in self.cut:
                more, change = self.cut.pop(op.slab)
                peak = max(peak, used + more + sum(window))
                used += change
            elif isinstance(op, UpdateOrSkip) and op.slab in self.swapped and coming:
                window.popleft()
                window.append(coming.popleft())
            elif isinstance(op, RecvState):
                used += self._joined(op.slab)
            elif isinstance(op, Drop):
                used -= self.slabs.pop(op.slab, 0.0)
        return max(peak, used + sum(window))


def _above(level: Level, token: float) -> Level:
    return Level(level.fixed, level.token + token)
