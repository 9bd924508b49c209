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
        self,
        path: str | None,
        world: World,
        iterations: Iterations,
        start_iteration: int = 0,
        interval: int = 1,
    ) -> None:
        """Go on in the trace after ``start_iteration``; collective.

        ``interval``: multiples of it are traced.
        """
        self._interval = interval
        self._path = None if path is None else Path(path)
        self._world = world
        self._iterations = iterations
        self.notice: str | None = None
        if self._path is not None:
            if world.process == 0:
                self.notice = resume(self._path, start_iteration)
            world.barrier()
        # Workers that share layers do the same: one of them is enough.
        first = world.tensor.index == 0
        writer = TraceWriter(path, world.rank) if path is not None and first else None
        self._writer = Expendable(writer, self._warn)
        self._look_at(start_iteration + 1)

    def _look_at(self, iteration: int) -> None:
        """Have the iteration that runs next traced, if it is to be."""
        wanted = iteration % self._interval == 0
        self._iterations.executor.clock.trace = wanted and self._writer.writer is not None

    def add(self, iteration: int) -> None:
        """Append the iteration that has just run, if it was to be traced."""
        clock = self._iterations.executor.clock
        traced = clock.trace
        self._look_at(iteration + 1)
        if not traced:
            return
        last = self._iterations.last
        assert last is not None
        told, micro_batches = last
        about = None
        if self._world.process == 0:
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

    def close(self) -> None:
        """Join the parts of all workers; collective."""
        path = self._path
        if path is None:
            return
        self._writer(TraceWriter.close)
        self._world.barrier()
        if self._world.process == 0:
            Expendable(path, self._warn_of_parts)(join)

    def _warn(self, text: str) -> None:
        print(f"{text} on worker {self._world.process}", file=sys.stderr, flush=True)

    def _warn_of_parts(self, text: str) -> None:
        assert self._path is not None
        kept = ", ".join(map(str, parts_of(self._path)))
        print(f"{text}: it stays in {kept}, which the next run with this flag joins",
              file=sys.stderr, flush=True)  # fmt: skip
