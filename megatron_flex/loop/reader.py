"""Reads the tokens of an iteration's micro-batches in threads, before they are needed."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from megatron_flex.data.batches import BatchSource
from megatron_flex.data.microbatch import MicroBatch
from megatron_flex.data.packed import PackedBatch
from megatron_flex.schedule.part import Part

# A read is a few milliseconds from memory; a network file system may take long. Seconds.
READ_TIMEOUT = 600.0


class Reader:
    """Reads micro-batches with ``threads`` threads; with none, when they are asked for."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, "reader") if threads else None
        self._futures: dict[int, Future[PackedBatch]] = {}

    def start(self, source: BatchSource, micro_batches: Sequence[MicroBatch], part: Part) -> None:
        """Begin to read what a worker needs for its part, in the order in which it needs it."""
        self._source, self._micro_batches = source, micro_batches
        self._futures = {}
        if self._pool is None:
            return
        for micro_batch, (inputs, targets) in part.read.items():
            self._futures[micro_batch] = self._pool.submit(self._read, micro_batch, inputs, targets)

    def __call__(self, micro_batch: int, inputs: bool, targets: bool) -> PackedBatch:
        """The tensors of a micro-batch (``StepInputs.packed``)."""
        future = self._futures.pop(micro_batch, None)
        if future is None:
            return self._read(micro_batch, inputs, targets)
        try:
            return future.result(READ_TIMEOUT)
        except TimeoutError as error:
            raise TimeoutError(
                f"the tokens of micro-batch {micro_batch} were not read within"
                f" {READ_TIMEOUT:.0f} s: the storage of the data set does not answer"
            ) from error

    def _read(self, micro_batch: int, inputs: bool, targets: bool) -> PackedBatch:
        return self._source.packed(self._micro_batches[micro_batch], inputs=inputs, targets=targets)
