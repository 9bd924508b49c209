from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import pytest

from megatron_flex.data.microbatch import MicroBatch, Slice
from megatron_flex.model.layers import LayerList
from megatron_flex.planner.plan import Plan, Stage
from megatron_flex.programs import build_program
from megatron_flex.schedule.costs import OpCosts
from megatron_flex.schedule.instructions import Forward, RecvState
from megatron_flex.schedule.migration import migrate
from megatron_flex.schedule.routing import route
from megatron_flex.schedule.text import dumps, loads
from megatron_flex.schedule.transition import transition
from megatron_flex.schedule.validate import ProgramError, validate
from tests.unit.planner.test_service import MODEL

LAYERS = LayerList(3, tied=True)


def plan(rng: random.Random, units: int, devices: int) -> Plan:
    count = rng.randint(1, min(units, devices + 1))
    cuts = [0, *sorted(rng.sample(range(1, units), count - 1)), units]
    return Plan(
        tuple(
            Stage(a, b, tuple(rng.sample(range(devices), rng.randint(1, devices))))
            for a, b in pairwise(cuts)
        )
    )


def batches(lengths: list[int]) -> list[MicroBatch]:
    return [MicroBatch((Slice.all_of(i, n),)) for i, n in enumerate(lengths)]


def test_moved_micro_batches_run_where_the_next_plan_says() -> None:
    old, new = Plan.parse("0:4@0 | 4:8@1"), Plan.parse("0:6@0 | 6:8@1")
    switch = transition(old, new, LAYERS)
    routes = [route(p, OpCosts.uniform(2, 4)) for p in (old, new)]
    found = migrate(switch, routes[0], routes[1], (2, 3), LAYERS)
    assert str(found.plan) == "0:4@0 | 4:6@0,1 | 6:8@1"
    assert found.route == ((0, 0, 0, 0), (1, 1, 0, 0), (1, 1, 1, 1))


def test_without_an_early_copy_nothing_moves() -> None:
    old, new = Plan.parse("0:4@0 | 4:8@1"), Plan.parse("0:6@0 | 6:8@1")
    switch = transition(old, new, LAYERS, late=None)
    routes = [route(p, OpCosts.uniform(2, 4)) for p in (old, new)]
    found = migrate(switch, routes[0], routes[1], (2, 3), LAYERS)
    assert found.route == ((0,) * 4, (1,) * 4, (1,) * 4)


def test_every_migrating_program_is_valid(count: Callable[[int, int], int]) -> None:
    rng = random.Random(5)
    units = MODEL.layers.num_units
    for _ in range(count(60, 3000)):
        devices = rng.randint(1, 6)
        old, new = plan(rng, units, devices), plan(rng, units, devices)
        late = rng.choice([None, frozenset[tuple[int, int]]()])
        switch = transition(old, new, MODEL.layers, late=late)
        parts = batches([rng.randint(1, 90) for _ in range(rng.randint(1, 12))])
        moved = None if rng.random() < 0.3 else [m for m in range(len(parts)) if rng.random() < 0.5]
        program = build_program(MODEL, old, parts, devices, switch=switch, moved=moved)
        validate(program, MODEL.layers)
        assert loads(dumps(program)) == program


def test_a_forward_before_its_weights_were_asked_for_is_refused() -> None:
    old, new = Plan.parse("0:4@0 | 4:10@1"), Plan.parse("0:6@0 | 6:10@1")
    switch = transition(old, new, MODEL.layers)
    program = build_program(MODEL, old, batches([9] * 4), 2, switch=switch, moved=(2, 3))
    lists = [list(steps) for steps in program.instructions]
    asked = [i for i in lists[0] if isinstance(i, RecvState)]
    last = max(n for n, i in enumerate(lists[0]) if isinstance(i, Forward))
    rest = [i for i in lists[0] if not isinstance(i, RecvState)]
    lists[0] = rest[: last + 1 - len(asked)] + asked + rest[last + 1 - len(asked) :]
    broken = type(program)(
        program.plan, program.tokens, program.route, tuple(map(tuple, lists)), program.next_plan,
        program.held,
    )  # fmt: skip
    with pytest.raises(ProgramError, match="does not have slab 4"):
        validate(broken, MODEL.layers)


def test_micro_batches_move_when_it_pays() -> None:
    """A plan that is badly out of balance is left within the iteration."""
    old, new = Plan.parse("0:1@0 | 1:10@1"), Plan.parse("0:6@0 | 6:10@1")
    switch = transition(old, new, MODEL.layers)
    parts = batches([100] * 8)
    program = build_program(MODEL, old, parts, 2, switch=switch, moved=None)
    assert program.held == old
    assert {m for row in program.route for m in row} == {0, 1}
    even = Plan.parse("0:5@0 | 5:10@1")
    balanced = build_program(
        MODEL, even, parts, 2, switch=transition(even, old, MODEL.layers), moved=None
    )
    assert balanced.held is None
