"""The copy kernels, called with tensors: segments, casts, varlen packing, chunks with flags.

On the CPU each runs on ``threads`` native threads (0: all cores that the process may use) without
the interpreter lock. On CUDA each is one launch on the current stream. Sizes are in bytes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
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


def cast_copy(source: Tensor, target: Tensor, threads: int = 0) -> None:
    """Copy fp32 to bfloat16 or back, bit for bit as ``target.copy_(source)`` does.

    Both are contiguous, of one size and on one device. Raises ``ValueError`` otherwise.
    """
    kinds = (source.dtype, target.dtype)
    narrow = kinds == (torch.float32, torch.bfloat16)
    if not narrow and kinds != (torch.bfloat16, torch.float32):
        raise ValueError(f"casts are between float32 and bfloat16, not {kinds[0]} to {kinds[1]}")
    if (
        source.numel() != target.numel()
        or source.device != target.device
        or not (source.is_contiguous() and target.is_contiguous())
    ):
        raise ValueError(
            f"a cast copy needs two contiguous tensors of one size on one device, not"
            f" {tuple(source.shape)} on {source.device} and {tuple(target.shape)} on"
            f" {target.device}"
        )
    name = "cast_float32_to_bfloat16" if narrow else "cast_bfloat16_to_float32"
    arguments = [source.data_ptr(), target.data_ptr(), source.numel()]
    if narrow:
        arguments.append(_nan_bits(source.device))
    if source.device.type == "cpu":
        native.function(f"mflex_{name}")(*arguments, threads)
    else:
        _cuda(name, source.device, *arguments)


def varlen_pack(padded: Tensor, cu_seqlens: Tensor, threads: int = 0) -> Tensor:
    """``[batch, length, ...]`` to ``[tokens, ...]``: each sample's first rows, without padding.

    ``cu_seqlens`` (int32, ``[batch + 1]``, from 0) says how many; ``tokens`` is its last entry.
    Raises ``ValueError`` when a sample has more rows than ``length`` (on the CPU; CUDA does not
    look at the values beyond the last).
    """
    batch, length = padded.shape[:2]
    packed = padded.new_empty((_tokens(cu_seqlens, batch), *padded.shape[2:]))
    _varlen("varlen_pack", padded.contiguous(), packed, cu_seqlens, length, threads)
    return packed


def varlen_pad(packed: Tensor, cu_seqlens: Tensor, length: int, threads: int = 0) -> Tensor:
    """``[tokens, ...]`` to ``[batch, length, ...]``; the padding is zero. The inverse of
    :func:`varlen_pack`, with the same errors."""
    batch = cu_seqlens.numel() - 1
    if _tokens(cu_seqlens, batch) != packed.shape[0]:
        raise ValueError(
            f"cu_seqlens end at {int(cu_seqlens[-1])}, but {packed.shape[0]} tokens are packed"
        )
    padded = packed.new_empty((batch, length, *packed.shape[1:]))
    _varlen("varlen_pad", packed.contiguous(), padded, cu_seqlens, length, threads)
    return padded


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


@cache
def _nan_bits(device: torch.device) -> int:
    """What PyTorch makes of NaN in bfloat16 on this device: its kernels do not agree."""
    nan = torch.full((64,), float("nan"), dtype=torch.float32, device=device)
    return int(nan.to(torch.bfloat16).view(torch.int16)[0]) & 0xFFFF


def _tokens(cu_seqlens: Tensor, batch: int) -> int:
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.numel() != batch + 1:
        raise ValueError(
            f"cu_seqlens must be int32 with {batch + 1} entries for {batch} samples, not"
            f" {cu_seqlens.dtype} with {cu_seqlens.numel()}"
        )
    return max(0, int(cu_seqlens[-1]))


def _varlen(
    name: str, source: Tensor, target: Tensor, cu_seqlens: Tensor, length: int, threads: int
) -> None:
    if cu_seqlens.device != source.device or not cu_seqlens.is_contiguous():
        raise ValueError(f"cu_seqlens must be contiguous and on {source.device}")
    batch = cu_seqlens.numel() - 1
    rows = batch * length if name == "varlen_pad" else source.shape[0] * source.shape[1]
    whole = target if name == "varlen_pad" else source
    row_bytes = whole.nbytes // rows if rows else 0
    arguments = [source.data_ptr(), target.data_ptr(), cu_seqlens.data_ptr(), batch, length]
    if source.device.type != "cpu":
        _cuda(name, source.device, *arguments, row_bytes)
        return
    bad = native.function(f"mflex_{name}")(*arguments, row_bytes, threads)
    if bad:
        raise ValueError(
            f"sample {bad - 1} of cu_seqlens {cu_seqlens.tolist()} must have 0 to {length} rows,"
            " and the first must start at 0"
        )


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
