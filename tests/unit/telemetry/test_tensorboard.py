"""TensorBoard files."""

from __future__ import annotations

import importlib
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_flex.telemetry.interval import Interval
from megatron_flex.telemetry.scalars import ScalarOptions
from megatron_flex.telemetry.sink import TelemetryError
from megatron_flex.telemetry.tensorboard import TensorBoardSink
from tests.unit.telemetry.records import completion, record, validation

EVENTS = "tensorboard.backend.event_processing.event_accumulator"
PLAIN = {"learning-rate", "batch-size", "lm loss", "loss-scale", "grad-norm"}


def series(directory: Path) -> dict[str, list[tuple[int, float]]]:
    events: Any = importlib.import_module(EVENTS).EventAccumulator(str(directory))
    events.Reload()
    return {
        tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }


def test_the_series_are_megatrons(tmp_path: Path) -> None:
    sink = TensorBoardSink(str(tmp_path), ScalarOptions(world_size=4), log_interval=2)
    for k in range(1, 5):
        sink.iteration(record(k, losses={"lm loss": float(k)}))
    sink.validation(validation(4))
    sink.validation(validation(4, test=True))
    sink.close()
    found = series(tmp_path)
    assert set(found) == {
        *PLAIN,
        *(f"{name} vs samples" for name in PLAIN),
        "lm loss validation",
        "lm loss validation vs samples",
        "tokens",
        "tokens-per-second",
    }
    assert found["lm loss"] == [(2, 2.0), (4, 4.0)]
    assert found["lm loss vs samples"] == [(32, 2.0), (64, 4.0)]
    assert found["lm loss validation"] == [(4, 2.0)]


def test_lengths_and_memory_are_histograms(tmp_path: Path) -> None:
    lists = {"lengths": [10, 10, 500], "memory-by-worker": [7, 7], "length-quantiles": [1] * 7}
    sink = TensorBoardSink(str(tmp_path), ScalarOptions(world_size=2), log_interval=2)
    for k in range(1, 5):
        sink.iteration(record(k, lists=lists))
    sink.close()
    sink = TensorBoardSink(str(tmp_path), ScalarOptions(world_size=2), start=(2, 32))
    sink.close()  # a resumed run takes back iteration 4's
    events: Any = importlib.import_module(EVENTS).EventAccumulator(str(tmp_path))
    events.Reload()
    assert set(events.Tags()["histograms"]) == {"lengths", "memory-by-worker"}
    (lengths,), (memory,) = (events.Histograms(n) for n in ("lengths", "memory-by-worker"))
    assert (lengths.step, memory.step) == (2, 2)
    found = lengths.histogram_value
    assert (found.min, found.max, found.num, found.sum) == (10, 500, 3, 520)
    assert sum(found.bucket) == 3
    assert memory.histogram_value.num == 2


def test_optional_series_are_written_when_asked_for(tmp_path: Path) -> None:
    options = ScalarOptions(
        world_size=4,
        log_loss_scale=False,
        log_validation_ppl=True,
        log_memory=True,
        log_world_size=True,
        log_timers=True,
    )
    r = record(
        1,
        num_zeros=3,
        params_norm=9.0,
        memory={"mem-resident-bytes": 7.0},
        extra={"bubble": 0.5},
    )
    summary = Interval(1, 4, 1e13).add(r)
    assert summary is not None
    sink = TensorBoardSink(str(tmp_path), options)
    sink.iteration(r)
    sink.interval(summary)
    sink.validation(validation(1))
    sink.close()
    found = series(tmp_path)
    values = {name: rows[0][1] for name, rows in found.items() if "vs samples" not in name}
    assert values == pytest.approx(
        {
            "learning-rate": 1e-3,
            "batch-size": 16,
            "lm loss": 4.0,
            "world-size": 4,
            "grad-norm": 1.25,
            "num-zeros": 3,
            "params-norm": 9.0,
            "mem-resident-bytes": 7.0,
            "tokens": 1000,
            "bubble": 0.5,
            "iteration-time": 0.5,
            "throughput": 1.0,
            "tokens-per-second": 2000.0,
            "padding": 0.0,
            "mfu": 10.0,
            "lm loss validation": 2.0,
            "lm loss validation ppl": 7.389056,
        }
    )
    assert found["lm loss validation ppl vs samples"][0][0] == 16
    assert "num-zeros vs samples" in found


def test_a_missing_package_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(TelemetryError, match="--tensorboard-dir needs the tensorboard package"):
        TensorBoardSink("x", ScalarOptions(world_size=1))


def test_a_directory_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TelemetryError, match=r"--tensorboard-dir .* cannot be written"):
        TensorBoardSink(str(tmp_path / "file" / "runs"), ScalarOptions(world_size=1))


