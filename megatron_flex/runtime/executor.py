"""Runs a program on one device: a table from instruction to handler. It decides nothing."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import astuple, fields, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megatron_flex.model.tensor_group import TensorGroupError
from megatron_flex.runtime import exact
from megatron_flex.runtime.arena import ArenaTransport
from megatron_flex.runtime.clock import Clock, Measured
from megatron_flex.runtime.communicator import Communicator
from megatron_flex.runtime.compute import Passes
from megatron_flex.runtime.custody import Custody
from megatron_flex.runtime.failure import lost
from megatron_flex.runtime.holdings import Holdings
from megatron_flex.runtime.memory import Expected
from megatron_flex.runtime.optimizer import OptimizerConfig, clip_coefficient, update
from megatron_flex.runtime.shards import collect
from megatron_flex.runtime.slab import Slab
from megatron_flex.runtime.step import Run, StepInputs, StepResult
from megatron_flex.runtime.world import World, explain
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
    PieceOp,
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
    StateOp,
    Transfer,
    UpdateOrSkip,
)
from megatron_flex.schedule.part import Part

Handler = Callable[[Any, Any], None]


def _apart(step: Callable[[Any], None]) -> Handler:
    """The handler of an instruction that is the same in a program and between iterations."""
    return lambda _, op: step(op)


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
        self.custody = Custody(world, holdings, arena)
        self.clock = Clock(world.device)
        self._after_norm = (0.0, 0.0)  # peak bytes of the last updates, and as predicted
        passes = Passes(world, holdings, self.clock, self.custody.usable)
        #: What runs each kind of instruction.
        self.handlers: dict[type[Instruction], Handler] = {
            Forward: passes.forward,
            Backward: passes.backward,
            BackwardInput: passes.backward,
            BackwardWeight: passes.backward_weight,
            SendActivation: self._send,
            SendGradient: self._send,
            RecvActivation: self._receive_activation,
            RecvGradient: self._receive_gradient,
            ReduceGradient: self._reduce,
            ScatterGradient: self._reduce,
            SquaredNorm: self._squared_norm,
            GlobalNorm: self._global_norm,
            UpdateOrSkip: self._update_or_skip,
            GatherParameters: _apart(self.custody.gather),
            Recut: _apart(self.custody.recut),
            SendPiece: _apart(self.custody.send_piece),
            RecvPiece: _apart(self.custody.receive_piece),
            SendState: _apart(self.custody.send),
            RecvState: self._receive_state,
            Drop: self._drop,
        }

    def run(self, part: Part, inputs: StepInputs) -> StepResult:
        """Execute this device's list. Without a ``step_size`` it evaluates: no gradients."""
        instructions = part.instructions
        unknown = {type(i).__name__ for i in instructions if type(i) not in self.handlers}
        if unknown:
            raise ValueError(f"the program has instructions that no handler runs: {unknown}")
        device = self.world.device
        count, slabs = len(part.tokens), self.holdings.config.layers.num_slabs
        run = Run(
            part,
            inputs,
            torch.zeros(count, len(inputs.denominators), dtype=torch.float64, device=device),
            torch.zeros(slabs, dtype=torch.float64, device=device),
            torch.zeros(1, dtype=torch.float64, device=device),
        )
        training = run.training
        clock = self.clock
        clock.begin(training=training)
        self.holdings.train(training)
        if training:
            self._place(part.plan.o_plan.optimizer)
        self._make_room(inputs.memory)
        self._connect(instructions)
        self.custody.carriers.prepare(part, self.holdings.state_bytes)
        self._communicator.expect(instructions, part.divided)
        clock.ready_to_run(inputs.read)
        with torch.set_grad_enabled(training):
            for instruction in instructions:
                if isinstance(instruction, Compute):
                    waiting = time.perf_counter()
                    self._communicator.delivered(instruction.under_way)
                    clock.delivered(time.perf_counter() - waiting)
                started = clock.start(instruction)
                try:
                    self.handlers[type(instruction)](run, instruction)
                except TensorGroupError as error:
                    what = f"{instruction} with the workers that share its layers"
                    raise lost(self.world.process, what, error) from error
                clock.stop(instruction, started)
        self._communicator.finish()
        self.custody.swap.settle()
        if run.result is None:
            raise ValueError("the program has no GlobalNorm")
        if training:
            self._after_norm = (float(self.holdings.memory.peak), inputs.memory.updates)
            self.holdings.updates += not run.result.skipped
        return run.result

    def _place(self, offloaded: Sequence[int]) -> None:
        """Have the optimizer state of the slabs where the plan wants it."""
        for number in list(self.holdings.slabs):
            self.custody.rehouse(number, offloaded=number in offloaded)

    def _make_room(self, expected: Expected) -> None:
        """Give back what the pool keeps beyond the budget, and begin to measure."""
        pool = self.holdings.pool
        if expected.budget is not None:
            pool.trim(max(0, int(expected.budget - max(expected.peak, expected.updates))))
        self.holdings.memory.begin(pool.kept)

    def _connect(self, instructions: Sequence[Instruction]) -> None:
        """Have connections to all whom a list names, before anything is on its way."""
        channels = ((self.world.pipeline, Transfer), (self.world.state, (StateOp, PieceOp)))
        for channel, kinds in channels:
            if channel is not None and channel.lazy:
                peers = {i.peer for i in instructions if isinstance(i, kinds)}
                with explain("connections", self.world):
                    channel.connect(peers, self.world.device)

    def switch(self, instructions: Sequence[Instruction]) -> None:
        """Run the instructions of a switch between iterations, and wait for what they begin."""
        self._connect(instructions)
        for instruction in instructions:
            self.handlers[type(instruction)](None, instruction)
        self.settle()

    def settle(self) -> None:
        """Wait for all slab states on their way, before anything but a program uses the slabs."""
        self.custody.settle()

    def collect(self) -> dict[int, Slab]:
        """Owned sharded slabs with their whole state on the host. All workers together."""
        self.custody.gathered()
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
                self.custody.copy(number, partial(copy, number, slab.state))

    # ---- messages ----------------------------------------------------------------------------

    def _send(self, run: Run, op: SendActivation | SendGradient) -> None:
        self._communicator.send(op, run.outgoing.pop((op.stage, op.micro_batch)))

    def _receive_activation(self, run: Run, op: RecvActivation) -> None:
        run.activations[op.stage, op.micro_batch] = self._communicator.receive(op)

    def _receive_gradient(self, run: Run, op: RecvGradient) -> None:
        run.gradients[op.stage - 1, op.micro_batch] = self._communicator.receive(op)

    # ---- the end of the iteration ------------------------------------------------------------

    def _reduce(self, run: Run, op: ReduceGradient) -> None:
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

    def _gradient(self, run: Run, number: int) -> Slab:
        """The slab, when its gradient is reduced and complete."""
        slab = self.holdings.slabs[number]
        work = run.reductions.pop(number, None)
        if work is not None:
            with explain(f"gradient reduction of slab {number}", self.world):
                work.wait(self.world.timeout)
        if number not in run.finished:
            run.finished.add(number)
            gradient = slab.grads if slab.sums is None else slab.sums
            for start, stop in slab.layout.partial:
                self.world.tensor.sum(gradient[start:stop])
            if slab.sums is not None:
                exact.finish(slab)
        return slab

    def _squared_norm(self, run: Run, op: SquaredNorm) -> None:
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

    def _global_norm(self, run: Run, _: GlobalNorm) -> None:
        # Each element has one contributor and zeros elsewhere, so the sum is exact and the
        # same whatever the plan; it is taken in slab and micro-batch order afterwards. Where
        # workers share the layers, each has its squares, and the first speaks for the others.
        # The last signal is this class's own: whether hand-overs can go through host memory.
        # A group may be destroyed when all have passed the norm after its last use.
        self._communicator.delivered()
        run.prefixes.finish()
        self.custody.gathered()
        if run.training:
            self.custody.swap.begin(self._to_update(run))
        unready = self.custody.carriers.unready
        signals = torch.tensor((*run.inputs.signals, unready), dtype=torch.float64)
        sharing, first = self.world.tensor, self.world.tensor.index == 0
        squares = torch.zeros(sharing.size, len(run.squares), dtype=torch.float64)
        squares[sharing.index] = run.squares
        losses = run.losses if first else torch.zeros_like(run.losses)
        parts = [squares.flatten(), losses.flatten().cpu(), run.zeros.cpu(), signals]
        before, foreseen = self._after_norm
        mine = replace(
            self.clock.measured(),
            memory=max(before, float(self.holdings.memory.peak)),
            predicted=max(foreseen, run.inputs.memory.peak),
        )
        self.holdings.memory.begin(self.holdings.pool.kept)
        rows = torch.zeros(self.world.size, len(fields(mine)), dtype=torch.float64)
        if first:
            rows[self.world.rank] = torch.tensor(astuple(mine))
        parts.append(rows.flatten())
        combined = torch.cat(parts)
        if self.world.control is not None:
            with explain("waiting for all workers at the global norm", self.world):
                dist.all_reduce(combined, group=self.world.control)
        squares, losses, zeros, signals, measured = combined.split([p.numel() for p in parts])
        sums = losses.view_as(run.losses).sum(0).tolist()
        self.custody.carriers.agree(bool(signals[-1] > 0))
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

    def _update_or_skip(self, run: Run, op: UpdateOrSkip) -> None:
        assert run.result is not None
        assert run.inputs.step_size is not None
        self._gradient(run, op.slab)
        slab = self.custody.changeable(op.slab)
        if not run.result.skipped:
            coefficient = clip_coefficient(run.result.grad_norm, self.optimizer.clip_grad)
            swaps = slab.offloaded and slab.layout.numel > 0
            update(
                slab,
                self.optimizer,
                run.inputs.step_size,
                coefficient,
                self.holdings.updates,
                self.custody.swap.take(slab) if swaps else None,
            )
            if swaps:
                self.custody.swap.give(slab)
        slab.grads.zero_()

    def _to_update(self, run: Run) -> list[Slab]:
        """The slabs whose states must come from the host for their updates, in order."""
        found = []
        for op in run.part.instructions:
            if isinstance(op, UpdateOrSkip) and not self.custody.cut_anew(op.slab):
                slab = self.holdings.slabs.get(op.slab)
                if slab is not None and slab.offloaded:
                    self.custody.usable(op.slab)  # of a joiner's state
                    found.append(slab)
        return found

    # ---- a switch ----------------------------------------------------------------------------

    def _receive_state(self, run: Run | None, op: RecvState) -> None:
        after = None if run is None else run.part.next_plan
        wanted = after is not None and op.slab in after.o_plan.optimizer
        # A message to a GPU cannot end in the host's memory.
        self.custody.receive(op, offloaded=wanted and self.world.device.type == "cpu")

    def _drop(self, run: Run | None, op: Drop) -> None:
        if run is not None:
            self._gradient(run, op.slab)
        self.custody.drop(op.slab)
