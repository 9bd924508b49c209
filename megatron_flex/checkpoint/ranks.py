"""Exchanges between the ranks of a process group in which an error of one reaches all.

Each wait has a time-out of its own, independent of the group's, because writing a checkpoint
to a slow disk may take far longer than any message of training. The exchange is built on
point-to-point messages (gloo's collectives accept no time-out of their own and do not say
which rank was missing): all ranks send to the first, which answers all.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron_flex.checkpoint.errors import CheckpointError, describe

T = TypeVar("T")

DEFAULT_TIMEOUT = 1800.0
"""Seconds that one rank waits for the slowest other."""

_GRACE = 5.0  # seconds: the first rank gives up first, so that its message names the culprit


@dataclass(frozen=True)
class Ranks:
    """The ranks that save or load together.

    ``group`` is a gloo group that nothing else uses meanwhile, or ``None`` for a process of
    its own. ``timeout`` is in seconds and holds for each single wait.
    """

    group: dist.ProcessGroup | None
    timeout: float = DEFAULT_TIMEOUT

    def __post_init__(self) -> None:
        if self.group is not None and dist.get_backend(self.group) != "gloo":
            raise CheckpointError(
                f"checkpoints need a gloo group, not {dist.get_backend(self.group)}: create one"
                " with new_group(backend='gloo')"
            )

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return 0 if self.group is None else dist.get_rank(self.group)

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return 1 if self.group is None else dist.get_world_size(self.group)

    def gather(self, step: str, fn: Callable[[], T]) -> list[T] | None:
        """Call ``fn`` on all ranks; the first rank receives the results, the others ``None``.

        Results must be JSON values. When ``fn`` raises on any rank, all ranks raise
        :class:`CheckpointError` that says ``step``, the rank and its error. ``step`` completes
        "while ...".
        """
        mine, cause = _attempt(fn)
        results: list[T] | None = None

        def verdict(everyone: list[Any]) -> Any:
            nonlocal results
            failed = {r: e["error"] for r, e in enumerate(everyone) if "error" in e}
            if failed:
                return {"error": _failure(step, failed, self.size)}
            results = [e["value"] for e in everyone]
            return {}

        reply = self._exchange(step, mine, verdict)
        if "error" in reply:
            raise CheckpointError(reply["error"]) from cause
        return results

    def from_first(self, step: str, fn: Callable[[], T]) -> T:
        """Call ``fn`` on the first rank; all ranks receive its result, or its error."""

        cause: Exception | None = None

        def verdict(_: list[Any]) -> Any:
            nonlocal cause
            answer, cause = _attempt(fn)
            return answer

        reply = self._exchange(step, {}, verdict)
        if "error" in reply:
            raise CheckpointError(_failure(step, {0: reply["error"]}, self.size)) from cause
        value: T = reply["value"]
        return value

    def _exchange(self, step: str, mine: Any, verdict: Callable[[list[Any]], Any]) -> Any:
        """Send ``mine`` to the first rank, which answers all with ``verdict(all messages)``."""
        if self.group is None or self.size == 1:
            return verdict([mine])
        if self.rank != 0:
            self._send(step, 0, mine, self.timeout + _GRACE)
            return self._receive(step, 0, self.timeout + _GRACE)
        deadline = time.monotonic() + self.timeout
        everyone, lost = [mine], {}
        for peer in range(1, self.size):
            try:
                left = max(0.1, deadline - time.monotonic())
                everyone.append(self._receive(step, peer, left))
            except CheckpointError as error:
                lost[peer] = error
        # The ranks that are still there learn at once that another is not.
        reply = {"error": str(next(iter(lost.values())))} if lost else verdict(everyone)
        for peer in sorted({*range(1, self.size)} - lost.keys()):
            try:
                self._send(step, peer, reply, _GRACE)
            except CheckpointError as error:
                lost[peer] = error
        if lost:
            raise next(iter(lost.values()))
        return reply

    def _send(self, step: str, peer: int, message: Any, timeout: float) -> None:
        data = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8)
        length = torch.tensor([data.numel()], dtype=torch.int64)
        for part in (length, data):
            self._wait(step, peer, timeout, dist.isend, part, group_dst=peer)

    def _receive(self, step: str, peer: int, timeout: float) -> Any:
        length = torch.zeros(1, dtype=torch.int64)
        self._wait(step, peer, timeout, dist.irecv, length, group_src=peer)
        data = torch.empty(int(length), dtype=torch.uint8)
        self._wait(step, peer, timeout, dist.irecv, data, group_src=peer)
        return json.loads(data.numpy().tobytes())

    def _wait(
        self,
        step: str,
        peer: int,
        timeout: float,
        operation: Callable[..., dist.Work | None],
        part: torch.Tensor,
        **peers: int,
    ) -> None:
        start = time.monotonic()
        try:
            work = operation(part, group=self.group, **peers)
            if work is None:
                raise CheckpointError(f"while {step}: this process is not in the group")
            work.wait(timedelta(seconds=timeout))
        except CheckpointError:
            raise
        except RuntimeError as error:
            waited = time.monotonic() - start
            if waited >= timeout - 0.05:
                raise CheckpointError(
                    f"while {step}: rank {peer} did not answer within {timeout:.0f} s; it is"
                    " stuck or its disk is slow (raise the time-out of checkpoints)"
                ) from error
            raise CheckpointError(
                f"while {step}: lost rank {peer} after {waited:.1f} s; its own message says why"
            ) from error


def _attempt(fn: Callable[[], T]) -> tuple[dict[str, Any], Exception | None]:
    try:
        return {"value": fn()}, None
    except Exception as error:  # whatever it is, the other ranks must learn of it
        return {"error": describe(error)}, error


def _failure(step: str, failed: dict[int, str], size: int) -> str:
    first = min(failed)
    where = "" if size == 1 else f"rank {first}: "
    same = [r for r in failed if r != first]
    more = f" (and {len(same)} other rank{'s' if len(same) > 1 else ''} failed)" if same else ""
    return f"while {step}: {where}{failed[first]}{more}"
