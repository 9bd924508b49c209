"""Interrupted and resumed is uninterrupted: the whole loop, with data, scheduler and dropout."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from megatron_flex.checkpoint.layout import TRACKER, iterations_in
from megatron_flex.checkpoint.load import read_common
from tests.close import assert_numbers_close
from tests.distributed.pool import WorkerError, WorkerPool
from tests.end_to_end import runs
from tools.checkpoint import convert

UNEVEN = "0:3@0,1 | 3:8@2"
LAST = 10


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Ten iterations of 8 samples on 50 documents: the second epoch begins within the seventh."""
    prefix = runs.write_documents(tmp_path_factory.mktemp("data") / "text")
    data = ["--data-path", prefix, "--split", "1,0,0", "--train-iters", str(LAST)]
    return [*runs.MODEL, *runs.TRAINING, *data]


def saving(directory: Path, *more: str) -> list[str]:
    return ["--save", str(directory), "--load", str(directory), "--save-interval", "100", *more]


@pytest.mark.parametrize(
    ("interrupted", "more"),
    [
        (3, ()),
        (7, ("--position-embedding-type", "rope", "--swiglu", "--normalization", "RMSNorm")),
        (5, ("--bf16", "--untie-embeddings-and-output-weights")),
    ],
)
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(
    workers: WorkerPool, flags: list[str], tmp_path: Path, interrupted: int, more: tuple[str, ...]
) -> None:
    layout = ["--flexpipe-plan", UNEVEN, *more]
    whole = runs.run(workers, 3, [*flags, *layout])
    here = [*flags, *layout, *saving(tmp_path)]
    first = runs.run(workers, 3, [*here, "--exit-interval", str(interrupted)])
    assert first.progress["iteration"] == interrupted
    assert f" exiting program at iteration {interrupted}" in first.printed
    rest = runs.run(workers, 3, here)
    assert first.losses + rest.losses == whole.losses
    assert first.norms + rest.norms == whole.norms
    rates = [r.learning_rate for run in (first, rest) for r in run.history.iterations]
    assert rates == [r.learning_rate for r in whole.history.iterations]
    runs.assert_equal_bits(rest, whole)


@pytest.mark.parametrize(
    ("saver", "more"),
    [
        (("core", "--target-tensor-parallel-size", "2", "--target-pipeline-parallel-size", "3"),
         ()),
        (("core", "--saver-transformer-impl", "local"),
         ("--bf16", "--untie-embeddings-and-output-weights")),
        (("torch_dist",), ("--swiglu", "--bf16")),
    ],
)  # fmt: skip
def test_a_run_goes_on_from_its_checkpoint_converted_to_megatrons_and_back(
    workers: WorkerPool, flags: list[str], tmp_path: Path, saver: tuple[str, ...],
    more: tuple[str, ...],
) -> None:  # fmt: skip
    layout = ["--flexpipe-plan", UNEVEN, *more]
    whole = runs.run(workers, 3, [*flags, *layout])
    here, there, back = (tmp_path / name for name in ("here", "there", "back"))
    runs.run(workers, 3, [*flags, *layout, *saving(here, "--exit-interval", "4")])
    for source, target, loader, words in (
        (here, there, "flex", saver), (there, back, "core", ("flex",)),
    ):  # fmt: skip
        argv = ["--model-type", "GPT", "--loader", loader, "--saver", *words]
        assert convert.main([*argv, "--load-dir", str(source), "--save-dir", str(target)]) == 0
    rest = runs.run(workers, 3, [*flags, *layout, *saving(back)])
    assert rest.losses == whole.losses[4:]
    assert rest.norms == whole.norms[4:]
    assert rest.state.keys() == whole.state.keys()
    for name, tensor in whole.state.items():
        by_token = name.endswith(("word_embeddings.weight", "output_layer.weight"))
        rows = slice(91 if by_token else None)  # behind them are rows that no token has
        assert torch.equal(rest.state[name][rows], tensor[rows]), name
    assert (rest.updates, rest.schedule) == (whole.updates, whole.schedule)
    assert rest.progress["consumed_samples"] == whole.progress["consumed_samples"]
    assert rest.progress["flops"] == whole.progress["flops"]


def test_a_run_saved_by_three_workers_goes_on_alike_on_one_two_four_and_five(
    workers: WorkerPool, flags: list[str], tmp_path: Path
) -> None:
    layout = ["--flexpipe-plan", UNEVEN]
    whole = runs.run(workers, 3, [*flags, *layout])
    runs.run(workers, 3, [*flags, *layout, *saving(tmp_path, "--exit-interval", "5")])
    for size, plan in (
        (1, "0:8@0"),
        (2, "0:6@1 | 6:8@0"),
        (4, "0:2@0 | 2:4@1 | 4:8@2,3"),
        (5, "0:1@4 | 1:4@0,1 | 4:8@2,3"),
    ):
        resumed = runs.run(
            workers, size, [*flags, "--flexpipe-plan", plan, "--load", str(tmp_path)]
        )
        assert len(resumed.losses) == LAST - 5
        runs.assert_same(resumed, whole, start=5)


