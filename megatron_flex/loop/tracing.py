"""Writes what each worker did into a trace, beside what its program was predicted to take."""

from __future__ import annotations

import sys
from pathlib import Path

from megatron_flex.loop.iteration import Iterations
from megatron_flex.planner.package import computes
from megatron_flex.runtime.world import World
from megatron_flex.telemetry.files import Expendable
from megatron_flex.telemetry.trace import TraceWriter, join, parts_of, resume


class Tracing:
    """One worker's part of ``--flexpipe-trace``; does nothing without a path.

    Attributes:
        notice: on the first worker, what became of an earlier run's trace.
    """

    def __init__(
        self, path: str | None, world: World, iterations: Iterations, start_iteration: int = 0
    ) -> None:
        """Go on in the trace after ``start_iteration``; collective."""
        self._path = None if path is None else Path(path)
        self._world = world
        self._iterations = iterations
        self.notice: str | None = None
        if self._path is not None:
            if world.rank == 0:
                self.notice = resume(self._path, start_iteration)
            world.barrier()
        writer = None if path is None else TraceWriter(path, world.rank)
        self._writer = Expendable(writer, self._warn)
        iterations.executor.clock.trace = path is not None

    def add(self, iteration: int) -> None:
        """Append the iteration that has just run."""
        clock = self._iterations.executor.clock
        if not clock.trace:
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
        spans = [(s.instruction, s.start, s.stop) for s in clock.spans]
        planned = dict(zip(computes(told.part.instructions), told.planned, strict=True))
        self._writer(lambda writer: writer.add(iteration, spans, about, planned))
        clock.spans.clear()
        clock.trace = self._writer.writer is not None

    def close(self) -> None:
        """Join the parts of all workers; collective."""
        path = self._path
        if path is None:
            return
        self._writer(TraceWriter.close)
        self._world.barrier()
        if self._world.rank == 0:
            Expendable(path, self._warn_of_parts)(join)

    def _warn(self, text: str) -> None:
        print(f"{text} on worker {self._world.rank}", file=sys.stderr, flush=True)

    def _warn_of_parts(self, text: str) -> None:
        assert self._path is not None
        kept = ", ".join(map(str, parts_of(self._path)))
        print(f"{text}: it stays in {kept}, which the next run with this flag joins",
              file=sys.stderr, flush=True)  # fmt: skip
