"""Chunks with flags: what a reader gets while a writer is at work, late, dead or too early."""

from __future__ import annotations

import mmap
import os
import signal
import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_flex import kernels


def _bytes(count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)


def _shared(size: int) -> Tensor:
    """Memory that a forked process shares."""
    return torch.frombuffer(mmap.mmap(-1, max(size, 1)), dtype=torch.uint8)[:size]


@given(
    st.integers(0, 60_000),
    st.integers(1, 9_000),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 2**62),
)
def test_a_reader_that_starts_first_gets_all_bytes(
    size: int, chunk_bytes: int, writers: int, readers: int, version: int
) -> None:
    source, arena, target = _bytes(size), torch.zeros(size, dtype=torch.uint8), torch.zeros(size)
    target = target.to(torch.uint8)
    flags = torch.zeros(kernels.chunk_count(size, chunk_bytes), dtype=torch.int64)
    reader = threading.Thread(
        target=kernels.read_chunks,
        args=(arena, target, flags, version, chunk_bytes, 30.0, readers),
    )
    reader.start()
    kernels.write_chunks(source, arena, flags, version, chunk_bytes, writers)
    reader.join(60)
    assert not reader.is_alive()
    assert torch.equal(target, source)
    assert (flags == version).all()


def test_a_reader_in_another_process_starts_before_the_writer_has_ended() -> None:
    size, chunk = 1 << 20, 1 << 18
    source, arena = _bytes(size), _shared(size)
    flags = _shared(32).view(torch.int64)
    first = _shared(8).view(torch.int64)
    child = os.fork()
    if child == 0:
        try:
            kernels.write_chunks(source[:chunk], arena[:chunk], flags[:1], 7, chunk)
            deadline = time.monotonic() + 30
            while not first[0] and time.monotonic() < deadline:
                time.sleep(0.001)
            rest = slice(chunk, size)
            kernels.write_chunks(source[rest], arena[rest], flags[1:], 7, chunk)
        finally:
            os._exit(0)
    target = torch.zeros(size, dtype=torch.uint8)
    try:
        kernels.read_chunks(arena[:chunk], target[:chunk], flags[:1], 7, chunk, 30.0)
        # The writer goes on only now, so this first chunk was read in the middle of its copy.
        assert not flags[1:].any()
        first[0] = 1
        kernels.read_chunks(arena, target, flags, 7, chunk, 30.0)
    finally:
        os.waitpid(child, 0)
    assert torch.equal(target, source)


def test_a_late_chunk_is_named() -> None:
    flags = torch.tensor([4, 4, 3], dtype=torch.int64)
    arena, target = _bytes(25), torch.zeros(25, dtype=torch.uint8)
    before = time.monotonic()
    with pytest.raises(TimeoutError, match=r"chunk 2 of 3 of version 4 did not come within 0\.2 s"):
        kernels.read_chunks(arena, target, flags, 4, 10, 0.2)
    assert 0.2 <= time.monotonic() - before < 30
    assert torch.equal(target[:20], arena[:20])
    assert not target[20:].any()


def test_a_chunk_of_a_newer_version_is_not_taken_for_the_older() -> None:
    flags = torch.tensor([4, 5], dtype=torch.int64)
    with pytest.raises(RuntimeError, match="chunk 1 of 2 was replaced by a version after 4"):
        kernels.read_chunks(_bytes(20), torch.zeros(20, dtype=torch.uint8), flags, 4, 10, 5.0)


def test_a_chunk_that_is_written_again_while_it_is_read_is_not_taken_for_whole() -> None:
    size = 128 << 20
    arena, flags = torch.ones(size, dtype=torch.uint8), torch.ones(1, dtype=torch.int64)
    newer, target = torch.full((size,), 2, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    for delay in (0.002, 0.004, 0.008, 0.016):  # at some time in the middle of the copy
        arena.fill_(1)
        flags.fill_(1)
        writer = threading.Timer(delay, kernels.write_chunks, (newer, arena, flags, 2, size))
        writer.start()
        try:
            kernels.read_chunks(arena, target, flags, 1, size, 30.0)
        except RuntimeError:
            continue
        finally:
            writer.join(60)
        old = int((target == 1).sum())  # a number: pytest would show the whole tensor
        assert old == size


def test_a_writer_killed_in_a_chunk_leaves_no_chunk_that_passes_for_whole() -> None:
    # Two versions with different bytes, written over and over by a process that is killed: every
    # chunk whose flag is set must hold that version's bytes throughout.
    size, chunk = 8 << 20, 1 << 20
    arena, flags = _shared(size), _shared(8 * 8).view(torch.int64)
    sources = [torch.full((size,), value, dtype=torch.uint8) for value in (1, 2)]
    child = os.fork()
    if child == 0:
        for version in range(1, 1_000_000):
            kernels.write_chunks(sources[version % 2], arena, flags, version, chunk)
        os._exit(0)
    try:
        deadline = time.monotonic() + 30
        while flags[0] < 3:
            assert time.monotonic() < deadline, "the writer does not write"
            time.sleep(0.001)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    for i, version in enumerate(flags.tolist()):
        if version:
            expected = sources[version % 2][0].item()
            assert (arena[i * chunk : (i + 1) * chunk] == expected).all()


@pytest.mark.parametrize(
    ("size", "flags", "version", "chunk_bytes", "message"),
    [
        (20, 1, 1, 10, "need 2 int64 flags"),
        (20, 2, 0, 10, "above 0"),
        (20, 2, 1, 0, "above 0"),
        (21, 3, 1, 10, "equal sizes"),
    ],
)
def test_chunks_that_do_not_fit_are_refused(
    size: int, flags: int, version: int, chunk_bytes: int, message: str
) -> None:
    source, target = _bytes(size), torch.zeros(20, dtype=torch.uint8)
    with pytest.raises(ValueError, match=message):
        kernels.write_chunks(
            source, target, torch.zeros(flags, dtype=torch.int64), version, chunk_bytes
        )
