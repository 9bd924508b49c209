"""What switches cost."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_flex.planner.plan import Plan
from megatron_flex.planner.switching import (
    CHUNK_OVERHEAD,
    DISK_BYTES_PER_SECOND,
    GROUP_SETUP,
    RESTART,
    LiveSwitches,
    Running,
    Way,
    arrivals,
    restart_seconds,
    switch,
    travelling,
)
from megatron_flex.schedule.slabs import slab_holders
from megatron_flex.schedule.transition import transition
from tests.unit.planner.instances_real import random_plan, small_planner

PLANNER = small_planner(8)
COSTS = PLANNER.units
UNITS = COSTS.num_elements


def running(plan: Plan, spare: float = 80e9, seconds: float = 1.0) -> Running:
    return Running(plan, seconds, (spare,) * 8)


@given(st.integers(0, 10**6), st.sampled_from([0.0, 3e8, 80e9]))
def test_every_new_holder_receives_each_slab_once_from_an_old_holder(
    seed: int, spare: float
) -> None:
    r = np.random.default_rng(seed)
    old, new = (random_plan(r, UNITS, 8) for _ in range(2))
    priced = switch(COSTS, running(old, spare), new)
    before, after = slab_holders(old, COSTS.layers), slab_holders(new, COSTS.layers)
    expected = {
        (slab, device)
        for slab, (a, b) in enumerate(zip(before, after, strict=True))
        for device in b
        if device not in a
    }
    assert len(priced.moves) == len(expected)
    assert {(m.slab, m.device) for m in priced.moves} == expected
    for move in priced.moves:
        assert move.source in before[move.slab]
        assert move.size == travelling(COSTS, move.slab, len(after[move.slab]))
        same = COSTS.cluster.server_of(move.device)
        nearer = [d for d in before[move.slab] if COSTS.cluster.server_of(d) == same]
        assert not nearer or COSTS.cluster.server_of(move.source) == same
    sizes = [travelling(COSTS, slab, 1) for slab in range(COSTS.layers.num_slabs)]
    per_server = COSTS.cluster.devices_per_server
    executed = transition(old, new, COSTS.layers, sizes=sizes, server_size=per_server)
    sent = [(m.slab, m.target, m.source) for m in executed.moves]
    assert [(m.slab, m.device, m.source) for m in priced.moves] == sent
    for device in range(COSTS.cluster.world_size):
        own = (m.size for m in priced.moves if (m.device, m.way) == (device, Way.JOIN_EARLY))
        assert sum(own) <= spare
    assert priced.seconds >= 0.0
    fast = LiveSwitches(COSTS).price(running(old, spare), new)
    assert (fast.seconds, fast.moved) == pytest.approx((priced.seconds, priced.moved))


def test_growing_drops_and_moves_nothing() -> None:
    priced = switch(COSTS, running(Plan.parse("0:14@0-7")), Plan.parse("0:7@0-3 | 7:14@4-7"))
    assert priced.moves == ()
    assert priced.seconds == 0.0


def test_shrinking_joins_early_behind_the_iteration_where_memory_allows() -> None:
    old, new = Plan.parse("0:7@0-3 | 7:14@4-7"), Plan.parse("0:14@0-7")
    hidden = switch(COSTS, running(old), new)
    assert {m.way for m in hidden.moves} == {Way.JOIN_EARLY}
    assert hidden.seconds == 0.0
    short = switch(COSTS, running(old, seconds=0.001), new)
    assert short.drag > 0.0
    assert short.stall == 0.0
    full = switch(COSTS, running(old, spare=0.0), new)
    assert {m.way for m in full.moves} == {Way.HAND_OVER}
    assert full.stall > 0.0


def test_ways_of_switching_are_ordered_as_in_the_paper() -> None:
    old, new = Plan.parse("0:7@0-3 | 7:14@4-7"), Plan.parse("0:10@0-3 | 10:14@4-7")
    live, handover, stall, restart = (
        switch(COSTS, running(old), new, mode).seconds
        for mode in ("live", "handover", "stall", "restart")
    )
    assert live < handover < stall < restart
    # Units 7 to 9 go from devices 4-7 to devices 0-3 on the other server, each on a link of its
    # own; the network of a server is shared by its four devices, which fill it.
    sizes = [travelling(COSTS, slab, 4) for slab in (7, 8, 9)]
    host, inter = COSTS.host, COSTS.cluster.inter
    through = sum(map(host.seconds, sizes))
    network = max(
        sum(map(inter.seconds, sizes)),
        4 * sum(sizes) / (inter.bytes_per_second * COSTS.cluster.devices_per_server),
    )
    assert live == pytest.approx(max(0.0, network - COSTS.options.travel * 1.0))
    assert handover == pytest.approx(CHUNK_OVERHEAD * max(through, network))
    assert stall == pytest.approx(through + network + through + GROUP_SETUP)
    state = [COSTS.slab_state(slab) for slab in range(COSTS.layers.num_slabs)]
    kept = sum(s.parameters + s.optimizer for s in state)
    assert restart == restart_seconds(COSTS)
    assert restart == pytest.approx(RESTART + 2 * kept / (2 * DISK_BYTES_PER_SECOND))


def test_crossing_servers_costs_more_than_staying_inside() -> None:
    old = Plan.parse("0:7@0,1 | 7:14@2,3")
    inside = switch(COSTS, running(old, spare=0.0), Plan.parse("0:9@0,1 | 9:14@2,3"))
    across = switch(COSTS, running(old, spare=0.0), Plan.parse("0:7@0,1 | 7:14@4,5"))
    assert inside.stall / inside.moved < across.stall / across.moved


def test_the_load_of_a_sender_counts() -> None:
    one = switch(COSTS, running(Plan.parse("0:14@0"), 0.0), Plan.parse("0:14@0,1"))
    many = switch(COSTS, running(Plan.parse("0:14@0"), 0.0), Plan.parse("0:14@0-3"))
    written_once = many.stall == pytest.approx(one.stall)
    assert written_once  # a TwinLayer is written once and read by all
    early_one = switch(COSTS, running(Plan.parse("0:14@0"), seconds=0.0), Plan.parse("0:14@0,1"))
    early_many = switch(COSTS, running(Plan.parse("0:14@0"), seconds=0.0), Plan.parse("0:14@0-3"))
    assert early_many.drag == pytest.approx(3 * early_one.drag)


def test_the_searches_see_what_is_held_and_what_must_come() -> None:
    old = Plan.parse("0:7@0-3 | 7:14@4-7")
    a = arrivals(COSTS, Running(old, 2.0, tuple(float(d) for d in range(8))))
    assert a.hide == COSTS.options.travel * 2.0
    for slot in range(8):
        row = a.device_class[slot]
        held = np.arange(UNITS) < 7 if slot < 4 else np.arange(UNITS) >= 7
        assert np.array_equal(a.size[row] == 0, held)
        assert a.spare[row] == slot
        size = np.where(held, 0.0, COSTS.travelling)
        assert a.size[row] == pytest.approx(size)
        # What is not held is on the other server.
        inter = size / COSTS.cluster.inter.bytes_per_second
        assert a.early[row] == pytest.approx(inter)
        through = CHUNK_OVERHEAD * size / COSTS.host.bytes_per_second
        assert a.handover[row] == pytest.approx(np.maximum(CHUNK_OVERHEAD * inter, through))
    near = arrivals(COSTS, running(Plan.parse("0:7@0 | 7:14@1")))
    for slot, slow in ((2, COSTS.intra), (6, COSTS.cluster.inter)):
        row = near.device_class[slot]
        assert near.size[row] == pytest.approx(COSTS.travelling)
        assert near.early[row] == pytest.approx(COSTS.travelling / slow.bytes_per_second)
        host = COSTS.travelling / COSTS.host.bytes_per_second
        assert (near.handover[row] >= CHUNK_OVERHEAD * host * (1 - 1e-9)).all()


def test_sharded_state_is_cut_anew_when_a_degree_changes() -> None:
    costs = small_planner(8, shard_optimizer=True).units
    old, new = Plan.parse("0:14@0-3"), Plan.parse("0:14@0-1")
    assert switch(COSTS, running(old), new).moves == ()
    recut = switch(costs, running(old), new)
    assert {m.device for m in recut.moves} == {0, 1}
    # Quarters become halves: device 0 keeps its quarter, device 1 keeps nothing.
    for move in recut.moves:
        lacks = (0.25, 0.5)[move.device]
        assert move.size == pytest.approx(lacks * costs.slab_state(move.slab).optimizer)
    for seconds in (0.0, 1.0):
        before = running(old, spare=3e8, seconds=seconds)
        fast = LiveSwitches(costs).price(before, new)
        assert fast.seconds == pytest.approx(switch(costs, before, new).seconds)
    assert recut.moved < switch(COSTS, running(old), Plan.parse("0:14@0-5")).moved
