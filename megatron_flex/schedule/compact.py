"""Instruction lists as numbers: what is sent to a worker, and what native code reads.

An instruction is one 64-bit word, from its lowest bit on: 6 bits of operation code, 18 of stage or
slab, 20 of peer, group (an index into the program's list of groups) or messages under way, 20 of
micro-batch. Ranges of elements follow in two more words. The sizes of messages are those of the
micro-batches, which both ends know. The text form (:mod:`text`) is for people.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from functools import lru_cache
from typing import overload

import numpy as np
from numpy.typing import NDArray

from megatron_flex.schedule.instructions import (
    NAMES,
    Compute,
    GatherParameters,
    GlobalNorm,
    Instruction,
    PieceOp,
    Recut,
    RecvPiece,
    ReduceGradient,
    SendPiece,
    StateOp,
    Transfer,
)

VERSION = 2
"""Of the words' form; a worker refuses another."""
CODES: dict[type[Instruction], int] = {cls: code for code, cls in enumerate(NAMES.values())}
"""Operation codes: the place in :data:`~megatron_flex.schedule.instructions.NAMES`."""
_CLASSES = tuple(NAMES.values())
_COMPUTES = sum(issubclass(cls, Compute) for cls in _CLASSES)  # they are the first
_MOST = {
    "stage": 1 << 18, "slab": 1 << 18, "peer": 1 << 20, "under_way": 1 << 20,
    "micro_batch": 1 << 20,
}  # fmt: skip

_RANGED = tuple(CODES[cls] for cls in (Recut, SendPiece, RecvPiece))

Words = NDArray[np.uint64]
Integers = NDArray[np.int64]
Group = tuple[int, ...]
Steps = tuple[Instruction, ...]


def groups_of(lists: Iterable[Sequence[Instruction]]) -> tuple[Group, ...]:
    """The sets of devices that reduce gradients or gather parameters together, in a fixed order."""
    if isinstance(lists, Lists):
        return lists.groups
    collective = (ReduceGradient, GatherParameters)
    found = {op.group for steps in lists for op in steps if isinstance(op, collective)}
    return tuple(sorted(found))


def encode(
    instructions: Sequence[Instruction], groups: Sequence[Group], *, clipped: bool = False
) -> Words:
    """The words of one list.

    Args:
        clipped: a number that is too large for its bits, or negative, becomes the largest there is,
            which no program uses; else it is a ``ValueError``.
    """
    index = {group: i for i, group in enumerate(groups)}
    words: list[int] = []
    for op in instructions:

        def bits(name: str, op: Instruction = op) -> int:
            value, most = int(getattr(op, name, 0)), _MOST[name]
            if 0 <= value < most:
                return value
            if clipped:
                return most - 1
            raise ValueError(f"'{op}': {name} must be between 0 and {most - 1}")

        low = bits("stage" if isinstance(op, Compute | Transfer) else "slab")
        group = op.group if isinstance(op, ReduceGradient | GatherParameters) else None
        number = "under_way" if isinstance(op, Compute) else "peer"
        middle = bits(number) if group is None else index[group]
        words.append(CODES[type(op)] | low << 6 | middle << 24 | bits("micro_batch") << 44)
        if isinstance(op, Recut | PieceOp):
            words += [op.start % (1 << 64), op.stop % (1 << 64)]
    return np.array(words, dtype=np.uint64)


def decode(words: Words, tokens: Sequence[int], groups: Sequence[Group]) -> tuple[Instruction, ...]:
    """The instructions of one list.

    Args:
        tokens: of each micro-batch.
        groups: of the program.

    Raises ``ValueError`` for words that no program has.
    """
    listed, codes = words.tolist(), (words & np.uint64(63)).tolist()
    lows = ((words >> np.uint64(6)) & np.uint64(0x3FFFF)).tolist()
    middles = ((words >> np.uint64(24)) & np.uint64(0xFFFFF)).tolist()
    highs = (words >> np.uint64(44)).tolist()
    out: list[Instruction] = []
    at, end = 0, len(codes)
    try:
        while at < end:
            code = codes[at]
            if code < _COMPUTES:
                out.append(_operation(listed[at]))
                at += 1
                continue
            read = _READERS[code]
            if read is not None:
                out.append(read(lows[at], middles[at], highs[at], tokens, groups))
                at += 1
                continue
            cls, slab = _CLASSES[code], lows[at]
            start, stop = listed[at + 1], listed[at + 2]
            if cls is Recut:
                out.append(Recut(slab, start, stop))
            else:
                out.append(cls(slab, middles[at], start, stop))
            at += 3
    except IndexError as error:
        raise ValueError(f"word {at} of a program is none of its instructions") from error
    return tuple(out)


