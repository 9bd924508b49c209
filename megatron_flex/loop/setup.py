"""What the planner's process needs to know of a run, from its flags."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from megatron_flex.cluster.cluster import Cluster, description, load
from megatron_flex.cluster.profile import Profile
from megatron_flex.config.config import Config
from megatron_flex.data.microbatches import CostCoefficients
from megatron_flex.loop.assemble import Parts
from megatron_flex.loop.iteration import run_cut
from megatron_flex.planner.options import PlannerOptions
from megatron_flex.planner.service import Setup
from megatron_flex.runtime.world import server_size


def planner_setup(
    config: Config, parts: Parts, devices: int, coefficients: CostCoefficients
) -> Setup:
    """The set-up of a run whose batches are cut by ``coefficients``.

    ``devices`` are those of a plan: groups of workers where these share layers.

    Raises ``ValueError`` naming the flag.
    """
    f = config.flexpipe
    if f.flexpipe and f.flexpipe_cluster is None and torch.cuda.is_available():
        raise ValueError("--flexpipe on GPUs needs --flexpipe-cluster, such as a100 or h200, or a"
                         " file that describes the devices and links")  # fmt: skip
    cluster = load(f.flexpipe_cluster or f"cpux{min(4, devices)}")
    size = config.parallel.tensor_model_parallel_size
    cluster = _sized(cluster, devices, server_size(devices * size) // size)
    options = PlannerOptions(
        planner=f.flexpipe_planner,
        unit=f.flexpipe_unit,
        schedule=config.schedule,
        lookahead=f.flexpipe_lookahead,
        simulations=f.simulations,
        budget=f.memory_budget,
        exact_memory=True,
        bitwise=f.flexpipe_bitwise,
        shard_optimizer=config.parallel.use_distributed_optimizer,
        # Tried on CPU workers only; on GPUs a plan may still ask for it.
        offload_optimizer=not torch.cuda.is_available(),
        offload_activations=not torch.cuda.is_available(),
        tensor_size=size,
        sequence_parallel=config.parallel.sequence_parallel,
    )
    path = f.flexpipe_profile
    profile = None if path is None else Profile.load(Path(path)).to_json()
    return Setup(
        parts.model,
        description(cluster),
        profile,
        options,
        run_cut(config, coefficients),
        str(parts.plan),
        f.flexpipe_switch,
        times=f.flexpipe_trace is not None,
    )


def _sized(cluster: Cluster, devices: int, per_server: int) -> Cluster:
    """The cluster with the job's own numbers of servers and devices."""
    servers = -(-devices // per_server)
    return replace(cluster, servers=servers, devices_per_server=per_server)
