"""The benchmark for GPUs runs to its end; its figures need one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.end_to_end.processes import ROOT


def test_the_rehearsal_without_a_gpu_measures_every_part(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    small = "--device cpu --mebibytes 1 --repeats 1 --iterations 0".split()
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), *small, "--out", str(out)],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert found["failed"] == []
    tables = {row["table"].split(",")[0].split(" (")[0] for row in found["rows"]}
    assert tables == {
        "segment copy on the device",
        "hidden dropout on the device",
        "link to the host",
        "hand-over between two workers of the GPU",
        "attention",
        "updates",
        "layers",
    }
    assert all(row["seconds"] > 0 for row in found["rows"])
