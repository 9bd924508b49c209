"""Peak bytes of a program on each device, found by going through its instructions.

The memory model of the searches (:mod:`megatron_flex.planner.cost`) is a bound: the largest
micro-batches together. Here is what an iteration takes as it is executed: which micro-batches are
in flight at every instruction, what each keeps, what the running pass needs, posted and unsent
messages, slabs that join early. Bytes are those of the device's allocator; what lives on the host
is not among them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_flex.model.config import ModelConfig
from megatron_flex.model.layers import Kind, Unit
from megatron_flex.planner.memory import (
    boundary_bytes,
    parameter_sizes,
    state_bytes,
    word_embedding_count,
)
from megatron_flex.planner.passes import Level, Passes, passes
from megatron_flex.planner.plan import OPlan, Plan
from megatron_flex.planner.tables import Array
from megatron_flex.schedule.instructions import (
    Backward,
    Compute,
    Drop,
    Forward,
    GlobalNorm,
    Instruction,
    Program,
    RecvActivation,
    RecvGradient,
    RecvState,
    SendActivation,
    SendGradient,
    Transfer,
    UpdateOrSkip,
)
from megatron_flex.schedule.residency import POSTED, WINDOW, travels
from megatron_flex.schedule.slabs import slab_holders

_ALIGNMENT, _ROW = 32, 1024  # elements; of parameters within a slab, and of slabs


@dataclass(frozen=True)
class _Curve:
    """Levels of one pass through a stage above what was in use before it, as arrays."""

    fixed: Array
    token: Array

    @classmethod
    def of(cls, levels: Sequence[Level]) -> _Curve:
        return cls(np.array([x.fixed for x in levels]), np.array([x.token for x in levels]))

    def __call__(self, tokens: float) -> float:
        return float((self.fixed + self.token * tokens).max())


@dataclass(frozen=True)
class _StagePasses:
    """Bytes of the passes of one stage.

    A token: ``left`` from a forward to its backward, ``travels`` of it to the host if there is time
    between them, ``output`` that the forward gives.
    """

    left: float
    travels: float
    output: float
    forward: _Curve
    backward: _Curve


class Footprint:
    """What programs of one model take.

    Args:
        config: the model.
        exact: gradients are summed exactly (``--flexpipe-bitwise``), in 8 more bytes a parameter.
    """

    def __init__(self, config: ModelConfig, *, exact: bool = False) -> None:
        self._config = config
        self._exact = exact
        self._units = config.layers.units
        self._passes: Mapping[Kind, Passes] = passes(config)
        self._hidden = boundary_bytes(config)
        self._stages: dict[tuple[int, int, OPlan], _StagePasses] = {}

    # ---- slabs -------------------------------------------------------------------------------

    @cached_property
    def _elements(self) -> tuple[int, ...]:
        """Padded elements of every slab, as ``runtime/slab.py`` lays them out."""
        c = self._config
        words = word_embedding_count(c)

        def padded(sizes: Sequence[int]) -> int:
            return _round_up(sum(_round_up(size, _ALIGNMENT) for size in sizes), _ROW)

        found = []
        for unit in self._units:
            end = unit.kind in (Kind.EMBEDDING, Kind.HEAD)
            own = (words,) if end and c.untie_embeddings_and_output_weights else ()
            found.append(padded((*own, *parameter_sizes(c, unit.kind))))
        return (*found, padded((words,))) if c.layers.tied else tuple(found)

    def slab(self, number: int, *, offloaded: bool = False) -> float:
        """Bytes of a slab on a device that holds it."""
        elements = self._elements[number]
        state = state_bytes(self._config, elements)
        optimizer = 0 if offloaded else state.optimizer
        return float(state.parameters + state.gradients + optimizer + 8 * elements * self._exact)

    def window(self, number: int) -> float:
        """Bytes on the device while the offloaded optimizer state of a slab is worked on."""
        return float(state_bytes(self._config, self._elements[number]).optimizer)

    def _held(self, plan: Plan, device: int) -> dict[int, float]:
        """Bytes of each slab that a device holds under ``plan``."""
        holders = slab_holders(plan, self._config.layers)
        return {s: self._joined(s, plan) for s, group in enumerate(holders) if device in group}

    def _joined(self, slab: int, plan: Plan) -> float:
        return self.slab(slab, offloaded=slab in plan.o_plan.optimizer)

    def _twice_tied(self, plan: Plan, device: int) -> float:
        """Bytes of the second sum of a tied slab's gradient, where both its users are here."""
        tied = self._config.layers.tied_slab
        both = device in plan.stages[0].group and device in plan.stages[-1].group
        return 4.0 * self._elements[tied] if self._exact and tied is not None and both else 0.0

    # ---- passes ------------------------------------------------------------------------------

    def _stage(self, start: int, stop: int, o: OPlan) -> _StagePasses:
        key = (start, stop, o)
        if key not in self._stages:
            self._stages[key] = self._stage_passes(self._units[start:stop], o)
        return self._stages[key]

    def _stage_passes(self, units: Sequence[Unit], o: OPlan) -> _StagePasses:
        hidden, last = self._hidden, units[-1].kind is Kind.HEAD
        forward: list[Level] = []
        backward: list[Level] = []
        left = away = 0.0  # bytes a token that the units so far keep, inputs included
        tied = 0.0  # the head's gradient of a tied embedding waits for the embedding's
        ends = units[0].kind is Kind.EMBEDDING and last and len(units) > 1
        if ends and self._config.layers.tied and not self._exact:
            tied = float(state_bytes(self._config, word_embedding_count(self._config)).parameters)
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
            extra = 0.0 if last and final else tied
            backward += [_above(x, left + kept + grads, extra) for x in levels]
            left += kept
            away += kept if unit.index in o.activations else 0.0
        output = 0.0 if last else hidden
        return _StagePasses(left, away, output, _Curve.of(forward), _Curve.of(backward))

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
        self.program = program
        self.rank = device
        self.o = program.plan.o_plan
        held = program.held or program.plan
        self.slabs = footprint._held(held, device)
        self.used = sum(self.slabs.values()) + footprint._twice_tied(held, device)
        self.peak = self.used
        # What joins is on the device as a whole until the next iteration.
        self.swapped = set(self.slabs) & set(self.o.optimizer)
        self.sent = 0.0
        instructions = program.instructions[device]
        self.expected = [i for i in instructions if isinstance(i, (RecvActivation, RecvGradient))]
        self.expected.reverse()
        self.posted: list[float] = []
        self.left = Counter(i.micro_batch for i in instructions if isinstance(i, Compute))
        self.begun: set[int] = set()
        layers = footprint._config.layers
        self.attends = {
            number: any(u.kind is Kind.ATTENTION for u in layers.units[s.start : s.stop])
            for number, s in enumerate(program.plan.stages)
        }
        self.contexts: dict[int, float] = {}
        self.travels = travels(instructions, program.plan)
        self.leaving = 0.0

    def run(self) -> tuple[float, float]:
        """Both peaks."""
        self._post()
        instructions: Sequence[Instruction] = self.program.instructions[self.rank]
        for number, op in enumerate(instructions):
            if isinstance(op, GlobalNorm):
                rest = instructions[number + 1 :]
                updated = [i.slab for i in rest if isinstance(i, UpdateOrSkip)]
                first = [slab for slab in updated if slab in self.swapped][:WINDOW]
                window = sum(map(self.f.window, first))
                return max(self.peak, self.used + window), self._updates(rest)
            if isinstance(op, Compute):
                self._begin(op)
            if isinstance(op, Forward):
                self._forward(op)
            elif isinstance(op, Backward):
                self._backward(op)
            elif isinstance(op, Transfer):
                self._transfer(op)
            elif isinstance(op, RecvState):
                self._join(op)
        return self.peak, self.used

    def _take(self, size: float) -> None:
        self.used += size
        self.peak = max(self.peak, self.used)

    def _post(self) -> None:
        while self.expected and len(self.posted) < POSTED:
            size = self.f._hidden * self.expected.pop().tokens
            self.posted.insert(0, size)
            self._take(size)

    def _transfer(self, op: Transfer) -> None:
        """A message of this device that was sent earlier has gone by now."""
        self.used -= self.sent
        self.sent = 0.0
        if isinstance(op, (SendActivation, SendGradient)):
            self.sent = self.f._hidden * op.tokens
        else:
            self.posted.pop()  # it goes on as an activation or a gradient
            self._post()

    def _passes(self, stage: int) -> _StagePasses:
        s = self.program.plan.stages[stage]
        return self.f._stage(s.start, s.stop, self.o)

    def _begin(self, op: Compute) -> None:
        """What the pass before saved has left, and what the next one needs comes back."""
        self.used -= self.leaving
        self.leaving = 0.0
        key = self.travels.back.get(op)
        if key is not None:
            stage, micro_batch = key
            self._take(self._passes(stage).travels * self.program.tokens[micro_batch])

    def _forward(self, op: Forward) -> None:
        tokens, p = self.program.tokens[op.micro_batch], self._passes(op.stage)
        if self.attends[op.stage] and op.micro_batch not in self.contexts:
            self.contexts[op.micro_batch] = self.f._context * tokens
            self._take(self.contexts[op.micro_batch])
        source = self.f._hidden * tokens if op.stage else 0.0  # in use already
        self.peak = max(self.peak, self.used - source + p.forward(tokens))
        self.used += (p.left + p.output) * tokens - source
        if (op.stage, op.micro_batch) in self.travels.passes:
            self.leaving = p.travels * tokens
        self._done(op)

    def _backward(self, op: Backward) -> None:
        tokens, p = self.program.tokens[op.micro_batch], self._passes(op.stage)
        gradient = p.output * tokens  # in use already
        base = self.used - p.left * tokens - gradient
        self.peak = max(self.peak, base + p.backward(tokens))
        self.used = base + (self.f._hidden * tokens if op.stage else 0.0)
        self._done(op)

    def _done(self, op: Compute) -> None:
        self.left[op.micro_batch] -= 1
        if not self.left[op.micro_batch]:
            self.used -= self.contexts.pop(op.micro_batch, 0.0)

    def _join(self, op: RecvState) -> None:
        self.slabs[op.slab] = self.f.slab(op.slab)
        self._take(self.slabs[op.slab])

    def _updates(self, instructions: Sequence[Instruction]) -> float:
        """Peak after the global norm."""
        used = peak = self.used - self.sent
        window: list[float] = []
        for op in instructions:
            if isinstance(op, UpdateOrSkip) and op.slab in self.swapped:
                window = [*window[1 - WINDOW :], self.f.window(op.slab)]
                peak = max(peak, used + sum(window))
            elif isinstance(op, RecvState):
                used += self.f.slab(op.slab)
            elif isinstance(op, Drop):
                used -= self.slabs.pop(op.slab, 0.0)
            peak = max(peak, used)
        return peak


def _above(level: Level, token: float, fixed: float = 0.0) -> Level:
    return Level(level.fixed + fixed, level.token + token)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
