#!/usr/bin/env python3
"""Copy kernels against one memcpy of the same bytes, and a hand-over between two processes.

    python benchmarks/copies.py [--mebibytes 512] [--repeats 5]

Every figure is a median of interleaved repeats, in GB/s of bytes copied, which are counted once.
memcpy runs on as many threads as the kernel beside it, each on its own part. All memory is touched
before. The hand-over copies source to arena in one process and arena to target in another; the
arena is shared memory.
"""

from __future__ import annotations

import argparse
import ctypes
import io
import mmap
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

# Else PyTorch's threads spin for some 15 ms after their work, on the cores of what is timed next.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from torch import Tensor

from megatron_flex import kernels, native

Arm = Callable[[], object]
MIB = 1 << 20
_memcpy = ctypes.CDLL(None).memcpy
_memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_memcpy.restype = None


def interleaved(arms: dict[str, Arm], repeats: int) -> dict[str, float]:
    """Median seconds of each arm.

    The arms take turns, so that all see the same machine, there and back, so that none always comes
    after the same other.
    """
    times: dict[str, list[float]] = {name: [] for name in arms}
    for repeat in range(repeats + 1):
        for name, arm in list(arms.items())[:: -1 if repeat % 2 else 1]:
            start = time.perf_counter()
            arm()
            if repeat:  # the first round warms caches and threads
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


class Memcpy:
    """The C library's memcpy of ``size`` bytes, cut evenly over ``threads`` threads."""

    def __init__(self, source: Tensor, target: Tensor, size: int, threads: int) -> None:
        self.memory, self.parts = (source, target), []
        for i in range(threads):
            begin, end = size * i // threads // 64 * 64, size * (i + 1) // threads // 64 * 64
            end = size if i == threads - 1 else end
            self.parts.append((target.data_ptr() + begin, source.data_ptr() + begin, end - begin))
        self.pool = ThreadPoolExecutor(threads - 1) if threads > 1 else None

    def __call__(self) -> None:
        rest = [self.pool.submit(_memcpy, *part) for part in self.parts[1:]] if self.pool else []
        _memcpy(*self.parts[0])
        for part in rest:
            part.result()


def touched(size: int) -> Tensor:
    """``size`` bytes of host memory that have been written."""
    return torch.randint(0, 255, (size,), dtype=torch.uint8)


def shared(size: int) -> Tensor:
    """``size`` bytes that a forked process shares, all touched."""
    return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8).fill_(1)


def row(name: str, size: int, seconds: dict[str, float]) -> None:
    """One line of the table; ``size`` in bytes."""
    rates = {arm: size / value / 1e9 for arm, value in seconds.items()}
    share = rates["kernel"] / rates["memcpy"]
    pytorch = f"{rates['pytorch']:8.2f}" if "pytorch" in rates else f"{'':8}"
    print(f"{name:<42}{rates['kernel']:8.2f}{rates['memcpy']:8.2f}{share:8.0%}{pytorch}")


def segments(size: int, each: int, threads: int, repeats: int) -> None:
    """Gather and scatter of segments of ``each`` bytes."""
    whole, buffer = touched(size), touched(size)
    tensors = list(whole.split(each))
    copy = kernels.SegmentCopy(tensors, buffer)
    views = list(buffer.split(each))
    plain = Memcpy(whole, buffer, size, threads)
    label = f"{each // MIB} MiB" if each >= MIB else f"{each / 1024:g} KiB"
    for name, arm, torch_arm in (
        ("gather", lambda: copy.gather(threads), lambda: torch.cat(tensors, out=buffer)),
        ("scatter", lambda: copy.scatter(threads), lambda: torch._foreach_copy_(tensors, views)),
    ):
        arms: dict[str, Arm] = {"kernel": arm, "memcpy": plain, "pytorch": torch_arm}
        row(f"{name}, segments of {label}", size, interleaved(arms, repeats))


def chunked_write(size: int, chunk: int, threads: int, repeats: int) -> None:
    """A copy that publishes each chunk, with nobody waiting."""
    source, target = touched(size), touched(size)
    flags = torch.zeros(kernels.chunk_count(size, chunk), dtype=torch.int64)
    arms: dict[str, Arm] = {
        "kernel": lambda: kernels.write_chunks(source, target, flags, 1, chunk, threads),
        "memcpy": Memcpy(source, target, size, threads),
    }
    row(f"chunked write, chunks of {chunk >> 10} KiB", size, interleaved(arms, repeats))


