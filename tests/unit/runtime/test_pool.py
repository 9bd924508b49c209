"""The pool of slab memory: reuse, and never more than the most that was in use at once."""

from __future__ import annotations

import random
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_flex.runtime.slab import Buffers, SlabPool
from tests.unit.runtime.slabs import CPU


def pool(dtype: torch.dtype = torch.float32, exact: bool = False) -> SlabPool:
    return SlabPool(dtype, CPU, exact)


def test_memory_is_reused_by_a_slab_of_the_same_size() -> None:
    memory = pool()
    first = memory.take(1024)
    address = first.state.data_ptr()
    memory.give(first)
    assert (memory.used, memory.kept) == (0, Buffers.nbytes(1024, torch.float32, False))
    again = memory.take(1024)
    assert again is first
    assert again.state.data_ptr() == address
    assert (memory.used, memory.kept) == (memory.most, 0)


@pytest.mark.parametrize(
    ("dtype", "exact", "each"),
    [
        (torch.float32, False, 16),
        (torch.bfloat16, False, 18),
        (torch.float32, True, 24),
        (torch.bfloat16, True, 26),
    ],
)
def test_bytes_are_counted_with_all_copies(dtype: torch.dtype, exact: bool, each: int) -> None:
    memory = pool(dtype, exact)
    memory.take(3072)
    assert memory.used == memory.most == each * 3072


def test_kept_memory_makes_room_for_another_size() -> None:
    memory = pool()
    small, large = memory.take(1024), memory.take(4096)
    gone = weakref.ref(large)
    memory.give(large)
    del large
    memory.take(2048)
    # 1024 + 4096 were the most: 1024 + 2048 are in use, so 4096 more may not be kept.
    assert gone() is None, "its memory is free"
    assert memory.kept == 0
    memory.give(small)
    assert memory.used + memory.kept <= memory.most


def test_a_slab_of_no_size_takes_no_memory() -> None:
    memory = pool()
    empty = memory.take(0)
    assert memory.most == 0
    memory.give(empty)
    assert (memory.used, memory.kept, memory.most) == (0, 0, 0)


def test_kept_memory_is_given_back_on_request_largest_first() -> None:
    memory = pool()
    taken = [memory.take(numel) for numel in (1024, 4096, 2048)]
    for buffers in taken:
        memory.give(buffers)
    alive = [weakref.ref(buffers) for buffers in taken]
    del taken, buffers
    memory.trim(16 * 3072)
    assert [ref() is None for ref in alive] == [False, True, False]
    assert memory.kept == 16 * 3072
    memory.trim(0)
    assert [ref() is None for ref in alive] == [True, True, True]
    assert (memory.used, memory.kept) == (0, 0)


@given(st.integers(0, 2**32), st.integers(1, 4))
def test_no_sequence_keeps_more_than_the_most_in_use(seed: int, kinds: int) -> None:
    rng = random.Random(seed)
    memory = pool()
    sizes = [1024 * rng.randint(1, 9) for _ in range(kinds)]
    held: list[Buffers] = []
    all_made: list[weakref.ref[Buffers]] = []
    most = 0
    for _ in range(60):
        if held and rng.random() < 0.5:
            memory.give(held.pop(rng.randrange(len(held))))
        else:
            held.append(memory.take(rng.choice(sizes)))
            if not any(ref() is held[-1] for ref in all_made):
                all_made.append(weakref.ref(held[-1]))
        used = sum(16 * b.grads.numel() for b in held)
        most = max(most, used)
        alive = sum(16 * b.grads.numel() for ref in all_made if (b := ref()) is not None)
        del b
        assert (memory.used, memory.most) == (used, most)
        assert memory.used + memory.kept == alive, "what is counted is what exists"
        assert alive <= most
