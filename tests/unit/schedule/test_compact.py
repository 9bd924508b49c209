"""Instruction lists as words: read back exactly, or refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from megatron_flex.schedule.compact import CODES, Lists, begins, decode, encode
from megatron_flex.schedule.instructions import (
    NAMES,
    Forward,
    Instruction,
    Recut,
    RecvPiece,
    SendPiece,
    SendState,
)
from tests.unit.schedule.strategies import Case, cases


@given(cases(devices=8, batches=16))
def test_every_program_is_read_back_exactly(case: Case) -> None:
    program = case.build().program
    steps = tuple(program.instructions)
    again = Lists.of(steps, program.tokens)
    assert again == steps
    assert isinstance(program.instructions, Lists)
    assert np.array_equal(again.words, program.instructions.words)
    assert np.array_equal(again.offset, program.instructions.offset)
    assert again.groups == program.instructions.groups


def test_ranges_of_elements_are_read_back() -> None:
    steps: list[Instruction] = [
        Recut(5, 32, 1 << 40), SendPiece(5, 3, 0, 64), Forward(2, 1), RecvPiece(1, 900, 32, 96),
        SendState(7, 1023),
    ]  # fmt: skip
    words = encode(steps, ())
    assert decode(words, (1, 2, 3), ()) == tuple(steps)
    assert begins(words).tolist() == [0, 3, 6, 7, 10]


def test_numbers_that_have_no_room_are_refused() -> None:
    with pytest.raises(ValueError, match="micro_batch must be between 0 and 1048575"):
        encode([Forward(1 << 20, 0)], ())
    with pytest.raises(ValueError, match="peer"):
        encode([SendState(1, -1)], ())


def test_words_that_are_no_program_are_refused() -> None:
    for words in ([63], [CODES[NAMES["Recut"]], 5]):
        with pytest.raises(ValueError, match="word 0 of a program"):
            decode(np.array(words, dtype=np.uint64), (), ())
