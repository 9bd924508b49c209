"""Random plans, costs and schedules, from one seed each, so that thousands are cheap to draw."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from megatron_flex.model.layers import LayerList
from megatron_flex.planner.plan import Plan, Stage
from megatron_flex.schedule.costs import Floats, OpCosts
from megatron_flex.schedule.list_scheduler import POLICIES, Schedule
from megatron_flex.schedule.routing import route
from tests.unit.schedule.building import build

SEEDS = st.integers(0, 2**32 - 1)


@dataclass(frozen=True)
class Case:
    """A plan with all that it takes to schedule it."""

    plan: Plan
    layers: LayerList
    costs: OpCosts
    tokens: tuple[int, ...]
    world_size: int
    policy: str
    turn: tuple[int, ...]
    memory: tuple[float, ...] | None
    chains: tuple[tuple[int, ...], ...] = ()

    def build(self, forward_only: bool = False) -> Schedule:
        return build(
            self.plan,
            self.layers,
            self.costs,
            self.tokens,
            POLICIES[self.policy],
            world_size=self.world_size,
            turn=self.turn,
            memory=self.memory,
            forward_only=forward_only,
            chains=self.chains,
        )


def random_plan(rng: random.Random, num_units: int, devices: int) -> Plan:
    """Straight, V-shaped or arbitrary stages; uneven degrees, idle and permuted devices."""
    names = rng.sample(range(devices), devices)
    shape = rng.choice(["straight", "v", "any"])
    if shape == "any":
        count = rng.randint(1, min(num_units, 2 * devices))
        groups = [
            tuple(rng.sample(range(devices), rng.randint(1, min(devices, 4)))) for _ in range(count)
        ]
    else:
        most = min(devices, num_units if shape == "straight" else num_units // 2)
        parts = rng.randint(1, most)
        bounds = sorted(rng.sample(range(1, devices + 1), parts))
        groups = [tuple(names[a:b]) for a, b in zip([0, *bounds[:-1]], bounds, strict=True)]
        if shape == "v":
            groups += groups[::-1]
    cuts = sorted(rng.sample(range(1, num_units), len(groups) - 1))
    edges = [0, *cuts, num_units]
    return Plan(
        tuple(Stage(a, b, g) for a, b, g in zip(edges[:-1], edges[1:], groups, strict=True))
    )


def random_costs(rng: random.Random, stages: int, batches: int, slabs: int) -> OpCosts:
    """Uneven times, sometimes zeros (ties everywhere) and slow links."""
    kind = rng.choice(["even", "uneven", "zeros"])
    sizes = [1.0 if kind == "even" else rng.lognormvariate(0, 0.8) for _ in range(batches)]

    def table(rows: int, scale: float) -> Floats:
        if kind == "even":
            return np.full((rows, batches), scale)
        noise = (lambda: rng.choice([0.0, 1.0])) if kind == "zeros" else rng.random
        found = [[scale * s * noise() for s in sizes] for _ in range(rows)]
        return np.array(found).reshape(rows, batches)

    return OpCosts(
        table(stages, 1.0),
        table(stages, 1.0),
        table(stages, 1.0),
        table(stages - 1, rng.choice([0.0, 0.1, 3.0])),
        table(stages, 1.0),
        tuple(rng.random() for _ in range(slabs)),
        tuple(rng.random() for _ in range(slabs)),
        table(stages, 0.3),
    )


def random_case(seed: int, devices: int = 16, batches: int = 64, policy: str | None = None) -> Case:
    """One case of at most ``devices`` x ``batches``; small ones are drawn more often."""
    rng = random.Random(seed)
    world = rng.choice([rng.randint(1, 4), rng.randint(1, devices)])
    count = rng.choice([rng.randint(1, 6), rng.randint(1, batches)])
    layers = LayerList(rng.randint(max(1, world // 2), 2 * world + 2), rng.random() < 0.5)
    plan = random_plan(rng, layers.num_units, world)
    costs = random_costs(rng, len(plan.stages), count, layers.num_slabs)
    chains = random_chains(rng, count) if rng.random() < 0.4 else ()
    turn = rng.sample(range(count), count)
    for chain in chains:
        for place, m in zip(sorted(map(turn.index, chain)), chain, strict=True):
            turn[place] = m
    memory = None
    if rng.random() < 0.3:
        memory = tuple(rng.uniform(0.0, 2.0 * len(plan.stages)) for _ in range(world))
    return Case(
        plan,
        layers,
        costs,
        tuple(rng.randint(1, 4000) for _ in range(count)),
        world,
        policy or rng.choice(sorted(POLICIES)),
        tuple(turn),
        memory,
        chains,
    )


def random_chains(rng: random.Random, batches: int) -> tuple[tuple[int, ...], ...]:
    """Some of the micro-batches as slices of longer samples."""
    names = rng.sample(range(batches), batches)
    found = []
    while len(names) > 1 and rng.random() < 0.7:
        size = rng.randint(2, min(len(names), rng.choice([3, 16])))
        found.append(tuple(names[:size]))
        names = names[size:]
    return tuple(found)


def tight_memory(case: Case) -> tuple[float, ...]:
    """Bytes of activations with which every device holds its largest micro-batch, and few more.

    Without the chains.
    """
    largest = [0.0] * (case.plan.devices[-1] + 1)
    table = route(case.plan, case.costs)
    for micro_batch in range(case.costs.num_micro_batches):
        whole = [0.0] * len(largest)
        for row, sizes in zip(table, case.costs.activation, strict=True):
            whole[row[micro_batch]] += sizes[micro_batch]
        largest = list(map(max, largest, whole))
    rng = random.Random(repr(case.turn))
    return tuple(a * rng.choice([1.0, 1.2, 2.0, 3.0]) for a in largest)


def cases(
    devices: int = 16, batches: int = 64, policy: str | None = None
) -> st.SearchStrategy[Case]:
    """Hypothesis strategy of :func:`random_case`."""
    return SEEDS.map(lambda seed: random_case(seed, devices, batches, policy))
