"""Process groups for gradient reductions (and gathers) over changing sets of workers.

A group costs milliseconds, threads and file descriptors, so groups are made in a thread while the
iteration that first needs them computes, kept for later iterations, and the least recently used
are destroyed. All workers see the same sequence of calls (it follows from the programs), so they
make and destroy groups in the same order. Only members take part: the backends are made directly
from the store, since ``torch.distributed.new_group`` stops all workers for each group, and its
``use_local_synchronization`` hangs when groups overlap (torch 2.13, gloo).

NCCL's groups are made at once, in the same order: what makes a communicator may wait for the GPU,
and so for kernels that wait for a peer.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError  # not the built-in in 3.10
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_flex.runtime.liveness import Liveness
from megatron_flex.schedule.shards import even, share

Ranks = tuple[int, ...]
Group = Any  # ProcessGroupGloo or ProcessGroupNCCL, whichever this torch was built with

LOOK = 1.0
"""Seconds of waiting for a group after which its members are looked after, again and again."""

CAPACITY = 24
"""Groups kept. With gloo each takes 7 descriptors and 3 threads."""


class ReductionGroups:
    """The groups of one worker.

    Args:
        store: where workers meet; all of them reach it.
        backend: ``gloo`` or ``nccl``.
        capacity: groups to keep, those of others included; more where an iteration and the one
            before it need more.
        liveness: tells whether a worker that a new group waits for has ended.
    """

    def __init__(
        self,
        rank: int,
        store: dist.Store,
        backend: str,
        timeout: timedelta,
        capacity: int = CAPACITY,
        liveness: Liveness | None = None,
    ) -> None:
        self._rank = rank
        self._store = store
        self._backend = backend
        self._timeout = timeout
        self.capacity = capacity
        # gloo's reduce-scatter takes two to three times as long as its all-reduce, and its gather
        # of equal parts twice the memory of the whole (torch 2.13).
        self.scatters = backend == "nccl"
        self._liveness = liveness
        self._known: OrderedDict[Ranks, Future[Group] | None] = OrderedDict()
        self._made: Counter[Ranks] = Counter()
        self._previous: list[Ranks] = []
        self._maker = ThreadPoolExecutor(1, "groups")

    def prepare(self, groups: Iterable[Ranks]) -> None:
        """Begin to make what is missing of ``groups``; call it on all workers alike.

        Only between iterations. What is destroyed was not used in the iteration before, so every
        worker is done with it: all have passed that iteration's global norm.
        """
        wanted = sorted(set(groups))
        for ranks in wanted:
            if ranks in self._known:
                self._known.move_to_end(ranks)
                continue
            self._made[ranks] += 1
            member = self._rank in ranks
            made = self._made[ranks]
            self._known[ranks] = self._begin(self._make, ranks, made) if member else None
        recent = len({*wanted, *self._previous})
        self._previous = wanted
        while len(self._known) > max(self.capacity, recent):
            _, future = self._known.popitem(last=False)
            if future is not None:
                self._begin(self._destroy, future)

    def all_reduce(self, tensor: torch.Tensor, ranks: Ranks) -> dist.Work:
        """Begin to sum ``tensor`` in place over ``ranks``; waits for a group still being made."""
        work: dist.Work = self._group(ranks).allreduce([tensor])
        return work

    def reduce_scatter(self, tensor: torch.Tensor, ranks: Ranks) -> dist.Work:
        """Begin to sum ``tensor`` over ``ranks``; each gets the sum of its own part.

        In place; the other parts (:func:`~megatron_flex.schedule.shards.share`) are undefined.
        """
        if not self.scatters or not even(tensor.numel(), len(ranks)):
            return self.all_reduce(tensor, ranks)
        part = tensor.view(len(ranks), -1)[ranks.index(self._rank)]
        work: dist.Work = self._group(ranks)._reduce_scatter_base(part, tensor)
        return work

    def all_gather(self, tensor: torch.Tensor, ranks: Ranks) -> list[dist.Work]:
        """Begin to fill ``tensor`` from its parts, of which each of ``ranks`` has its own."""
        group, count, numel = self._group(ranks), len(ranks), tensor.numel()
        if self.scatters and even(numel, count):
            part = tensor.view(count, -1)[ranks.index(self._rank)]
            return [group._allgather_base(tensor, part)]
        parts = (share(numel, count, place) for place in range(count))
        return [
            group.broadcast(tensor[start:stop], place)
            for place, (start, stop) in enumerate(parts)
            if start < stop
        ]

    def _group(self, ranks: Ranks) -> Group:
        """The group; ``RuntimeError`` if it does not come in time, or a member is gone."""
        future = self._known[ranks]
        if future is None:
            raise ValueError(f"worker {self._rank} does not belong to the group {ranks}")
        seconds = self._timeout.total_seconds()
        deadline = time.monotonic() + seconds
        while True:
            left = deadline - time.monotonic()
            try:
                return future.result(max(0.0, min(left, LOOK)))
            except FutureTimeoutError as error:
                # It may have come just now; a time-out inside its making is an end, too.
                failed = future.done() and future.exception() is error
                if left <= LOOK or failed:
                    raise RuntimeError(
                        f"the process group {ranks} was not made within {seconds:.0f} s: is one of"
                        " its workers stuck?"
                    ) from error
            if self._liveness is not None:
                self._liveness.check(ranks)

    @property
    def size(self) -> int:
        """Number of groups kept, those of others included."""
        return len(self._known)

    def close(self) -> None:
        """Wait for what the thread is doing, and end it."""
        self._maker.shutdown(wait=True)

    def _begin(self, do: Callable[..., Any], *arguments: object) -> Future[Any]:
        """Do it in the thread, or at once."""
        if self._backend != "nccl":
            return self._maker.submit(do, *arguments)
        done: Future[Any] = Future()
        done.set_result(do(*arguments))
        return done

    def _make(self, ranks: Ranks, number: int) -> Group:
        name = f"reduction/{','.join(map(str, ranks))}/{number}"
        store = dist.PrefixStore(name, self._store)
        return make_group(store, ranks.index(self._rank), len(ranks), self._backend, self._timeout)

    @staticmethod
    def _destroy(future: Future[Group]) -> None:
        future.result().shutdown()


def make_group(
    store: dist.Store,
    place: int,
    size: int,
    backend: str,
    timeout: timedelta,
    *,
    urgent: bool = False,
) -> Group:
    """A process group of the ``size`` workers that give the same ``store``; ``place`` is its own.

    Nobody else takes part. With NCCL there must be no operation under way; ``urgent``: what the
    group does goes before what is computed on the same GPU.
    """
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=urgent)
        options._timeout = timeout
        group: Group = dist.ProcessGroupNCCL(store, place, size, options)
        # Its communicator is made now, and not in the middle of a program.
        group.allreduce([torch.zeros(1, device="cuda")]).wait()
        return group
    return dist.ProcessGroupGloo(store, place, size, timeout)
