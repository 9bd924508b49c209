from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_flex.runtime.host_buffers import HostBuffers, rounded


@given(st.integers(0, 1 << 40))
def test_a_buffer_is_at_most_an_eighth_larger_than_asked(size: int) -> None:
    assert size <= rounded(size) <= size + size // 8 + 1
    assert rounded(rounded(size)) == rounded(size)


@given(st.lists(st.one_of(st.integers(1, 5000), st.none()), max_size=200))
def test_memory_stays_within_what_was_in_use_at_one_time(events: list[int | None]) -> None:
    buffers, used = HostBuffers(pinned=False), list[Tensor]()
    most = largest = 0
    for size in events:
        if size is None:
            if used:
                buffers.give(used.pop(0))
        else:
            buffer = buffers.take(size)
            assert buffer.numel() >= size
            assert all(buffer.data_ptr() != other.data_ptr() for other in used)
            used.append(buffer)
            largest = max(largest, rounded(size))
        most = max(most, len(used))
        held = buffers.free + sum(buffer.numel() for buffer in used)
        assert held <= most * largest


def test_other_sizes_use_the_same_memory() -> None:
    buffers = HostBuffers(pinned=False)
    first = buffers.take(5000)
    address = first.data_ptr()
    buffers.give(first)
    for size in range(4000, 5000):
        buffer = buffers.take(size)
        assert buffer.data_ptr() == address
        buffers.give(buffer)
