"""What a worker is told to do: small frozen values with a text form.

The text form is the class name and its fields, ``Forward micro_batch=3 stage=1``; groups are
comma-separated, and a number that has a default is left out where it is that. :func:`parse` reads
it back. A :class:`Program` holds one list for each device.

In communication, ``stage`` is the stage that *produced* the tensor: an activation of stage s
travels to stage s+1, the gradient of stage s's input travels to stage s-1. ``tokens`` is the first
dimension of the message, so that both ends can check it before anything is posted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from megatron_flex.planner.plan import Plan


@dataclass(frozen=True, slots=True)
class Instruction:
    """Base of all instructions."""

    def __str__(self) -> str:
        words = [type(self).__name__]
        for entry in fields(self):
            value = getattr(self, entry.name)
            text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            if value != entry.default:
                words.append(f"{entry.name}={text}")
        return " ".join(words)


@dataclass(frozen=True, slots=True)
class Compute(Instruction):
    """Work of one micro-batch on one stage.

    It begins when all but the last ``under_way`` messages that the device has sent before are
    taken. Which work it is does not depend on that.
    """

    micro_batch: int
    stage: int
    under_way: int = field(default=0, compare=False)


class Forward(Compute):
    """Run the stage forward; keep what its backward needs."""

    __slots__ = ()


class Backward(Compute):
    """Whole backward: gradients of the input and of the weights."""

    __slots__ = ()


class BackwardInput(Compute):
    """First half of a split backward: the gradient of the input only."""

    __slots__ = ()


class BackwardWeight(Compute):
    """Second half of a split backward: the gradients of the weights."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Transfer(Instruction):
    """A message between two devices."""

    micro_batch: int
    stage: int
    peer: int
    tokens: int


class SendActivation(Transfer):
    """Send the output of ``stage`` to ``peer``, which runs stage + 1."""

    __slots__ = ()


class RecvActivation(Transfer):
    """Receive the output of ``stage`` from ``peer``."""

    __slots__ = ()


class SendGradient(Transfer):
    """Send the gradient of ``stage``'s input to ``peer``, which runs stage - 1."""

    __slots__ = ()


class RecvGradient(Transfer):
    """Receive the gradient of ``stage``'s input from ``peer``."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class ReduceGradient(Instruction):
    """Sum the gradient of a slab over its holders (at least two, ascending)."""

    slab: int
    group: tuple[int, ...]


class ScatterGradient(ReduceGradient):
    """Sum the gradient of a sharded slab; each holder gets the sum of its own part."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class SlabOp(Instruction):
    """Work on one slab."""

    slab: int


class SquaredNorm(SlabOp):
    """Squared norm of a slab's reduced gradient, by exactly one of its holders.

    After a :class:`ScatterGradient` by each of them, of its own part.
    """

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class GlobalNorm(Instruction):
    """Combine all squared norms and losses. The one point where all devices wait."""


class UpdateOrSkip(SlabOp):
    """Clip and apply the optimizer to a slab, or skip if the global norm is not finite.

    Of a sharded slab to this device's own part; after a :class:`Recut` to the new one.
    """

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class GatherParameters(SlabOp):
    """Begin to gather the parameters of a sharded slab from its holders, after the update.

    Whatever uses the slab next waits for it.
    """

    group: tuple[int, ...]


class Drop(SlabOp):
    """Free a slab: this device does not hold it in the next plan."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class StateOp(SlabOp):
    """Weights and optimizer state of a slab on their way to a device that will hold it."""

    peer: int


class SendState(StateOp):
    """Begin to send a slab's state to ``peer``. An update of the slab waits until it has left."""

    __slots__ = ()


class RecvState(StateOp):
    """Make room for a slab and begin to receive its state from ``peer``.

    Whatever uses the slab next waits for it. From here on this device takes part in the slab's
    reduction, if the program says so, with a gradient of zero.
    """

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Recut(SlabOp):
    """Make room for the optimizer state of elements ``[start, stop)`` of a slab.

    They are this device's part under the next plan. What it owns of them already is copied, the
    rest comes in pieces. Its present part stays until the update, for others may need pieces of it.
    """

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class PieceOp(SlabOp):
    """Master weights and moments of elements ``[start, stop)`` of a slab on their way."""

    peer: int
    start: int
    stop: int


class SendPiece(PieceOp):
    """Begin to send a piece of this device's present part of a slab."""

    __slots__ = ()


class RecvPiece(PieceOp):
    """Begin to receive a piece of the part that a :class:`Recut` made room for."""

    __slots__ = ()


NAMES: dict[str, type[Instruction]] = {
    c.__name__: c
    for c in (
        Forward, Backward, BackwardInput, BackwardWeight,
        SendActivation, RecvActivation, SendGradient, RecvGradient,
        ReduceGradient, ScatterGradient, SquaredNorm, GlobalNorm, UpdateOrSkip, GatherParameters,
        SendState, RecvState, Recut, SendPiece, RecvPiece, Drop,
    )
}  # fmt: skip


def parse(text: str) -> Instruction:
    """Read one instruction's text form; ``ValueError`` says what is wrong."""
    name, *words = text.split()
    cls = NAMES.get(name)
    if cls is None:
        raise ValueError(f"unknown instruction '{name}' in '{text}'")
    given: dict[str, Any] = {}
    for word in words:
        key, _, value = word.partition("=")
        given[key] = tuple(map(int, value.split(","))) if key == "group" else int(value)
    known = {f.name for f in fields(cls)}
    if not {f.name for f in fields(cls) if f.default is MISSING} <= set(given) <= known:
        raise ValueError(f"'{text}': {name} takes {sorted(known)}, got {sorted(given)}")
    return cls(**given)


@dataclass(frozen=True)
class Program:
    """What all devices do in one iteration.

    Attributes:
        plan: the layout that it runs on.
        tokens: tokens of each micro-batch.
        route: ``route[stage][micro_batch]`` is the device that runs it.
        instructions: one list a device, for devices ``0 .. world_size - 1``; idle devices still
            take part in ``GlobalNorm``. Where the scheduler wrote them they are words
            (:class:`~megatron_flex.schedule.compact.Lists`), which are decoded on access.
        next_plan: the layout that it leaves behind; ``None``: the same.
        held: the layout that the devices are in when it begins, where some of ``plan``'s devices
            join their stages on the way (live migration); ``None``: ``plan``.
        elements: padded elements of every slab, where sharded optimizer state is cut anew.
        chains: micro-batches that hold the slices of one sample, in order.
    """

    plan: Plan
    tokens: tuple[int, ...]
    route: tuple[tuple[int, ...], ...]
    instructions: Sequence[tuple[Instruction, ...]]
    next_plan: Plan | None = None
    held: Plan | None = None
    elements: tuple[int, ...] = ()
    chains: tuple[tuple[int, ...], ...] = ()