def test_each_new_plan_is_a_text_and_its_stages_a_number(tmp_path: Path) -> None:
    sink = TensorBoardSink(str(tmp_path), ScalarOptions(world_size=4))
    for k, plan in enumerate(["0:8@0", "0:8@0", "0:4@0 | 4:8@1 ; recompute 1"], 1):
        sink.iteration(record(k, plan=plan))
    sink.close()
    assert series(tmp_path)["stages"] == [(1, 1.0), (2, 1.0), (3, 2.0)]
    events: Any = importlib.import_module(EVENTS).EventAccumulator(str(tmp_path))
    events.Reload()
    texts = [
        (e.step, e.tensor_proto.string_val[0].decode()) for e in events.Tensors("plan/text_summary")
    ]
    assert texts == [(1, "`0:8@0`"), (3, "`0:4@0 | 4:8@1 ; recompute 1`")]


@pytest.mark.parametrize("resumed", [3, 5])
def test_a_resumed_run_leaves_one_point_a_step(tmp_path: Path, resumed: int) -> None:
    options = ScalarOptions(world_size=4)

    def write(first: int, last: int, loss: float) -> TensorBoardSink:
        start = (first - 1, 16 * (first - 1))
        sink = TensorBoardSink(str(tmp_path), options, start=start)
        for k in range(first, last + 1):
            sink.iteration(record(k, losses={"lm loss": loss}, plan="0:8@0"))
        sink.validation(validation(last))
        sink.close()
        return sink

    write(1, 5, 1.0)
    torn = next(tmp_path.iterdir())
    torn.write_bytes(torn.read_bytes()[:-7])  # as a killed process leaves it
    sink = write(resumed + 1, 7, 2.0)
    assert (sink.notice is None) == (resumed == 5)
    found = series(tmp_path)
    losses = [1.0] * resumed + [2.0] * (7 - resumed)
    assert found["lm loss"] == list(zip(range(1, 8), losses, strict=True))
    assert found["lm loss vs samples"] == list(zip(range(16, 113, 16), losses, strict=True))
    assert found["stages"] == [(k, 1.0) for k in range(1, 8)]
    assert found["lm loss validation"] == ([(5, 2.0)] if resumed == 5 else []) + [(7, 2.0)]


def test_a_run_that_starts_anew_keeps_the_curves_of_earlier_ones(tmp_path: Path) -> None:
    (tmp_path / "events.out.tfevents.1.theirs").write_bytes(b"of another program")
    for loss in (1.0, 2.0, 3.0):
        sink = TensorBoardSink(str(tmp_path), ScalarOptions(world_size=1))
        sink.iteration(record(1, losses={"lm loss": loss}))
        sink.close()
    assert (
        sink.notice
        == f"--tensorboard-dir: the files of an earlier run are now in {tmp_path}/earlier"
    )
    (tmp_path / "events.out.tfevents.1.theirs").rename(tmp_path / "theirs")
    found = [series(tmp_path / name)["lm loss"] for name in ("earlier.1", "earlier", ".")]
    assert found == [[(1, 1.0)], [(1, 2.0)], [(1, 3.0)]]
    assert (tmp_path / "theirs").read_bytes() == b"of another program"


def test_a_clock_that_was_set_back_changes_no_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    for k, ago in enumerate((0, 3600, 3600, 1800), 1):
        monkeypatch.setattr(time, "time", lambda ago=ago: now - ago)
        sink = TensorBoardSink(str(tmp_path), ScalarOptions(world_size=1), start=(k, 16 * k))
        sink.iteration(record(k))
        sink.close()
        newest = max(tmp_path.glob("events*"), key=lambda path: path.stat().st_mtime_ns)
        assert newest == max(tmp_path.glob("events*"))
    assert [step for step, _ in series(tmp_path)["lm loss"]] == [1, 2, 3, 4]


def test_what_a_log_line_has_said_is_written(tmp_path: Path) -> None:
    sink = TensorBoardSink(str(tmp_path), ScalarOptions(world_size=1))
    interval = Interval(2, 1, None)
    for k in (1, 2, 3):
        sink.iteration(record(k))
        summary = interval.add(record(k))
        if k == 2:
            assert summary is not None
            sink.interval(summary)
    assert [step for step, _ in series(tmp_path)["lm loss"]] == [1, 2]  # as if it were killed
    sink.close()
    assert [step for step, _ in series(tmp_path)["lm loss"]] == [1, 2, 3]


def test_completions_are_texts_of_which_nothing_is_markup(tmp_path: Path) -> None:
    sink = TensorBoardSink(str(tmp_path), ScalarOptions(world_size=4))
    for k in (2, 4):
        sink.completions([completion(k), completion(k, completion="# no heading")])
    sink.close()
    events: Any = importlib.import_module(EVENTS).EventAccumulator(str(tmp_path))
    events.Reload()
    tags = ["completions/1/text_summary", "completions/2/text_summary"]
    assert sorted(events.Tags()["tensors"]) == tags
    found = events.Tensors(tags[0])
    assert [e.step for e in found] == [2, 4]
    text = found[0].tensor_proto.string_val[0].decode()
    assert text == "prompt:\n\n    def f(\n\ncompletion:\n\n    x):\n      pass"
