"""What a worker takes from the environment before it meets the others."""

from __future__ import annotations

import pytest

from megatron_flex.runtime.launch import _threads


@pytest.mark.parametrize(("words", "threads"), [("4", 4), ("3,2", 3), ("", 1), ("all", 1)])
def test_threads_are_those_of_the_outermost_level(words: str, threads: int) -> None:
    assert _threads({"OMP_NUM_THREADS": words}) == threads
