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
