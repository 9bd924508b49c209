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
wide = torch.randn(2_000_003)
narrow = torch.zeros(wide.shape, dtype=torch.bfloat16)
kernels.cast_copy(wide, narrow)
assert torch.equal(narrow, wide.bfloat16())
kernels.cast_copy(narrow, wide)
assert torch.equal(wide, narrow.float())
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


# Bit patterns of fp32 where rounding is at stake: any, and those near ties, the largest values,
# denormals, infinities and NaN.
patterns = st.one_of(
    st.integers(0, 2**32 - 1),
    st.builds(
        lambda high, low: high << 16 | low,
        st.integers(0, 0xFFFF),
        st.sampled_from([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF]),
    ),
    st.builds(
        lambda sign, low: sign << 31 | low,
        st.integers(0, 1),
        st.sampled_from([0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0x7F7FFFFF, 1, 0x7FFFFF]),
    ),
)


def _as_float(bits: list[int], shift: int, repeat: int) -> Tensor:
    signed = [b - 2**32 if b >= 2**31 else b for b in bits * repeat]
    return torch.tensor([0] * shift + signed, dtype=torch.int32).view(torch.float32)[shift:]


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int16 if tensor.dtype == torch.bfloat16 else torch.int32)


@given(
    st.lists(patterns, max_size=40),
    st.integers(0, 5),
    st.integers(0, 9),
    st.integers(1, 7),
    threads,
)
def test_casts_equal_pytorchs_bit_for_bit(
    bits: list[int], shift: int, other: int, repeat: int, threads: int
) -> None:
    source = _as_float(bits, shift, repeat)
    narrow = torch.zeros(other + source.numel(), dtype=torch.bfloat16)[other:]
    kernels.cast_copy(source, narrow, threads)
    assert torch.equal(_bits(narrow), _bits(source.to(torch.bfloat16)))
    wide = torch.zeros(shift + source.numel())[shift:]
    kernels.cast_copy(narrow, wide, threads)
    assert torch.equal(_bits(wide), _bits(narrow.to(torch.float32)))


@given(
    st.lists(patterns, max_size=40), st.integers(0, 5), st.integers(0, 9), st.integers(1, 7), lanes
)
def test_the_gpus_indexing_of_casts_equals_pytorch_bit_for_bit(
    bits: list[int], shift: int, other: int, repeat: int, lanes: int
) -> None:
    source = _as_float(bits, shift, repeat)
    count = source.numel()
    expected = source.to(torch.bfloat16)
    nan = int(_bits(torch.full((64,), float("nan")).to(torch.bfloat16))[0]) & 0xFFFF
    narrow = torch.zeros(other + count, dtype=torch.bfloat16)
    native.function("mflex_cast_float32_to_bfloat16_by_lanes")(
        source.data_ptr(), narrow[other:].data_ptr(), count, nan, lanes
    )
    assert torch.equal(_bits(narrow[other:]), _bits(expected))
    assert not narrow[:other].any()
    wide = torch.zeros(shift + count)
    native.function("mflex_cast_bfloat16_to_float32_by_lanes")(
        narrow[other:].data_ptr(), wide[shift:].data_ptr(), count, lanes
    )
    assert torch.equal(_bits(wide[shift:]), _bits(expected.to(torch.float32)))


@pytest.mark.parametrize(("shift", "other", "threads"), [(0, 0, 1), (1, 3, 2), (3, 31, 3)])
def test_casts_too_large_for_the_caches_equal_pytorch_bit_for_bit(
    shift: int, other: int, threads: int
) -> None:
    generator = torch.Generator().manual_seed(shift)
    bits = torch.randint(-(2**31), 2**31, (1_500_007 + shift,), generator=generator)
    source = bits.to(torch.int32).view(torch.float32)[shift:]
    narrow = torch.zeros(other + source.numel(), dtype=torch.bfloat16)[other:]
    kernels.cast_copy(source, narrow, threads)
    assert torch.equal(_bits(narrow), _bits(source.to(torch.bfloat16)))
    wide = torch.zeros(shift + source.numel())[shift:]
    kernels.cast_copy(narrow, wide, threads)
    assert torch.equal(_bits(wide), _bits(narrow.to(torch.float32)))


@pytest.mark.soak
def test_all_fp32_values_round_as_in_pytorch() -> None:
    for start in range(-(2**31), 2**31, 2**26):
        source = torch.arange(start, start + 2**26, dtype=torch.int64).to(torch.int32)
        source = source.view(torch.float32)
        narrow = torch.empty(source.shape, dtype=torch.bfloat16)
        kernels.cast_copy(source, narrow)
        assert torch.equal(_bits(narrow), _bits(source.to(torch.bfloat16)))


