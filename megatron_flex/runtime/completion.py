"""Whether the job has ended well already: a worker that dies at its very end starts nothing anew.

A launcher starts all workers again when one has died, also when it died after the job's last
meeting, between the end of training and the end of its process. What it was to do is done then,
and host copies may be gone. So workers leave a mark in the launcher's store, which outlives them.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from megatron_flex.runtime.attempt import is_first_attempt

if TYPE_CHECKING:
    import torch.distributed as dist


class Completion:
    """The mark of a job that has ended well.

    Args:
        store: a client of the launcher's store, the same for all attempts; ``None`` where it ends
            with a worker, and nobody starts workers again.
    """

    def __init__(self, store: dist.Store | None) -> None:
        self._store = store
        self._key = f"run {os.environ.get('TORCHELASTIC_RUN_ID', 'none')} has ended well"

    def reached(self) -> bool:
        """Whether an earlier attempt at this job left the mark; the same on all workers."""
        if self._store is None or is_first_attempt():
            return False
        return bool(self._store.check([self._key]))

    def mark(self) -> None:
        """Leave the mark. All workers have done what they were to do, and all call this."""
        if self._store is None:
            return
        try:
            self._store.set(self._key, "yes")
        except RuntimeError:  # the launcher is gone: nobody starts this job again
            pass
