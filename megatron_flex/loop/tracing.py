"""Writes what each worker did into a trace, with what the schedule expected of it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from megatron_flex.loop.iteration import Iterations
from megatron_flex.planner.ordering import op_costs
from megatron_flex.runtime.world import World
from megatron_flex.telemetry.trace import TraceWriter, join


class Tracing:
    """One worker's part of ``--flexpipe-trace``; does nothing without a path."""

    def __init__(self, path: str | None, world: World, iterations: Iterations) -> None:
        self._path = path
        self._world = world
        self._iterations = iterations
        self._writer = TraceWriter(path, world.rank) if path is not None else None
        iterations.executor.clock.trace = path is not None

    def add(self, iteration: int) -> None:
        """Append the iteration that has just run."""
        if self._writer is None:
            return
        spans = self._iterations.executor.clock.spans
        about = self._about() if self._world.rank == 0 else None
        self._writer.add(iteration, ((s.instruction, s.start, s.stop) for s in spans), about)
        spans.clear()

    def close(self) -> None:
        """Join the parts of all workers; collective."""
        if self._writer is None or self._path is None:
            return
        self._writer.close()
        self._world.barrier()
        if self._world.rank == 0:
            join(self._path, self._world.size)

    def _about(self) -> dict[str, Any]:
        """Plan, routing and relative costs: what ``tools/draw_schedule.py`` draws as planned."""
        last = self._iterations.last
        assert last is not None
        program, micro_batches = last
        model = self._iterations.executor.holdings.config
        return {
            "plan": str(program.plan),
            "route": program.route,
            "tokens": program.tokens,
            "schedule": self._iterations.config.flexpipe.flexpipe_schedule,
            "costs": asdict(op_costs(model, program.plan, micro_batches)),
        }
