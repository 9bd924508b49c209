"""Instruction lists as numbers: what is sent to a worker, and what native code reads.

An instruction is one 64-bit word, from its lowest bit on: 6 bits of operation code, 18 of stage or
slab, 20 of peer or group (an index into the program's list of groups), 20 of micro-batch. Ranges
of elements follow in two more words. The sizes of messages are those of the micro-batches, which
both ends know. The text form (:mod:`text`) is for people.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields

import numpy as np
from numpy.typing import NDArray

from megatron_flex.schedule.instructions import (
    NAMES,
    Compute,
    GatherParameters,
    GlobalNorm,
    Instruction,
    PieceOp,
    Program,
    Recut,
    ReduceGradient,
    SlabOp,
    StateOp,
    Transfer,
)

VERSION = 1
"""Of the words' form; a worker refuses another."""
CODES: dict[type[Instruction], int] = {cls: code for code, cls in enumerate(NAMES.values())}
"""Operation codes: the place in :data:`~megatron_flex.schedule.instructions.NAMES`."""
_CLASSES = tuple(NAMES.values())
_MOST = {"stage": 1 << 18, "slab": 1 << 18, "peer": 1 << 20, "micro_batch": 1 << 20}

Words = NDArray[np.uint64]
Group = tuple[int, ...]


def groups_of(lists: Iterable[Sequence[Instruction]]) -> tuple[Group, ...]:
    """The sets of devices that reduce gradients or gather parameters together, in a fixed order."""
    collective = (ReduceGradient, GatherParameters)
    found = {op.group for steps in lists for op in steps if isinstance(op, collective)}
    return tuple(sorted(found))


def encode(instructions: Sequence[Instruction], groups: Sequence[Group]) -> Words:
    """The words of one list. ``ValueError`` where a number is too large for its bits."""
    index = {group: i for i, group in enumerate(groups)}
    words: list[int] = []
    for op in instructions:
        for name, most in _MOST.items():
            if not 0 <= getattr(op, name, 0) < most:
                raise ValueError(f"'{op}': {name} must be between 0 and {most - 1}")
        low, middle, high = 0, 0, 0
        if isinstance(op, Compute | Transfer):
            low, high = op.stage, op.micro_batch
            middle = op.peer if isinstance(op, Transfer) else 0
        elif isinstance(op, ReduceGradient | GatherParameters):
            low, middle = op.slab, index[op.group]
        elif isinstance(op, SlabOp):
            low = op.slab
            middle = op.peer if isinstance(op, StateOp | PieceOp) else 0
        words.append(CODES[type(op)] | low << 6 | middle << 24 | high << 44)
        if isinstance(op, Recut | PieceOp):
            words += [op.start, op.stop]
    return np.array(words, dtype=np.uint64)


def decode(words: Words, tokens: Sequence[int], groups: Sequence[Group]) -> tuple[Instruction, ...]:
    """The instructions of one list.

    Args:
        tokens: of each micro-batch.
        groups: of the program.

    Raises ``ValueError`` for words that no program has.
    """
    codes = (words & np.uint64(63)).tolist()
    lows = ((words >> np.uint64(6)) & np.uint64(0x3FFFF)).tolist()
    middles = ((words >> np.uint64(24)) & np.uint64(0xFFFFF)).tolist()
    highs = (words >> np.uint64(44)).tolist()
    out: list[Instruction] = []
    at, end = 0, len(codes)
    try:
        while at < end:
            code = codes[at]
            read = _READERS[code]
            if read is not None:
                out.append(read(lows[at], middles[at], highs[at], tokens, groups))
                at += 1
                continue
            cls, slab = _CLASSES[code], lows[at]
            start, stop = int(words[at + 1]), int(words[at + 2])
            if cls is Recut:
                out.append(Recut(slab, start, stop))
            else:
                out.append(cls(slab, middles[at], start, stop))
            at += 3
    except IndexError as error:
        raise ValueError(f"word {at} of a program is none of its instructions") from error
    return tuple(out)


_Reader = Callable[[int, int, int, Sequence[int], Sequence[Group]], Instruction]


def _reader(cls: type[Instruction]) -> _Reader | None:
    """How an instruction of one word is read; ``None`` for those with more words."""
    make: Callable[..., Instruction] = cls
    names = {f.name for f in fields(cls)}
    if issubclass(cls, Compute):
        return lambda low, middle, high, tokens, groups: make(high, low)
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


def program_words(program: Program) -> tuple[tuple[Words, ...], tuple[Group, ...]]:
    """The words of all lists of a program, and its groups."""
    groups = groups_of(program.instructions)
    return tuple(encode(steps, groups) for steps in program.instructions), groups
