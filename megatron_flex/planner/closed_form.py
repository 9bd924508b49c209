"""A profile written down from a described cluster: FLOPs over sustained speed, nothing measured."""

from __future__ import annotations

from dataclasses import replace

from megatron_flex.cluster.cluster import Cluster
from megatron_flex.cluster.profile import KindProfile, Line, Profile, shape_of
from megatron_flex.model.config import ModelConfig
from megatron_flex.model.layers import Kind
from megatron_flex.planner.flops import kind_work
from megatron_flex.planner.memory import boundary_bytes, tied_state, unit_memory
from megatron_flex.planner.tensor import ALONE, POINTWISE, TensorParallel, shared_profile

LONGEST = 1 << 20
"""A closed form holds for any length; this is the range it claims, in tokens."""

_PRODUCTS = {Kind.EMBEDDING: 0, Kind.ATTENTION: 2, Kind.MLP: 2, Kind.HEAD: 1}
_UPDATE_BYTES = {"float32": 28, "bfloat16": 32}
"""Bytes a parameter that AdamW moves: reads and writes weights and moments, reads the gradient."""


def closed_form_profile(
    config: ModelConfig, cluster: Cluster, tensor: TensorParallel = ALONE
) -> Profile:
    """The profile that the description of ``cluster`` predicts for ``config``.

    Matrix products and attention run at the described sustained speeds; the rest of a unit is
    memory traffic. The weight half of the backward pass has the products' FLOPs once, the input
    half the rest; attention's backward counts twice its forward, all of it in the input half.
    With ``tensor`` ranks that share each layer it is what one of them takes.
    """
    return with_shared_layers(config, _whole_layers(config, cluster), cluster, tensor)


def run_profile(
    config: ModelConfig, cluster: Cluster, tensor: TensorParallel, given: Profile | None
) -> Profile:
    """What a run plans by: the profile that it is given, or what is described."""
    if given is None:
        return closed_form_profile(config, cluster, tensor)
    return with_shared_layers(config, given, cluster, tensor)


def with_shared_layers(
    config: ModelConfig, profile: Profile, cluster: Cluster, tensor: TensorParallel
) -> Profile:
    """A profile of whole layers as that of one of the ranks that share them.

    A profile that is of shared layers stays as it is.
    """
    if tensor.size == 1 or profile.tensor > 1:
        return profile
    memory, shared = unit_memory(config, tensor), shared_profile(profile, cluster, tensor)
    kinds = {
        kind: replace(costs, activation=memory[kind].activation, transient=memory[kind].transient)
        for kind, costs in shared.kinds.items()
    }
    return replace(shared, kinds=kinds)


def _whole_layers(config: ModelConfig, cluster: Cluster) -> Profile:
    device = cluster.device
    product_fixed, product_rate = device.matmul.line()
    pair_fixed, pair_rate = device.attention.line()
    memory = unit_memory(config)
    kinds = {}
    for kind in Kind:
        work = kind_work(config, kind)
        products = _PRODUCTS[kind]
        token_bytes = POINTWISE[kind] * boundary_bytes(config)
        traffic = Line(per_token=token_bytes / device.memory_bytes_per_second)
        product = Line(products * product_fixed, work.linear * product_rate)
        has_pairs = work.quadratic > 0.0
        pairs = Line(pair_fixed if has_pairs else 0.0, 0.0, work.quadratic * pair_rate)
        parameters = memory[kind].state.gradients // 4
        kinds[kind] = KindProfile(
            forward=product + pairs + traffic,
            backward_input=product + pairs.scaled(2.0) + traffic.scaled(2.0),
            backward_weight=product,
            activation=memory[kind].activation,
            transient=memory[kind].transient,
            update=_update_seconds(config, cluster, parameters),
        )
    return Profile(
        name=f"closed form on {cluster.name}",
        kinds=kinds,
        boundary=boundary_bytes(config),
        tied_update=_update_seconds(config, cluster, tied_state(config).gradients // 4),
        tokens=(1, LONGEST),
        longest=LONGEST,
        links={},
        model=shape_of(config),
    )


def _update_seconds(config: ModelConfig, cluster: Cluster, parameters: int) -> float:
    size = parameters * _UPDATE_BYTES[config.params_dtype]
    return size / cluster.device.memory_bytes_per_second
