"""From one plan to the next: who sends which slab to whom, and what the program makes of it."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_flex.model.layers import LayerList
from megatron_flex.planner.plan import Plan, PlanError
from megatron_flex.schedule.costs import OpCosts
from megatron_flex.schedule.instructions import (
    Drop,
    GlobalNorm,
    RecvState,
    ReduceGradient,
    SendState,
    SquaredNorm,
    UpdateOrSkip,
)
from megatron_flex.schedule.text import dumps, loads
from megatron_flex.schedule.transition import Move, Transition, transition
from tests.unit.schedule.building import build
from tests.unit.schedule.strategies import SEEDS
from tests.unit.schedule.switches import SwitchCase, find, holders, random_switch

TIED, UNTIED = LayerList(3, tied=True), LayerList(3, tied=False)
SWITCHES = SEEDS.map(lambda seed: random_switch(seed, devices=8, batches=8))


def moves(before: str, after: str, layers: LayerList = UNTIED, **options: object) -> Transition:
    return transition(Plan.parse(before), Plan.parse(after), layers, **options)  # type: ignore[arg-type]


# -- which slabs move --------------------------------------------------------------------------


@given(SWITCHES)
def test_a_device_gets_exactly_what_it_lacks_and_drops_exactly_what_it_does_not_need(
    drawn: SwitchCase,
) -> None:
    switch, layers = drawn.switch, drawn.layers
    before, after = holders(switch.plan, layers), holders(switch.next_plan, layers)
    assert len(switch.drops) == layers.num_slabs
    assert Counter((m.slab, m.target) for m in switch.moves) == Counter(
        (s, d) for s in range(layers.num_slabs) for d in after[s] - before[s]
    )
    for move in switch.moves:
        assert move.source in before[move.slab]
    for slab, dropped in enumerate(switch.drops):
        assert set(dropped) == before[slab] - after[slab]
        assert dropped == tuple(sorted(set(dropped)))


@given(SWITCHES)
def test_moves_are_in_one_order_and_early_ones_are_of_joiners(drawn: SwitchCase) -> None:
    switch = drawn.switch
    assert list(switch.moves) == sorted(switch.moves, key=lambda m: (m.slab, m.target))
    expected: dict[int, list[int]] = {}
    for move in switch.moves:
        if move.early:
            expected.setdefault(move.slab, []).append(move.target)
    assert switch.joiners == {slab: tuple(targets) for slab, targets in expected.items()}


def test_the_same_plan_moves_and_drops_nothing() -> None:
    switch = moves("0:4@0,1 | 4:8@2", "0:4@0,1 | 4:8@2", TIED)
    assert switch.moves == ()
    assert set(switch.drops) == {()}


def test_growing_out_of_replicas_moves_nothing() -> None:
    switch = moves("0:8@0,1", "0:4@0 | 4:8@1")
    assert switch.moves == ()
    assert switch.drops == ((1,),) * 4 + ((0,),) * 4


def test_shrinking_fills_each_device_from_the_other() -> None:
    switch = moves("0:4@0 | 4:8@1", "0:8@0,1")
    assert switch.moves == tuple(
        [Move(slab, 1, 0) for slab in range(4)] + [Move(slab, 0, 1) for slab in range(4, 8)]
    )
    assert set(switch.drops) == {()}


def test_migrating_moves_the_layers_between_the_boundaries() -> None:
    switch = moves("0:4@0 | 4:8@1", "0:6@0 | 6:8@1")
    assert switch.moves == (Move(4, 0, 1), Move(5, 0, 1))
    assert switch.drops == ((),) * 4 + ((1,), (1,), (), ())


def test_the_tied_embedding_moves_only_where_neither_embedding_nor_head_was() -> None:
    tied = TIED.tied_slab
    assert tied is not None
    switch = moves("0:4@0 | 4:8@1", "0:4@1 | 4:8@0", TIED)
    assert tied not in {m.slab for m in switch.moves}
    assert switch.drops[tied] == ()
    switch = moves("0:4@0 | 4:8@1", "0:4@0 | 4:7@1 | 7:8@2", TIED)
    assert [m for m in switch.moves if m.slab == tied] == [Move(tied, 2, 0)]
    assert switch.drops[tied] == (1,)


# -- who sends ---------------------------------------------------------------------------------


def test_equal_slabs_are_sent_in_turn_by_all_holders() -> None:
    switch = moves("0:8@0,1,2", "0:8@0,1,2,3")
    assert Counter(m.source for m in switch.moves) == {0: 3, 1: 3, 2: 2}


def test_sending_is_spread_by_bytes() -> None:
    sizes = [10.0, 1, 1, 1, 1, 1, 1, 1]
    switch = moves("0:8@0,1", "0:8@0,1,2", sizes=sizes)
    assert [m.source for m in switch.moves] == [0] + [1] * 7


@given(SWITCHES, st.integers(1, 4))
def test_a_source_on_the_same_server_is_preferred(drawn: SwitchCase, server: int) -> None:
    layers = drawn.layers
    switch = transition(drawn.switch.plan, drawn.switch.next_plan, layers, server_size=server)
    before = holders(switch.plan, layers)
    for move in switch.moves:
        near = {d for d in before[move.slab] if d // server == move.target // server}
        assert not near or move.source in near


def test_two_servers_each_fill_their_own_joiner() -> None:
    switch = moves("0:8@0,2", "0:8@0,1,2,3", server_size=2)
    assert {(m.target, m.source) for m in switch.moves} == {(1, 0), (3, 2)}


def test_late_pairs_are_handed_over_and_the_others_join_early() -> None:
    late = frozenset({(4, 0), (5, 1)})  # (5, 1) does not move
    switch = moves("0:4@0 | 4:8@1", "0:6@0 | 6:8@1", late=late)
    assert switch.moves == (Move(4, 0, 1, early=False), Move(5, 0, 1, early=True))
    assert switch.joiners == {5: (0,)}
    everything = moves("0:4@0 | 4:8@1", "0:6@0 | 6:8@1", late=None)
    assert everything.joiners == {}
    assert everything.moves == (Move(4, 0, 1, early=False), Move(5, 0, 1, early=False))


# -- what the program makes of it --------------------------------------------------------------


def program(switch: Transition, layers: LayerList = UNTIED, world_size: int = 3):  # type: ignore[no-untyped-def]
    costs = OpCosts.uniform(len(switch.plan.stages), 2)
    return build(switch.plan, layers, costs, (5, 7), world_size=world_size, switch=switch).program


def test_an_early_joiner_reduces_with_the_holders_and_updates() -> None:
    built = program(moves("0:4@0 | 4:8@1", "0:5@0 | 5:8@1"))
    assert find(built, SendState)[:2] == (1, 0)
    assert find(built, RecvState) == (0, 0, RecvState(4, 1))
    for device in (0, 1):
        assert find(built, ReduceGradient, on=device)[2] == ReduceGradient(4, (0, 1))
    assert find(built, SquaredNorm, slab=4)[0] == 0
    assert find(built, UpdateOrSkip, slab=4)[0] == 0
    with pytest.raises(IndexError):  # who drops it does not update it
        find(built, UpdateOrSkip, slab=4, on=1)
    assert built.instructions[1][-1] == Drop(4)
    assert built.next_plan == Plan.parse("0:5@0 | 5:8@1")


def test_a_hand_over_follows_the_update_and_comes_before_the_drop() -> None:
    built = program(moves("0:4@0 | 4:8@1", "0:5@0 | 5:8@1", late=None))
    steps = built.instructions[1]
    at = steps.index(GlobalNorm())
    # What another device waits for is updated first.
    assert steps[at + 1] == UpdateOrSkip(4)
    assert steps[-2:] == (SendState(4, 0), Drop(4))
    steps = built.instructions[0]
    assert steps[-1] == RecvState(4, 1)
    assert not [s for s in steps if isinstance(s, ReduceGradient)]
    assert UpdateOrSkip(4) not in steps


def test_what_goes_makes_room_before_what_comes_and_what_is_sent_goes_last() -> None:
    # Device 1 is handed slab 3 and gives up 7, which nobody waits for; device 0 sends 3 on.
    built = program(moves("0:4@0 | 4:7@1 | 7:8@1,2", "0:3@0 | 3:7@1 | 7:8@2", late=None))
    steps = built.instructions[1]
    assert steps[steps.index(GlobalNorm()) + 1 :] == (
        *map(UpdateOrSkip, (4, 5, 6)), Drop(7), RecvState(3, 0),
    )  # fmt: skip
    assert built.instructions[0][-2:] == (SendState(3, 1), Drop(3))


def test_an_idle_device_that_joins_reduces_too() -> None:
    built = program(moves("0:8@0", "0:4@0 | 4:8@2"))
    names = [type(s).__name__ for s in built.instructions[2]]
    assert names == [
        *["RecvState"] * 4, *["ReduceGradient"] * 4, "GlobalNorm", *["UpdateOrSkip"] * 4
    ]  # fmt: skip
    assert built.instructions[1] == (GlobalNorm(),)


def test_a_switch_that_starts_elsewhere_or_leads_nowhere_is_refused() -> None:
    switch = moves("0:4@0 | 4:8@1", "0:8@0")
    costs = OpCosts.uniform(1, 2)
    with pytest.raises(ValueError, match=r"the switch starts from '0:4@0 \| 4:8@1'"):
        build(Plan.parse("0:8@0"), UNTIED, costs, (5, 7), world_size=2, switch=switch)
    far = moves("0:8@0", "0:8@5")
    with pytest.raises(PlanError, match="names device 5, but there are 2 workers"):
        build(Plan.parse("0:8@0"), UNTIED, costs, (5, 7), world_size=2, switch=far)
    with pytest.raises(ValueError, match="covers 4 units, the model has 8"):
        moves("0:8@0", "0:4@0")


@given(SWITCHES)
def test_a_program_that_switches_round_trips_as_text(drawn: SwitchCase) -> None:
    built = drawn.build()
    assert built.next_plan is not None
    assert loads(dumps(built)) == built


def test_the_text_names_the_next_plan_and_refuses_a_broken_one() -> None:
    text = dumps(program(moves("0:4@0 | 4:8@1", "0:5@0 | 5:8@1")))
    lines = text.splitlines()
    assert lines[5:8] == ["next 0:5@0 | 5:8@1", "device 0", "  RecvState slab=4 peer=1"]
    with pytest.raises(ValueError, match=r"line 6.*must start at unit 0"):
        loads(text.replace("next 0:5", "next 1:5"))
