"""Records of a run that never was, with round numbers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TWO = "0:4@0 | 4:8@1 ; schedule 1f1b ; cut 64"
ONE = "0:8@0,1"
LAYOUTS = (TWO, TWO, ONE, ONE, TWO)


def iteration(k: int, **changes: Any) -> dict[str, Any]:
    """Iteration ``k``, which takes ten seconds for a hundred tokens."""
    found = {
        "event": "iteration",
        "iteration": k,
        "elapsed": 10.0,
        "lm loss": 9.0 - k,
        "learning_rate": 1e-3,
        "global_batch_size": 4,
        "tokens": 100,
        "plan": TWO,
        "bubble": 0.25,
        "seconds-to-norm": 8.0,
        "seconds-compute": 5.0,
        "seconds-balanced": 4.0,
        "seconds-receive": 1.0,
        "seconds-send": 0.25,
        "seconds-reduce": 0.5,
        "seconds-state": 0.25,
        "seconds-norm": 0.75,
        "seconds-update": 0.5,
        "seconds-program": 0.5,
        "memory-measured": 2000.0,
        "memory-predicted": 1900.0,
        "memory-by-worker": [2000, 1000],
        "length-quantiles": [10, 11, 15, 20, 30, 40, 50],
        "lengths": [10, 20, 20, 50],
        "time": 1000.0 + 10.0 * k,
    }
    found |= changes
    return {name: value for name, value in found.items() if value is not None}


def run_object(iteration: int = 0, **more: Any) -> dict[str, Any]:
    """What a run begins with, without a set-up."""
    return {"event": "run", "iteration": iteration, "workers": 2, "train_iters": 100,
            "parameters": 1234, "budget": 2500, "kind": "training", **more}  # fmt: skip


def write_log(path: Path, objects: Sequence[dict[str, Any]]) -> Path:
    """A file as ``--log-jsonl`` writes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(o)}\n" for o in objects))
    return path
