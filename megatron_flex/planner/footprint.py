"""Peak bytes of a program on each device, found by going through its instructions.

The going through is native (``kernels/src/program_footprint.cpp``); the tests have it in Python.
What slabs and passes take is worked out here.

The memory model of the searches (:mod:`megatron_flex.planner.cost`) is a bound: the largest
micro-batches together. Here is what an iteration takes as it is executed: which micro-batches are
in flight at every instruction, what each keeps, what the running pass needs, posted and unsent
messages, slabs that join early. Bytes are those of the device's allocator; what lives on the host
is not among them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence, Set
from functools import cached_property, lru_cache

import numpy as np

from megatron_flex.model.config import ModelConfig
from megatron_flex.model.layers import Kind
from megatron_flex.native import Array, function, pointers, structure
from megatron_flex.planner.levels import (
    SlicePasses,
    StagePasses,
    rotary_bytes,
    slice_stage,
    stage_passes,
)
from megatron_flex.planner.memory import (
    ChainBytes,
    boundary_bytes,
    chain_bytes,
    slab_elements,
    state_bytes,
)
from megatron_flex.planner.passes import Level, passes, slice_passes
from megatron_flex.planner.plan import OPlan, Plan, Stage
from megatron_flex.planner.tensor import ALONE, TensorParallel
from megatron_flex.schedule.compact import Lists, offsets, rows
from megatron_flex.schedule.instructions import Program
from megatron_flex.schedule.residency import POSTED, WINDOW
from megatron_flex.schedule.shards import Range, cuts, sharded_slabs, share
from megatron_flex.schedule.slabs import slab_holders

_Problem = structure(
    "devices stages batches slabs chains posted window divided",
    "boundary share keys_values gradients tables",
    "words word_offset tokens sliced chain chain_ends chain_tokens moves pass line_offset line"
    " slice slice_offset slice_line weight_offset weight_line held held_offset held_slab held_bytes"
    " offloaded joined swap recut_offset recut_slab recut peak",
)
"""``mflex_footprint_problem`` of ``kernels/src/program_footprint.cpp``, field by field."""
_REMEMBERED = 4096  # stages
_PLANS = 4


class Footprint:
    """What programs of one model take.

    Args:
        config: the model.
        exact: gradients are summed exactly (``--flexpipe-bitwise``), in 8 more bytes a parameter.
        tensor: how layers are shared; bytes are those of one rank of a device.
        divided: see :attr:`megatron_flex.schedule.part.Part.divided`.

    Attributes:
        boundary: bytes of one token between units.
        elements: padded elements of every slab.
        chains: bytes a token of what an attention unit holds of a sample that is cut to slices.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        exact: bool = False,
        tensor: TensorParallel = ALONE,
        divided: int = 0,
    ) -> None:
        self._config = config
        self._tensor = tensor
        self._divided = divided
        self._exact = exact
        self._layers = config.layers
        self.boundary = boundary_bytes(config, tensor)
        self.elements = slab_elements(config, tensor)
        self._all_held = lru_cache(_PLANS)(self._find_held)
        units, whole = self._layers.units, passes(config, tensor)
        sliced = {**whole, Kind.ATTENTION: slice_passes(config, tensor)}
        self._stages = lru_cache(_REMEMBERED)(
            lambda start, stop, o: stage_passes(whole, units[start:stop], o, config, tensor)
        )
        self._sliced = lru_cache(_REMEMBERED)(
            lambda start, stop, o: slice_stage(sliced, units[start:stop], o, config, tensor)
        )
        self.chains: ChainBytes = chain_bytes(config, tensor)
        self._tables = rotary_bytes(config)

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

    def windows(self, plan: Plan, device: int) -> float:
        """Most bytes on the device of offloaded states that are worked on at the same time."""
        away = (
            self.window(slab) for slab in self._held(plan, device) if slab in plan.o_plan.optimizer
        )
        return sum(sorted(away)[-WINDOW:])

    def held(self, plan: Plan, device: int) -> float:
        """Bytes of all slabs that a device holds under ``plan``."""
        return sum(self._held(plan, device).values()) + self._twice_tied(plan, device)

    def _held(self, plan: Plan, device: int) -> Mapping[int, float]:
        """Bytes of each slab that a device holds under ``plan``, in their order."""
        return self._all_held(plan).get(device, {})

    def _find_held(self, plan: Plan) -> dict[int, dict[int, float]]:
        sharded, away = sharded_slabs(plan, self._layers), plan.o_plan.optimizer
        found: dict[int, dict[int, float]] = {}
        for slab, group in enumerate(slab_holders(plan, self._layers)):
            size = self.slab(slab, offloaded=slab in away)
            for place, device in enumerate(group):
                if slab in sharded:
                    part = share(self.elements[slab], len(group), place)
                    size = self.slab(slab, offloaded=slab in away, part=part)
                found.setdefault(device, {})[slab] = size
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

    def _stage(self, stage: Stage, o: OPlan) -> StagePasses:
        return self._stages(stage.start, stage.stop, o)

    def _slices(self, stage: Stage, o: OPlan) -> SlicePasses:
        return self._sliced(stage.start, stage.stop, o)

    def travelling(self, plan: Plan, stage: int, tokens: float, sliced: float = 0.0) -> float:
        """Bytes of one pass's activations that may go to the host.

        Args:
            sliced: tokens among ``tokens`` of a sample that is cut; 0: there is none.
        """
        held, o = plan.stages[stage], plan.o_plan
        if sliced:
            return self._slices(held, o).travels(tokens, sliced)
        return self._stage(held, o).travels * tokens

    # ---- programs ----------------------------------------------------------------------------

    def device(
        self, program: Program, device: int, sliced: Sequence[int] = ()
    ) -> tuple[float, float]:
        """:meth:`devices` of one device."""
        return self._replay(program, sliced, device, device + 1)[0]

    def devices(
        self, program: Program, sliced: Sequence[int] = ()
    ) -> tuple[tuple[float, float], ...]:
        """Peak bytes on every device: up to the global norm, and in the updates after it.

        Args:
            program: with the chains of its micro-batches.
            sliced: tokens of the slice of a longer sample in each micro-batch; 0: there is none.
                Without it the program's chains are counted as if they were whole samples.
        """
        return self._replay(program, sliced, 0, len(program.instructions))

    def _replay(
        self, program: Program, sliced: Sequence[int], first: int, last: int
    ) -> tuple[tuple[float, float], ...]:
        lists = Lists.of(program.instructions, program.tokens)
        chains = program.chains if len(sliced) else ()
        peak = np.zeros((len(lists), 2))
        arrays: dict[str, Array] = {
            "words": lists.words,
            "word_offset": lists.offset,
            "tokens": np.array(program.tokens, dtype=np.int64),
            "sliced": np.array(sliced, dtype=np.int64),
            "peak": peak,
            **_chains(chains, sliced, len(program.tokens)),
            **self._of_passes(program.plan, sliced=bool(chains)),
            **self._of_slabs(program, len(lists)),
        }
        native = _Problem(
            devices=len(lists),
            stages=len(program.plan.stages),
            batches=len(program.tokens),
            slabs=self._layers.num_slabs,
            chains=len(chains),
            posted=POSTED,
            window=WINDOW,
            divided=self._divided,
            boundary=self.boundary,
            share=self.boundary / self._tensor.size,
            keys_values=self.chains.keys_values,
            gradients=self.chains.gradients,
            tables=self._tables,
            **pointers(arrays),
        )
        function("mflex_program_footprint")(ctypes.addressof(native), first, last)
        return tuple((a, b) for a, b in peak[first:last].tolist())

    def _of_passes(self, plan: Plan, *, sliced: bool) -> dict[str, Array]:
        """What passes of every stage take."""
        o = plan.o_plan
        passes = [self._stage(stage, o) for stage in plan.stages]
        slices = [self._slices(stage, o) for stage in plan.stages] if sliced else []
        away = [any(s.start <= unit < s.stop for unit in o.activations) for s in plan.stages]
        line_offset, line = _table(
            [
                q
                for p in passes
                for q in (p.forward, p.backward, p.backward_input, p.backward_weight)
            ]
        )
        slice_offset, slice_line = _table(
            [
                [(x.level.fixed, x.level.token, x.level.sliced, x.own, x.before) for x in lines]
                for p in slices
                for lines in (p.forward, p.backward, p.backward_input)
            ]
        )
        weight_offset, weight_line = _table([p.backward_weight for p in slices])
        return {
            "moves": np.array(away, dtype=np.int64),
            "pass": np.array([(p.left, p.travels, p.output, p.context, p.owed) for p in passes]),
            "line_offset": line_offset,
            "line": line,
            "slice": np.array(
                [(*_level(p.left), *_level(p.travels), float(p.units), p.owed) for p in slices],
            ),
            "slice_offset": slice_offset,
            "slice_line": slice_line,
            "weight_offset": weight_offset,
            "weight_line": weight_line,
        }

    def _of_slabs(self, program: Program, devices: int) -> dict[str, Array]:
        """What slabs take: those that are there, and those that come or are cut anew."""
        held = program.held or program.plan
        after = program.next_plan
        now = set(program.plan.o_plan.optimizer)
        later = set(after.o_plan.optimizer) if after is not None else set()
        slabs = range(self._layers.num_slabs)
        all_held = self._all_held(held)
        owned = [all_held.get(device, {}) for device in range(devices)]
        held_offset, held_slab = rows([list(own) for own in owned])
        recut: list[dict[int, tuple[float, float, float]]] = [{} for _ in range(devices)]
        if after is not None:
            sharded = sharded_slabs(held, self._layers)
            for slab, cut in cuts(held, after, self._layers, program.elements).items():
                for d in cut.changed:
                    part, holds = cut.after[d], d in cut.before
                    recut[d][slab] = self._recut(slab, part, holds, slab in sharded)
        recut_offset, recut_slab = rows([list(of_device) for of_device in recut])
        return {
            "held": np.array([self.held(held, device) for device in range(devices)]),
            "held_offset": held_offset,
            "held_slab": held_slab,
            "held_bytes": np.array([b for own in owned for b in own.values()], dtype=np.float64),
            "offloaded": np.array([(s in now) + 2 * (s in later) for s in slabs]),
            "joined": np.array([self.slab(s, offloaded=s in later) for s in slabs]),
            "swap": np.array([self.window(s) for s in slabs]),
            "recut_offset": recut_offset,
            "recut_slab": recut_slab,
            "recut": np.array([t for of_device in recut for t in of_device.values()]),
        }


def _chains(
    chains: Sequence[Sequence[int]], sliced: Sequence[int], batches: int
) -> dict[str, Array]:
    """Which micro-batches are of which chain, and what the chains are."""
    number = np.full(batches, -1)
    for i, chain in enumerate(chains):
        number[list(chain)] = i
    return {
        "chain": number,
        "chain_ends": np.array([(c[0], c[-1]) for c in chains], dtype=np.int64),
        "chain_tokens": np.array([sum(sliced[m] for m in c) for c in chains], dtype=np.float64),
    }


def _level(level: Level) -> tuple[float, float, float]:
    return level.fixed, level.token, level.sliced


def _table(parts: Sequence[Sequence[tuple[float, ...]]]) -> tuple[Array, Array]:
    """Lines of several passes as native code reads them: where each begins, and all."""
    lines = [line for part in parts for line in part]
    return offsets(list(map(len, parts))), np.array(lines, dtype=np.float64)
