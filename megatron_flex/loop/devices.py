"""The devices of a run and what its model costs on them, from its flags."""

from __future__ import annotations

from dataclasses import replace

import torch

from megatron_flex.cluster.cluster import Cluster, described_as, load
from megatron_flex.cluster.profile import Profile
from megatron_flex.config.config import Config
from megatron_flex.model.config import ModelConfig
from megatron_flex.planner.build import ModelCosts
from megatron_flex.planner.closed_form import run_profile
from megatron_flex.planner.options import PlannerOptions
from megatron_flex.planner.plan import PlanError
from megatron_flex.planner.planner import Planner
from megatron_flex.runtime.world import server_size


def cluster_of(config: Config, devices: int) -> Cluster:
    """The described devices, as many as the job has.

    Raises ``PlanError`` naming the flag.
    """
    f = config.flexpipe
    name = f.flexpipe_cluster
    if name is None and config.asks_planner and torch.cuda.is_available():
        device = torch.cuda.get_device_name()
        name = described_as(device)
        if name is None:
            flag = "--flexpipe" if f.flexpipe else f"--flexpipe-batching {f.flexpipe_batching}"
            raise PlanError(
                f"{flag} on {device} needs --flexpipe-cluster, such as a100 or h200, or a file that"
                " describes the devices and links"
            )
    cluster = load(name or f"cpux{min(4, devices)}")
    size = config.parallel.tensor_model_parallel_size
    per_server = server_size(devices, size)
    servers = -(-devices // per_server)
    return replace(cluster, servers=servers, devices_per_server=per_server)


def planner_options(config: Config) -> PlannerOptions:
    """What the flags say of planning."""
    f = config.flexpipe
    # Tried on CPU workers only; on GPUs a plan may still ask for it.
    host = not torch.cuda.is_available() and not config.cut_by_batch
    return PlannerOptions(
        planner="given" if config.cut_by_batch else f.flexpipe_planner,
        unit=f.flexpipe_unit,
        schedule=config.schedule,
        lookahead=1 if config.cut_by_batch else f.flexpipe_lookahead,
        simulations=f.simulations,
        budget=f.memory_budget,
        exact_memory=True,
        bitwise=f.flexpipe_bitwise,
        shard_optimizer=config.parallel.use_distributed_optimizer,
        offload_optimizer=host,
        offload_activations=host,
        tensor_size=config.parallel.tensor_model_parallel_size,
        sequence_parallel=config.parallel.sequence_parallel,
    )


def unit_costs(config: Config, model: ModelConfig, given: Profile | None) -> ModelCosts:
    """What each unit of the model costs; ``given``: as was measured."""
    cluster, options = cluster_of(config, config.devices), planner_options(config)
    profile = run_profile(model, cluster, options.tensor, given)
    return Planner(model, profile, cluster, options).units
