"""Whether another worker is still there, for waits that would not notice its end by themselves.

A worker that waits for a message notices that its peer has ended: the connection closes. One that
waits for a peer to come to a new process group has no connection to it yet, but it has one in the
group of all workers, and sending over a closed connection fails at once.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

# Nothing else in that group is sent from one worker to another.
_TAG = 0x11FE


class Liveness:
    """Looks after the other workers of ``group``, a gloo group of all workers of the job.

    ``sharing`` workers are one device; those of this one's number in it are looked after.
    """

    def __init__(self, process: int, group: dist.ProcessGroup, sharing: int = 1) -> None:
        self._rank, self._index = divmod(process, sharing)
        self._sharing = sharing
        self._group = group
        # Nobody receives these; gloo needs their memory for as long as the group exists.
        self._sent: list[tuple[torch.Tensor, object]] = []

    def check(self, ranks: Iterable[int]) -> None:
        """Raise ``RuntimeError`` that names the first that is gone of the devices ``ranks``."""
        for device in ranks:
            if device == self._rank:
                continue
            peer = device * self._sharing + self._index
            byte = torch.zeros(1, dtype=torch.uint8)
            try:
                self._sent.append((byte, dist.isend(byte, peer, group=self._group, tag=_TAG)))
            except RuntimeError as error:
                raise RuntimeError(f"worker {peer} has ended: {error}") from error
