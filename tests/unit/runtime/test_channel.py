"""In which order workers meet whose connections are made by both at once."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from megatron_flex.runtime.channel import meetings

PAIRS = list(combinations(range(6), 2))


@given(st.sets(st.sampled_from(PAIRS)))
def test_all_meet_whoever_meets_whom(pairs: set[tuple[int, int]]) -> None:
    waiting = {
        rank: meetings(rank, {a + b - rank for a, b in pairs if rank in (a, b)})
        for rank in range(6)
    }
    while any(waiting.values()):
        met = [(a, b) for a, b in PAIRS if waiting[a][:1] == [b] and waiting[b][:1] == [a]]
        assert met, f"all wait: {waiting}"
        for pair in met:
            for rank in pair:
                waiting[rank].pop(0)
