"""Tensor parallelism inside a server (Megatron-LM, with sequence parallelism).

t devices share each layer: each has 1/t of the heads, of the MLP's width and of the vocabulary, and
of the tokens where layers are not split. So a group of t devices is one logical device with 1/t of
the work, of the state and of the bytes of activations and messages. On top come an all-gather and a
reduce-scatter of the activations in every half of a layer, forward and backward, over the links
inside a server; nothing hides them. (Megatron can overlap a part of them with the products.)
"""

from __future__ import annotations

from dataclasses import replace

from megatron_flex.cluster.cluster import Cluster
from megatron_flex.cluster.profile import KindProfile, Line, Profile, shape_of
from megatron_flex.model.config import ModelConfig
from megatron_flex.model.layers import Kind
from megatron_flex.model.tensor_cut import part_of
from megatron_flex.planner.planner import Planner
from megatron_flex.simulator.context import logical
from megatron_flex.simulator.setting import Setting
from megatron_flex.simulator.static import Runner, Variant

_COLLECTIVES = {Kind.EMBEDDING: 1, Kind.ATTENTION: 2, Kind.MLP: 2, Kind.HEAD: 1}
"""All-gathers and reduce-scatters of a pass, each way."""


def divides(config: ModelConfig, degree: int) -> bool:
    """Whether so many devices can share the layers of a model."""
    parts = (config.num_attention_heads, config.num_query_groups, config.ffn_hidden_size)
    return not any(part % degree for part in parts)


def profile_of(config: ModelConfig, profile: Profile, cluster: Cluster, degree: int) -> Profile:
    """What it costs: the work divided, and the collectives."""
    link = profile.links.get("intra", cluster.intra)
    part = (degree - 1) / degree
    one = Line((degree - 1) * link.latency, part * profile.boundary / link.bytes_per_second)

    def shared(line: Line, count: int = 0) -> Line:
        divided = Line(line.fixed, line.per_token / degree, line.per_pair / degree)
        return divided + one.scaled(count)

    kinds = {
        kind: KindProfile(
            forward=shared(costs.forward, _COLLECTIVES[kind]),
            backward_input=shared(costs.backward_input, _COLLECTIVES[kind]),
            backward_weight=shared(costs.backward_weight),
            activation=costs.activation / degree,
            transient=costs.transient / degree,
            update=costs.update / degree,
        )
        for kind, costs in profile.kinds.items()
    }
    return replace(
        profile,
        name=f"{profile.name} over {degree} devices",
        kinds=kinds,
        boundary=profile.boundary / degree,
        tied_update=profile.tied_update / degree,
        model=shape_of(part_of(config, degree)),
    )


class TensorRunner(Runner):
    """Static plans whose devices are groups of devices that share every layer."""

    def __init__(self, setting: Setting, variant: Variant, degree: int) -> None:
        self._degree = degree
        super().__init__(setting, variant)

    def _planner(self, setting: Setting) -> Planner:
        degree = self._degree
        inner = Setting(
            part_of(setting.config, degree),
            logical(setting.cluster, degree),
            profile_of(setting.config, setting.profile, setting.cluster, degree),
            setting.base,
        )
        return super()._planner(inner)
