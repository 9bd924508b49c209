"""Who owns which part of a sharded slab, and which pieces travel when the parts are cut anew."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_flex.model.layers import LayerList
from megatron_flex.planner.plan import Plan
from megatron_flex.schedule.shards import (
    GRAIN,
    Range,
    cuts,
    even,
    missing,
    owners,
    sharded_slabs,
    share,
)
from megatron_flex.schedule.transition import Piece, transition
from tests.unit.schedule.strategies import SEEDS
from tests.unit.schedule.switches import random_switch

TIED, UNTIED = LayerList(3, tied=True), LayerList(3, tied=False)
ROWS = st.integers(0, 40).map(lambda rows: 1024 * rows)
DEGREES = st.integers(1, 70)


@given(ROWS, DEGREES)
def test_parts_follow_one_another_and_cover_the_slab(numel: int, degree: int) -> None:
    parts = [share(numel, degree, place) for place in range(degree)]
    assert parts[0][0] == 0
    assert parts[-1][1] == numel
    assert all(a[1] == b[0] for a, b in pairwise(parts))
    assert all(edge % GRAIN == 0 for part in parts for edge in part)


@given(ROWS, DEGREES)
def test_parts_are_equal_but_for_the_last_ones(numel: int, degree: int) -> None:
    sizes = [b - a for a, b in (share(numel, degree, place) for place in range(degree))]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - numel / degree < GRAIN
    assert even(numel, degree) is (len(set(sizes)) == 1)


def test_parts_in_numbers() -> None:
    assert [share(2048, 2, i) for i in range(2)] == [(0, 1024), (1024, 2048)]
    assert [share(1024, 3, i) for i in range(3)] == [(0, 352), (352, 704), (704, 1024)]
    assert not even(1024, 3)
    assert even(3072, 3)
    assert owners((2, 5), 2048, sharded=True) == {2: (0, 1024), 5: (1024, 2048)}
    assert owners((2, 5), 2048, sharded=False) == {2: (0, 2048), 5: (0, 2048)}


def test_missing_parts_in_numbers() -> None:
    assert missing((10, 20), None) == [(10, 20)]
    assert missing((10, 20), (0, 10)) == [(10, 20)]
    assert missing((10, 20), (12, 14)) == [(10, 12), (14, 20)]
    assert missing((10, 20), (5, 15)) == [(15, 20)]
    assert missing((10, 20), (0, 30)) == []
    assert missing((10, 10), None) == []


def test_only_named_slabs_of_several_holders_are_sharded() -> None:
    plan = Plan.parse("0:2@0,1 | 2:5@2 | 5:8@3,4 ; shard 1-3,7")
    assert sharded_slabs(plan, UNTIED) == {1, 7}
    assert sharded_slabs(Plan.parse("0:2@0,1 | 2:8@2"), UNTIED) == set()


@pytest.mark.parametrize(("units", "sharded"), [("0", {8}), ("0,1", {8}), ("7", set())])
def test_a_tied_embedding_goes_with_the_embedding(units: str, sharded: set[int]) -> None:
    # One device holds the embedding's own slab, two hold the tied one.
    assert sharded_slabs(Plan.parse(f"0:3@0 | 3:8@1 ; shard {units}"), TIED) == sharded


ELEMENTS = (4096,) * 8


def pieces(before: str, after: str, server_size: int = 8) -> tuple[Piece, ...]:
    plans = Plan.parse(before), Plan.parse(after)
    switch = transition(*plans, UNTIED, elements=ELEMENTS, server_size=server_size)
    assert not switch.moves
    return switch.pieces


def test_turning_sharding_on_needs_no_messages() -> None:
    assert pieces("0:8@0,1", "0:8@0,1 ; shard 0-7") == ()


def test_turning_it_off_sends_to_each_what_it_lacks() -> None:
    got = pieces("0:8@0,1 ; shard 3", "0:8@0,1")
    assert got == (Piece(3, 0, 2048, 4096, 1), Piece(3, 1, 0, 2048, 0))


def test_a_dropping_holders_part_goes_to_those_who_will_own_it() -> None:
    got = pieces("0:8@0-3 ; shard 3", "0:8@1,2 ; shard 3")
    of_slab = [p for p in got if p.slab == 3]
    assert of_slab == [
        Piece(3, 1, 0, 1024, 0),
        Piece(3, 2, 3072, 4096, 3),
    ]


def test_a_joiner_gets_its_part_only() -> None:
    switch = transition(
        Plan.parse("0:4@0,1 | 4:8@2 ; shard 0-7"),
        Plan.parse("0:4@0,1 | 4:8@2,3 ; shard 0-7"),
        UNTIED,
        elements=ELEMENTS,
    )
    assert switch.pieces == tuple(Piece(slab, 3, 2048, 4096, 2) for slab in range(4, 8))


def test_a_near_source_is_preferred() -> None:
    got = pieces("0:8@0,2 ; shard 0", "0:8@0,2,3 ; shard 0-7", server_size=2)
    assert {p.source for p in got if p.slab and p.target == 3} == {2}


def test_a_cut_without_the_sizes_of_slabs_is_refused() -> None:
    with pytest.raises(ValueError, match="give the number of elements of every slab"):
        transition(Plan.parse("0:8@0,1"), Plan.parse("0:8@0,1 ; shard 3"), UNTIED)


@given(SEEDS)
def test_pieces_are_exactly_what_is_lacking_from_those_who_have_it(seed: int) -> None:
    drawn = random_switch(seed, devices=8, batches=2, sharded=True)
    switch = drawn.switch
    anew = cuts(switch.plan, switch.next_plan, drawn.layers, switch.elements)
    assert not {m.slab for m in switch.moves} & anew.keys()
    assert list(switch.pieces) == sorted(switch.pieces)
    wanted = {
        (slab, device, x)
        for slab, cut in anew.items()
        for device, part in cut.after.items()
        for gap in missing(part, cut.before.get(device))
        for x in grains(gap)
    }
    got = [(p.slab, p.target, x) for p in switch.pieces for x in grains((p.start, p.stop))]
    assert len(got) == len(set(got))
    assert set(got) == wanted
    for p in switch.pieces:
        assert missing((p.start, p.stop), anew[p.slab].before[p.source]) == []


def grains(part: Range) -> range:
    return range(*part, GRAIN)