@lru_cache(maxsize=1 << 14)
def _operation(word: int) -> Instruction:
    """What a word computes: the same words come in one program after the other."""
    make: Callable[..., Instruction] = _CLASSES[word & 63]
    return make(word >> 44, word >> 6 & 0x3FFFF, word >> 24 & 0xFFFFF)


_Reader = Callable[[int, int, int, Sequence[int], Sequence[Group]], Instruction]


def _reader(cls: type[Instruction]) -> _Reader | None:
    """How an instruction of one word that computes nothing is read; ``None``: it has more words."""
    make: Callable[..., Instruction] = cls
    names = {f.name for f in fields(cls)}
    if issubclass(cls, Transfer):
        return lambda low, middle, high, tokens, groups: make(high, low, middle, tokens[high])
    if "group" in names:
        return lambda low, middle, high, tokens, groups: make(low, groups[middle])
    if "start" in names:
        return None
    if issubclass(cls, StateOp):
        return lambda low, middle, high, tokens, groups: make(low, middle)
    if cls is GlobalNorm:
        return lambda low, middle, high, tokens, groups: make()
    return lambda low, middle, high, tokens, groups: make(low)


_READERS: tuple[_Reader | None, ...] = tuple(map(_reader, _CLASSES))


def offsets(lengths: Sequence[int] | Integers) -> Integers:
    """Where consecutive runs of these lengths begin, and the end of the last."""
    found = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=found[1:])
    return found


def rows(values: Iterable[Sequence[int] | Integers]) -> tuple[Integers, Integers]:
    """Sequences of different lengths as native code reads them: where each begins, and all."""
    parts = [np.asarray(value, dtype=np.int64) for value in values]
    return offsets(list(map(len, parts))), np.concatenate([np.zeros(0, np.int64), *parts])


class Lists(Sequence[Steps]):
    """Instruction lists of all devices as words; each is decoded when it is asked for.

    Attributes:
        words: of all devices, one list after the other.
        offset: that of a device is ``words[offset[device]:offset[device + 1]]``.
        groups: what reductions and gathers name by number.
        tokens: of each micro-batch.
    """

    def __init__(
        self, words: Words, offset: Integers, groups: Sequence[Group], tokens: Sequence[int]
    ) -> None:
        self.words, self.offset = words, offset
        self.groups, self.tokens = tuple(groups), tuple(tokens)
        self._decoded: dict[int, Steps] = {}

    @classmethod
    def of(cls, lists: Sequence[Steps], tokens: Sequence[int], *, clipped: bool = False) -> Lists:
        """Lists as words, if they are not already.

        Their messages have the sizes of the micro-batches then. ``clipped``: see :func:`encode`.
        """
        if isinstance(lists, cls):
            return lists
        groups = groups_of(lists)
        parts = [encode(steps, groups, clipped=clipped) for steps in lists]
        words = np.concatenate([np.zeros(0, np.uint64), *parts])
        return cls(words, offsets(list(map(len, parts))), groups, tokens)

    def of_device(self, device: int) -> Words:
        """The words of one device."""
        return self.words[self.offset[device] : self.offset[device + 1]]

    def __len__(self) -> int:
        return len(self.offset) - 1

    @overload
    def __getitem__(self, device: int) -> Steps: ...
    @overload
    def __getitem__(self, device: slice) -> tuple[Steps, ...]: ...
    def __getitem__(self, device: int | slice) -> Steps | tuple[Steps, ...]:
        if isinstance(device, slice):
            return tuple(self[d] for d in range(*device.indices(len(self))))
        place = range(len(self))[device]
        if place not in self._decoded:
            self._decoded[place] = decode(self.of_device(place), self.tokens, self.groups)
        return self._decoded[place]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Lists | tuple) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]


def begins(words: Words) -> Integers:
    """Where instructions begin among the words of one list: others are ranges of elements."""
    first = np.ones(len(words), dtype=bool)
    for at in np.flatnonzero(np.isin(words & np.uint64(63), _RANGED)).tolist():
        if first[at]:
            first[at + 1 : at + 3] = False
    return np.flatnonzero(first)
