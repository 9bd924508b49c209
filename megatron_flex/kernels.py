"""The copy kernels, called with tensors: segments, and chunks with flags.

On the CPU each runs on ``threads`` native threads (0: all cores that the process may use) without
the interpreter lock. On CUDA each is one launch on the current stream. Sizes are in bytes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from megatron_flex import native

#: Bytes that one block of threads copies at a time, on CUDA.
TILE_BYTES = 32 << 10


class SegmentCopy:
    """Copies between many tensors and one contiguous buffer, both ways, in one launch.

    Tensor i lies at ``offsets[i]`` bytes of the buffer (default: end to end); its size and its
    alignment may be any. Addresses are taken once, so the tensors must keep their memory.
    """

    def __init__(
        self, tensors: Sequence[Tensor], buffer: Tensor, offsets: Sequence[int] | None = None
    ) -> None:
        """Raises ``ValueError`` for tensors that are strided, elsewhere, or do not fit."""
        sizes = [tensor.nbytes for tensor in tensors]
        if offsets is None:
            offsets = list(accumulate(sizes, initial=0))[:-1]
        if len(offsets) != len(sizes):
            raise ValueError(f"{len(sizes)} tensors need as many offsets, not {len(offsets)}")
        for i, tensor in enumerate([*tensors, buffer]):
            if not tensor.is_contiguous() or tensor.device != buffer.device:
                name = f"tensor {i}" if i < len(sizes) else "the buffer"
                raise ValueError(
                    f"{name} must be contiguous and on {buffer.device}; it is on {tensor.device}"
                    f" with strides {tensor.stride()}"
                )
        end = 0
        for i in sorted(range(len(sizes)), key=lambda i: (offsets[i], sizes[i])):
            if offsets[i] < end or offsets[i] + sizes[i] > buffer.nbytes:
                raise ValueError(
                    f"tensor {i} of {sizes[i]} bytes at byte {offsets[i]} overlaps another or"
                    f" leaves the buffer of {buffer.nbytes} bytes"
                )
            end = offsets[i] + sizes[i]
        self._keep = (*tensors, buffer)
        self._device = buffer.device
        self._count = len(sizes)
        outside = [tensor.data_ptr() for tensor in tensors]
        inside = [buffer.data_ptr() + offset for offset in offsets]
        table = torch.zeros(4, self._count + 1, dtype=torch.int64)
        table[:3, : self._count] = torch.tensor([outside, inside, sizes])
        tiles = native.function("mflex_segment_tiles")
        self._tiles = tiles(table[2].data_ptr(), self._count, TILE_BYTES, table[3].data_ptr())
        self._table = table.to(buffer.device)

    def gather(self, threads: int = 0) -> None:
        """Tensors into the buffer. Bytes between the tensors are left as they are."""
        self._run(0, 1, threads)

    def scatter(self, threads: int = 0) -> None:
        """The buffer into the tensors."""
        self._run(1, 0, threads)

    def _run(self, source: int, target: int, threads: int) -> None:
        rows = [self._table[row].data_ptr() for row in (source, target, 2, 3)]
        if self._device.type == "cpu":
            native.function("mflex_segment_copy")(*rows[:3], self._count, threads)
        else:
            _cuda("segment_copy", self._device, *rows, self._count, self._tiles, TILE_BYTES)


def chunk_count(size: int, chunk_bytes: int) -> int:
    """How many flags (int64) a copy of ``size`` bytes needs."""
    return -(-size // chunk_bytes)


def write_chunks(
    source: Tensor,
    target: Tensor,
    flags: Tensor,
    version: int,
    chunk_bytes: int,
    threads: int = 1,
) -> None:
    """Copy into host memory chunk by chunk; each chunk's flag becomes ``version`` when it is there.

    ``target`` and ``flags`` (int64, one for each chunk, 0 at first) may be shared with another
    process. Versions are above 0 and grow. While a chunk is written its flag is 0.

    ``source`` may lie on a GPU when ``target`` and ``flags`` are registered with
    :func:`register_host`; the call then returns at once, and the copy runs on the current stream.
    """
    size = _check_chunks(source, target, flags, version, chunk_bytes)
    if source.device.type != "cpu":
        addresses = [_device_address(source.device, tensor) for tensor in (target, flags)]
        _cuda(
            "chunked_write",
            source.device,
            source.data_ptr(),
            addresses[0],
            size,
            chunk_bytes,
            addresses[1],
            version,
        )
        return
    native.function("mflex_chunked_write")(
        source.data_ptr(),
        target.data_ptr(),
        size,
        chunk_bytes,
        flags.data_ptr(),
        version,
        threads,
    )


def read_chunks(
    source: Tensor,
    target: Tensor,
    flags: Tensor,
    version: int,
    chunk_bytes: int,
    timeout: float,
    threads: int = 1,
) -> None:
    """Copy host memory chunk by chunk, each as soon as :func:`write_chunks` has brought it.

    Raises ``TimeoutError`` when a chunk does not come within ``timeout`` seconds of waiting for
    it, and ``RuntimeError`` when a newer version replaced one; ``target`` is then incomplete.
    """
    size = _check_chunks(source, target, flags, version, chunk_bytes)
    result = native.function("mflex_chunked_read")(
        source.data_ptr(),
        target.data_ptr(),
        size,
        chunk_bytes,
        flags.data_ptr(),
        version,
        int(timeout * 1e9),
        threads,
    )
    total = chunk_count(size, chunk_bytes)
    if result > 0:
        raise TimeoutError(
            f"chunk {result - 1} of {total} of version {version} did not come within"
            f" {timeout:g} s: the writer is late or has ended"
        )
    if result < 0:
        raise RuntimeError(
            f"chunk {-1 - result} of {total} was replaced by a version after {version} before it"
            " was read: the writer must wait for its readers"
        )


def register_host(memory: Tensor) -> None:
    """Pin host memory that exists already and map it for the GPU, until :func:`unregister_host`."""
    code = native.function("mflex_cuda_host_register")(memory.data_ptr(), memory.nbytes)
    _check_cuda("host_register", code)


def unregister_host(memory: Tensor) -> None:
    """Undo :func:`register_host`, before the memory goes."""
    _check_cuda("host_unregister", native.function("mflex_cuda_host_unregister")(memory.data_ptr()))


def _check_chunks(
    source: Tensor, target: Tensor, flags: Tensor, version: int, chunk_bytes: int
) -> int:
    if source.nbytes != target.nbytes or version <= 0 or chunk_bytes <= 0:
        raise ValueError(
            f"a chunked copy needs equal sizes, a version and chunks above 0, not {source.nbytes}"
            f" and {target.nbytes} bytes, version {version}, chunks of {chunk_bytes}"
        )
    chunks = chunk_count(source.nbytes, chunk_bytes)
    if flags.dtype != torch.int64 or flags.numel() < chunks:
        raise ValueError(
            f"{source.nbytes} bytes in chunks of {chunk_bytes} need {chunks} int64 flags, not"
            f" {flags.numel()} of {flags.dtype}"
        )
    if target.device.type != "cpu" or flags.device.type != "cpu":
        raise ValueError("the target and the flags of a chunked copy lie in host memory")
    if not (source.is_contiguous() and target.is_contiguous() and flags.is_contiguous()):
        raise ValueError("a chunked copy is between contiguous tensors")
    return source.nbytes


def _device_address(device: torch.device, memory: Tensor) -> int:
    """Where the device sees registered host memory."""
    address = ctypes.c_void_p()
    with torch.cuda.device(device):
        code = native.function("mflex_cuda_host_address")(memory.data_ptr(), ctypes.byref(address))
    _check_cuda("host_address", code)
    return address.value or 0


def _cuda(name: str, device: torch.device, *arguments: int) -> None:
    """Launch on the device's current stream; raises ``RuntimeError`` with CUDA's own words."""
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream(device).cuda_stream
        code = native.function(f"mflex_cuda_{name}")(*arguments, stream)
    _check_cuda(name, code)


def _check_cuda(name: str, code: int) -> None:
    if code:
        text = native.function("mflex_cuda_error_text")(code).decode()
        raise RuntimeError(f"{name} failed on CUDA: {text}")
