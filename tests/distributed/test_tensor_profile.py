"""The costs of shared layers, measured by the workers that share them."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch

from megatron_flex.cluster.cluster import load
from megatron_flex.cluster.profile import Profile
from megatron_flex.planner.memory import unit_memory
from megatron_flex.planner.options import PlannerOptions
from megatron_flex.planner.planner import Planner
from megatron_flex.planner.tensor import TensorParallel
from megatron_flex.runtime.world import World
from tests.distributed.pool import WorkerPool
from tests.unit.model.support import make_config
from tools.profile_layers import Work

WIDE = make_config(
    hidden_size=128, ffn_hidden_size=512, kv_channels=32, max_position_embeddings=2048
)  # tokens cost more than any exchange


def _measured(sequence: bool) -> str:
    cpu = torch.device("cpu")
    world = World.create(cpu, timedelta(seconds=60), 2, sequence_parallel=sequence)
    work = Work(WIDE, [64, 2048], [64], 1, 3, "shared", {})
    return work(cpu, world.tensor)[0].to_json()


@pytest.mark.parametrize("sequence", [False, True], ids=["whole rows", "shared rows"])
def test_all_of_a_group_measure_the_same_profile(workers: WorkerPool, *, sequence: bool) -> None:
    first, second = map(Profile.from_json, workers.run(2, _measured, sequence))
    assert first == second
    assert (first.tensor, first.sequence) == (2, sequence)
    config, tensor = WIDE, TensorParallel(2, sequence)
    memory = unit_memory(config, tensor)
    for kind, costs in first.kinds.items():
        assert costs.transient == memory[kind].transient
        assert costs.forward(64, 1024) > 0
    options = PlannerOptions(tensor_size=2, sequence_parallel=sequence)
    Planner(config, first, load("cpux1"), options)
