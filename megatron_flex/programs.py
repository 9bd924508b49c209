"""From a plan and the micro-batches of an iteration to its program: pure, no clock, no tensor."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from megatron_flex.data.microbatch import MicroBatch
from megatron_flex.model.config import ModelConfig
from megatron_flex.planner.ordering import op_costs
from megatron_flex.planner.plan import Plan
from megatron_flex.schedule.instructions import Program
from megatron_flex.schedule.list_scheduler import build, simulate
from megatron_flex.schedule.list_scheduler import policy as policy_named
from megatron_flex.schedule.migration import migrate
from megatron_flex.schedule.routing import route
from megatron_flex.schedule.transition import Transition

MIGRATION_GAIN = 0.05
"""Micro-batches move to the next layout within an iteration if its simulated time falls by this."""


def build_program(
    config: ModelConfig,
    plan: Plan,
    micro_batches: Sequence[MicroBatch],
    world_size: int,
    *,
    policy: str = "1f1b",
    forward_only: bool = False,
    switch: Transition | None = None,
    moved: Collection[int] | None = (),
) -> Program:
    """The instruction lists of one iteration for all devices.

    Args:
        policy: a schedule's name.
        forward_only: an evaluation.
        switch: leads to the next iteration's plan.
        moved: micro-batches that run by the next plan already (live migration); ``None`` moves
            some where the simulated iteration gains from it.

    Raises ``ValueError`` if the policy is unknown or the plan does not fit the model and the world.
    """
    rule = policy_named(policy)
    costs = op_costs(config, plan, micro_batches)
    table = route(plan, costs)
    if switch is not None and not forward_only:
        sets = _some_to_move(len(micro_batches)) if moved is None else [tuple(moved)]
        best = simulate(plan, costs, rule, table=table).makespan if moved is None else math.inf
        limit = best * (1.0 - MIGRATION_GAIN)
        new_table = route(switch.next_plan, op_costs(config, switch.next_plan, micro_batches))
        old_table = table
        for chosen in filter(None, sets):
            migration = migrate(switch, old_table, new_table, chosen, config.layers)
            pieces = op_costs(config, migration.plan, micro_batches)
            placed = simulate(migration.plan, pieces, rule, table=migration.route)
            if placed.makespan < min(best, limit) or moved is not None:
                best, plan, costs, table = placed.makespan, migration.plan, pieces, migration.route
    return build(
        plan,
        config.layers,
        costs,
        [m.tokens for m in micro_batches],
        rule,
        world_size=world_size,
        table=table,
        forward_only=forward_only,
        switch=switch,
    ).program


def _some_to_move(count: int) -> list[tuple[int, ...]]:
    """Sets of micro-batches that may move: every second one, soon and in the second half.

    Every second, so that old and new holders compute side by side; not the first ones, whose turn
    comes before the weights have arrived.
    """
    return [tuple(range(2, count, 2)), tuple(range(count // 2, count, 2))]
