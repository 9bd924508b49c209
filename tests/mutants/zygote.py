"""A process that has imported the large libraries already, and forks one that runs tests.

Importing them takes most of the time of a test that notices a fault. Nothing of the project is
imported here, so each fork sees the source as it is then. It reads JSON lines, ``{"arguments",
"output"}``, and answers each with two: the fork's process number, and its exit status when it ends.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from importlib import import_module

LIBRARIES = (
    "hypothesis",
    "matplotlib",
    "numpy",
    "psutil",
    "pytest",
    "tokenizers",
    "torch",
    "torch.distributed.checkpoint",
    "tqdm",
    "yaml",
    "megatron.core",
    "megatron.core.models.bert.bert_model",
    "megatron.core.models.gpt",
    "megatron.core.datasets.indexed_dataset",
    "megatron.core.optimizer_param_scheduler",
)


def main() -> None:
    """Serve until the input ends."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in LIBRARIES:
            import_module(name)
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            _become(job["output"])
            import pytest

            sys.exit(int(pytest.main(job["arguments"])))
        _say(child)
        _, status = os.waitpid(child, 0)
        _say(os.waitstatus_to_exitcode(status))


def _become(output: str) -> None:
    """A session of its own, whose output goes to a file."""
    os.setsid()
    sink = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    empty = os.open(os.devnull, os.O_RDONLY)
    for target, source in ((0, empty), (1, sink), (2, sink)):
        os.dup2(source, target)
    os.close(sink)
    os.close(empty)


def _say(number: int) -> None:
    print(json.dumps(number), flush=True)


if __name__ == "__main__":
    main()
