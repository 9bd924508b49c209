"""Where the plans of a run come from, by its flags."""

from __future__ import annotations

from dataclasses import replace

from megatron_flex.config.config import Config
from megatron_flex.config.flexpipe import PADDED
from megatron_flex.loop.assemble import Parts
from megatron_flex.loop.desk import Desk
from megatron_flex.loop.lengths import Lengths
from megatron_flex.loop.planned import PlannedPlans
from megatron_flex.loop.plans import Choice, Plans, ScriptedPlans, read_plans
from megatron_flex.planner.plan import Plan, PlanError


def open_plans(
    config: Config, parts: Parts, desk: Desk, lengths: Lengths | None, iteration: int
) -> Plans:
    """The source of plans that the flags ask for; the run starts at ``iteration``."""
    model = parts.model
    if config.asks_planner:
        assert lengths is not None, "a planner needs training data"
        return PlannedPlans(config, parts.plan, desk, lengths, iteration)
    path = config.flexpipe.flexpipe_plans
    if path is None:
        _check_cut(config, parts.plan)
        return ScriptedPlans([Choice(parts.plan)])
    try:
        choices = read_plans(path, model.layers, config.devices)
    except PlanError as error:
        raise PlanError(f"{error}{config.parallel.device_note}") from error
    for choice in choices:
        _check_cut(config, choice.plan)
    if config.parallel.use_distributed_optimizer:
        choices = [replace(c, plan=c.plan.sharded()) for c in choices]
    return ScriptedPlans(choices)


def _check_cut(config: Config, plan: Plan) -> None:
    """Raise ``PlanError`` if a plan says how its batch is cut, and a flag says otherwise."""
    tokens, size = config.data.micro_batch_tokens, config.training.micro_batch_size
    slices = config.flexpipe.slice_tokens
    how = config.flexpipe.flexpipe_batching
    flag = (
        f"--flexpipe-batching {how}" if how in PADDED
        else f"--flexpipe-slice-tokens {slices}" if slices
        else f"--micro-batch-size {size}" if size
        else f"--micro-batch-tokens {tokens}" if tokens not in (None, plan.cut)
        else None
    )  # fmt: skip
    if plan.cut and flag is not None:
        raise PlanError(
            f"the plan '{plan}' says how its batch is cut, and {flag} says otherwise: leave the"
            f" flag out, or '; cut {plan.cut}'"
        )
