"""Runs whose workers share layers are saved, and go on where layers are shared otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_flex.checkpoint.load import verify
from tests.distributed.pool import WorkerPool
from tests.end_to_end import runs

V = ("0:2@0 | 2:4@1 | 4:6@1 | 6:8@0 ; schedule zb-v", "0:3@1 | 3:8@0", "0:4@0 | 4:5@1 | 5:8@0")
SHARED = ["--tensor-model-parallel-size", "2"]
LAST = 8


def flags(tmp_path: Path, *more: str) -> list[str]:
    prefix = runs.write_documents(tmp_path / "data" / "text")
    data = ["--data-path", prefix, "--split", "1,0,0", "--train-iters", str(LAST)]
    return [*runs.MODEL, *runs.TRAINING, *data, *more]


@pytest.mark.parametrize(
    "more",
    [(), ("--swiglu", "--bf16", "--untie-embeddings-and-output-weights")],
    ids=["gpt", "gated bf16"],
)
def test_from_two_to_one_and_back(
    workers: WorkerPool, tmp_path: Path, more: tuple[str, ...]
) -> None:
    """Saved on a plan in a V between two switches, then by three workers, then with shared rows."""
    common = flags(tmp_path, *more)
    alone = runs.run(workers, 1, common)
    directory = tmp_path / "saved"
    here = [*common, "--save", str(directory), "--load", str(directory), "--save-interval", "100"]
    if more:
        here.append("--async-save")
    script = tmp_path / "plans.txt"
    script.write_text("\n".join(V))
    legs = [
        (4, [*SHARED, "--flexpipe-plans", str(script)], 3),
        (3, ["--flexpipe-plan", "0:3@0,1 | 3:8@2", "--use-distributed-optimizer"], 5),
        (4, [*SHARED, "--sequence-parallel", "--flexpipe-plan", "0:5@0 | 5:8@1"], LAST),
    ]
    losses: list[tuple[float, ...]] = []
    for size, words, until in legs:
        found = runs.run(workers, size, [*here, *words, "--exit-interval", str(until)])
        assert found.progress["iteration"] == until
        losses += found.losses
        chunked = any(entry.chunks for entry in verify(directory).tensors.values())
        assert chunked is (SHARED[0] in words)
    assert len(losses) == LAST
    tolerance = 1e-2 if "--bf16" in more else 1e-5
    runs.assert_numbers_close(losses, alone.losses, tolerance, "losses")
    if "--bf16" not in more:
        runs.assert_state_close(found.state, alone.state, 2e-5)
    assert found.updates == alone.updates


def test_state_that_replicas_of_shared_layers_split_is_saved_whole(
    workers: WorkerPool, tmp_path: Path
) -> None:
    common = flags(tmp_path, "--use-distributed-optimizer")
    whole = runs.run(workers, 4, [*common, *SHARED])  # two replicas of two workers
    here = [*common, "--save", str(tmp_path / "a"), "--load", str(tmp_path / "a")]
    first = runs.run(workers, 4, [*here, *SHARED, "--exit-interval", "3"])
    rest = runs.run(workers, 4, [*here, *SHARED])
    assert first.losses + rest.losses == whole.losses
    runs.assert_equal_bits(rest, whole)
