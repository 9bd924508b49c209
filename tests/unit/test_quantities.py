"""Sizes, counts and times in words."""

from __future__ import annotations

import pytest

from megatron_flex.quantities import count, duration, size


@pytest.mark.parametrize(
    ("number", "text"),
    [(12, "12 bytes"), (7800, "7.8 kB"), (45.64e6, "45.6 MB"), (1.234e9, "1.23 GB")],
)
def test_sizes(number: float, text: str) -> None:
    assert size(number) == text


@pytest.mark.parametrize(
    ("number", "text"), [(12345, "12,345"), (1.234e6, "1.23 million"), (2.5e9, "2.50 billion")]
)
def test_counts(number: float, text: str) -> None:
    assert count(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1, "0 s"), (45.4, "45 s"), (59.6, "1 min 0 s"), (725, "12 min 5 s"), (12000, "3 h 20 min"),
     (183600, "2 d 3 h")],
)  # fmt: skip
def test_times(seconds: float, text: str) -> None:
    assert duration(seconds) == text
