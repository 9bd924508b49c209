"""The copy kernels on CUDA against plain indexing. Skipped where there is no GPU."""

from __future__ import annotations

import mmap

import pytest
import torch
from torch import Tensor

from megatron_flex import kernels, native

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(
        not native.LIBRARY.exists() or not native.function("mflex_built_with_cuda")(),
        reason="the library was built without CUDA",
    ),
]


def _random_bytes(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator).cuda()


@pytest.mark.parametrize("seed", range(20))
def test_gather_and_scatter_move_every_byte_and_no_other(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensors, offsets, end = [], [], 0
    for i in range(30):
        gap, size = (int(torch.randint(0, n, (), generator=generator)) for n in (20, 200_000))
        size = size if i % 3 else size % 50
        tensors.append(_random_bytes(gap + size, seed + i)[gap:])
        offsets.append(end + gap % 5)
        end = offsets[-1] + size
    buffer = _random_bytes(end + 5, seed + 100)
    expected = buffer.clone()
    for tensor, offset in zip(tensors, offsets, strict=True):
        expected[offset : offset + tensor.nbytes] = tensor
    copy = kernels.SegmentCopy(tensors, buffer, offsets)
    copy.gather()
    assert torch.equal(buffer, expected)
    before = [tensor.clone() for tensor in tensors]
    for tensor in tensors:
        tensor.zero_()
    copy.scatter()
    assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))


@pytest.mark.parametrize(("shift", "other", "count"), [(0, 0, 1 << 20), (1, 3, 100_003), (3, 7, 5)])
def test_casts_equal_pytorchs_bit_for_bit(shift: int, other: int, count: int) -> None:
    bits = torch.randint(-(2**31), 2**31, (shift + count,)).to(torch.int32)
    bits[::5] |= 0x7F800000
    source = bits.cuda().view(torch.float32)[shift:]
    narrow = torch.zeros(other + count, dtype=torch.bfloat16, device="cuda")[other:]
    kernels.cast_copy(source, narrow)
    assert torch.equal(narrow.view(torch.int16), source.to(torch.bfloat16).view(torch.int16))
    wide = torch.zeros(shift + count, device="cuda")[shift:]
    kernels.cast_copy(narrow, wide)
    assert torch.equal(wide.view(torch.int32), narrow.float().view(torch.int32))


@pytest.mark.parametrize("hidden", [1, 7, 1024])
def test_packing_and_padding_equal_the_cpus(hidden: int) -> None:
    lengths = torch.tensor([0, 31, 32, 0, 1, 17], dtype=torch.int32)
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0).int()])
    padded = torch.randn(6, 32, hidden)
    packed = kernels.varlen_pack(padded.cuda(), cu_seqlens.cuda())
    assert torch.equal(packed.cpu(), kernels.varlen_pack(padded, cu_seqlens))
    back = kernels.varlen_pad(packed, cu_seqlens.cuda(), 32)
    assert torch.equal(back.cpu(), kernels.varlen_pad(packed.cpu(), cu_seqlens, 32))


def test_a_cpu_reader_takes_the_gpus_chunks_as_they_come() -> None:
    size, chunk = (8 << 20) + 4096, 1 << 20
    source = _random_bytes(size, 1)
    memory = torch.frombuffer(mmap.mmap(-1, size + 4096), dtype=torch.uint8)
    arena, flags = memory[:size], memory[size : size + 8 * 9].view(torch.int64)
    target = torch.zeros(size, dtype=torch.uint8)
    kernels.register_host(memory)
    try:
        for version in (1, 2):
            target.zero_()
            kernels.write_chunks(source, arena, flags, version, chunk)
            kernels.read_chunks(arena, target, flags, version, chunk, 30.0)
            assert torch.equal(target, source.cpu())
    finally:
        torch.cuda.synchronize()
        kernels.unregister_host(memory)
