"""Copy kernels against plain indexing, on random shapes, offsets and alignments.

Each is run in its CPU form and, lane by lane, with the very indexing that the GPU runs.
"""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from megatron_flex import kernels, native

threads = st.integers(0, 3)
lanes = st.integers(1, 33)
tile_bytes = st.integers(1, 5000)
seeds = st.integers(0, 2**31)
# (bytes before the segment, bytes of the segment); now and then a large one.
sizes = st.one_of(st.just(0), st.integers(1, 80), st.integers(1, 3000), st.just(700_001))
segments = st.lists(st.tuples(st.integers(0, 17), sizes), max_size=9)


def _random_bytes(count: int, seed: int) -> Tensor:
    return torch.randint(
        0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


def _layout(gaps_and_sizes: list[tuple[int, int]], seed: int) -> tuple[list[Tensor], list[int]]:
    """Tensors at odd addresses and the places of their bytes in a buffer with gaps."""
    tensors, offsets, end = [], [], 0
    for i, (gap, size) in enumerate(gaps_and_sizes):
        tensors.append(_random_bytes(gap + size, seed + i)[gap:])
        offsets.append(end + gap * 7 % 5)
        end = offsets[-1] + size
    return tensors, offsets


@given(segments, seeds, threads)
@example([(3, 9_000_001), (0, 0), (1, 1)], 0, 2)
def test_gather_and_scatter_move_every_byte_and_no_other(
    gaps_and_sizes: list[tuple[int, int]], seed: int, threads: int
) -> None:
    tensors, offsets = _layout(gaps_and_sizes, seed)
    end = offsets[-1] + tensors[-1].nbytes if tensors else 0
    buffer = _random_bytes(end + 5, seed + 100)
    expected = buffer.clone()
    for tensor, offset in zip(tensors, offsets, strict=True):
        expected[offset : offset + tensor.nbytes] = tensor
    copy = kernels.SegmentCopy(tensors, buffer, offsets)
    copy.gather(threads)
    assert torch.equal(buffer, expected)
    before = [tensor.clone() for tensor in tensors]
    for tensor in tensors:
        tensor.zero_()
    copy.scatter(threads)
    assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))
    assert torch.equal(buffer, expected)


@given(segments, seeds, tile_bytes, lanes)
def test_the_gpus_indexing_of_segments_moves_every_byte_and_no_other(
    gaps_and_sizes: list[tuple[int, int]], seed: int, tile_bytes: int, lanes: int
) -> None:
    tensors, offsets = _layout(gaps_and_sizes, seed)
    end = offsets[-1] + tensors[-1].nbytes if tensors else 0
    buffer = _random_bytes(end + 5, seed + 100)
    expected = buffer.clone()
    for tensor, offset in zip(tensors, offsets, strict=True):
        expected[offset : offset + tensor.nbytes] = tensor
    count = len(tensors)
    sources = torch.tensor([t.data_ptr() for t in tensors], dtype=torch.int64)
    targets = torch.tensor([buffer.data_ptr() + o for o in offsets], dtype=torch.int64)
    nbytes = torch.tensor([t.nbytes for t in tensors], dtype=torch.int64)
    first = torch.empty(count + 1, dtype=torch.int64)
    tiles = native.function("mflex_segment_tiles")(
        nbytes.data_ptr(), count, tile_bytes, first.data_ptr()
    )
    assert tiles == sum(-(-t.nbytes // tile_bytes) for t in tensors)
    native.function("mflex_segment_copy_by_lanes")(
        *(t.data_ptr() for t in (sources, targets, nbytes, first)), count, tile_bytes, lanes
    )
    assert torch.equal(buffer, expected)


def test_a_segment_of_more_than_two_gigabytes_is_copied_whole() -> None:
    size = 2**31 + 4097
    source, buffer = (torch.from_numpy(np.zeros(size, np.uint8)) for _ in range(2))
    marks = torch.tensor([0, 1, 2**16, 2**30 + 3, 2**31 - 1, 2**31, 2**31 + 1, size - 1])
    source[marks] = torch.arange(1, len(marks) + 1, dtype=torch.uint8)
    kernels.SegmentCopy([source], buffer).gather()
    assert torch.equal(buffer[marks], source[marks])
    assert buffer.count_nonzero() == len(marks)


# Both ways of copying much at once, which a process chooses between by a measurement, once.
BOTH_WAYS = """
import torch
from megatron_flex import kernels
for gap in (0, 1, 64, 1024, 2048, 3000, 4032):  # bytes from source to target within a page
    whole = torch.randint(0, 256, (6_000_001 + 8192,), dtype=torch.uint8)
    source, size = whole[4096:-4096], 6_000_001
    room = torch.zeros(size + 16384, dtype=torch.uint8)
    begin = 4096 + (source.data_ptr() + gap - room.data_ptr()) % 4096
    target, pieces = room[begin : begin + size], source.split(70_000 + gap)
    kernels.SegmentCopy(pieces, target).gather(2)
    assert torch.equal(target, source)
    assert not room[:begin].any() and not room[begin + size :].any()
    flags = torch.zeros(kernels.chunk_count(size, 99_999), dtype=torch.int64)
    kernels.write_chunks(source, target.zero_(), flags, 1, 99_999)
    assert torch.equal(target, source)
"""


@pytest.mark.parametrize("way", ["pages", "abreast", "memcpy"])
def test_each_way_of_copying_much_moves_every_byte_and_no_other(way: str) -> None:
    environment = {**os.environ, "MEGATRON_FLEX_COPY": way}
    command = [sys.executable, "-c", BOTH_WAYS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("shapes", "offsets", "message"),
    [
        ([(4,), (4,)], [0, 3], "overlaps"),
        ([(9,)], None, "leaves the buffer of 8 bytes"),
        ([(4,)], [0, 4], "as many offsets"),
    ],
)
def test_segments_that_do_not_fit_are_refused(
    shapes: list[tuple[int]], offsets: list[int] | None, message: str
) -> None:
    tensors = [torch.zeros(shape, dtype=torch.uint8) for shape in shapes]
    with pytest.raises(ValueError, match=message):
        kernels.SegmentCopy(tensors, torch.zeros(8, dtype=torch.uint8), offsets)


def test_strided_segments_are_refused() -> None:
    with pytest.raises(ValueError, match="tensor 0 must be contiguous"):
        kernels.SegmentCopy([torch.zeros(4, 4)[:, 1]], torch.zeros(8))
