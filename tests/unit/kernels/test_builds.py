"""The kernels built in other ways: with sanitizers, which run them, and for CUDA, which links."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from kernels.build import configure_and_build
from megatron_flex import native

BUILDS = Path(__file__).resolve().parents[3] / "build"


def _driver(sanitizer: str) -> Path:
    """The C++ test driver; built again only where something changed."""
    directory = BUILDS / sanitizer
    options = {"MFLEX_CUDA": "OFF", "MFLEX_TESTS": "ON", "MFLEX_SANITIZE": sanitizer}
    configure_and_build(directory, options | {"MFLEX_WERROR": "ON"}, ("kernel_tests",))
    return directory / "kernel_tests"


@pytest.mark.parametrize(
    ("sanitizer", "rounds", "way"), [("address", 500, "stream"), ("thread", 100, "memcpy")]
)
def test_random_rounds_pass_under_sanitizers(
    sanitizer: str, rounds: int, way: str, count: Callable[[int, int], int]
) -> None:
    rounds = count(rounds, 20 * rounds)
    command = [str(_driver(sanitizer)), str(rounds), "1"]
    environment = {**os.environ, "MEGATRON_FLEX_COPY": way}
    run = partial(subprocess.run, capture_output=True, text=True, timeout=600, env=environment)
    done = run(command)
    if "unexpected memory mapping" in done.stderr:
        # Older ThreadSanitizers do not bear as much address randomisation as newer kernels do.
        command = ["setarch", platform.machine(), "--addr-no-randomize", *command]
        done = run(command)
    assert done.returncode == 0, done.stderr[-5000:]
    assert f"{rounds} rounds passed" in done.stdout
    assert "Sanitizer" not in done.stderr


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on PATH")
def test_the_cuda_kernels_compile_and_link_without_a_warning() -> None:
    directory = BUILDS / "cuda"
    options = {"MFLEX_CUDA": "ON", "MFLEX_WERROR": "ON", "MFLEX_TESTS": "ON"}
    output = configure_and_build(
        directory, options | {"CMAKE_CUDA_ARCHITECTURES": "80;90"}, ("cuda_only",)
    )
    assert "warning" not in output
    library = directory / "libcuda_only.so"
    symbols = subprocess.run(["nm", "-D", str(library)], capture_output=True, text=True, check=True)
    exported = [name for name in native.SIGNATURES if name.startswith("mflex_cuda_")]
    assert exported
    assert all(f" T {name}\n" in symbols.stdout for name in exported)
    # Machine code of each architecture is in the library's fat binary.
    content = library.read_bytes()
    assert b"sm_80" in content
    assert b"sm_90" in content
