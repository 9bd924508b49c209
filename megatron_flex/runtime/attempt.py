"""Suspend and resume: a switch of plans by way of a checkpoint and new processes.

What a job without live flexibility would do; here for comparison (``--flexpipe-switch restart``).
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn

ATTEMPT = "MEGATRON_FLEX_ATTEMPT"
"""Environment variable that counts the restarts of this process, so that workers of one attempt do
not meet keys of an earlier one in the job's store."""


def attempt() -> str:
    """A name for this attempt at the job: restarts by torchrun, and by this module."""
    elastic = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return f"attempt {elastic}.{os.environ.get(ATTEMPT, '0')}"


def is_first_attempt() -> bool:
    """Whether no attempt at this job came before."""
    return attempt() == "attempt 0.0"


def restarts_are_left() -> bool:
    """Whether torchrun starts the workers again if one of them fails."""
    done, most = (
        int(os.environ.get(f"TORCHELASTIC_{name}", "0"))
        for name in ("RESTART_COUNT", "MAX_RESTARTS")
    )
    return done < most


def check_restartable() -> None:
    """Raise ``SystemExit`` unless the job's store outlives its workers."""
    alone = os.environ.get("WORLD_SIZE", "1") == "1"
    if not alone and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise SystemExit("--flexpipe-switch restart needs torchrun: it keeps the workers' meeting"
                         " point while they restart")  # fmt: skip


def restart(checkpoint_directory: str) -> NoReturn:
    """Start this process again from the newest checkpoint; all workers do so together."""
    environment = {**os.environ, ATTEMPT: str(int(os.environ.get(ATTEMPT, "0")) + 1)}
    sys.stdout.flush()
    sys.stderr.flush()
    words = [sys.executable, *sys.orig_argv[1:], "--load", checkpoint_directory]
    os.execve(sys.executable, words, environment)
