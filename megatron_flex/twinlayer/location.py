"""Where the manager of a job on this server is found: one socket for each job."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from megatron_flex.twinlayer.errors import TwinError

DIRECTORY = "MEGATRON_FLEX_RUNTIME_DIR"
"""Environment variable that puts the sockets elsewhere. Default: ``/tmp/megatron-flex-<uid>``."""


def runtime_directory() -> Path:
    """The directory of the sockets, mode 0700 and this user's own; made if it is not there.

    Raises :class:`TwinError` if others could reach into it.
    """
    path = Path(os.environ.get(DIRECTORY) or f"/tmp/megatron-flex-{os.getuid()}")
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.lstat()
    except OSError as error:
        raise TwinError(
            f"the directory {path} for the sockets of host copies cannot be made"
            f" ({error.strerror}): set {DIRECTORY} to another, or give --flexpipe-no-twin"
        ) from error
    own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    if not own or stat.S_IMODE(found.st_mode) & 0o077:
        raise TwinError(
            f"{path} must be a directory of this user's own with mode 0700: remove it, or set"
            f" {DIRECTORY} to another"
        )
    return path


def job_name(environment: Mapping[str, str]) -> str | None:
    """A name for this job that its restarts share and no other job at the same time has.

    From the launcher's run id and the workers' meeting point; ``None`` without a meeting point.
    """
    if "MASTER_ADDR" not in environment or "MASTER_PORT" not in environment:
        return None
    run = environment.get("TORCHELASTIC_RUN_ID") or environment.get("SLURM_JOB_ID") or "none"
    return f"{run} at {environment['MASTER_ADDR']}:{environment['MASTER_PORT']}"


def socket_of(job: str) -> Path:
    """The socket of a job's manager on this server."""
    return runtime_directory() / f"{hashlib.sha256(job.encode()).hexdigest()[:16]}.sock"


def sockets() -> list[Path]:
    """The sockets of all managers of this user on this server, dead ones included."""
    return sorted(p for p in runtime_directory().iterdir() if p.is_socket())
