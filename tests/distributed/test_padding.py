"""Padded samples, on any plan and schedule, train as packed ones on one process do."""

from __future__ import annotations

import shlex

import numpy as np
import pytest

from megatron_flex.data.cut import PADS, Cut
from megatron_flex.data.dynapipe import DynaPipe, Stage, StageTime
from megatron_flex.model.config import ModelConfig
from tests.distributed import jobs
from tests.distributed.pool import WorkerPool
from tests.distributed.test_exactness import TIED, UNTIED, reference
from tests.end_to_end import runs
from tests.unit.data.files import write_flat

LONGEST = 60
STAGE = Stage(StageTime(50.0, 1.0, 0.002), 150.0)
DYNAPIPE = DynaPipe(2, 1, STAGE, STAGE)
MODELS = {"tied": TIED, "untied": UNTIED, "bert": jobs.BERT}


def cut(pad: str, least: int = 0) -> Cut:
    return Cut(100, 3, pad=pad, pad_to=least, dynapipe=DYNAPIPE)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("pad", PADS)
def test_one_process_with_padding_equals_itself_without(
    workers: WorkerPool, model: str, pad: str
) -> None:
    config = MODELS[model]
    whole = reference(workers, config, longest=LONGEST, iterations=4)
    plan = f"0:{config.layers.num_units}@0"
    run = workers.run(1, jobs.train, config, plan, longest=LONGEST, iterations=4, cut=cut(pad))
    jobs.assert_same(jobs.merge(run), whole)


@pytest.mark.parametrize(
    ("model", "policy", "plan", "size", "pad"),
    [
        ("untied", "1f1b", "0:4@0 | 4:8@1 ; recompute 1-6 ; cut 2", 2, "dynapipe"),
        ("tied", "zb-h1", "0:3@0 | 3:8@1,2", 3, "batch"),
        ("tied", "zb-v", "0:2@0 | 2:4@1 | 4:6@1 | 6:8@0 ; cut 3", 2, "bucket"),
        ("bert", "1f1b", "0:3@0,1 | 3:6@2", 3, "batch"),
    ],
)
def test_plans_and_schedules_with_padding_equal_one_process(
    workers: WorkerPool, model: str, policy: str, plan: str, size: int, pad: str
) -> None:
    config: ModelConfig = MODELS[model]
    whole = reference(workers, config, longest=LONGEST, iterations=4)
    run = workers.run(size, jobs.train, config, plan, longest=LONGEST, iterations=4,
                      policy=policy, cut=cut(pad, 64 if pad == "batch" else 0))  # fmt: skip
    jobs.assert_same(jobs.merge(run), whole)


# ---- by flags --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    draw = np.random.default_rng(3)
    lengths = draw.integers(3, 60, 64)
    documents = [draw.integers(0, runs.VOCABULARY, n).tolist() for n in lengths]
    prefix = write_flat(tmp_path_factory.mktemp("padding") / "text", documents)
    training = [w for w in runs.TRAINING if w not in ("--micro-batch-tokens", "50")]
    return [*runs.MODEL, *training, *shlex.split(f"--data-path {prefix} --split 1,0,0"),
            *shlex.split("--train-iters 5 --flexpipe-memory-budget-gb 1")]  # fmt: skip


@pytest.fixture(scope="module")
def packed(workers: WorkerPool, flags: list[str]) -> runs.Run:
    return runs.run(workers, 1, [*flags, "--micro-batch-tokens", "50"])


BASELINES = {
    "megatron-pad": "--micro-batch-size 2",
    "megatron-pad-all": "--micro-batch-size 2",
    "zero-bubble-pad": "--micro-batch-size 2",
    "packed-1f1b": "--micro-batch-tokens 80",
    "packed-zero-bubble": "--micro-batch-tokens 80 --flexpipe-schedule zb-v",
    "bucket": "--micro-batch-tokens 80",
    "dynapipe": "",
    "seq1f1b": "--micro-batch-tokens 30",
}


@pytest.mark.parametrize("name", BASELINES)
def test_every_baseline_trains_as_one_process(
    workers: WorkerPool, flags: list[str], packed: runs.Run, name: str
) -> None:
    words = shlex.split(f"--pipeline-model-parallel-size 2 --flexpipe-baseline {name}")
    run = runs.run(workers, 2, [*flags, *words, *shlex.split(BASELINES[name])])
    runs.assert_same(run, packed)
    for record in run.history.iterations:
        assert (record.padding > 0) == (
            name not in ("packed-1f1b", "packed-zero-bubble", "seq1f1b")
        )
        if name == "megatron-pad-all":
            assert record.padding + record.tokens == 8 * 64
