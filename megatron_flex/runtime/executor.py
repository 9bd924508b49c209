"""Runs a program on one device: a table from instruction to handler. It decides nothing."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import astuple, dataclass, field, fields, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron_flex.data.packed import PackedBatch
from megatron_flex.model.tape import Tape, recording
from megatron_flex.runtime import exact
from megatron_flex.runtime.activations import ActivationOffload
from megatron_flex.runtime.arena import ArenaTransport
from megatron_flex.runtime.clock import Clock, Measured
from megatron_flex.runtime.communicator import Communicator, explain
from megatron_flex.runtime.holdings import Holdings
from megatron_flex.runtime.memory import Expected
from megatron_flex.runtime.optimizer import OptimizerConfig, StepSize, clip_coefficient, update
from megatron_flex.runtime.recompute import recomputed
from megatron_flex.runtime.shards import ShardMoves, collect
from megatron_flex.runtime.slab import Slab
from megatron_flex.runtime.states import StateTransfers
from megatron_flex.runtime.swap import OptimizerSwap
from megatron_flex.runtime.world import World
from megatron_flex.schedule.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Drop,
    Forward,
    GatherParameters,
    GlobalNorm,
    Instruction,
    Recut,
    RecvActivation,
    RecvGradient,
    RecvPiece,
    RecvState,
    ReduceGradient,
    ScatterGradient,
    SendActivation,
    SendGradient,
    SendPiece,
    SendState,
    SquaredNorm,
    UpdateOrSkip,
)
from megatron_flex.schedule.part import Part
from megatron_flex.schedule.residency import Key, Travels, at_once, travels


@dataclass(frozen=True)
class StepInputs:
    """What an iteration works on.

    Attributes:
        packed: ``packed(micro_batch, inputs, targets)`` gives the tensors of a micro-batch, tokens
            only where ``inputs`` is set and labels only where ``targets`` is.
        denominators: for each loss, what its sum over the whole global batch is divided by.
        step_size: learning rate and weight decay; ``None`` for a forward-only program.
        signals: what this worker wants all to know at the end of the iteration (time to stop, a
            failed save); they travel with the norms and cost nothing.
        count_zeros: count the zeros in the reduced gradient.
        memory: what this device is expected to have in use, and may.
    """

    packed: Callable[[int, bool, bool], PackedBatch]
    denominators: tuple[int, ...]
    step_size: StepSize | None = None
    signals: tuple[bool, ...] = ()
    count_zeros: bool = False
    memory: Expected = field(default_factory=Expected)


@dataclass(frozen=True)
class StepResult:
    """What an iteration gave, the same on every worker.

    ``losses`` are means over the global batch (0.0 where a denominator is 0), ``skipped`` says
    that no update was made, ``finite`` is false if the gradient norm was NaN or infinite.
    ``signals`` are true where any worker's was. ``zeros`` is the number of zero gradients.
    ``measured`` are times and memory of each device.
    """

    losses: tuple[float, ...]
    grad_norm: float
    skipped: bool
    finite: bool
    signals: tuple[bool, ...] = ()
    zeros: int | None = None
    measured: tuple[Measured, ...] = field(default=(), compare=False)


@dataclass
class _Run:
    """State of one execution. Keys are (stage, micro-batch)."""

    part: Part
    inputs: StepInputs
    training: bool
    losses: torch.Tensor
    squares: torch.Tensor
    zeros: torch.Tensor
    batches: dict[int, PackedBatch] = field(default_factory=dict)
    activations: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    gradients: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    # The input, and where the backward begins: the output itself is not kept for it.
    saved: dict[tuple[int, int], tuple[torch.Tensor | None, GradientEdge]] = field(
        default_factory=dict
    )
    outgoing: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    reductions: dict[int, dist.Work] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)
    # Slabs of whose gradient this device has the sum of its own part only, and the first holder.
    scattered: dict[int, int] = field(default_factory=dict)
    result: StepResult | None = None

    def __post_init__(self) -> None:
        o_plan = self.part.plan.o_plan
        self.recompute = frozenset(o_plan.recompute if self.training else ())
        self.at_once = at_once(o_plan)
        #: Of passes whose backward is split.
        self.tapes: dict[Key, Tape] = {}
        #: Operations that each micro-batch still has on this device.
        self.ahead: Counter[int] = Counter()
        self.travels = Travels()
        self.leaving: tuple[int, int] | None = None


class Executor:
    """The worker of one device."""

    def __init__(
        self,
        world: World,
        holdings: Holdings,
        optimizer: OptimizerConfig,
        arena: ArenaTransport | None = None,
    ) -> None:
        """``arena`` carries what is handed over within a server; without it, messages do."""
        self.world = world
        self.holdings = holdings
        self.optimizer = optimizer
        dtype = torch.bfloat16 if holdings.config.params_dtype == "bfloat16" else torch.float32
        self._communicator = Communicator(world, holdings.config.hidden_size, dtype)
        self._states = StateTransfers(world, arena)
        self._shards = ShardMoves(world, holdings, self._states)
        self.clock = Clock(world.device)
        self._slabs_of = [unit.slabs for unit in holdings.config.layers.units]
        self._swap = OptimizerSwap(world.device)
        self._activations = ActivationOffload(world.device)
        self._after_norm = (0.0, 0.0)  # peak bytes of the last updates, and as predicted

    def run(self, part: Part, inputs: StepInputs) -> StepResult:
        """Execute this device's list. Without a ``step_size`` it evaluates: no gradients."""
        training = inputs.step_size is not None
        instructions = part.instructions
        unknown = {type(i).__name__ for i in instructions} - {c.__name__ for c in HANDLERS}
        if unknown:
            raise ValueError(f"the program has instructions that no handler runs: {unknown}")
        device = self.world.device
        count, slabs = len(part.tokens), self.holdings.config.layers.num_slabs
        run = _Run(
            part,
            inputs,
            training,
            torch.zeros(count, len(inputs.denominators), dtype=torch.float64, device=device),
            torch.zeros(slabs, dtype=torch.float64, device=device),
            torch.zeros(1, dtype=torch.float64, device=device),
        )
        run.ahead.update(i.micro_batch for i in instructions if isinstance(i, Compute))
        if training:
            run.travels = travels(instructions, part.plan)
            halves = (i for i in instructions if isinstance(i, BackwardWeight))
            run.tapes = {(i.stage, i.micro_batch): Tape() for i in halves}
        clock = self.clock
        clock.begin()
        self.holdings.train(training)
        if training:
            self._place(part.plan.o_plan.optimizer)
        self._make_room(inputs.memory)
        self._states.prepare(part, self.holdings.state_bytes)
        self._communicator.expect(instructions)
        with torch.set_grad_enabled(training):
            for instruction in instructions:
                started = clock.start(instruction)
                HANDLERS[type(instruction)](self, run, instruction)
                clock.stop(instruction, started)
        self._communicator.finish()
        self._swap.settle()
        if run.result is None:
            raise ValueError("the program has no GlobalNorm")
        if training:
            self._after_norm = (float(self.holdings.memory.peak), inputs.memory.updates)
            self.holdings.updates += not run.result.skipped
        return run.result

    def _place(self, offloaded: Sequence[int]) -> None:
        """Have the optimizer state of the slabs where the plan wants it."""
        for number, slab in list(self.holdings.slabs.items()):
            wanted = number in offloaded and slab.layout.numel > 0
            if slab.offloaded is not wanted:
                self._wait_arrived(number)
                self._states.left(number)
                self.holdings.rehouse(number, offloaded=wanted)

    def _make_room(self, expected: Expected) -> None:
        """Give back what the pool keeps beyond the budget, and begin to measure."""
        pool = self.holdings.pool
        if expected.budget is not None:
            pool.trim(max(0, int(expected.budget - max(expected.peak, expected.updates))))
        self.holdings.memory.begin(pool.kept)

    def switch(self, instructions: Sequence[Instruction]) -> None:
        """Run the state messages and drops of a switch between iterations, and wait for them."""
        for op in instructions:
            if isinstance(op, SendState):
                self._send_state(None, op)
            elif isinstance(op, RecvState):
                self._receive_state(None, op)
            elif isinstance(op, Recut):
                self._recut(None, op)
            elif isinstance(op, SendPiece):
                self._send_piece(None, op)
            elif isinstance(op, RecvPiece):
                self._shards.receive(op)
        self.settle()
        for op in instructions:
            if isinstance(op, Recut):
                self._shards.finish(op.slab)
            elif isinstance(op, Drop):
                self.holdings.drop(op.slab)
            elif isinstance(op, GatherParameters):
                self._shards.gather(op)

    def settle(self) -> None:
        """Wait for all slab states on their way, before anything but a program uses the slabs."""
        for slab in self._states.arriving:
            self._wait_arrived(slab)
        for slab in self._states.leaving:
            self._states.left(slab)
        self._shards.settle()

    def collect(self) -> dict[int, Slab]:
        """Owned sharded slabs with their whole state on the host. All workers together."""
        self._shards.settle()
        return collect(self.world, self.holdings)

    def copy_states(
        self, copy: Callable[[int, torch.Tensor], Future[None]], whole: Mapping[int, Slab]
    ) -> None:
        """Begin ``copy(slab, state)`` for all owned slabs, or when a slab has arrived.

        Whatever changes or drops a slab next waits for its copy. ``whole`` is of :meth:`collect`.
        """
        for number in self.holdings.owned:
            slab = whole.get(number, self.holdings.slabs[number])
            if slab.layout.numel:
                self._states.copy(number, partial(copy, number, slab.state))

    # ---- compute -----------------------------------------------------------------------------

    def _forward(self, run: _Run, op: Forward) -> None:
        self._move_activations(run, op)
        stage = run.part.plan.stages[op.stage]
        batch = self._batch(run, op)
        tape = run.tapes.get((op.stage, op.micro_batch))
        source = run.activations.pop((op.stage - 1, op.micro_batch), None)
        if source is not None and run.training:
            source.requires_grad_()
        hidden = source
        for unit in range(stage.start, stage.stop):
            waiting = time.perf_counter()
            if sum(map(self._wait_arrived, self._slabs_of[unit])):
                self.clock.waited(time.perf_counter() - waiting)
            block = self.holdings.blocks[unit]
            # The embedding keeps nothing, so there is nothing to recompute.
            if unit in run.recompute and hidden is not None:
                hidden = recomputed(block, hidden, batch)
            else:
                owed = None if unit in run.at_once else tape
                with self._saving(run, op, unit, hidden), recording(owed):
                    hidden = block(hidden, batch)
        assert hidden is not None
        if run.training:
            run.saved[op.stage, op.micro_batch] = (source, get_gradient_edge(hidden))
        output = hidden.detach()
        if op.stage + 1 == len(run.part.plan.stages):
            run.losses[op.micro_batch] = output
        elif (op.stage, op.micro_batch) not in run.part.sent:
            run.activations[op.stage, op.micro_batch] = output
        else:
            run.outgoing[op.stage, op.micro_batch] = output
        if (op.stage, op.micro_batch) in run.travels.passes:
            run.leaving = (op.stage, op.micro_batch)
        self._passed(run, op)

    def _saving(
        self, run: _Run, op: Forward, unit: int, hidden: torch.Tensor | None
    ) -> AbstractContextManager[object]:
        """Where a unit's saved activations are kept."""
        key = op.stage, op.micro_batch
        if key not in run.travels.passes or unit not in run.part.plan.o_plan.activations:
            return nullcontext()
        stay = [self.holdings.slabs[slab].params for slab in self._slabs_of[unit]]
        return self._activations.saving(key, stay if hidden is None else [*stay, hidden])

    def _move_activations(self, run: _Run, op: Compute) -> None:
        """Before a pass: what the one before saved leaves, what the next one needs returns."""
        if run.leaving is not None:
            self._activations.away(run.leaving)
            run.leaving = None
        returning = run.travels.back.get(op)
        if returning is not None:
            self._activations.back(returning)

    def _passed(self, run: _Run, op: Compute) -> None:
        """Let go of the micro-batch's tensors after its last operation here."""
        run.ahead[op.micro_batch] -= 1
        if not run.ahead[op.micro_batch]:
            del run.batches[op.micro_batch]

    def _backward(self, run: _Run, op: Backward | BackwardInput) -> None:
        self._move_activations(run, op)
        source, edge = run.saved.pop((op.stage, op.micro_batch))
        if op.stage + 1 == len(run.part.plan.stages):
            gradient = self._loss_scale(run)
        else:
            gradient = run.gradients.pop((op.stage, op.micro_batch))
        torch.autograd.backward(edge, gradient)
        self._activations.done((op.stage, op.micro_batch))
        if self.holdings.exact:
            self._accumulate(run, op)
        if source is not None:
            assert source.grad is not None
            if (op.stage, op.micro_batch) not in run.part.returned:
                run.gradients[op.stage - 1, op.micro_batch] = source.grad
            else:
                run.outgoing[op.stage, op.micro_batch] = source.grad
        self._passed(run, op)

    def _backward_weight(self, run: _Run, op: BackwardWeight) -> None:
        self._move_activations(run, op)
        run.tapes.pop((op.stage, op.micro_batch)).run()
        if self.holdings.exact:
            self._accumulate(run, op)
        self._passed(run, op)

    def _loss_scale(self, run: _Run) -> torch.Tensor:
        """Each loss is scaled at its source, by the denominator of the whole global batch."""
        scales = [1.0 / d if d > 0 else 0.0 for d in run.inputs.denominators]
        return torch.tensor(scales, dtype=torch.float32, device=self.world.device)

    def _batch(self, run: _Run, op: Forward) -> PackedBatch:
        """The micro-batch's tensors, read once where one device runs several of its stages."""
        batch = run.batches.get(op.micro_batch)
        if batch is None:
            inputs, targets = run.part.read[op.micro_batch]
            batch = run.inputs.packed(op.micro_batch, inputs, targets).to(self.world.device)
            run.batches[op.micro_batch] = batch
        return batch

    # ---- messages ----------------------------------------------------------------------------

    def _send(self, run: _Run, op: SendActivation | SendGradient) -> None:
        self._communicator.send(op, run.outgoing.pop((op.stage, op.micro_batch)))

    def _receive_activation(self, run: _Run, op: RecvActivation) -> None:
        run.activations[op.stage, op.micro_batch] = self._communicator.receive(op)

    def _receive_gradient(self, run: _Run, op: RecvGradient) -> None:
        run.gradients[op.stage - 1, op.micro_batch] = self._communicator.receive(op)

    # ---- the end of the iteration ------------------------------------------------------------

    def _reduce(self, run: _Run, op: ReduceGradient) -> None:
        slab = self.holdings.slabs[op.slab]
        if slab.layout.numel:
            assert self.world.reductions is not None
            gradient = slab.grads if slab.sums is None else slab.sums
            reduce = self.world.reductions.all_reduce
            if isinstance(op, ScatterGradient):
                run.scattered[op.slab] = op.group[0]
                # Exact sums are reduced whole: their norm's bits must not depend on the parts.
                if slab.sums is None:
                    reduce = self.world.reductions.reduce_scatter
            with explain(op, self.world):
                run.reductions[op.slab] = reduce(gradient, op.group)

    def _gradient(self, run: _Run, number: int) -> Slab:
        """The slab, when its gradient is reduced and complete."""
        slab = self.holdings.slabs[number]
        work = run.reductions.pop(number, None)
        if work is not None:
            with explain(f"gradient reduction of slab {number}", self.world):
                work.wait(self.world.timeout)
        if slab.sums is not None and number not in run.finished:
            exact.finish(slab)
            run.finished.add(number)
        return slab

    def _squared_norm(self, run: _Run, op: SquaredNorm) -> None:
        slab = self._gradient(run, op.slab)
        part = None
        if op.slab in run.scattered:
            if slab.sums is None:
                part = slab.part
            elif run.scattered[op.slab] != self.world.rank:
                return
        # Added, not set: a device may already have marked the slab's gradient as not finite.
        run.squares[op.slab] += slab.squared_norm(part)
        if run.inputs.count_zeros:
            run.zeros += slab.zeros(part)

    def _accumulate(self, run: _Run, op: Compute) -> None:
        """Move what this pass has completed of the gradients into the exact sums.

        The two halves of a backward complete different parts, and each part is rounded before
        another micro-batch adds to it.
        """
        stage = run.part.plan.stages[op.stage]
        for unit in range(stage.start, stage.stop):
            whole = isinstance(op, Backward) or unit in run.at_once
            if whole and isinstance(op, BackwardWeight):
                continue
            for number in self._slabs_of[unit]:
                slab, part = self.holdings.slabs[number], None
                if not whole:
                    decayed, end = slab.layout.decayed, slab.layout.numel
                    part = (decayed, end) if isinstance(op, BackwardInput) else (0, decayed)
                if not exact.accumulate(slab, unit, part):
                    run.squares[number] = math.nan

    def _global_norm(self, run: _Run, _: GlobalNorm) -> None:
        # Each element has one contributor and zeros elsewhere, so the sum is exact and the
        # same whatever the plan; it is taken in slab and micro-batch order afterwards.
        # The last signal is this class's own: whether hand-overs can go through host memory.
        # A group may be destroyed when all have passed the norm after its last use.
        self._shards.settle()
        if run.training:
            self._swap.begin(self._to_update(run))
        signals = torch.tensor((*run.inputs.signals, self._states.unready), dtype=torch.float64)
        parts = [run.squares.cpu(), run.losses.flatten().cpu(), run.zeros.cpu(), signals]
        before, foreseen = self._after_norm
        mine = replace(
            self.clock.measured(),
            memory=max(before, float(self.holdings.memory.peak)),
            predicted=max(foreseen, run.inputs.memory.peak),
        )
        self.holdings.memory.begin(self.holdings.pool.kept)
        rows = torch.zeros(self.world.size, len(fields(mine)), dtype=torch.float64)
        rows[self.world.rank] = torch.tensor(astuple(mine))
        parts.append(rows.flatten())
        combined = torch.cat(parts)
        if self.world.control is not None:
            with explain("waiting for all workers at the global norm", self.world):
                dist.all_reduce(combined, group=self.world.control)
        squares, losses, zeros, signals, measured = combined.split([p.numel() for p in parts])
        sums = losses.view_as(run.losses).sum(0).tolist()
        self._states.agree(bool(signals[-1] > 0))
        norm = math.sqrt(squares.sum().item()) if run.training else 0.0
        finite = math.isfinite(norm)
        run.result = StepResult(
            losses=tuple(
                s / d if d > 0 else 0.0 for s, d in zip(sums, run.inputs.denominators, strict=True)
            ),
            grad_norm=norm,
            skipped=run.training and not (finite and any(run.inputs.denominators)),
            finite=finite,
            signals=tuple((signals[:-1] > 0).tolist()),
            zeros=int(zeros.item()) if run.inputs.count_zeros else None,
            measured=tuple(Measured(*row) for row in measured.view_as(rows).tolist()),
        )

    def _update_or_skip(self, run: _Run, op: UpdateOrSkip) -> None:
        assert run.result is not None
        assert run.inputs.step_size is not None
        self._gradient(run, op.slab)
        self._wait_arrived(op.slab)
        self._states.left(op.slab)
        self._shards.finish(op.slab)
        slab = self.holdings.slabs[op.slab]
        if not run.result.skipped:
            coefficient = clip_coefficient(run.result.grad_norm, self.optimizer.clip_grad)
            swaps = slab.offloaded and slab.layout.numel > 0
            update(
                slab,
                self.optimizer,
                run.inputs.step_size,
                coefficient,
                self.holdings.updates,
                self._swap.take(slab) if swaps else None,
            )
            if swaps:
                self._swap.give(slab)
        slab.grads.zero_()

    def _to_update(self, run: _Run) -> list[Slab]:
        """The slabs whose states must come from the host for their updates, in order."""
        anew = self._shards.cut_anew
        found = []
        for op in run.part.instructions:
            if isinstance(op, UpdateOrSkip) and op.slab not in anew:
                slab = self.holdings.slabs.get(op.slab)
                if slab is not None and slab.offloaded:
                    self._wait_arrived(op.slab)  # of a joiner's state
                    found.append(slab)
        return found

    # ---- a switch ----------------------------------------------------------------------------

    def _send_state(self, run: _Run | None, op: SendState) -> None:
        slab = self.holdings.slabs[op.slab]
        if slab.layout.numel:
            self._wait_arrived(op.slab)
            self._swap.settle()
            self._states.send(op, slab.state.to(self.world.device))

    def _receive_state(self, run: _Run | None, op: RecvState) -> None:
        after = None if run is None else run.part.next_plan
        wanted = after is not None and op.slab in after.o_plan.optimizer
        # A message to a GPU cannot end in the host's memory.
        slab = self.holdings.join(op.slab, offloaded=wanted and self.world.device.type == "cpu")
        if slab.layout.numel:
            self._states.receive(op, slab.state)

    def _gather(self, run: _Run, op: GatherParameters) -> None:
        self._shards.gather(op)

    def _recut(self, run: _Run | None, op: Recut) -> None:
        self._ready_to_cut(op.slab)
        self._shards.recut(op)

    def _send_piece(self, run: _Run | None, op: SendPiece) -> None:
        self._ready_to_cut(op.slab)
        self._shards.send(op)

    def _receive_piece(self, run: _Run, op: RecvPiece) -> None:
        self._shards.receive(op)

    def _ready_to_cut(self, number: int) -> None:
        """Wait until a slab's optimizer state is there."""
        self._wait_arrived(number)
        self._swap.settle()

    def _drop(self, run: _Run, op: Drop) -> None:
        slab = self._gradient(run, op.slab)
        # What was handed over to a device without work may still be on its way.
        self._wait_arrived(op.slab)
        self._states.left(op.slab)
        self._swap.settle()
        slab.grads.zero_()
        self.holdings.drop(op.slab)

    def _wait_arrived(self, number: int) -> bool:
        """Have a slab whose state or parameters are on their way here; whether they were."""
        arrived = self._states.arrived(number)
        if arrived:
            self.holdings.slabs[number].params_from_masters()
        gathered = self._shards.gathered(number)
        return arrived or gathered


HANDLERS: dict[type[Instruction], Callable[[Executor, _Run, Any], None]] = {
    Forward: Executor._forward,
    Backward: Executor._backward,
    BackwardInput: Executor._backward,
    BackwardWeight: Executor._backward_weight,
    SendActivation: Executor._send,
    SendGradient: Executor._send,
    RecvActivation: Executor._receive_activation,
    RecvGradient: Executor._receive_gradient,
    ReduceGradient: Executor._reduce,
    ScatterGradient: Executor._reduce,
    SquaredNorm: Executor._squared_norm,
    GlobalNorm: Executor._global_norm,
    UpdateOrSkip: Executor._update_or_skip,
    GatherParameters: Executor._gather,
    Recut: Executor._recut,
    SendPiece: Executor._send_piece,
    RecvPiece: Executor._receive_piece,
    SendState: Executor._send_state,
    RecvState: Executor._receive_state,
    Drop: Executor._drop,
}
