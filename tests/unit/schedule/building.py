"""A plan's program in one call, without planner and cost model."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_flex.model.layers import LayerList
from megatron_flex.planner.plan import Plan
from megatron_flex.schedule.costs import OpCosts
from megatron_flex.schedule.list_scheduler import Chains, Schedule, finish, simulate
from megatron_flex.schedule.policies.one_f_one_b import ONE_F_ONE_B
from megatron_flex.schedule.policies.policy import Policy
from megatron_flex.schedule.routing import Route
from megatron_flex.schedule.transition import Transition


def build(
    plan: Plan,
    layers: LayerList,
    costs: OpCosts,
    tokens: Sequence[int],
    rule: Policy = ONE_F_ONE_B,
    *,
    world_size: int,
    table: Route | None = None,
    turn: Sequence[int] | None = None,
    memory: Sequence[float] | None = None,
    forward_only: bool = False,
    switch: Transition | None = None,
    chains: Chains = (),
) -> Schedule:
    """Schedule one iteration and write its instruction lists.

    Args:
        tokens: tokens of each micro-batch.
        world_size: number of devices; ``instructions`` has a list for each, idle ones included.
        table, turn, memory, forward_only, chains: as for :func:`simulate`.
        switch: the change to the next iteration's plan; ``None`` keeps the plan.

    Raises ``ValueError`` (or its kind ``PlanError``) when plan, model, costs and world size do
    not belong together.
    """
    plan.check(layers.num_units, world_size)
    placement = simulate(
        plan,
        costs,
        rule,
        table=table,
        turn=turn,
        memory=memory,
        forward_only=forward_only,
        chains=chains,
    )
    return finish(placement, layers, tokens, world_size=world_size, name=rule.name, switch=switch)
