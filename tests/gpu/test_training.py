"""Training by workers that share a GPU, over gloo: the losses are those of one CPU worker."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_flex.twinlayer.location import DIRECTORY, socket_of
from megatron_flex.twinlayer.manager import stop
from tests.close import assert_numbers_close
from tests.gpu.launch import SECONDS, Launch, flags_of, losses_on_the_cpu

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

ITERATIONS = 12
# The bits differ from the CPU's, and what Adam makes of a difference grows with the iterations.
TOLERANCE = 1e-4
PIPELINES = {
    1: "0:8@0",
    2: "0:4@0 | 4:8@1",
    3: "0:3@0,1 | 3:8@2",
    4: "0:4@0,3 | 4:8@1,2",
}
CHANGING = "0:3@0,1 | 3:8@2\n0:5@2 | 5:8@0,1\n0:2@1 | 2:5@0 | 5:8@2\n"
# Optimizer state and activations of some units go to the host, others are computed again.
OPTIMISED = (
    "0:4@0 | 4:8@1 ; recompute 1 ; optimizer 2-4 ; activations 2\n"
    "0:5@0 | 5:8@1 ; recompute 6 ; optimizer 2,5 ; activations 3,4\n"
    "0:8@0,1 ; optimizer 1-6 ; activations 1-5\n"
)


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return flags_of(tmp_path_factory.mktemp("data"), ITERATIONS)


@pytest.fixture(scope="module")
def expected(flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return losses_on_the_cpu(tmp_path_factory.mktemp("cpu"), flags, ITERATIONS)


@pytest.mark.parametrize("size", PIPELINES)
def test_a_static_pipeline_trains_as_the_cpu_does(
    flags: list[str], expected: list[float], tmp_path: Path, size: int
) -> None:
    with Launch(tmp_path, [*flags, "--flexpipe-plan", PIPELINES[size]], size=size) as job:
        job.wait(SECONDS)
        assert_numbers_close(job.losses(), expected, TOLERANCE)


@pytest.mark.parametrize(
    "way",
    [
        "live",
        "handover",
        "handover --flexpipe-no-twin",
        "live --flexpipe-bitwise",
        "live --use-distributed-optimizer",
        "handover --use-distributed-optimizer --flexpipe-twin-snapshot 2",
    ],
)
def test_changing_plans_train_as_the_cpu_does(
    flags: list[str], expected: list[float], tmp_path: Path, way: str
) -> None:
    script = tmp_path / "plans.txt"
    script.write_text(ITERATIONS * CHANGING)
    more = ["--flexpipe-plans", str(script), "--flexpipe-switch", *way.split()]
    with Launch(tmp_path, [*flags, *more], size=3) as job:
        job.wait(SECONDS)
        assert_numbers_close(job.losses(), expected, TOLERANCE)


@pytest.mark.parametrize("way", ["live", "handover"])
def test_offloading_and_recomputing_change_nothing(
    flags: list[str], expected: list[float], tmp_path: Path, way: str
) -> None:
    script = tmp_path / "plans.txt"
    script.write_text(ITERATIONS * OPTIMISED)
    more = ["--flexpipe-plans", str(script), "--flexpipe-switch", way]
    more += ["--flexpipe-twin-snapshot", "2"]
    with Launch(tmp_path, [*flags, *more], size=2) as job:
        job.wait(SECONDS)
        assert_numbers_close(job.losses(), expected, TOLERANCE)


def test_bfloat16_is_close(flags: list[str], expected: list[float], tmp_path: Path) -> None:
    with Launch(tmp_path, [*flags, "--bf16", "--flexpipe-plan", PIPELINES[2]], size=2) as job:
        job.wait(SECONDS)
        assert_numbers_close(job.losses(), expected, 3e-2)


def test_a_killed_job_goes_on_from_host_memory(
    flags: list[str], expected: list[float], tmp_path: Path
) -> None:
    more = ["--flexpipe-plan", PIPELINES[2], "--flexpipe-twin-snapshot", "2"]
    runtime = {DIRECTORY: str(tmp_path / "runtime")}
    with Launch(tmp_path, [*flags, *more], size=2, environment=runtime) as job:
        job.until(6, SECONDS)
    again = Launch(
        tmp_path, [*flags, *more], size=2, port=job.port, attempt=1, environment=runtime
    )  # fmt: skip
    try:
        with again:
            again.wait(SECONDS)
            assert "in host memory: starting at iteration" in again.output
            assert_numbers_close(again.losses(), expected, TOLERANCE)
    finally:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(DIRECTORY, runtime[DIRECTORY])
            stop(socket_of(f"none at 127.0.0.1:{job.port}"))


def test_nccl_with_several_workers_on_a_gpu_is_refused(flags: list[str], tmp_path: Path) -> None:
    size = torch.cuda.device_count() + 1
    more = ["--distributed-backend", "nccl"]
    with Launch(tmp_path, [*flags, *more], size=size) as job:
        with pytest.raises(AssertionError):
            job.wait(60.0)
        assert "needs a GPU for each worker" in job.output
