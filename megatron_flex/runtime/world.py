"""The workers of a job and the process groups they talk over. Passed around, never global."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_flex.model.tensor_group import SOLO, TensorGroup
from megatron_flex.runtime.agreement import Facts, check_alike
from megatron_flex.runtime.channel import Channel
from megatron_flex.runtime.failure import lost
from megatron_flex.runtime.groups import ReductionGroups, make_group
from megatron_flex.runtime.liveness import Liveness


@dataclass
class World:
    """This worker's place among all, and its communicators.

    Programs and plans know devices: ``rank`` is this one of ``size``. A device is one worker, or a
    group of neighbouring ones that share its layers: ``tensor``. ``process`` is this worker's
    number among all ``processes``. ``pipeline``, ``state`` and ``reductions`` join the workers of
    one place in their groups, ``control`` joins all.

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
    tensor: TensorGroup = SOLO

    @classmethod
    def create(
        cls,
        device: torch.device,
        timeout: timedelta,
        sharing: int = 1,
        *,
        sequence_parallel: bool = False,
        control: dist.ProcessGroup | None = None,
    ) -> World:
        """Make the world-wide groups. Collective; the default group must exist if size > 1.

        Args:
            device: where this worker's tensors are.
            timeout: longest wait for another worker.
            sharing: neighbouring workers that are one device; the number of workers is a multiple.
            sequence_parallel: they divide tokens too.
            control: what joins all workers, where it is there already (:func:`control_group`).
        """
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return cls(0, 1, device, timeout)
        process, processes = dist.get_rank(), dist.get_world_size()
        if processes % sharing:
            raise ValueError(f"{processes} workers are no multiple of {sharing}")
        rank, index = divmod(process, sharing)
        pipeline, state = (Channel.create(device, timeout, sharing) for _ in range(2))
        control = control or _new_control_group(timeout)
        backend, store = dist.get_backend(), _default_store()
        tensor = SOLO
        if sharing > 1:
            own = dist.PrefixStore(f"layers of device {rank}", store)
            tensor = TensorGroup(
                index,
                sharing,
                make_group(own, index, sharing, backend, timeout, urgent=True),
                scatters=backend == "nccl",
                sequence_parallel=sequence_parallel,
            )
            store = dist.PrefixStore(f"place {index}", store)
        reductions = ReductionGroups(
            rank, store, backend, timeout, liveness=Liveness(process, control, sharing)
        )
        return cls(
            rank,
            processes // sharing,
            device,
            timeout,
            pipeline,
            state,
            control,
            reductions,
            tensor,
        )

    @property
    def process(self) -> int:
        """This worker's number among all."""
        return self.rank * self.tensor.size + self.tensor.index

    @property
    def processes(self) -> int:
        """Number of workers."""
        return self.size * self.tensor.size

    def broadcast(self, value: object) -> object:
        """The first worker's ``value``, on every worker."""
        if self.control is None:
            return value
        box = [value]
        with explain("what the first worker says", self):
            dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]

    def deliver(self, messages: Sequence[bytes] | None) -> tuple[bytes, float]:
        """The message to each worker's device, and the seconds that it was on its way.

        ``messages``: of the first worker, by device; the others wait for it before that time.
        """
        if self.control is None:
            assert messages is not None
            return messages[0], 0.0
        with explain("what the first worker sends to each", self):
            sizes, rows = torch.zeros(self.size, dtype=torch.int64), None
            if messages is not None:
                sizes = torch.tensor([len(m) for m in messages])
                longest = int(sizes.max())
                padded = b"".join(m.ljust(longest, b"\0") for m in messages)
                each = torch.frombuffer(bytearray(padded), dtype=torch.uint8).split(longest)
                rows = [row for row in each for _ in range(self.tensor.size)]
            dist.broadcast(sizes, src=0, group=self.control)
            began = time.perf_counter()
            mine = torch.empty(int(sizes.max()), dtype=torch.uint8)
            dist.scatter(mine, rows, src=0, group=self.control)
            seconds = time.perf_counter() - began
        return mine[: int(sizes[self.rank])].numpy().tobytes(), seconds

    def gather(self, value: object) -> list[Any]:
        """The ``value`` of every worker, in their order, on every worker."""
        if self.control is None:
            return [value]
        values: list[Any] = [None] * self.processes
        with explain("what all workers say", self):
            dist.all_gather_object(values, value, group=self.control)
        return values

    def alike(self, values: Sequence[Any]) -> list[Any]:
        """Of values of all workers those of this one's place in each device, by device."""
        return list(values[self.tensor.index :: self.tensor.size])

    def check_alike(self, facts: Facts) -> None:
        """Raise ``SystemExit`` on all workers if they do not start from the same ``facts``."""
        with explain("what all workers start from", self):
            check_alike(self.control, facts)

    def barrier(self) -> None:
        """Wait for all workers."""
        self.max(0)

    def sum(self, value: float) -> float:
        """The sum of all workers' ``value``, on every worker."""
        if self.control is None:
            return value
        tensor = torch.tensor([value], dtype=torch.float64)
        with explain("a sum over all workers", self):
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
        with explain("a maximum over all workers", self):
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.control)
        return int(tensor.item())


class explain:  # noqa: N801 - reads as a statement
    """``with explain(what, world):`` turns a backend's error into one that names the wait."""

    def __init__(self, what: object, world: World) -> None:
        self._what, self._world = what, world

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, RuntimeError):
            limit = f"{self._what} (time-out {self._world.timeout.total_seconds():.0f} s)"
            raise lost(self._world.process, limit, error) from error


def control_group(timeout: timedelta) -> dist.ProcessGroup | None:
    """A group of all workers for what they agree about; ``None`` for one worker. Collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return _new_control_group(timeout)


def _new_control_group(timeout: timedelta) -> dist.ProcessGroup:
    group: dist.ProcessGroup = dist.new_group(timeout=timeout, backend="gloo")
    return group


def _default_store() -> dist.Store:
    # torch has no public name for the store of the default group.
    store: dist.Store = dist.distributed_c10d._get_default_store()
    return store


def local_rank() -> int:
    """This worker's number on its server, as torchrun says."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def server_size(devices: int, sharing: int = 1) -> int:
    """Devices of one server, as torchrun says; all ``devices`` where nobody says.

    ``sharing``: workers that are one device.
    """
    return int(os.environ.get("LOCAL_WORLD_SIZE", str(devices * sharing))) // sharing


def workers_per_gpu() -> int:
    """How many workers of this server share a GPU, at most."""
    workers = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return -(-workers // torch.cuda.device_count())