class Reader:
    """A process that copies arena to target, one version after the other, until version 0."""

    def __init__(self, size: int, chunk: int) -> None:
        self.arena, self.target = shared(size), shared(size)
        self.flags = shared(8 * kernels.chunk_count(size, chunk)).view(torch.int64).zero_()
        self.chunk = chunk
        # [asked for, done]: versions
        self.state = shared(16).view(torch.int64).zero_()
        self.child = os.fork()
        if self.child == 0:
            try:
                self._serve()
            finally:
                os._exit(0)

    def _serve(self) -> None:
        wait = native.function("mflex_chunked_read")
        nothing = torch.zeros(1, dtype=torch.uint8)
        version = 1
        while True:
            # Waits for the request as it waits for a chunk: a one-byte read of version `version`.
            pointers = (nothing.data_ptr(), nothing.data_ptr(), 1, 1, self.state.data_ptr())
            if wait(*pointers, version, int(60e9), 1) != 0:
                return
            kernels.read_chunks(self.arena, self.target, self.flags, version, self.chunk, 60.0)
            self.state[1] = version
            version += 1

    def hand_over(self, source: Tensor, version: int) -> None:
        """Write ``source`` into the arena, and return when the reader has all of it."""
        nothing = torch.zeros(1, dtype=torch.uint8)
        self.state[0] = version
        kernels.write_chunks(source, self.arena, self.flags, version, self.chunk)
        pointers = (nothing.data_ptr(), nothing.data_ptr(), 1, 1, self.state[1:].data_ptr())
        if native.function("mflex_chunked_read")(*pointers, version, int(60e9), 1) != 0:
            raise TimeoutError(f"the reader did not finish version {version} within 60 s")

    def close(self) -> None:
        """End the process."""
        self.state[0] = 2**62
        os.waitpid(self.child, 0)


def hand_over(size: int, chunk: int, repeats: int) -> None:
    """Pipelined through shared memory, against one copy of the bytes, and what users have now."""
    source, other = touched(size), touched(size)
    reader = Reader(size, chunk)
    versions = iter(range(1, 10**6))

    def save_and_load() -> None:
        stream = io.BytesIO()
        torch.save(source, stream)
        stream.seek(0)
        torch.load(stream)

    arms: dict[str, Arm] = {
        "one memcpy": Memcpy(source, other, size, 1),
        "pipelined": lambda: reader.hand_over(source, next(versions)),
        "PyTorch's copy in, then out": lambda: (
            reader.arena.copy_(source),
            other.copy_(reader.arena),
        ),
        "torch.save and torch.load in memory": save_and_load,
    }
    seconds = interleaved(arms, repeats)
    if not torch.equal(reader.target, source):
        raise RuntimeError("the hand-over changed bytes")
    reader.close()
    one = seconds.pop("one memcpy")
    units = ", ".join(f"{name} {value / one:.2f}x" for name, value in seconds.items())
    print(
        f"{size // MIB} MiB in chunks of {chunk >> 10} KiB: {units}"
        f" (one memcpy: {one * 1e3:.1f} ms, {size / one / 1e9:.2f} GB/s)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mebibytes", type=int, default=512, help="bytes of each copy")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    size, repeats = arguments.mebibytes * MIB, arguments.repeats
    cores = len(os.sched_getaffinity(0))
    print(f"{cores} cores, {arguments.mebibytes} MiB a copy, median of {repeats}, GB/s")
    for threads in sorted({1, cores}):
        torch.set_num_threads(threads)
        print(f"\n{f'{threads} threads':<42}{'kernel':>8}{'memcpy':>8}{'share':>8}{'PyTorch':>8}")
        for each in (size, MIB, 64 << 10, 4 << 10):
            segments(size, each, threads, repeats)
        for chunk in (MIB, 256 << 10):
            chunked_write(size, chunk, threads, repeats)
    torch.set_num_threads(1)
    print("\nhand-over between two processes, in units of one memcpy of the same bytes")
    for mebibytes in sorted({256, arguments.mebibytes}):
        for chunk in (MIB, 512 << 10, 256 << 10):
            hand_over(mebibytes * MIB, chunk, repeats)


if __name__ == "__main__":
    main()
