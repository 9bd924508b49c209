"""What the planner's process needs to know of a run, from its flags."""

from __future__ import annotations

from megatron_flex.cluster.cluster import description
from megatron_flex.config.config import Config
from megatron_flex.data.microbatches import CostCoefficients
from megatron_flex.loop.assemble import Parts
from megatron_flex.loop.cores import planning_part
from megatron_flex.loop.cutting import run_cut
from megatron_flex.loop.devices import cluster_of, planner_options
from megatron_flex.planner.messages import Setup


def planner_setup(
    config: Config, parts: Parts, devices: int, coefficients: CostCoefficients
) -> Setup:
    """The set-up of a run whose batches are cut by ``coefficients``.

    ``devices`` are those of a plan: groups of workers where these share layers.

    Raises ``PlanError`` naming the flag.
    """
    f, given = config.flexpipe, parts.profile
    return Setup(
        parts.model,
        description(cluster_of(config, devices)),
        None if given is None else given.to_json(),
        planner_options(config),
        run_cut(config, coefficients, parts.model, given),
        str(parts.plan),
        f.flexpipe_switch,
        part=planning_part(config.world_size),
        times=f.flexpipe_trace is not None,
    )
