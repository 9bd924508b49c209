"""Random switches between plans, from one seed each, and how a program is broken on purpose."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from megatron_flex.model.layers import LayerList
from megatron_flex.planner.plan import OPlan, Plan
from megatron_flex.schedule.costs import OpCosts
from megatron_flex.schedule.instructions import Instruction, Program
from megatron_flex.schedule.list_scheduler import POLICIES, Schedule
from megatron_flex.schedule.migration import Migration, migrate
from megatron_flex.schedule.routing import route
from megatron_flex.schedule.slabs import slab_holders
from megatron_flex.schedule.transition import Transition, transition
from megatron_flex.schedule.validate import ProgramError, validate
from tests.unit.schedule.building import build
from tests.unit.schedule.strategies import Case, random_case, random_costs, random_plan


@dataclass(frozen=True)
class SwitchCase:
    """A case with the change to the next iteration's plan.

    ``pieces``, with costs of their own: some micro-batches run by the next plan already.
    """

    case: Case
    switch: Transition
    pieces: Migration | None
    costs: OpCosts

    @property
    def layers(self) -> LayerList:
        return self.case.layers

    def build(self) -> Program:
        return self.schedule().program

    def schedule(self) -> Schedule:
        case, pieces = self.case, self.pieces
        return build(
            case.plan if pieces is None else pieces.plan,
            case.layers,
            self.costs,
            case.tokens,
            POLICIES[case.policy],
            world_size=case.world_size,
            turn=case.turn,
            memory=case.memory,
            table=None if pieces is None else pieces.route,
            switch=self.switch,
            chains=case.chains,
        )


#: The model of programs that are broken by hand, and their micro-batches.
LAYERS = LayerList(3, tied=True)
TOKENS = (100, 250, 60, 180)


def refused(broken: Program, message: str) -> tuple[int, int]:
    """The device and step at which a program is refused; the message must name both."""
    with pytest.raises(ProgramError, match=message) as caught:
        validate(broken, LAYERS)
    error = caught.value
    assert f"device {error.device}, step {error.step} " in str(error)
    return error.device, error.step


def check_accepted(drawn: SwitchCase, built: Program, seed: int) -> None:
    """A generated program must be valid; the error says what was drawn."""
    try:
        validate(built, drawn.layers)
    except ProgramError as error:
        text = f"seed {seed}: {drawn.switch.plan} to {drawn.switch.next_plan}: {error}"
        raise AssertionError(text) from error


def random_shard(rng: random.Random, plan: Plan) -> Plan:
    """The plan with the optimizer state of any units sharded: none, some or all."""
    often = rng.choice([0.0, 0.5, 1.0])
    units = tuple(u for u in range(plan.num_units) if rng.random() < often)
    return replace(plan, o_plan=OPlan(shard=units))


def random_switch(
    seed: int, devices: int = 16, batches: int = 64, *, sharded: bool = False
) -> SwitchCase:
    """Any plan to any plan; all early, all late, or each slab its own way; some migrate at once.

    ``sharded``: any units' optimizer state is, in either plan.
    """
    case = random_case(seed, devices, batches)
    rng = random.Random(seed + 1)
    units = case.layers.num_units
    next_plan = case.plan if rng.random() < 0.05 else random_plan(rng, units, case.world_size)
    elements: tuple[int, ...] = ()
    if sharded:
        shards = random.Random(seed + 2)
        case = replace(case, plan=random_shard(shards, case.plan))
        which = shards.random()
        if which < 0.3:  # the same stages, and perhaps the same altogether
            next_plan = case.plan if which < 0.2 else random_shard(shards, case.plan)
        elif which < 0.9:
            next_plan = random_shard(shards, next_plan)
        elements = tuple(1024 * shards.randint(0, 9) for _ in range(case.layers.num_slabs))
    late: frozenset[tuple[int, int]] | None = frozenset()
    way = rng.choice(["early", "late", "mixed"])
    if way == "late":
        late = None
    elif way == "mixed":
        pairs = [(s, d) for s in range(case.layers.num_slabs) for d in range(case.world_size)]
        late = frozenset(pair for pair in pairs if rng.random() < 0.5)
    sizes = [rng.random() for _ in range(case.layers.num_slabs)]
    switch = transition(
        case.plan,
        next_plan,
        case.layers,
        sizes=rng.choice([[], sizes]),
        late=late,
        server_size=rng.choice([1, 2, 4, 1 << 30]),
        elements=elements,
    )
    if rng.random() < 0.7:
        return SwitchCase(case, switch, None, case.costs)
    count, slabs = len(case.tokens), case.layers.num_slabs
    later = random_costs(rng, len(next_plan.stages), count, slabs)
    old_route = route(case.plan, case.costs, case.chains)
    new_route = route(next_plan, later, case.chains)
    going = [rng.random() < 0.5 for _ in range(count)]
    lead = {m: chain[0] for chain in case.chains for m in chain}
    moved = [m for m in range(count) if going[lead.get(m, m)]]
    pieces = migrate(switch, old_route, new_route, moved, case.layers)
    return SwitchCase(
        case, switch, pieces, random_costs(rng, len(pieces.plan.stages), count, slabs)
    )


def holders(plan: Plan, layers: LayerList) -> list[set[int]]:
    """The devices that hold each slab."""
    return [set(devices) for devices in slab_holders(plan, layers)]


def find(
    given: Program, kind: type[Instruction], nth: int = 0, *, on: int | None = None, **fields: Any
) -> tuple[int, int, Any]:
    """Device, step and value of the ``nth`` instruction of a kind with these fields."""
    hits = [
        (device, step, instruction)
        for device, steps in enumerate(given.instructions)
        for step, instruction in enumerate(steps)
        if type(instruction) is kind
        and on in (None, device)
        and all(getattr(instruction, key) == value for key, value in fields.items())
    ]
    return hits[nth]


def edited(given: Program, device: int, change: Callable[[list[Instruction]], Any]) -> Program:
    """The program with one device's list changed in place by ``change``."""
    steps = list(given.instructions[device])
    change(steps)
    lists = list(given.instructions)
    lists[device] = tuple(steps)
    return replace(given, instructions=tuple(lists))


def without(given: Program, device: int, step: int) -> Program:
    """The program without one instruction."""
    return edited(given, device, lambda steps: steps.pop(step))


def inserted(given: Program, device: int, step: int, instruction: Instruction) -> Program:
    """The program with one instruction more, at ``step``."""
    return edited(given, device, lambda steps: steps.insert(step, instruction))


def put(given: Program, device: int, step: int, instruction: Instruction) -> Program:
    """The program with one instruction replaced."""
    return edited(given, device, lambda steps: steps.__setitem__(step, instruction))


def moved(given: Program, device: int, step: int, to: int) -> Program:
    """The program with one instruction at another place of its list."""
    return edited(given, device, lambda steps: steps.insert(to, steps.pop(step)))
