"""When each instruction of an iteration ran on this device: for bubbles, stalls and traces."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch

from megatron_flex.schedule.instructions import (
    Compute,
    Forward,
    Instruction,
    RecvActivation,
    UpdateOrSkip,
)

RECEIVE = ("RecvActivation", "RecvGradient")
SEND = ("SendActivation", "SendGradient")
REDUCE = ("ReduceGradient", "ScatterGradient", "SquaredNorm")
UPDATE = ("UpdateOrSkip", "GatherParameters")
STATE = ("SendState", "RecvState", "Recut", "SendPiece", "RecvPiece", "Drop")
"""Kinds of instructions whose time is told apart in :class:`Measured`."""


@dataclass(frozen=True)
class Span:
    """One instruction, in seconds of the machine's monotonic clock (the same for all workers of a
    server)."""

    instruction: Instruction
    start: float
    stop: float


@dataclass(frozen=True)
class Measured:
    """One device's times in an iteration, in seconds, and its memory, in bytes.

    Attributes:
        gap: from the last update of the iteration before to the first operation of this one, less
            the wait for its input from the stage before, and with the waits of operations for state
            that arrives late; 0 for a device without work in either.
        busy: computing (forward and backward).
        elapsed: from the first instruction to the global norm.
        memory: peak bytes in use on the device, from the updates of the iteration before to the
            global norm of this one; 0 where nothing counts them.
        predicted: what ``memory`` was predicted to be; 0 without a prediction.
        receive: waiting for activations and gradients of other stages: until they were made, and
            until they were here. This and the following are 0 on CUDA, where the host's times say
            nothing.
        send: handing over activations and gradients, and waiting until peers have taken them.
        reduce: starting gradient reductions, waiting for them, and the norms.
        state: handling state that moves for a switch, and operations waiting for it.
        update: optimizer updates of the iteration before (those of this one are yet to come).
        reading: the device's own way to its first instruction: receiving and reading its list,
            posting its first receives.
    """

    gap: float
    busy: float
    elapsed: float
    memory: float = 0.0
    predicted: float = 0.0
    receive: float = 0.0
    send: float = 0.0
    reduce: float = 0.0
    state: float = 0.0
    update: float = 0.0
    reading: float = 0.0


@dataclass
class Clock:
    """Times of one worker. On CUDA host times say nothing, so compute is timed by events there.

    ``ended``: when the last update was done, on the machine's monotonic clock, later by the time of
    evaluations since. ``spans`` are of training only.
    """

    device: torch.device
    trace: bool = False
    spans: list[Span] = field(default_factory=list)
    ended: float | None = None
    _began: float = 0.0
    _first: float | None = None
    _busy: float = 0.0
    _input: float = 0.0  # waiting for the input of the first operation
    _state: float = 0.0  # operations waiting for state
    _reading: float = 0.0  # its list, and what comes before the first instruction
    _events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)
    _open: torch.cuda.Event | None = None
    _spent: dict[str, float] = field(default_factory=dict)  # by kind of instruction
    _updates: float = 0.0  # of the iteration before
    _paused: float | None = None  # when evaluations after it began

    def begin(self, *, training: bool = True) -> None:
        """An iteration begins, or an evaluation, whose time is no part of any gap."""
        self._began = time.perf_counter()
        if training:
            self._updates = self._sum(UPDATE)
            self._spent.clear()
            if self._paused is not None and self.ended is not None:
                self.ended += self._began - self._paused
            self._paused = None
        else:
            self._spent = {kind: self._spent.get(kind, 0.0) for kind in UPDATE}
            self._paused = self._began if self._paused is None else self._paused
        self._first = None
        self._busy = self._input = self._state = 0.0
        self._events.clear()

    def ready_to_run(self, read: float) -> None:
        """The first instruction is next; ``read``: seconds that it took to get the list."""
        self._reading = read + time.perf_counter() - self._began

    def start(self, instruction: Instruction) -> float:
        """An instruction starts; give the result to :meth:`stop`."""
        if isinstance(instruction, Compute) and self.device.type == "cuda":
            self._open = torch.cuda.Event(enable_timing=True)
            self._open.record()
        return time.perf_counter()

    def stop(self, instruction: Instruction, started: float) -> None:
        """The instruction that started at ``started`` is done."""
        now = time.perf_counter()
        if isinstance(instruction, Compute):
            if self._first is None and isinstance(instruction, Forward):
                self._first = started
            if self._open is not None:
                end = torch.cuda.Event(enable_timing=True)
                end.record()
                self._events.append((self._open, end))
                self._open = None
            else:
                self._busy += now - started
        else:
            kind = type(instruction).__name__
            self._spent[kind] = self._spent.get(kind, 0.0) + now - started
            if isinstance(instruction, UpdateOrSkip):
                self.ended = now
            elif isinstance(instruction, RecvActivation) and self._first is None:
                self._input += now - started
        if self.trace and self._paused is None:
            self.spans.append(Span(instruction, started, now))

    def delivered(self, seconds: float) -> None:
        """Before an operation, messages were waited for that peers had not taken."""
        self._spent["SendActivation"] = self._spent.get("SendActivation", 0.0) + seconds

    def waited(self, seconds: float) -> None:
        """An operation waited for state before it computed."""
        self._state += seconds

    @property
    def ready(self) -> float | None:
        """When the first operation began, were it not for its input; later by waits for state."""
        return None if self._first is None else self._first - self._input + self._state

    def measured(self) -> Measured:
        """Times so far in this iteration; on CUDA only after a synchronisation."""
        busy = self._busy + sum(a.elapsed_time(b) for a, b in self._events) / 1000.0
        ready = self.ready
        gap = 0.0 if ready is None or self.ended is None else max(0.0, ready - self.ended)
        elapsed = time.perf_counter() - self._began
        if self.device.type == "cuda":
            return Measured(gap, busy, elapsed)
        return Measured(
            gap,
            busy - self._state,
            elapsed,
            receive=self._sum(RECEIVE),
            send=self._sum(SEND),
            reduce=self._sum(REDUCE),
            state=self._sum(STATE) + self._state,
            update=self._updates,
            reading=self._reading,
        )

    def _sum(self, kinds: tuple[str, ...]) -> float:
        """Seconds of the instructions of some kinds in this iteration."""
        return sum(self._spent.get(kind, 0.0) for kind in kinds)
