"""The demo, in little: every step of it, twice, and the commands that it suggests."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_flex.checkpoint.load import read_common, verify
from tests.end_to_end.processes import ROOT

SCRIPT = ROOT / "examples" / "demo.sh"


def demo(directory: Path, **settings: str) -> str:
    """Run the demo from elsewhere; what it printed."""
    # The venv's programs first, as `make demo` does it.
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "RUN": str(directory), **settings}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        environment.pop(name, None)
    done = subprocess.run(
        ["bash", str(SCRIPT)],
        cwd=directory.parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """The directory of a demo, and what its first and its second run printed."""
    directory = tmp_path_factory.mktemp("demo") / "run"
    first = demo(directory, ITERATIONS="12", PLAN="0:4@0,1 | 4:10@2", WORKERS="3")
    second = demo(directory, ITERATIONS="4", WORKERS="1")
    return directory, first, second


def test_the_demo_shows_the_loss_falling_and_says_where_everything_is(
    runs: tuple[Path, str, str],
) -> None:
    directory, printed, _ = runs
    losses = [float(x) for x in re.findall(r"iteration +\d+/ +12 \| lm loss: (\S+)", printed)]
    assert len(losses) == 2
    assert losses[1] < losses[0] - 0.2
    for begin in (
        " model: GPT with",
        " training data: ",
        " warning: cut: ",
        " this run: 12 iterations",
    ):
        assert f"\n{begin}" in printed
    for end in (" trained: 12 iterations", " checkpoint: iteration 12 in", " plans: 1"):
        assert f"\n{end}" in printed[printed.index("---- summary ----") :]
    assert printed.count(" | ETA: ") == 2
    warned = [line.partition(": ")[2] for line in printed.splitlines() if "warn" in line.lower()]
    assert [words.partition(":")[0] for words in warned] == ["cut"]
    assert len(printed.splitlines()) < 60
    names = ("report.html", "checkpoints", "log.jsonl", "tensorboard", "trace.json", "train.log")
    assert re.search(rf"^{directory}/report.html \(.* MB, .* s\)$", printed, re.M)
    for name in names:
        assert f"{directory}/{name}" in printed
        assert (directory / name).exists()
    assert list((directory / "tensorboard").glob("events.out.tfevents.*"))
    log = (directory / "train.log").read_text()
    assert "--- arguments ---" in log
    assert re.search(r"flexpipe_plan \.+ 0:4@0,1 \| 4:10@2", log)


def test_a_second_run_uses_what_is_there_and_trains_on(runs: tuple[Path, str, str]) -> None:
    directory, _, printed = runs
    for step in ("Collecting", "Training a tokenizer", "Tokenizing"):
        assert step not in printed
    assert "Training on from iteration 12 to 16 with 1 workers" in printed
    lines = [json.loads(line) for line in (directory / "log.jsonl").read_text().splitlines()]
    assert [x["iteration"] for x in lines if x["event"] == "iteration"] == list(range(1, 17))
    assert [(x["iteration"], x["workers"]) for x in lines if x["event"] == "run"] == [
        (0, 3), (12, 1)
    ]  # fmt: skip
    verify(directory / "checkpoints")
    assert read_common(directory / "checkpoints")["progress"]["iteration"] == 16


def test_what_the_demo_suggests_works_as_printed(runs: tuple[Path, str, str]) -> None:
    _, printed, _ = runs
    block = printed[printed.index("Try next") :]
    commands = [x.strip() for x in block.splitlines()[1:] if re.match(r"  \S", x)]
    assert len(commands) == 6
    for command in commands:
        words = shlex.split(command)
        if words[0] == "make":  # the script itself, with these settings: see the fixture
            assert words[1] == "demo"
            assert {x.partition("=")[0] for x in words[2:]} <= {"WORKERS", "PLAN"}
            assert re.search(rf"#   {re.escape(command)} ", SCRIPT.read_text())
            continue
        if words[0].endswith("tensorboard"):
            words.insert(1, "--inspect")  # reads the files, and ends
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        if "--inspect" in words:
            assert "lm loss" in done.stdout


def test_a_failed_training_is_not_reported_as_done(tmp_path: Path) -> None:
    (tmp_path / "run" / "data").mkdir(parents=True)
    for name in ("corpus.jsonl", "tokenizer.model", "stdlib_text_document.bin"):
        (tmp_path / "run" / "data" / name).write_text("not needed: the flags are wrong")
    (tmp_path / "run" / "data" / "stdlib_text_document.idx").write_text("nor this")
    with pytest.raises(AssertionError) as caught:
        demo(tmp_path / "run", WORKERS="1", PLAN="0:5@0 | 5:10@1")
    printed = str(caught.value)
    # The launcher's report is long, and ends with our message too.
    assert printed.count("names device 1, but there are 1 workers") >= 2
    assert "Training failed; the message above says why" in printed
    assert "== Done" not in printed
