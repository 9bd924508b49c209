"""Forward, backward and the two halves of a split backward, as a device executes them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch.autograd.graph import get_gradient_edge

from megatron_flex.data.packed import PackedBatch
from megatron_flex.model.tape import recording
from megatron_flex.runtime import exact
from megatron_flex.runtime.activations import ActivationOffload
from megatron_flex.runtime.anticipate import anticipated
from megatron_flex.runtime.clock import Clock
from megatron_flex.runtime.holdings import Holdings
from megatron_flex.runtime.recompute import recomputed
from megatron_flex.runtime.step import Run
from megatron_flex.runtime.world import World
from megatron_flex.schedule.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Forward,
)


class Passes:
    """The handlers of :class:`Compute` instructions."""

    def __init__(
        self, world: World, holdings: Holdings, clock: Clock, arrived: Callable[[int], bool]
    ) -> None:
        """``arrived(slab)`` waits for a slab on its way here, and says whether it was."""
        self._world = world
        self._holdings = holdings
        self._clock = clock
        self._arrived = arrived
        self._slabs_of = [unit.slabs for unit in holdings.config.layers.units]
        self._head = len(self._slabs_of) - 1
        self._activations = ActivationOffload(world.device)

    def forward(self, run: Run, op: Forward) -> None:
        """Run the stage; keep what its backward needs, if there is one."""
        self._move_activations(run, op)
        stage = run.part.plan.stages[op.stage]
        batch = self._batch(run, op)
        run.prefixes.forward(op.stage, op.micro_batch, batch)
        tape = run.tapes.get((op.stage, op.micro_batch))
        source = run.activations.pop((op.stage - 1, op.micro_batch), None)
        if source is not None and run.training:
            source.requires_grad_()
        hidden = source
        for unit in range(stage.start, stage.stop):
            waiting = time.perf_counter()
            if sum(map(self._arrived, self._slabs_of[unit])):
                self._clock.waited(time.perf_counter() - waiting)
            block = self._holdings.blocks[unit]
            # The embedding keeps nothing, so there is nothing to recompute.
            if unit in run.recompute and hidden is not None:
                hidden = recomputed(block, hidden, batch)
            elif unit == self._head and run.training and batch.cut is not None:
                assert hidden is not None
                with recording(None):
                    hidden = anticipated(block, hidden, batch, self._loss_scale(run))
                if self._holdings.exact:
                    self._accumulate(run, unit)
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
        self, run: Run, op: Forward, unit: int, hidden: torch.Tensor | None
    ) -> AbstractContextManager[object]:
        """Where a unit's saved activations are kept."""
        key = op.stage, op.micro_batch
        if key not in run.travels.passes or unit not in run.part.plan.o_plan.activations:
            return nullcontext()
        stay = [self._holdings.slabs[slab].params for slab in self._slabs_of[unit]]
        stay = stay if hidden is None else [*stay, hidden]
        return self._activations.saving(key, stay, run.prefixes.holds)

    def _move_activations(self, run: Run, op: Compute) -> None:
        """Before a pass: what the one before saved leaves, what the next one needs returns."""
        if run.leaving is not None:
            self._activations.away(run.leaving)
            run.leaving = None
        returning = run.travels.back.get(op)
        if returning is not None:
            self._activations.back(returning)

    def _passed(self, run: Run, op: Compute) -> None:
        """Let go of the micro-batch's tensors after its last operation here."""
        run.ahead[op.micro_batch] -= 1
        if not run.ahead[op.micro_batch]:
            del run.batches[op.micro_batch]

    def backward(self, run: Run, op: Backward | BackwardInput) -> None:
        """The gradient of the stage's input; of its weights too, or their tape is filled."""
        self._move_activations(run, op)
        run.prefixes.backward(op.stage, op.micro_batch, run.batches[op.micro_batch])
        source, edge = run.saved.pop((op.stage, op.micro_batch))
        if op.stage + 1 == len(run.part.plan.stages):
            gradient = self._loss_scale(run)
        else:
            gradient = run.gradients.pop((op.stage, op.micro_batch))
        torch.autograd.backward(edge, gradient)
        self._activations.done((op.stage, op.micro_batch))
        if self._holdings.exact:
            self._accumulate_stage(run, op)
        if source is not None:
            assert source.grad is not None
            if (op.stage, op.micro_batch) not in run.part.returned:
                run.gradients[op.stage - 1, op.micro_batch] = source.grad
            else:
                run.outgoing[op.stage, op.micro_batch] = source.grad
        self._passed(run, op)

    def backward_weight(self, run: Run, op: BackwardWeight) -> None:
        """The gradients of the stage's weights, from the tape of the pass."""
        self._move_activations(run, op)
        run.tapes.pop((op.stage, op.micro_batch)).run()
        if self._holdings.exact:
            self._accumulate_stage(run, op)
        self._passed(run, op)

    def _loss_scale(self, run: Run) -> torch.Tensor:
        """Each loss is scaled at its source, by the denominator of the whole global batch."""
        scales = [1.0 / d if d > 0 else 0.0 for d in run.inputs.denominators]
        return torch.tensor(scales, dtype=torch.float32, device=self._world.device)

    def _batch(self, run: Run, op: Forward) -> PackedBatch:
        """The micro-batch's tensors, read once where one device runs several of its stages."""
        batch = run.batches.get(op.micro_batch)
        if batch is None:
            inputs, targets = run.part.read[op.micro_batch]
            batch = run.inputs.packed(op.micro_batch, inputs, targets).to(self._world.device)
            if batch.cut is not None:
                batch = replace(batch, prefixes=run.prefixes)
            run.batches[op.micro_batch] = batch
        return batch

    def _accumulate_stage(self, run: Run, op: Compute) -> None:
        """Move what this pass has completed of the gradients into the exact sums.

        The two halves of a backward complete different parts, and each part is rounded before
        another micro-batch adds to it.
        """
        stage = run.part.plan.stages[op.stage]
        for unit in range(stage.start, stage.stop):
            whole = isinstance(op, Backward) or unit in run.at_once
            if whole and isinstance(op, BackwardWeight):
                continue
            self._accumulate(run, unit, None if whole else type(op))

    def _accumulate(self, run: Run, unit: int, half: type[Compute] | None = None) -> None:
        """The same of one unit, after a half of a backward or after all of it."""
        for number in self._slabs_of[unit]:
            slab, part = self._holdings.slabs[number], None
            if half is not None:
                decayed, end = slab.layout.decayed, slab.layout.numel
                part = (decayed, end) if half is BackwardInput else (0, decayed)
            if not exact.accumulate(slab, unit, part):
                run.squares[number] = math.nan
