"""Which process groups are kept, made anew and given up; no second worker is needed for that."""

from __future__ import annotations

from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_flex.runtime.groups import ReductionGroups

OUTSIDE = 99
"""A worker that is in no group: it keeps count of them, and makes none."""


def groups(rank: int = OUTSIDE, capacity: int = 3, seconds: float = 30.0) -> ReductionGroups:
    return ReductionGroups(rank, dist.HashStore(), "gloo", timedelta(seconds=seconds), capacity)


def kept(reductions: ReductionGroups) -> list[tuple[int, ...]]:
    return list(reductions._known)


def test_the_least_recently_used_goes_first() -> None:
    reductions = groups(capacity=3)
    reductions.prepare([(0, 1), (1, 2)])
    reductions.prepare([(2, 3)])
    assert kept(reductions) == [(0, 1), (1, 2), (2, 3)]
    reductions.prepare([(0, 1)])
    reductions.prepare([(0, 3)])
    assert kept(reductions) == [(2, 3), (0, 1), (0, 3)]
    assert reductions.size == 3


def test_what_the_iteration_before_used_stays_whatever_the_capacity() -> None:
    # Its last reductions may not have ended on all workers.
    reductions = groups(capacity=1)
    reductions.prepare([(0, 1), (1, 2)])
    assert kept(reductions) == [(0, 1), (1, 2)]
    reductions.prepare([(2, 3), (0, 3)])
    assert kept(reductions) == [(0, 1), (1, 2), (0, 3), (2, 3)]
    reductions.prepare([(0, 3)])
    assert kept(reductions) == [(2, 3), (0, 3)]
    reductions.prepare([(0, 3)])
    assert kept(reductions) == [(0, 3)]


def test_all_workers_keep_the_same_groups() -> None:
    calls = [[(0, 1)], [(0, 1), (2, 3)], [(1, 3)], [], [(0, 2), (0, 1)], [(2, 3)]]
    for capacity in (1, 2, 3):
        histories = []
        for rank in (OUTSIDE, OUTSIDE + 1):
            reductions = groups(rank, capacity)
            history = []
            for call in calls:
                reductions.prepare(call if rank == OUTSIDE else reversed(call))
                history.append(kept(reductions))
            histories.append(history)
        assert histories[0] == histories[1]


def test_a_group_that_comes_back_is_made_under_another_name() -> None:
    # Else it would meet the addresses of its predecessor in the store.
    reductions = groups(capacity=1)
    for _ in range(2):
        reductions.prepare([(0, 1)])
        reductions.prepare([(2, 3)])
        reductions.prepare([])
    assert reductions._made == {(0, 1): 2, (2, 3): 2}


def test_a_group_of_one_sums_and_is_destroyed() -> None:
    reductions = groups(rank=0, capacity=0)
    for value in (1.0, 2.0):
        reductions.prepare([(0,)])
        tensor = torch.full((5,), value)
        reductions.all_reduce(tensor, (0,)).wait()
        assert (tensor == value).all()
        reductions.prepare([])
        reductions.prepare([])
        assert reductions.size == 0
    reductions.close()


def test_a_sum_over_a_group_of_others_is_refused() -> None:
    reductions = groups()
    reductions.prepare([(0, 1)])
    with pytest.raises(ValueError, match=r"worker 99 does not belong to the group \(0, 1\)"):
        reductions.all_reduce(torch.ones(1), (0, 1))


def test_a_member_that_never_comes_is_not_waited_for_without_end() -> None:
    reductions = groups(rank=0, seconds=1.0)
    reductions.prepare([(0, 1)])
    with pytest.raises(RuntimeError, match=r"the process group \(0, 1\) was not made within 1 s|"
                       r"wait timeout"):  # fmt: skip
        reductions.all_reduce(torch.ones(1), (0, 1))


class Late(Future[Any]):
    """A group that is there when the first wait for it has just ended."""

    def result(self, timeout: float | None = None) -> Any:
        if not self.done():
            self.set_result("the group")
            raise FutureTimeoutError
        return super().result(timeout)


def test_a_group_that_comes_as_a_wait_ends_is_taken() -> None:
    reductions = groups(rank=0)
    reductions._known[0, 1] = Late()
    assert reductions._group((0, 1)) == "the group"
