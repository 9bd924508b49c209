"""progress.txt, memory figures and the profiler."""

from __future__ import annotations

import dataclasses
import mmap
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_flex.config.profiling import ProfilingOptions
from megatron_flex.telemetry.memory import memory_in_use
from megatron_flex.telemetry.profiler import Profiler
from megatron_flex.telemetry.progress import ProgressLog, earliest_start
from megatron_flex.telemetry.sink import TelemetryError


def test_each_checkpoint_is_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    log = ProgressLog(str(tmp_path), 4, flops=1e15, tokens=10**9)
    log.iteration(5e14, 10**9)
    log.iteration(5e14, 10**9)
    log.checkpoint(20)
    log.checkpoint(20, asynchronous=True)
    start, first, second = (tmp_path / "progress.txt").read_text().splitlines()
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\tJob ID: 77\t# GPUs: 4\tStarting job", start
    )
    assert re.search(
        r"\t# GPUs: 4\tSaved checkpoint\tIteration: 20\tJob throughput: [\d.]+ TFLOP/s/GPU\t"
        r"Cumulative throughput: [\d.]+ TFLOP/s/GPU\tFloating-point operations: 2\.00e\+15\t"
        r"Tokens \(in billions\): 3\.00$",
        first,
    )
    assert "\tSaving async checkpoint\t" in second


def test_cumulative_throughput_starts_with_the_first_job_of_this_size(tmp_path: Path) -> None:
    path = tmp_path / "progress.txt"
    text = "2026-01-01 00:0{}:00\tJob ID: \t# GPUs: {}\t{}\n"
    saved = "Saved checkpoint\tIteration: 5\tJob throughput: 1\tCumulative throughput: 1\t"
    path.write_text(
        text.format(0, 4, "Starting job")
        + text.format(1, 2, "Starting job")
        + text.format(2, 2, saved + "Floating-point operations: 3.00e+15\tTokens: 1")
        + text.format(3, 4, "Starting job")
        + "torn"
        + text.format(4, 4, "Starting job")
    )
    start = earliest_start(path, 4)
    # The first of the newest jobs with four workers: at minute 3, not 0 or 4.
    stamp = datetime(2026, 1, 1, 0, 3).timestamp()
    assert start == (stamp, 3e15)
    assert earliest_start(path, 2) is None
    with path.open("a") as file:
        file.write(text.format(5, 2, "Starting job"))
    assert earliest_start(path, 2) == (datetime(2026, 1, 1, 0, 5).timestamp(), 3e15)
    assert earliest_start(path, 4) is None
    assert earliest_start(tmp_path / "absent", 4) is None


def test_a_directory_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TelemetryError, match=r"--log-progress: .* cannot be written"):
        ProgressLog(str(tmp_path / "file"), 1)


def test_memory_in_use_grows_with_what_is_allocated() -> None:
    size = 64 << 20
    name = "mem-allocated-bytes" if torch.cuda.is_available() else "mem-resident-bytes"
    before = memory_in_use()[name]
    if torch.cuda.is_available():
        more = torch.ones(size, dtype=torch.uint8, device="cuda")
    else:  # pages of its own: an allocator may have had as much at hand that is resident already
        more = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8).fill_(1)
    assert size - (4 << 20) <= memory_in_use()[name] - before <= size + (32 << 20)
    del more


def profiling(**changes: Any) -> ProfilingOptions:
    plain = ProfilingOptions(
        profile=True, profile_step_start=1, profile_step_end=3, use_pytorch_profiler=True
    )
    return dataclasses.replace(plain, **changes)


def test_the_profiler_records_the_iterations_that_were_asked_for(tmp_path: Path) -> None:
    profiler = Profiler(profiling(), 0, str(tmp_path))
    for done in range(5):
        profiler.before(done)
        assert len(list(tmp_path.iterdir())) == (1 if done >= 3 else 0)
        torch.ones(3) * 2
    profiler.close()
    (trace,) = tmp_path.iterdir()
    assert trace.name.startswith("rank0.")
    assert trace.read_text().count("aten::mul") >= 2


def test_a_run_that_ends_early_still_writes_its_trace(tmp_path: Path) -> None:
    profiler = Profiler(profiling(), 0, str(tmp_path))
    profiler.before(1)
    torch.ones(3) * 2
    profiler.close()
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(("changes", "rank"), [({"profile": False}, 0), ({}, 1)])
def test_other_workers_and_runs_are_not_profiled(
    tmp_path: Path, changes: dict[str, object], rank: int
) -> None:
    profiler = Profiler(profiling(**changes), rank, str(tmp_path))
    for done in range(5):
        profiler.before(done)
    profiler.close()
    assert list(tmp_path.iterdir()) == []


def test_marks_for_nsys_need_cuda() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is CUDA")
    with pytest.raises(TelemetryError, match="add --use-pytorch-profiler"):
        Profiler(profiling(use_pytorch_profiler=False), 0, None)
