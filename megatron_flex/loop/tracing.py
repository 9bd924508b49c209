"""Writes what each worker did into a trace, beside what its program was predicted to take."""

from __future__ import annotations

from megatron_flex.loop.iteration import Iterations
from megatron_flex.planner.package import computes
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
        last = self._iterations.last
        assert last is not None
        told, micro_batches = last
        about = None
        if self._world.rank == 0:
            about = {
                "plan": str(told.part.plan),
                "tokens": [m.tokens for m in micro_batches],
                "schedule": told.schedule,
                "seconds": told.seconds,
            }
        spans = self._iterations.executor.clock.spans
        planned = zip(computes(told.part.instructions), told.planned, strict=True)
        self._writer.add(
            iteration, ((s.instruction, s.start, s.stop) for s in spans), about, dict(planned)
        )
        spans.clear()

    def close(self) -> None:
        """Join the parts of all workers; collective."""
        if self._writer is None or self._path is None:
            return
        self._writer.close()
        self._world.barrier()
        if self._world.rank == 0:
            join(self._path, self._world.size)
