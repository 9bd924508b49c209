"""Builds the native library and the manager program with CMake.

``setup.py``, ``make native`` and the tests use it.

``python kernels/build.py`` builds into the package of this source tree.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

KERNELS = Path(__file__).resolve().parent
LIBRARY = "libmegatron_flex.so"
PRODUCTS = (LIBRARY, "twin_manager")
"""What is put into the package."""


def find_cmake() -> str | None:
    """Path of a CMake that runs: from PATH, else from the ``cmake`` package of PyPI.

    A found program is started once, since the package's launcher fails inside a build environment
    that hides its own environment's packages.
    """
    candidates = [shutil.which("cmake"), str(Path(sys.executable).parent / "cmake")]
    for candidate in candidates:
        if candidate and os.access(candidate, os.X_OK):
            try:
                subprocess.run([candidate, "--version"], check=True, capture_output=True)
            except (OSError, subprocess.CalledProcessError):
                continue
            return candidate
    return None


def configure_and_build(build_dir: Path, options: dict[str, str], targets: tuple[str, ...]) -> str:
    """Configure ``kernels`` in ``build_dir`` with ``-Dkey=value`` options and build ``targets``.

    Returns all that CMake and the compilers printed. Raises ``RuntimeError`` with that text when
    a step fails. Only one process at a time works in a build directory.
    """
    cmake = find_cmake()
    if cmake is None:
        raise RuntimeError(
            "building the kernels needs CMake 3.22 or newer: install it (apt install cmake, or"
            " pip install cmake)"
        )
    build_dir.mkdir(parents=True, exist_ok=True)
    definitions = [f"-D{key}={value}" for key, value in options.items()]
    # Under `make`, its own job server and flags are not meant for this build.
    environment = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL")}
    cores = str(len(os.sched_getaffinity(0)))
    output = []
    with (build_dir / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for command in (
            [cmake, "-S", str(KERNELS), "-B", str(build_dir), *definitions],
            [cmake, "--build", str(build_dir), "--parallel", cores, "--target", *targets],
        ):
            done = subprocess.run(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=environment,
            )
            output.append(done.stdout)
            if done.returncode != 0:
                raise RuntimeError(
                    f"building the kernels failed in: {' '.join(command)}\n{''.join(output)}"
                )
    return "".join(output)


def build_library(build_dir: Path, destination: Path, cuda: str = "AUTO") -> Path:
    """Build the products and put them into the directory ``destination``, replacing older ones.

    ``cuda`` is AUTO (when a working nvcc is found), ON or OFF; ``CUDAARCHS`` in the
    environment says for which GPUs, such as 90 (default: 80 and 90). Files are renamed into place,
    so that processes which have an older one loaded keep it. Returns the path of the library.
    """
    options = {"MFLEX_CUDA": cuda}
    if architectures := os.environ.get("CUDAARCHS"):  # CMake's own variable; see there
        options["CMAKE_CUDA_ARCHITECTURES"] = architectures
    text = configure_and_build(build_dir, options, ("megatron_flex", "twin_manager"))
    print(text, end="")
    destination.mkdir(parents=True, exist_ok=True)
    for name in PRODUCTS:
        partial = destination / f".{name}.{os.getpid()}"
        shutil.copy2(build_dir / name, partial)
        partial.replace(destination / name)
    return destination / LIBRARY


if __name__ == "__main__":
    root = KERNELS.parent
    try:
        built = build_library(
            root / "build" / "native", root / "megatron_flex", os.environ.get("MFLEX_CUDA", "AUTO")
        )
    except RuntimeError as error:
        sys.exit(str(error))
    print(f"built {built.relative_to(root)}")
