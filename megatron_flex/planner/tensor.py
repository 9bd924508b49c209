"""Tensor parallelism inside a server: what a rank has of a model, and what sharing layers costs.

A device of a plan may be a group of T neighbouring ranks that share every layer (Megatron-LM;
Korthikanti et al., 2022, for the sequence): each has 1/T of the heads, of the MLP's width and of
the vocabulary. What lies between the products (norms, dropout, the residual stream, messages) each
has whole, or 1/T of the tokens of it with sequence parallelism. Bytes and seconds are those of one
rank, of which all of a group are alike.

On top come collectives over the links inside a server: the sum over the group in every half of a
layer, forward and backward, or with sequence parallelism a gather and a reduce-scatter of the same
bytes, and in the backward another gather of what was gathered in the forward. All of the backward's
belong to its input half. Nothing is said to hide them; a part of the backward's runs beside the
products of weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_flex.cluster.cluster import Cluster, Link
from megatron_flex.cluster.profile import KindProfile, Line, Profile, ProfileError
from megatron_flex.model.layers import Kind

POINTWISE = {Kind.EMBEDDING: 2, Kind.ATTENTION: 6, Kind.MLP: 8, Kind.HEAD: 4}
"""Passes over ``[tokens, hidden]`` in device memory outside the products: norm, bias, dropout,
residual, activation function (counted at the width of the hidden state)."""
_SHARED = {Kind.EMBEDDING: 0, Kind.ATTENTION: 0, Kind.MLP: 2, Kind.HEAD: 2}
"""Passes among them that are divided in any case: the activation function, the loss."""

# Passes of a ring around the group: a sum over it is two, a gather or a reduce-scatter one.
_SUMS = {Kind.EMBEDDING: (2, 0), Kind.ATTENTION: (2, 2), Kind.MLP: (2, 2), Kind.HEAD: (0, 2)}
_GATHERS = {Kind.EMBEDDING: (1, 1), Kind.ATTENTION: (2, 2), Kind.MLP: (2, 2), Kind.HEAD: (1, 1)}
_AGAIN = {Kind.EMBEDDING: 0, Kind.ATTENTION: 1, Kind.MLP: 1, Kind.HEAD: 1}


@dataclass(frozen=True)
class TensorParallel:
    """How layers are shared.

    Attributes:
        size: ranks of a group, T.
        sequence: what lies between the products is divided by tokens.
    """

    size: int = 1
    sequence: bool = False

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"--tensor-model-parallel-size must be at least 1, not {self.size}")

    @property
    def shards(self) -> int:
        """Parts that the tokens between the products are in."""
        return self.size if self.sequence else 1

    def __str__(self) -> str:
        if self.size == 1:
            return "no tensor parallelism"
        return f"tensor parallelism {self.size}{' with sequence parallelism' * self.sequence}"


ALONE = TensorParallel()


def check_profile(profile: Profile, tensor: TensorParallel) -> None:
    """Raise :class:`ProfileError` unless a profile is of layers that are shared so."""
    measured = TensorParallel(profile.tensor, profile.sequence)
    if measured != tensor and max(measured.size, tensor.size) > 1:
        raise ProfileError(
            f"the profile '{profile.name}' was measured with {measured}, and this is {tensor}:"
            " measure again with tools/profile_layers.py and this command's flags"
        )


def collective(boundary: float, link: Link, size: int) -> Line:
    """Seconds of one pass of a ring over ``boundary`` bytes a token."""
    part = (size - 1) / size
    return Line((size - 1) * link.latency, part * boundary / link.bytes_per_second)


def divides_messages(between: Link, inside: Link, tensor: TensorParallel) -> bool:
    """Whether ranks send a share each of a message that all of them have, to another server.

    The ranks that receive it gather it over the links of their own server (Megatron-LM's
    ``scatter_gather_tensors_in_pipeline``). With sequence parallelism each has a share anyway.
    """
    slower = between.bytes_per_second < inside.bytes_per_second
    return tensor.size > 1 and not tensor.sequence and slower


def message_link(between: Link, inside: Link, tensor: TensorParallel) -> Link:
    """What carries messages between servers; a share each and the gather, where that is faster."""
    if not divides_messages(between, inside, tensor):
        return between
    size = tensor.size
    gather = collective(1.0, inside, size)
    per_byte = 1.0 / (size * between.bytes_per_second) + gather.per_token
    return Link(1.0 / per_byte, between.latency + gather.fixed)


def shared_profile(
    profile: Profile, cluster: Cluster, tensor: TensorParallel, *, again: bool = True
) -> Profile:
    """What a model costs whose layers are shared, from a profile of whole layers.

    Products and attention are divided by the ranks, what is between them only with sequence
    parallelism: of every pass over it ``cluster``'s memory bandwidth says how long it takes, but
    never longer than half of what a unit takes. Memory is divided by the ranks. Without ``again``
    the second gather of a product's input is hidden behind another product, as Megatron-LM does.
    """
    size = tensor.size
    if size == 1:
        return profile
    link = profile.links.get("intra", cluster.intra)
    one = collective(profile.boundary, link, size)
    passes = _GATHERS if tensor.sequence else _SUMS
    byte = 1.0 / cluster.device.memory_bytes_per_second

    def divided(line: Line, whole: float, count: int = 0) -> Line:
        whole = min(whole, line.per_token / 2)
        token = whole / tensor.shards + (line.per_token - whole) / size
        return Line(line.fixed, token, line.per_pair / size) + one.scaled(count)

    kinds = {}
    for kind, costs in profile.kinds.items():
        forward, backward = passes[kind]
        if tensor.sequence and again:
            backward += _AGAIN[kind]
        traffic = (POINTWISE[kind] - _SHARED[kind]) * profile.boundary * byte
        kinds[kind] = KindProfile(
            forward=divided(costs.forward, traffic, forward),
            backward_input=divided(costs.backward_input, 2 * traffic, backward),
            backward_weight=divided(costs.backward_weight, 0.0),
            activation=costs.activation / size,
            transient=costs.transient / size,
            update=costs.update / size,
        )
    return replace(
        profile,
        name=f"{profile.name} over {size} devices",
        kinds=kinds,
        boundary=profile.boundary / tensor.shards,
        tied_update=profile.tied_update / size,
        tensor=size,
        sequence=tensor.sequence,
    )
