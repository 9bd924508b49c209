"""Attempts at a job: those of torchrun, which all workers must call alike, and one of our own.

The latter is suspend and resume: a switch of plans by way of a checkpoint and new processes. It is
what a job without live flexibility would do; here for comparison (``--flexpipe-switch restart``).
"""

from __future__ import annotations

import os
import secrets
import sys
import time
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    import torch.distributed as dist

AGREED = "MEGATRON_FLEX_JOB_ATTEMPT"
"""Environment variable with the number of torchrun's attempt, where several torchruns agreed."""

ATTEMPT = "MEGATRON_FLEX_ATTEMPT"
"""Environment variable that counts the restarts of this process, so that workers of one attempt do
not meet keys of an earlier one in the job's store."""


def attempt() -> str:
    """A name for this attempt at the job: restarts by torchrun, and by this module."""
    elastic = os.environ.get(AGREED) or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return f"attempt {elastic}.{os.environ.get(ATTEMPT, '0')}"


def several_torchruns() -> bool:
    """Whether torchruns on several servers start the workers, which have not agreed yet."""
    return int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1 and AGREED not in os.environ


def agree(store: dist.Store, rank: int, size: int, timeout: timedelta) -> int:
    """The number of this attempt, the same on all workers; all call this before anything else.

    A torchrun counts the failures of its own workers alone, so that after the first one
    ``TORCHELASTIC_RESTART_COUNT`` differs from server to server. The first worker counts for all.
    What earlier attempts left in the store is told apart by a word that each worker makes up: the
    first worker answers it with the number, and goes on when all have thanked for this number.

    Raises ``RuntimeError`` when a worker is missing.
    """
    if rank:
        word = secrets.token_hex(8)
        store.set(f"hello of {rank}", word)
        store.wait([f"attempt for {word}"], timeout)
        number = int(store.get(f"attempt for {word}"))
        store.set(f"thanks for {word}: {number}", "")
        return number
    number = store.add("attempts", 1) - 1
    answered = dict.fromkeys(range(1, size), "")
    deadline = time.monotonic() + timeout.total_seconds()
    while answered:
        for other, word in list(answered.items()):
            if word and store.check([f"thanks for {word}: {number}"]):
                del answered[other]
            elif store.check([f"hello of {other}"]):
                new = store.get(f"hello of {other}").decode()
                if new != word:
                    store.set(f"attempt for {new}", str(number))
                    answered[other] = new
        if time.monotonic() > deadline:
            raise RuntimeError(f"nothing from workers {', '.join(map(str, answered))}")
        time.sleep(0.01)
    return number


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
