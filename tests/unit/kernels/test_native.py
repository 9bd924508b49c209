"""Finding and loading the library, and what is said when it is missing or old."""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path

import pytest
import torch

from megatron_flex import kernels, native


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Another place for the library, where there is none yet."""
    path = tmp_path / "libmegatron_flex.so"
    monkeypatch.setattr(native, "LIBRARY", path)
    monkeypatch.setattr(native, "library", native.library.__wrapped__)
    monkeypatch.setattr(native, "function", native.function.__wrapped__)
    return path


def test_a_missing_library_says_how_to_build_it(elsewhere: Path) -> None:
    with pytest.raises(native.NativeError, match=r"is missing: run `make native`"):
        native.function("mflex_built_with_cuda")


def test_a_broken_library_says_how_to_build_it(elsewhere: Path) -> None:
    elsewhere.write_bytes(b"not a library")
    with pytest.raises(native.NativeError, match=r"cannot be loaded .* build it again"):
        native.function("mflex_built_with_cuda")


def test_a_function_that_the_library_lacks_says_how_to_build_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(native.SIGNATURES, "mflex_of_tomorrow", (None, []))
    with pytest.raises(native.NativeError, match=r"no function mflex_of_tomorrow: it is older"):
        native.function("mflex_of_tomorrow")


def test_the_library_has_every_function_of_the_table() -> None:
    cuda = native.function("mflex_built_with_cuda")()
    for name in native.SIGNATURES:
        if cuda or not name.startswith("mflex_cuda_"):
            native.function(name)
        else:
            with pytest.raises(native.NativeError, match="built without CUDA"):
                native.function(name)


@pytest.mark.parametrize("cap", native.LEVELS)
def test_the_environment_caps_the_instruction_sets(
    cap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    used, newest = native.cap_cpu(), native.cap_cpu("avx512")
    monkeypatch.setenv(native.CPU_CAP, cap)
    try:
        native.library.__wrapped__()
        levels = list(native.LEVELS)
        assert native.cap_cpu() == min(cap, newest, key=levels.index)
    finally:
        native.cap_cpu(used)


def test_a_cap_that_is_no_level_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.CPU_CAP, "sse9")
    words = r"MEGATRON_FLEX_CPU is 'sse9' in the environment: use baseline, avx2, avx512"
    with pytest.raises(native.NativeError, match=words):
        native.library.__wrapped__()


def test_the_library_is_loaded_once() -> None:
    assert native.library() is native.library()
    assert isinstance(native.library(), ctypes.CDLL)


def test_other_python_threads_run_while_a_kernel_waits() -> None:
    flags = torch.zeros(1, dtype=torch.int64)
    arena, target = torch.ones(8, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)
    late: list[str] = []

    def read() -> None:
        try:
            kernels.read_chunks(arena, target, flags, 1, 8, 20.0)
        except TimeoutError as error:
            late.append(str(error))

    reader = threading.Thread(target=read)
    reader.start()
    # With the lock held by the waiting kernel, this thread could not come to write.
    kernels.write_chunks(arena, arena.clone(), flags, 1, 8)
    reader.join(30)
    assert not reader.is_alive()
    assert not late
    assert torch.equal(target, arena)
