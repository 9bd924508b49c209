"""All checks that need a GPU, in one command: build for it, tests/gpu, benchmarks/gpu.py.

    make gpu                                (PYTHON=python3.12 names the Python that has PyTorch)
    python3 tools/gpu.py --out results.json --wheels wheels

Uses the packages of this Python. What is missing is installed beside the build, from the wheels in
``--wheels`` where that directory exists, from the package index otherwise. No more than 12 minutes.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ROOT / "build" / "gpu-packages"
NEEDED = {
    "hypothesis": "hypothesis",
    "megatron.core": "megatron-core",
    "numpy": "numpy",
    "psutil": "psutil",
    "pytest": "pytest",
    "safetensors": "safetensors",
    "sentencepiece": "sentencepiece",
    "tokenizers": "tokenizers",
    "tqdm": "tqdm",
    "xxhash": "xxhash",
    "yaml": "pyyaml",
}
"""Module and package, of what a run imports beside PyTorch."""
OPTIONAL = (
    ("Transformer Engine", "transformer_engine", "transformer-engine"),
    ("Apex", "apex.normalization", "apex"),
    ("flash-attn", "flash_attn", "flash-attn"),
)
LIMITS = {"build": 180, "tests": 330, "benchmark": 210}
"""Seconds."""


def missing() -> list[str]:
    """Packages that are not there."""
    sys.path.insert(0, str(PACKAGES))
    importlib.invalidate_caches()
    return [package for module, package in NEEDED.items() if not _found(module)]


def _found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


def engines() -> str:
    """Which packages are there whose layers and kernels are tested where they are installed."""
    words = []
    for title, module, name in OPTIONAL:
        version = "no"
        if _found(module):
            try:
                version = metadata.version(name)
            except metadata.PackageNotFoundError:
                version = "of unknown version"
        words.append(f"{title}: {version}")
    return "; ".join(words)


def install(packages: list[str], wheels: Path) -> None:
    """Install into ``PACKAGES``, without what they depend on: that is in the list itself."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps",
               "--target", str(PACKAGES), "-c", str(ROOT / "constraints.txt")]  # fmt: skip
    if wheels.is_dir():
        command += ["--no-index", "--find-links", str(wheels)]
    subprocess.run([*command, *packages], check=True)


def run(name: str, command: list[str], environment: dict[str, str]) -> bool:
    """Run one step within its limit; whether it went well."""
    print(f"== {name}: {' '.join(command)}", flush=True)
    began = time.monotonic()
    try:
        status = subprocess.run(
            command, cwd=ROOT, env=environment, timeout=LIMITS[name], check=False
        ).returncode
    except subprocess.TimeoutExpired:
        status = None
    took = time.monotonic() - began
    word = f"did not end within {LIMITS[name]} s" if status is None else f"status {status}"
    print(f"== {name}: {word}, {took:.0f} s", flush=True)
    return status == 0


def main() -> int:
    """The exit status: 0 when all went well."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("gpu-results.json"), help="the figures")
    parser.add_argument("--wheels", type=Path, default=ROOT / "wheels", help="packages to install")
    arguments = parser.parse_args()
    try:
        import torch
    except ModuleNotFoundError:
        print("error: this Python has no PyTorch; name another: make gpu PYTHON=python3.12",
              file=sys.stderr)  # fmt: skip
        return 1
    if not torch.cuda.is_available():
        print("error: this Python's PyTorch finds no GPU; name another: make gpu PYTHON=python3.12",
              file=sys.stderr)  # fmt: skip
        return 1
    if packages := missing():
        install(packages, arguments.wheels)
    print(f"== {engines()}", flush=True)
    capability = "".join(map(str, torch.cuda.get_device_capability()))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, PACKAGES))),
        "OMP_NUM_THREADS": "1",
        "MFLEX_CUDA": "ON",
        "CUDAARCHS": os.environ.get("CUDAARCHS", capability),
    }
    python = sys.executable
    if not run("build", [python, "kernels/build.py"], environment):
        return 1
    tests = [python, "-m", "pytest", "-q", "-ra", "--durations=5", "tests/gpu"]
    tested = run("tests", tests, environment)
    benchmark = [python, "benchmarks/gpu.py", "--out", str(arguments.out.resolve())]
    measured = run("benchmark", benchmark, environment)
    return 0 if tested and measured else 1


if __name__ == "__main__":
    sys.exit(main())
