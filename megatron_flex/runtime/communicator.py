"""Point-to-point messages, with every size known before anything is posted.

Sends never block: the worker goes on, and the buffer is kept until the program says that the peer
has taken it. There the worker waits for that, so that what it has in use does not depend on time.
Activations and gradients are received ahead of their use, in program order, a bounded number at a
time, so that the peer's send completes while this worker still computes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

import torch

from megatron_flex.runtime.channel import Message
from megatron_flex.runtime.world import World, explain
from megatron_flex.schedule.instructions import (
    Instruction,
    RecvActivation,
    RecvGradient,
    Transfer,
)
from megatron_flex.schedule.residency import POSTED


class Communicator:
    """Sends and receives activations and gradients of shape ``[tokens, 1, hidden]``.

    Of the tokens that are here, where the workers of a device divide them.
    """

    def __init__(self, world: World, hidden_size: int, dtype: torch.dtype) -> None:
        self._world = world
        self._hidden = hidden_size
        self._dtype = dtype
        self._expected: deque[Transfer] = deque()
        self._posted: deque[tuple[Transfer, torch.Tensor, Message]] = deque()
        self._sent: deque[tuple[Transfer, torch.Tensor, Message]] = deque()
        self._divided = 0

    def expect(self, instructions: Iterable[Instruction], divided: int = 0) -> None:
        """Start an iteration whose receives are those among ``instructions``, in that order.

        ``divided``: see :attr:`~megatron_flex.schedule.part.Part.divided`.
        """
        self._divided = divided
        self._expected = deque(
            i for i in instructions if isinstance(i, (RecvActivation, RecvGradient))
        )
        self._post()

    def _post(self) -> None:
        while self._expected and len(self._posted) < POSTED:
            op = self._expected[0]
            assert self._world.pipeline is not None
            if self._world.pipeline.lazy and any(p.peer == op.peer for p, _, _ in self._posted):
                # One of NCCL would wait on the GPU behind the other, and what is launched after it
                # may wait for both.
                return
            self._expected.popleft()
            shape: tuple[int, ...] = self._shape(op)
            if self._divides(op):
                shape = (self._world.tensor.share_elements(math.prod(shape)),)
            buffer = torch.empty(shape, dtype=self._dtype, device=self._world.device)
            with explain(op, self._world):
                work = self._world.pipeline.receive(buffer, op.peer)
            self._posted.append((op, buffer, work))

    def _shape(self, op: Transfer) -> tuple[int, int, int]:
        return self._world.tensor.rows(op.tokens), 1, self._hidden

    def _divides(self, op: Transfer) -> bool:
        """Whether each worker of the device has a share of this message."""
        n = self._divided
        return n > 0 and op.peer // n != self._world.rank // n

    def send(self, op: Transfer, tensor: torch.Tensor) -> None:
        """Send ``tensor`` without waiting for the peer."""
        if tensor.shape != self._shape(op):
            raise ValueError(f"'{op}' would send a tensor of shape {tuple(tensor.shape)}")
        tensor = tensor.contiguous()
        if self._divides(op):
            tensor = self._world.tensor.share_of_message(tensor)
        assert self._world.pipeline is not None
        with explain(op, self._world):
            work = self._world.pipeline.send(tensor, op.peer)
        self._sent.append((op, tensor, work))

    def delivered(self, under_way: int = 0) -> None:
        """Wait until all but the last ``under_way`` messages are taken, and let go of them.

        NCCL's messages are only looked at: the host does not wait for a GPU.
        """
        looks = self._world.pipeline is not None and self._world.pipeline.lazy
        while len(self._sent) > under_way and (not looks or self._sent[0][2].is_completed()):
            self._wait()

    def _wait(self) -> None:
        op, _, work = self._sent.popleft()
        with explain(op, self._world):
            work.wait(self._world.timeout)

    def receive(self, op: Transfer) -> torch.Tensor:
        """Wait for the message that ``op`` names."""
        posted, buffer, work = self._posted.popleft()
        if posted != op:
            raise ValueError(f"'{op}' is due, but '{posted}' was posted first")
        with explain(op, self._world):
            work.wait(self._world.timeout)
        self._post()
        if self._divides(op):
            buffer = self._world.tensor.whole_message(buffer, self._shape(op))
        return buffer

    def finish(self) -> None:
        """End an iteration: wait until every message is delivered."""
        while self._sent:
            self._wait()
        if self._posted or self._expected:
            raise ValueError(f"a receive was never used: {[str(p[0]) for p in self._posted]}")
