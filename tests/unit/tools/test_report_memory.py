"""tools/report_memory.py: tables of bytes for a model, a plan and lengths."""

from __future__ import annotations

import json

import pytest

from tools.report_memory import main

PLAN = "0:12@0 | 12:23@1 | 23:34@2,3"
BATCH = ["--lengths", "2560", "300", "120", "90"]
MANY = ["--mock-samples", "32"]


def reports(capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, dict[str, object]]:
    assert main(["--plan", PLAN, *MANY, "--json", *more]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return {line["name"]: line for line in lines}


def peaks(report: dict[str, object]) -> list[float]:
    devices = report["devices"]
    assert isinstance(devices, list)
    return [row["most"] for row in devices]


def test_each_optimisation_takes_less_than_none(capsys: pytest.CaptureFixture[str]) -> None:
    found = reports(capsys, "--compare")
    none = peaks(found.pop("none"))
    assert len(none) == 4
    for name, report in found.items():
        less = peaks(report)
        assert all(a <= b for a, b in zip(less, none, strict=True)), name
        assert sum(less) < sum(none), name
    both = peaks(found["recompute all, optimizer on the host"])
    assert sum(both) < sum(peaks(found["optimizer on the host"]))


def test_only_replicas_split_their_optimizer_state(capsys: pytest.CaptureFixture[str]) -> None:
    found = reports(capsys, "--compare")
    none, split = peaks(found["none"]), peaks(found["optimizer sharded"])
    assert split[:2] == none[:2]
    assert split[2:] < none[2:]
    assert found["optimizer sharded"]["plan"] == f"{PLAN} ; shard 23-33"
    assert main(["--stages", "2", *MANY, "--json", "--compare"]) == 0
    assert "sharded" not in capsys.readouterr().out


def test_slabs_are_16_or_18_bytes_a_parameter(capsys: pytest.CaptureFixture[str]) -> None:
    slabs = {}
    for flag in ((), ("--float32",)):
        (report,) = reports(capsys, *flag).values()
        devices = report["devices"]
        assert isinstance(devices, list)
        slabs[flag] = sum(row["slabs"] for row in devices)
    assert slabs[("--float32",)] == pytest.approx(slabs[()] * 16 / 18, rel=1e-3)


def test_the_tables_name_devices_over_the_budget(capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--micro-batch-tokens", "4096", "--budget-gb", "22"]
    assert main(["--plan", PLAN, *BATCH, *more]) == 0
    text = capsys.readouterr().out
    assert "3,428,130,816 parameters in bfloat16; 1 micro-batches of 3070 to 3070 tokens" in text
    assert text.count("GB over the budget") >= 1
    assert "attention" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--plan", "0:3@0"], "covers 3 units, the model has 34"),
        (["--stages", "3", "--devices", "4"], "4 devices are no multiple of --stages 3"),
        (["--stages", "2", "--model", "gpt-9"], "gpt-9"),
        (["--stages", "0"], "--stages must be at least 1"),
        (["--stages", "2", "--devices", "-2"], "--devices must be at least 1"),
        (["--stages", "2", "--budget-gb", "nan"], "--budget-gb must be a finite number above 0"),
    ],
)
def test_what_cannot_be_is_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, *BATCH]) == 1
    assert message in capsys.readouterr().err