def test_an_evaluation_leaves_no_trace_in_training(
    workers: WorkerPool, flags: list[str], tmp_path: Path
) -> None:
    prefix = runs.write_documents(tmp_path / "valid", count=3)
    layout = ["--pipeline-model-parallel-size", "2"]
    whole = runs.run(workers, 2, [*flags, *layout])
    split = flags.index("--split")
    data = [
        *flags[:split - 2], "--train-data-path", flags[split - 1], "--valid-data-path", prefix,
        *flags[split + 2 :],
    ]  # fmt: skip
    evaluated = runs.run(workers, 2, [*data, *layout, "--eval-interval", "3", "--eval-iters", "2"])
    assert evaluated.losses == whole.losses
    runs.assert_equal_bits(evaluated, whole)
    # Three validations and the one at the end, each on the three rows that there are.
    assert [v.samples for v in evaluated.history.validations] == [3, 3, 3, 3]
    assert any("all there are: 3 of the" in line for line in evaluated.printed)


def test_a_finished_run_that_is_started_again_trains_nothing_and_keeps_its_checkpoint(
    workers: WorkerPool, flags: list[str], tmp_path: Path
) -> None:
    here = [*flags, *saving(tmp_path)]
    whole = runs.run(workers, 1, here)
    before = sorted((p, p.stat().st_mtime_ns) for p in tmp_path.rglob("*"))
    again = runs.run(workers, 1, here)
    assert again.losses == []
    runs.assert_equal_bits(again, whole)
    assert sorted((p, p.stat().st_mtime_ns) for p in tmp_path.rglob("*")) == before


def test_finetuning_starts_anew_from_the_weights(
    workers: WorkerPool, flags: list[str], tmp_path: Path
) -> None:
    whole = runs.run(workers, 1, [*flags, *saving(tmp_path)])
    tuned = runs.run(workers, 2, [*flags, "--load", str(tmp_path), "--finetune"])
    assert len(tuned.losses) == LAST
    assert tuned.progress["consumed_samples"] == whole.progress["consumed_samples"]
    assert tuned.losses[0] < whole.losses[0]


@pytest.mark.parametrize(
    "way",
    [
        ("--load", "DIR", "--finetune"),
        ("--pretrained-checkpoint", "DIR", "--use-distributed-optimizer"),
    ],
)
def test_a_bfloat16_run_goes_on_from_weights_that_were_loaded_alone(
    workers: WorkerPool, flags: list[str], tmp_path: Path, way: tuple[str, ...]
) -> None:
    words = [*flags, "--bf16", "--lr-warmup-iters", "0"]
    whole = runs.run(workers, 1, [*words, *saving(tmp_path)])
    # Steps far below a weight's last bit: an update rounds the master weights and no more.
    still = ["--train-iters", "2", "--lr", "1e-12", "--min-lr", "0"]
    alone = [word.replace("DIR", str(tmp_path)) for word in way]
    tuned = runs.run(workers, 2, [*words, *still, *alone])
    assert tuned.updates == 2
    loaded = {n: t for n, t in whole.state.items() if not n.startswith("optimizer.")}
    assert loaded
    for name, weight in loaded.items():
        error = (tuned.state[name].double() - weight.double()).abs().max()
        assert error <= 1e-9, f"{name} differs by {error:.1e}"


@pytest.mark.parametrize("more", [(), ("--async-save",)])
def test_a_run_whose_weights_are_lost_ends_and_keeps_its_good_checkpoints(
    workers: WorkerPool, flags: list[str], tmp_path: Path, more: tuple[str, ...]
) -> None:
    here = [
        *flags, "--pipeline-model-parallel-size", "2", "--save", str(tmp_path), "--load",
        str(tmp_path), "--save-interval", "1", "--keep-last-n", "2", *more,
    ]  # fmt: skip
    runs.run(workers, 2, [*here, "--exit-interval", "3"])
    lost = [*here, "--lr", "1e38", "--override-opt_param-scheduler"]
    with pytest.raises(WorkerError, match="were not saved: go on from an earlier") as caught:
        runs.run(workers, 2, lost)
    assert f"--load {tmp_path} --ckpt-step N; there is 2, 3)" in str(caught.value)
    assert iterations_in(tmp_path) == [2, 3]
    # Saved seldom, it goes on until its gradients have not been finite for a while.
    seldom = [*lost, "--save-interval", "100", "--train-iters", "20"]
    with pytest.raises(WorkerError, match="not finite in 5 iterations in a row") as caught:
        runs.run(workers, 2, seldom)
    assert "(up to 9)" in str(caught.value)
    assert iterations_in(tmp_path) == [2, 3]
    again = runs.run(workers, 2, here)  # from iteration 3, as if nothing had been
    assert len(again.losses) == LAST - 3
    assert again.progress["skipped"] == 0


