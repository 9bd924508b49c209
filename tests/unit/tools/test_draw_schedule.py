"""Samples in slices, as they are drawn."""

from __future__ import annotations

import pytest

from tools.draw_schedule import make, parse_arguments, read_tokens


def test_a_sample_in_slices_is_a_chain() -> None:
    assert read_tokens("100,10/3,7") == ([100, 3, 3, 4, 7], [(1, 2, 3)])
    assert read_tokens("5/1,6") == ([5, 6], [])
    for wrong in ("5/0", "2/3"):
        with pytest.raises(ValueError, match="at least one slice"):
            read_tokens(wrong)
    for wrong in ("a/b", "/2", "900/", "900/1.5", "900/3/2", "900,,2", "nan", "1e3"):
        with pytest.raises(ValueError, match="not a number of tokens, such as 900, or 900/3"):
            read_tokens(wrong)


@pytest.mark.parametrize("name", ["1f1b", "seq1f1b", "zb", "zb-v", "best"])
def test_slices_are_scheduled_by_every_policy(name: str) -> None:
    words = ["--devices", "3", "--tokens", "900/5,100,200/2", "--schedule", name]
    placed = make(parse_arguments(words), name)
    assert placed.problem.chains == ((0, 1, 2, 3, 4), (6, 7))
    whole = make(parse_arguments([*words[:3], "900,100,200", *words[4:]]), name)
    # The unit of time is a mean micro-batch: of 150 and of 400 tokens.
    assert placed.makespan * 150 < 0.9 * whole.makespan * 400
