"""Tensor parallelism inside a server (Megatron-LM, with sequence parallelism).

t devices share each layer: each has 1/t of the heads, of the MLP's width and of the vocabulary, and
of the tokens where layers are not split. So a group of t devices is one logical device with 1/t of
the work, of the state and of the bytes of activations and messages (Megatron-LM gathers the inputs
of products anew in the backward pass, and keeps shards), and collectives on top
(:func:`megatron_flex.planner.tensor.shared_profile`).
"""

from __future__ import annotations

from dataclasses import replace

from megatron_flex.cluster.cluster import Cluster
from megatron_flex.cluster.profile import Profile, shape_of
from megatron_flex.model.config import ModelConfig
from megatron_flex.model.tensor_cut import check, part_of
from megatron_flex.planner.planner import Planner
from megatron_flex.planner.tensor import TensorParallel, shared_profile
from megatron_flex.simulator.setting import Setting
from megatron_flex.simulator.static import Runner, Variant


def divides(config: ModelConfig, degree: int) -> bool:
    """Whether so many devices can share the layers of a model."""
    try:
        check(config, degree, vocabulary=False)
    except ValueError:
        return False
    return True


def profile_of(config: ModelConfig, profile: Profile, cluster: Cluster, degree: int) -> Profile:
    """What one of ``degree`` devices takes, as a profile of a model of its own."""
    tensor = TensorParallel(degree, sequence=True)
    shared = shared_profile(profile, cluster, tensor, again=False)
    return replace(shared, model=shape_of(part_of(config, degree)), tensor=1, sequence=False)


class TensorRunner(Runner):
    """Static plans whose devices are groups of devices that share every layer."""

    def __init__(self, setting: Setting, variant: Variant, degree: int) -> None:
        self._degree = degree
        super().__init__(setting, variant)

    def _planner(self, setting: Setting) -> Planner:
        degree, config, full = self._degree, setting.config, setting.full
        profile = profile_of(config, full.profile, full.cluster, degree)
        return super()._planner(setting.of_groups(degree, part_of(config, degree), profile))