def test_checkpoints_without_a_tracker_are_never_taken_for_nothing(
    workers: WorkerPool, flags: list[str], tmp_path: Path
) -> None:
    here = [*flags, *saving(tmp_path), "--save-interval", "3", "--keep-last-n", "3"]
    whole = runs.run(workers, 1, here)
    (tmp_path / TRACKER).unlink()
    before = sorted((p, p.stat().st_mtime_ns) for p in tmp_path.rglob("*"))
    beside = ["--save-interval", "3"]
    for way in (
        here,
        [*flags, "--load", str(tmp_path)],
        [*flags, "--load", str(tmp_path), "--finetune"],
        [*flags, "--pretrained-checkpoint", str(tmp_path)],
        [*flags, "--save", str(tmp_path), *beside],
        [*flags, "--save", str(tmp_path), "--load", str(tmp_path / "empty"), *beside],
    ):
        with pytest.raises(WorkerError, match=r"iterations 6, 9, 10, but no .*--ckpt-step"):
            runs.run(workers, 1, way)
    assert sorted((p, p.stat().st_mtime_ns) for p in tmp_path.rglob("*")) == before
    resumed = runs.run(workers, 1, [*here, "--ckpt-step", "6"])
    assert resumed.losses == whole.losses[6:]
    assert (tmp_path / TRACKER).read_text() == str(LAST)


@pytest.mark.parametrize(
    ("schedule", "rate"),
    [
        ((), 3e-3),
        (("--override-opt_param-scheduler", "--lr", "1e-3"), 1e-3),
        (("--use-checkpoint-opt_param-scheduler", "--lr", "1e-3"), 3e-3),
    ],
)
def test_without_the_optimizer_the_schedule_goes_on_from_its_position(
    workers: WorkerPool, flags: list[str], tmp_path: Path, schedule: tuple[str, ...], rate: float
) -> None:
    here = [*flags, *saving(tmp_path)]
    runs.run(workers, 1, [*here, "--exit-interval", "5"])
    position = read_common(tmp_path)["opt_param_scheduler"]["num_steps"]
    assert position == 5 * 8
    alone = runs.run(workers, 2, [*flags, "--load", str(tmp_path), "--no-load-optim", *schedule])
    rates = [r.learning_rate for r in alone.history.iterations]
    # Two iterations of warm-up, then a cosine over the other eight down to --min-lr.
    cosine = [0.5 * (1.0 + math.cos(math.pi * (i - 2) / (LAST - 2))) for i in range(5, LAST)]
    assert rates == pytest.approx([1e-4 + (rate - 1e-4) * c for c in cosine])
    assert alone.schedule["num_steps"] == LAST * 8
    assert alone.updates == LAST - 5, "moments begin anew, and so does their bias correction"


def convert_to(loader: str, source: Path, saver: str, target: Path) -> None:
    """Convert a checkpoint in ``source``."""
    places = ["--load-dir", str(source), "--save-dir", str(target)]
    words = ["--model-type", "GPT", "--loader", loader, "--saver", saver, *places]
    assert convert.main(words) == 0


@pytest.mark.parametrize("through", ["core", "torch_dist"])
def test_a_converted_checkpoint_is_evaluated_by_its_own_arguments(
    workers: WorkerPool, flags: list[str], tmp_path: Path, through: str
) -> None:
    split = flags.index("--split")
    data = ["--data-path", flags[split - 1], "--split", "8,2,0"]
    here = [*flags, "--split", "8,2,0", "--train-iters", "3", "--eval-interval", "3"]
    whole = runs.run(workers, 1, [*here, *saving(tmp_path / "flex")])
    convert_to("flex", tmp_path / "flex", through, tmp_path / "core")
    convert_to(through, tmp_path / "core", "flex", tmp_path / "back")
    model, saved = (read_common(tmp_path / name)["model"] for name in ("back", "flex"))
    assert model == saved
    assert model["vocab_size"] == runs.VOCABULARY + 1
    arguments = read_common(tmp_path / "back")["arguments"]
    assert arguments["tokenizer_type"] == "NullTokenizer"
    assert arguments["vocab_size"] == runs.VOCABULARY, "Megatron's flag leaves the end token out"
    words = [
        *runs.TRAINING, *data, "--train-iters", "3", "--distributed-backend", "gloo",
        "--num-workers", "0", "--use-checkpoint-args", "--load", str(tmp_path / "back"),
    ]  # fmt: skip
    evaluated = runs.run(workers, 2, [*words, "--skip-train"])
    last = whole.history.validations[-1]
    assert [v.samples for v in evaluated.history.validations] == [last.samples]
    assert_numbers_close(
        [tuple(v.losses.values()) for v in evaluated.history.validations],
        [tuple(last.losses.values())],
        3e-7,
        "losses",
    )
    # Training goes on from where it was, or anew.
    longer = [*words, "--train-iters", "5", "--override-opt_param-scheduler"]
    assert len(runs.run(workers, 2, longer).losses) == 2
    tuned = runs.run(workers, 2, [*words, "--finetune"])
    assert len(tuned.losses) == 3
