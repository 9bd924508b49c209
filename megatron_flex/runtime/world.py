"""The workers of a job and the process groups they talk over. Passed around, never global."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_flex.runtime.channel import Channel
from megatron_flex.runtime.failure import lost
from megatron_flex.runtime.groups import ReductionGroups
from megatron_flex.runtime.liveness import Liveness


@dataclass
class World:
    """This worker's place among all, and its communicators.

    ``pipeline`` carries activations and their gradients, ``state`` weights and optimizer state (so
    that they never block activations), ``control`` norms, losses and agreements. ``reductions``
    are the groups in which gradients are summed. All are ``None`` in a world of one.
    """

    rank: int
    size: int
    device: torch.device
    timeout: timedelta
    pipeline: Channel | None = None
    state: Channel | None = None
    control: dist.ProcessGroup | None = None
    reductions: ReductionGroups | None = None

    @classmethod
    def create(cls, device: torch.device, timeout: timedelta) -> World:
        """Make the world-wide groups. Collective; the default group must exist if size > 1."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return cls(0, 1, device, timeout)
        rank = dist.get_rank()
        pipeline, state = (Channel.create(device, timeout) for _ in range(2))
        control = dist.new_group(timeout=timeout, backend="gloo")
        reductions = ReductionGroups(
            rank, _default_store(), dist.get_backend(), timeout, liveness=Liveness(rank, control)
        )
        return cls(
            rank, dist.get_world_size(), device, timeout, pipeline, state, control, reductions
        )

    def broadcast(self, value: object) -> object:
        """Rank 0's ``value``, on every worker."""
        if self.control is None:
            return value
        box = [value]
        with self._together("what the first worker says"):
            dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]

    def deliver(self, messages: Sequence[bytes] | None) -> bytes:
        """Each worker's own message; ``messages`` of the first worker, by rank."""
        if self.control is None:
            assert messages is not None
            return messages[0]
        with self._together("what the first worker sends to each"):
            sizes = torch.zeros(self.size, dtype=torch.int64)
            if messages is not None:
                sizes = torch.tensor([len(m) for m in messages])
            dist.broadcast(sizes, src=0, group=self.control)
            longest = int(sizes.max())
            rows = None
            if messages is not None:
                padded = b"".join(m.ljust(longest, b"\0") for m in messages)
                rows = list(torch.frombuffer(bytearray(padded), dtype=torch.uint8).split(longest))
            mine = torch.empty(longest, dtype=torch.uint8)
            dist.scatter(mine, rows, src=0, group=self.control)
        return mine[: int(sizes[self.rank])].numpy().tobytes()

    def gather(self, value: object) -> list[Any]:
        """The ``value`` of every worker by rank, on every worker."""
        if self.control is None:
            return [value]
        values: list[Any] = [None] * self.size
        with self._together("what all workers say"):
            dist.all_gather_object(values, value, group=self.control)
        return values

    def barrier(self) -> None:
        """Wait for all workers."""
        self.max(0)

    def sum(self, value: float) -> float:
        """The sum of all workers' ``value``, on every worker."""
        if self.control is None:
            return value
        tensor = torch.tensor([value], dtype=torch.float64)
        with self._together("a sum over all workers"):
            dist.all_reduce(tensor, group=self.control)
        return float(tensor.item())

    def slowest(self, seconds: float) -> float:
        """The largest of all workers' times, on every worker."""
        return self.max(round(seconds * 1e9)) / 1e9

    def max(self, value: int) -> int:
        """The largest ``value`` of all workers, on every worker."""
        if self.control is None:
            return value
        tensor = torch.tensor([value])
        with self._together("a maximum over all workers"):
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.control)
        return int(tensor.item())

    @contextmanager
    def _together(self, what: str) -> Iterator[None]:
        """Give the error of a wait for all workers a name."""
        try:
            yield
        except RuntimeError as error:
            raise lost(self.rank, what, error) from error


def _default_store() -> dist.Store:
    # torch has no public name for the store of the default group.
    store: dist.Store = dist.distributed_c10d._get_default_store()
    return store


def local_rank() -> int:
    """This worker's number on its server, as torchrun says."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def server_size(world_size: int) -> int:
    """Workers of one server, as torchrun says; all where nobody says."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size)))


def workers_per_gpu() -> int:
    """How many workers of this server share a GPU, at most."""
    workers = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return -(-workers // torch.cuda.device_count())
