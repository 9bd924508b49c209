"""How the parameters of a model are divided over a tensor-parallel group, as Megatron divides them.

A rank of the group has a share of the heads (by query groups), of the MLP's width and of the
vocabulary; what is not cut it has whole. Values only: no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_flex.model.config import ModelConfig

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Cut:
    """How a parameter's full tensor is divided over a group.

    Attributes:
        dim: the dimension that is cut.
        parts: independent parts along it, each cut on its own: 2 where a gated MLP's first matrix
            has the gate's rows before the others.
    """

    dim: int
    parts: int = 1


@dataclass(frozen=True)
class Piece:
    """A block of a full tensor that one rank has.

    Attributes:
        offsets: where it begins in the full tensor.
        sizes: its extent.
        local: where it begins in the rank's own tensor.
    """

    offsets: Shape
    sizes: Shape
    local: Shape


# Column-parallel layers and tables are cut by outputs, row-parallel layers by inputs.
_OUTPUTS = ("linear_qkv.weight", "linear_qkv.bias", "word_embeddings.weight",
            "output_layer.weight", "output_layer.bias")  # fmt: skip
_GATED = ("linear_fc1.weight", "linear_fc1.bias")
_INPUTS = ("linear_proj.weight", "linear_fc2.weight")

# Norms of heads: every rank has all of their weights, and sees its own heads only.
_OF_HEADS = ("q_layernorm.weight", "q_layernorm.bias", "k_layernorm.weight", "k_layernorm.bias")
# What sees all tokens on every rank, also where the ranks divide the tokens among them.
_ALL_TOKENS = ("embedding.", "pooler.", "binary_head.")


def cut_of(config: ModelConfig, name: str) -> Cut | None:
    """How the parameter with Megatron's full name ``name`` is cut; ``None``: replicated."""
    if name.endswith(_OUTPUTS):
        return Cut(0)
    if name.endswith(_GATED):
        return Cut(0, 2 if config.swiglu else 1)
    return Cut(1) if name.endswith(_INPUTS) else None


def is_partial(config: ModelConfig, name: str, *, sequence_parallel: bool) -> bool:
    """Whether ranks have different parts of the gradient of a replicated parameter.

    Their sum is its gradient (Megatron's ``_allreduce_layernorm_grads``). False for one that is
    cut.
    """
    if cut_of(config, name) is not None:
        return False
    return name.endswith(_OF_HEADS) or (sequence_parallel and not name.startswith(_ALL_TOKENS))


def local_shape(shape: Sequence[int], cut: Cut | None, size: int) -> Shape:
    """The shape of one rank's tensor.

    Raises ``ValueError`` if ``shape`` cannot be divided by ``size`` like that.
    """
    if cut is None or size == 1:
        return tuple(shape)
    extent = shape[cut.dim]
    if extent % (cut.parts * size):
        raise ValueError(
            f"dimension {cut.dim} of a tensor of shape {tuple(shape)} cannot be divided by {size}"
        )
    return (*shape[: cut.dim], extent // size, *shape[cut.dim + 1 :])


def full_shape(shape: Sequence[int], cut: Cut | None, size: int) -> Shape:
    """The shape of the full tensor of which one rank has ``shape``."""
    if cut is None:
        return tuple(shape)
    return (*shape[: cut.dim], shape[cut.dim] * size, *shape[cut.dim + 1 :])


def pieces(shape: Sequence[int], cut: Cut | None, index: int, size: int) -> tuple[Piece, ...]:
    """The blocks of a full tensor of ``shape`` that rank ``index`` of ``size`` has.

    Together they fill its own tensor.
    """
    zero = (0,) * len(shape)
    if cut is None or size == 1:
        return (Piece(zero, tuple(shape), zero),)
    own = local_shape(shape, cut, size)

    def at(offset: int) -> Shape:
        return (*zero[: cut.dim], offset, *zero[cut.dim + 1 :])

    each = own[cut.dim] // cut.parts
    sizes = (*own[: cut.dim], each, *own[cut.dim + 1 :])
    return tuple(
        Piece(at((part * size + index) * each), sizes, at(part * each)) for part in range(cut.parts)
    )


def check(config: ModelConfig, size: int, *, vocabulary: bool = True) -> None:
    """Raise ``ValueError`` naming the flag if ``size`` ranks cannot share the layers.

    ``vocabulary``: whether the vocabulary's size is known.
    """
    extents = [
        ("--num-attention-heads", config.num_attention_heads),
        ("--num-query-groups", config.num_query_groups),
        ("--ffn-hidden-size", config.ffn_hidden_size),
    ]
    for flag, extent in extents:
        if extent % size:
            raise ValueError(
                f"{flag} {extent} is not a multiple of --tensor-model-parallel-size {size}: change"
                " one of them"
            )
    if vocabulary and config.padded_vocab_size % size:
        raise ValueError(
            f"the padded vocabulary ({config.padded_vocab_size}) is not a multiple of"
            f" --tensor-model-parallel-size {size}: give --make-vocab-size-divisible-by a multiple"
            " of it, or --padded-vocab-size"
        )


def part_of(config: ModelConfig, size: int) -> ModelConfig:
    """What one of ``size`` ranks has, as a model: its work, its slabs, its bytes.

    The sizes must divide, but for the vocabulary's: the first rank has most words of the tokenizer,
    and it is its part. Layers and hidden states are those of the whole model.
    """
    if size == 1:
        return config
    rows = -(-config.padded_vocab_size // size)
    return replace(
        config,
        num_attention_heads=config.num_attention_heads // size,
        num_query_groups=config.num_query_groups // size,
        ffn_hidden_size=config.ffn_hidden_size // size,
        vocab_size=min(config.vocab_size, rows),
        padded_vocab_size=rows,
    )


def vocabulary_rows(config: ModelConfig, index: int, size: int) -> tuple[int, int]:
    """The first of rank ``index``'s rows of the vocabulary, and how many belong to the tokenizer.

    Rows of padding come last, so that the last ranks may have no others.
    """
    rows = config.padded_vocab_size // size
    first = index * rows
    return first, min(max(config.vocab_size - first, 0), rows)