def test_every_bfloat16_value_survives_the_way_to_fp32_and_back() -> None:
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    numbers = values[~values.isnan()]
    wide, back = torch.empty(numbers.shape), torch.empty_like(numbers)
    kernels.cast_copy(numbers, wide)
    kernels.cast_copy(wide, back)
    assert torch.equal(_bits(back), _bits(numbers))


def test_casts_between_other_types_are_refused() -> None:
    with pytest.raises(ValueError, match=r"torch\.float16"):
        kernels.cast_copy(torch.zeros(4), torch.zeros(4, dtype=torch.float16))
    with pytest.raises(ValueError, match="of one size"):
        kernels.cast_copy(torch.zeros(4), torch.zeros(5, dtype=torch.bfloat16))


batches = st.integers(1, 24).flatmap(
    lambda length: st.tuples(st.just(length), st.lists(st.integers(0, length), max_size=7))
)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.uint8])


def _varlen(lengths: list[int], length: int, hidden: int, dtype: torch.dtype, seed: int) -> Tensor:
    raw = _random_bytes(len(lengths) * length * hidden * dtype.itemsize, seed)
    return raw.view(dtype).view(len(lengths), length, hidden)


def _cu_seqlens(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def _raw(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


@given(batches, st.integers(1, 70), dtypes, seeds, threads)
@example((4096, [4096, 0, 1, 4095]), 96, torch.float32, 0, 3)
def test_packing_keeps_each_samples_rows_and_padding_is_zero(
    batch: tuple[int, list[int]], hidden: int, dtype: torch.dtype, seed: int, threads: int
) -> None:
    length, lengths = batch
    padded = _varlen(lengths, length, hidden, dtype, seed)
    cu_seqlens = _cu_seqlens(lengths)
    packed = kernels.varlen_pack(padded, cu_seqlens, threads)
    rows = [padded[b, :n] for b, n in enumerate(lengths)]
    expected = torch.cat(rows) if rows else padded.new_empty(0, hidden)
    assert torch.equal(_raw(packed), _raw(expected))
    for b, n in enumerate(lengths):
        padded[b, n:] = 0
    back = kernels.varlen_pad(packed, cu_seqlens, length, threads)
    assert torch.equal(_raw(back), _raw(padded))


@given(batches, st.integers(1, 70), seeds, tile_bytes, lanes)
def test_the_gpus_indexing_of_varlen_rows_equals_the_cpus(
    batch: tuple[int, list[int]], hidden: int, seed: int, tile_bytes: int, lanes: int
) -> None:
    length, lengths = batch
    padded = _varlen(lengths, length, hidden, torch.uint8, seed)
    cu_seqlens = _cu_seqlens(lengths)
    packed = kernels.varlen_pack(padded, cu_seqlens)
    by_lanes = torch.zeros_like(packed)
    run = native.function("mflex_varlen_by_lanes")
    shape = (cu_seqlens.data_ptr(), len(lengths), length, hidden)
    run(padded.data_ptr(), by_lanes.data_ptr(), *shape, 0, tile_bytes, lanes)
    assert torch.equal(by_lanes, packed)
    back = _random_bytes(padded.numel(), seed + 1).view(padded.shape)
    run(packed.data_ptr(), back.data_ptr(), *shape, 1, tile_bytes, lanes)
    assert torch.equal(back, kernels.varlen_pad(packed, cu_seqlens, length))


@pytest.mark.parametrize("cu_seqlens", [[0, 5, 5], [0, 3, 2], [1, 2, 3]])
def test_rows_that_a_sample_does_not_have_are_refused(cu_seqlens: list[int]) -> None:
    with pytest.raises(ValueError, match=r"sample \d of cu_seqlens"):
        kernels.varlen_pack(torch.zeros(2, 4, 3), torch.tensor(cu_seqlens, dtype=torch.int32))


def test_a_wrong_number_of_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="3 entries for 2 samples"):
        kernels.varlen_pack(torch.zeros(2, 4, 3), torch.tensor([0, 1], dtype=torch.int32))
    with pytest.raises(ValueError, match="end at 3, but 4 tokens"):
        kernels.varlen_pad(torch.zeros(4, 3), torch.tensor([0, 3], dtype=torch.int32), 5)
