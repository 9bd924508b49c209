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
from dataclasses import dataclass
from functools import cached_property

from megatron_flex.model.config import ModelConfig
from megatron_flex.model.layers import Kind, Unit
from megatron_flex.planner.memory import (
    boundary_bytes,
    slab_elements,
    state_bytes,
)
from megatron_flex.planner.passes import Level, Passes, passes
from megatron_flex.planner.plan import OPlan, Plan, Stage
from megatron_flex.schedule.instructions import (
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


class Footprint:
    """What programs of one model take.

    Args:
        config: the model.
        exact: gradients are summed exactly (``--flexpipe-bitwise``), in 8 more bytes a parameter.

    Attributes:
        elements: padded elements of every slab.
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
        hidden, last = self._hidden, units[-1].kind is Kind.HEAD
        forward: list[Level] = []
        backward: list[Level] = []
        left = away = 0.0  # bytes a token that the units so far keep, inputs included
        begun: list[tuple[Unit, Passes, float, Sequence[Level]]] = []
        for number, unit in enumerate(units):
            p = self._passes[unit.kind]
            again = unit.index in o.recompute and unit.kind is not Kind.EMBEDDING
            if unit.kind is not Kind.EMBEDDING:
                left += hidden  # its input
            forward += [_above(x, left) for x in (p.unkept if again else p.forward)]
            kept = 0.0 if again else p.kept
            final = number + 1 == len(units)
            # The gradient that the backward began with stays to its end, besides the one of this
            # unit's output.
            grads = 0.0 if last and final else hidden
            if not final:
                grads = hidden if last else 2 * hidden
            levels = list(p.backward)
            if again:
                levels = [*p.forward, *(_above(x, p.kept) for x in p.backward)]
            backward += [_above(x, left + kept + grads) for x in levels]
            begun.append((unit, p, left + kept + grads, levels))
            left += kept
            away += kept if unit.index in o.activations else 0.0
        output = 0.0 if last else hidden
        attends = any(unit.kind is Kind.ATTENTION for unit in units)
        context = self._context if attends else 0.0
        owed, first, second = self._halves(begun, at_once(o))
        lines = map(_envelope, (forward, backward, first, second))
        return _StagePasses(left, away, output, context, owed, *lines)

    def _halves(
        self, begun: Sequence[tuple[Unit, Passes, float, Sequence[Level]]], whole: Set[int]
    ) -> tuple[float, list[Level], list[Level]]:
        """A split backward: bytes a token owed between the halves, and the levels of both.

        Args:
            begun: for each unit of the stage, bytes a token in use when its backward begins, and
                the levels of a fused backward.
            whole: units that owe nothing.
        """
        owed = 0.0
        first: list[Level] = []
        second: list[Level] = []
        final = begun[-1][0]
        # Without dropout the last unit owes the very gradient that the backward began with.
        apart = self._config.hidden_dropout > 0.0 or final.kind is Kind.HEAD or final.index in whole
        shared = 0.0 if apart else self._hidden
        for unit, p, above, fused in reversed(begun):
            above += owed - (0.0 if unit is final else shared)
            if unit.index in whole:
                first += [_above(x, above) for x in fused]
                continue
            first += [_above(x, above) for x in p.backward_input]
            second += [_above(x, -owed) for x in p.backward_weight]
            owed += p.owed
        # Weight halves free in the same order.
        return owed, first, [_above(x, owed) for x in second]

    @cached_property
    def _context(self) -> float:
        """Bytes a token that the blocks of one micro-batch share: rotary tables."""
        c = self._config
        if c.position_embedding_type != "rope":
            return 0.0
        return 4.0 * int(c.kv_channels * c.rotary_percent)

    # ---- programs ----------------------------------------------------------------------------

    def peaks(self, program: Program) -> tuple[float, ...]:
        """Peak bytes on every device of the world."""
        devices = range(len(program.instructions))
        return tuple(max(self.device(program, device)) for device in devices)

    def device(self, program: Program, device: int) -> tuple[float, float]:
        """Peak bytes on one device: up to the global norm, and in the updates after it."""
        return _Replay(self, program, device).run()


class _Replay:
    """Goes through the instructions of one device."""

    def __init__(self, footprint: Footprint, program: Program, device: int) -> None:
        self.f = footprint
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
        self.passes = {n: footprint._stage(plan.stages[n], o) for n in plan.stages_of(device)}
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
            stage, micro_batch = key
            self._take(self.passes[stage].travels * self.tokens[micro_batch])

    def _forward(self, op: Forward) -> None:
        tokens, p = self.tokens[op.micro_batch], self.passes[op.stage]
        if p.context and op.micro_batch not in self.contexts:
            self.contexts[op.micro_batch] = p.context * tokens
            self._take(self.contexts[op.micro_batch])
        source = self.f.boundary * tokens if op.stage else 0.0  # in use already
        self.peak = max(self.peak, self.used - source + _highest(p.forward, tokens))
        self.used += (p.left + p.output) * tokens - source
        if (op.stage, op.micro_batch) in self.travels.passes:
            self.leaving = p.travels * tokens
        self._done(op)

    def _backward(self, op: Compute) -> None:
        tokens, p = self.tokens[op.micro_batch], self.passes[op.stage]
        # What the forward left, and the gradient of its output, are in use already.
        base = self.used - (p.left + p.output) * tokens
        split = isinstance(op, BackwardInput)
        lines = p.backward_input if split else p.backward
        self.peak = max(self.peak, base + _highest(lines, tokens))
        self.used = base + (self.f.boundary * tokens if op.stage else 0.0)
        self.used += p.owed * tokens if split else 0.0
        self._done(op)

    def _backward_weight(self, op: Compute) -> None:
        tokens, p = self.tokens[op.micro_batch], self.passes[op.stage]
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
