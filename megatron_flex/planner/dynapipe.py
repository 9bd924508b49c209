"""What DynaPipe's cut needs to know of a plan: its slowest stage, and its fullest."""

from __future__ import annotations

import math

import numpy as np

from megatron_flex.data.dynapipe import DynaPipe, Stage, StageTime
from megatron_flex.planner.build import Batch, ModelCosts
from megatron_flex.planner.plan import Plan
from megatron_flex.planner.simulation import static_bytes


def dynapipe_of(costs: ModelCosts, plan: Plan) -> DynaPipe:
    """For an even plan; ``costs`` are of single units."""
    kept, again = (
        Stage(_seconds(costs, plan, all_again), _most_tokens(costs, plan, all_again))
        for all_again in (False, True)
    )
    return DynaPipe(len(plan.stages), plan.degrees[0], kept, again)


def _seconds(costs: ModelCosts, plan: Plan, again: bool) -> StageTime:
    """Forward and backward of the slowest stage; ``again``: everything is recomputed."""
    lines = costs.backward + costs.forward * (2.0 if again else 1.0)
    sums = [lines[:, s.start : s.stop].sum(axis=1) for s in plan.stages]
    fixed, token, pair = max(sums, key=lambda line: float(line[1]))
    return StageTime(float(fixed), float(token), float(pair))


def _most_tokens(costs: ModelCosts, plan: Plan, again: bool) -> float:
    """Tokens of a micro-batch of which each stage has room for as many as 1F1B has in flight."""
    none = Batch(np.zeros(1), np.zeros(1))
    one = Batch(np.ones(1), np.ones(1))
    state = static_bytes(costs, plan, none)
    besides = [b - a for a, b in zip(state, static_bytes(costs, plan, one), strict=True)]
    kept = np.minimum(costs.activation, costs.profile.boundary) if again else costs.activation
    most = math.inf
    for number, stage in enumerate(plan.stages):
        device = stage.group[0]
        held = float(kept[stage.start : stage.stop].sum()) * (len(plan.stages) - number)
        most = min(most, max(0.0, costs.budget - state[device]) / (held + besides[device]))
    return most
