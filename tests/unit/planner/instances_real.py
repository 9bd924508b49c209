"""Small real jobs for the planner's tests: a model, a cluster, batches from the length mixture."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from megatron_flex.cluster.cluster import Cluster, load
from megatron_flex.data.global_batch import GlobalBatch
from megatron_flex.data.microbatches import CostCoefficients, cut_by_tokens
from megatron_flex.data.mock import mixture_lengths
from megatron_flex.model.config import ModelConfig
from megatron_flex.planner.build import Batch
from megatron_flex.planner.closed_form import closed_form_profile
from megatron_flex.planner.options import PlannerOptions
from megatron_flex.planner.plan import Plan, Stage
from megatron_flex.planner.planner import Planner


def small_model(layers: int = 6, **changes: Any) -> ModelConfig:
    """A GPT of a few layers with an output head worth more than a layer."""
    config = ModelConfig(
        num_layers=layers,
        hidden_size=1024,
        num_attention_heads=16,
        vocab_size=32000,
        padded_vocab_size=32000,
        max_position_embeddings=8192,
        ffn_hidden_size=4096,
        kv_channels=64,
        num_query_groups=16,
        params_dtype="bfloat16",
    )
    return replace(config, **changes)


def small_cluster(devices: int, memory: float = 80e9) -> Cluster:
    """Servers of up to four A100-like devices with ``memory`` bytes."""
    base = load("a100").first(devices)
    return replace(base, device=replace(base.device, memory=int(memory)), reserved=0)


def drawn_batch(seed: int, samples: int = 32, budget: int = 1024) -> Batch:
    """One batch of the length mixture, cut as the trainer cuts it."""
    lengths = mixture_lengths(seed, np.arange(samples))
    batch = GlobalBatch(0, lengths, (int(lengths.sum()),))
    return Batch.of(cut_by_tokens(batch, budget, CostCoefficients(1.0, 1e-4)))


def even_batch(count: int, tokens: int) -> Batch:
    """Equal micro-batches of one sample each."""
    size = np.full(count, float(tokens))
    return Batch(size, size**2)


def small_planner(
    devices: int = 4, memory: float = 80e9, config: ModelConfig | None = None, **options: Any
) -> Planner:
    """A planner; options default to a split schedule without simulations."""
    config = config or small_model()
    cluster = small_cluster(devices, memory)
    given = {"schedule": "zb-h1", "simulations": 0, **options}
    return Planner(config, closed_form_profile(config, cluster), cluster, PlannerOptions(**given))


def random_plan(r: np.random.Generator, units: int, devices: int, shuffle: bool = True) -> Plan:
    """Any straight plan: random cuts, random groups, some devices idle, devices in any order."""
    stages = int(r.integers(1, min(units, devices) + 1))
    inner = np.sort(r.choice(np.arange(1, units), stages - 1, replace=False)).tolist()
    cuts = [0, *inner, units]
    order = r.permutation(devices) if shuffle else np.arange(devices)
    used = int(r.integers(stages, devices + 1))
    between = np.sort(r.choice(np.arange(1, used), stages - 1, replace=False)).tolist()
    ends = [0, *between, used]
    return Plan(
        tuple(
            Stage(cuts[i], cuts[i + 1], tuple(sorted(order[ends[i] : ends[i + 1]].tolist())))
            for i in range(stages)
        )
    )
