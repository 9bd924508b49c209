"""The workers of a job and the process groups they talk over. Passed around, never global."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist


@dataclass
class World:
    """This worker's place among all, and its communicators.

    Pipeline messages go over two world-wide groups by direction (to a higher rank, to a lower
    one): with NCCL a receive that is posted early would otherwise block the sends behind it.
    ``control`` carries norms, losses and agreements. ``reductions`` are the groups in which
    gradients are summed, one for each set of holders.
    """

    rank: int
    size: int
    device: torch.device
    timeout: timedelta
    up: dist.ProcessGroup | None = None
    down: dist.ProcessGroup | None = None
    control: dist.ProcessGroup | None = None
    reductions: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)

    @classmethod
    def create(cls, device: torch.device, timeout: timedelta) -> World:
        """Make the world-wide groups. Collective; the default group must exist if size > 1."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return cls(0, 1, device, timeout)
        backend = dist.get_backend()
        up, down, control = (dist.new_group(timeout=timeout, backend=b)
                             for b in (backend, backend, "gloo"))  # fmt: skip
        return cls(dist.get_rank(), dist.get_world_size(), device, timeout, up, down, control)

    def prepare_reductions(self, groups: Iterable[tuple[int, ...]]) -> None:
        """Create the groups in which a program reduces. Collective: same sets on every worker."""
        for ranks in sorted(set(groups) - set(self.reductions)):
            group = dist.new_group(list(ranks), timeout=self.timeout)
            self.reductions[ranks] = group

    def broadcast(self, value: object) -> object:
        """Rank 0's ``value``, on every worker."""
        if self.control is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]

    def sum(self, value: float) -> float:
        """The sum of all workers' ``value``, on every worker."""
        if self.control is None:
            return value
        tensor = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(tensor, group=self.control)
        return float(tensor.item())

    def max(self, value: int) -> int:
        """The largest ``value`` of all workers, on every worker."""
        if self.control is None:
            return value
        tensor = torch.tensor([value])
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.control)
        return int(tensor.item())


def local_rank() -> int:
    """This worker's number on its server, as torchrun says."""
    return int(os.environ.get("LOCAL_RANK", "0"))
