"""Where the plans of a run come from, by its flags."""

from __future__ import annotations

from dataclasses import replace

from megatron_flex.config.config import Config
from megatron_flex.loop.assemble import Parts
from megatron_flex.loop.planned import PlannedPlans
from megatron_flex.loop.plans import Plans, ScriptedPlans, StaticPlan, read_plans
from megatron_flex.runtime.world import World


def open_plans(config: Config, parts: Parts, world: World, iteration: int, samples: int) -> Plans:
    """The source of plans that the flags ask for.

    The run starts at ``iteration``, after ``samples`` samples.
    """
    model, static = parts.model, parts.plan
    if config.flexpipe.flexpipe:
        return PlannedPlans(config, parts, world, iteration, samples)
    path = config.flexpipe.flexpipe_plans
    if path is not None:
        choices = read_plans(path, model.layers.num_units, config.world_size)
        if config.parallel.use_distributed_optimizer:
            choices = [replace(c, plan=c.plan.sharded()) for c in choices]
        return ScriptedPlans(choices)
    return StaticPlan(static)
