"""Saving beside training: a copy of the state is taken, a thread writes it."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_flex.checkpoint.errors import CheckpointError
from megatron_flex.checkpoint.layout import Foreign
from megatron_flex.checkpoint.parts import Value, local_of, with_local
from megatron_flex.checkpoint.ranks import DEFAULT_TIMEOUT, Ranks
from megatron_flex.checkpoint.retention import KEEP_ALL, Retention
from megatron_flex.checkpoint.save import save


class AsyncSaver:
    """Saves one checkpoint at a time in a thread; all ranks call each method together.

    :meth:`start` returns as soon as this rank's tensors are copied to host memory, so they may
    change right after: the checkpoint holds them as they were. Its cost in memory is one copy of
    this rank's tensors, kept and used again. A checkpoint that comes due while the previous one
    is still being written waits for it: memory stays bounded, and the tracker moves forward only.

    ``group`` is a gloo group for this object alone. The thread does not keep a process alive:
    call :meth:`close` before leaving, else the last checkpoint may be lost (never half-named).
    """

    def __init__(
        self,
        directory: Path | str,
        *,
        group: dist.ProcessGroup | None,
        retention: Retention = KEEP_ALL,
        timeout: float = DEFAULT_TIMEOUT,
        foreign: Foreign | None = None,
    ) -> None:
        self._directory = Path(directory)
        self._foreign = foreign
        self._ranks = Ranks(group, timeout)
        self._retention = retention
        self._buffers: dict[str, Value] = {}
        self._job: _Job | None = None

    @property
    def running(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._job is not None and self._job.is_alive()

    @property
    def failed(self) -> bool:
        """Whether the last checkpoint failed; :meth:`wait` raises its error.

        For the flags that the ranks agree on at the end of an iteration: all ranks fail together,
        but do not see it in the same instant.
        """
        return self._job is not None and not self._job.is_alive() and self._job.error is not None

    def start(
        self,
        iteration: int,
        tensors: Mapping[str, Value],
        common: Mapping[str, Any],
        *,
        rotate: bool = True,
    ) -> float:
        """Begin to save; see :func:`megatron_flex.checkpoint.save.save` for the arguments.

        Without ``rotate`` this checkpoint makes no earlier one expire.

        Returns the seconds spent waiting for the previous checkpoint. Raises that one's error.
        """
        begin = time.monotonic()
        self.wait()
        waited = time.monotonic() - begin
        self._ranks.gather(
            f"copying the state of iteration {iteration} to host memory",
            lambda: self._copy(tensors),
        )
        self._job = _Job(
            self._directory,
            iteration,
            dict(self._buffers),
            copy.deepcopy(dict(common)),
            self._ranks,
            self._retention if rotate else KEEP_ALL,
            self._foreign,
        )
        self._job.start()
        return waited

    def wait(self) -> Path | None:
        """Wait for the checkpoint that is being written; its directory, or its error.

        ``None`` when there is none, or it has been waited for already.
        """
        job = self._job
        if job is None:
            return None
        # Each wait within a save has the time-out; only a disk that never answers has none.
        limit = 4 * self._ranks.timeout
        job.join(limit)
        if job.is_alive():
            raise CheckpointError(
                f"the checkpoint of iteration {job.iteration} was not written within"
                f" {limit:.0f} s: the storage of {self._directory} does not answer"
            )
        self._job = None
        if job.error is not None:
            raise job.error
        return job.path

    def close(self) -> None:
        """Wait for the last checkpoint and free the copy; raises its error."""
        self.wait()
        self._buffers.clear()

    def _copy(self, tensors: Mapping[str, Value]) -> None:
        buffers: dict[str, Value] = {}
        devices = set()
        for name, value in tensors.items():
            tensor, known = local_of(value), self._buffers.get(name)
            buffer = None if known is None else local_of(known)
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                pinned = tensor.device.type == "cuda"
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
            buffers[name] = with_local(value, buffer.copy_(tensor.detach(), non_blocking=True))
            devices.add(tensor.device)
        for device in devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        self._buffers = buffers


class _Job(threading.Thread):
    """One checkpoint on its way to the disk."""

    def __init__(
        self,
        directory: Path,
        iteration: int,
        tensors: dict[str, Value],
        common: dict[str, Any],
        ranks: Ranks,
        retention: Retention,
        foreign: Foreign | None,
    ) -> None:
        super().__init__(name=f"checkpoint-{iteration}", daemon=True)
        self.iteration = iteration
        self.path: Path | None = None
        self.error: Exception | None = None
        self._save = partial(
            save,
            directory,
            iteration,
            tensors,
            common,
            group=ranks.group,
            retention=retention,
            timeout=ranks.timeout,
            foreign=foreign,
        )

    def run(self) -> None:
        try:
            self.path = self._save()
        except Exception as error:  # raised in the training thread by AsyncSaver.wait
            self.error = error
