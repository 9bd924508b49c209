"""What a run writes beside its checkpoints goes on where a resumed run does."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from megatron_flex.telemetry.jsonl import read
from tests.end_to_end import runs
from tests.end_to_end.processes import Job
from tests.unit.telemetry.test_tensorboard import series


def test_a_resumed_run_has_each_iteration_once_in_all_its_files(tmp_path: Path) -> None:
    data = runs.write_documents(tmp_path / "text")
    more = shlex.split(
        f"--data-path {data} --split 1,0,0 --save {tmp_path}/saved --load {tmp_path}/saved"
        f" --save-interval 2 --lr-decay-iters 9 --log-jsonl {tmp_path}/log.jsonl"
        f" --tensorboard-dir {tmp_path}/board --flexpipe-record {tmp_path}/plans"
        f" --flexpipe-trace {tmp_path}/trace.json --override-opt_param-scheduler"
    )
    flags = [*runs.MODEL, *runs.TRAINING, *more]
    for number, (size, steps) in enumerate([(2, ("5",)), (1, ("7", "--ckpt-step", "2"))]):
        with Job(tmp_path / f"job{number}").start(
            "pretrain_gpt.py", [*flags, "--train-iters", *steps], size=size
        ) as job:
            assert job.wait() == [0] * size, job.output
    assert "--log-jsonl: 3 records of iterations after 2" in job.output
    expected = list(range(1, 8))
    lines = read(tmp_path / "log.jsonl")
    order = [(o["event"], o["iteration"]) for o in lines]
    assert order[:3] == [("run", 0), ("iteration", 1), ("iteration", 2)]
    assert order[3:] == [("run", 2), *(("iteration", k) for k in range(3, 8))]
    losses = {o["iteration"]: o["lm loss"] for o in lines if o["event"] == "iteration"}
    found = series(tmp_path / "board")
    assert [step for step, _ in found["lm loss"]] == expected
    assert [step for step, _ in found["lm loss vs samples"]] == [8 * k for k in expected]
    for name in ("lm loss", "lm loss vs samples"):
        assert all(
            abs(value - losses[k]) < 1e-6 * losses[k] for k, (_, value) in enumerate(found[name], 1)
        )
    plans = (tmp_path / "plans").read_text().splitlines()
    assert [line.partition("#")[0].strip() for line in plans] == 2 * ["0:8@0,1"] + 5 * ["0:8@0"]
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    about = {
        e["args"]["iteration"]: e["args"]["plan"] for e in events if e.get("name") == "iteration"
    }
    assert about == {k: "0:8@0,1" if k <= 2 else "0:8@0" for k in expected}
    spans = {(e["args"]["iteration"], e["pid"]) for e in events if e.get("ph") == "X"}
    assert spans == {(1, 0), (1, 1), (2, 0), (2, 1), *((k, 0) for k in range(3, 8))}
    starts = [min(e["ts"] for e in events if e.get("ph") == "X" and e["args"]["iteration"] == k)
              for k in expected]  # fmt: skip
    assert starts == sorted(starts)
