"""Names and layouts of Hugging Face's tensors, from and to Megatron's.

A parameter of Megatron's is made of one to three tensors there: queries, keys and values, and gate
and input of a gated MLP, are apart; GPT-2 keeps its matrices transposed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from megatron_flex.model.config import ModelConfig

Layout = Literal["plain", "tokens", "qkv", "gated", "transposed", "transposed qkv"]


@dataclass(frozen=True)
class Source:
    """The tensors that a parameter of Megatron's is made of, and how."""

    names: tuple[str, ...]
    layout: Layout = "plain"


# Module of a layer -> modules there; the parameter (weight, bias) has the same name.
_ROTARY_LAYER: dict[str, tuple[str, Layout]] = {
    "input_layernorm": ("input_layernorm", "plain"),
    "self_attention.linear_qkv": ("self_attn.q_proj self_attn.k_proj self_attn.v_proj", "qkv"),
    "self_attention.q_layernorm": ("self_attn.q_norm", "plain"),
    "self_attention.k_layernorm": ("self_attn.k_norm", "plain"),
    "self_attention.linear_proj": ("self_attn.o_proj", "plain"),
    "pre_mlp_layernorm": ("post_attention_layernorm", "plain"),
    "mlp.linear_fc1": ("mlp.gate_proj mlp.up_proj", "gated"),
    "mlp.linear_fc2": ("mlp.down_proj", "plain"),
}
_GPT2_LAYER: dict[str, tuple[str, Layout]] = {
    "input_layernorm": ("ln_1", "plain"),
    "self_attention.linear_qkv": ("attn.c_attn", "transposed qkv"),
    "self_attention.linear_proj": ("attn.c_proj", "transposed"),
    "pre_mlp_layernorm": ("ln_2", "plain"),
    "mlp.linear_fc1": ("mlp.c_fc", "transposed"),
    "mlp.linear_fc2": ("mlp.c_proj", "transposed"),
}
_BERT_LAYER: dict[str, tuple[str, Layout]] = {
    "self_attention.linear_qkv": (
        "attention.self.query attention.self.key attention.self.value",
        "qkv",
    ),
    "self_attention.linear_proj": ("attention.output.dense", "plain"),
    "mlp.linear_fc1": ("intermediate.dense", "plain"),
    "mlp.linear_fc2": ("output.dense", "plain"),
}
_MEGATRON_BERT_LAYER: dict[str, tuple[str, Layout]] = _BERT_LAYER | {
    "input_layernorm": ("attention.ln", "plain"),
    "pre_mlp_layernorm": ("ln", "plain"),
}

_BERT_ENDS: dict[str, tuple[str, Layout]] = {
    "embedding.word_embeddings.weight": ("bert.embeddings.word_embeddings.weight", "tokens"),
    "embedding.position_embeddings.weight": (
        "bert.embeddings.position_embeddings.weight",
        "plain",
    ),
    "embedding.tokentype_embeddings.weight": (
        "bert.embeddings.token_type_embeddings.weight",
        "plain",
    ),
    "output_layer.weight": ("cls.predictions.decoder.weight", "tokens"),
    "output_layer.bias": ("cls.predictions.bias", "tokens"),
    "lm_head.dense": ("cls.predictions.transform.dense", "plain"),
    "lm_head.layer_norm": ("cls.predictions.transform.LayerNorm", "plain"),
    "pooler.dense": ("bert.pooler.dense", "plain"),
    "binary_head": ("cls.seq_relationship", "plain"),
}
TOKEN_TYPES = "bert.embeddings.token_type_embeddings.weight"


@dataclass(frozen=True)
class Naming:
    """Names of one family: ``base`` is the prefix of the model without its head."""

    base: str
    layers: str
    layer: dict[str, tuple[str, Layout]]
    ends: dict[str, tuple[str, Layout]]
    #: Tensors beside the parameters: masks, positions, copies of tied ones.
    superfluous: str

    @property
    def heads(self) -> tuple[str, ...]:
        """First words of names outside of the model without its head."""
        return tuple({there.split(".")[0] for there, _ in self.ends.values()} | {self.base})


_ROTARY = Naming(
    "model",
    "model.layers",
    _ROTARY_LAYER,
    {
        "embedding.word_embeddings.weight": ("model.embed_tokens.weight", "tokens"),
        "decoder.final_layernorm": ("model.norm", "plain"),
        "output_layer.weight": ("lm_head.weight", "tokens"),
    },
    r".*\.rotary_emb\.inv_freq|lm_head\.weight",
)
_GPT2 = Naming(
    "transformer",
    "transformer.h",
    _GPT2_LAYER,
    {
        "embedding.word_embeddings.weight": ("transformer.wte.weight", "tokens"),
        "embedding.position_embeddings.weight": ("transformer.wpe.weight", "plain"),
        "decoder.final_layernorm": ("transformer.ln_f", "plain"),
        "output_layer.weight": ("lm_head.weight", "tokens"),
    },
    r".*\.attn\.(masked_)?bias|lm_head\.weight",
)
_TIED_BERT = r".*\.position_ids|cls\.predictions\.decoder\.(weight|bias)"
_BERT = Naming("bert", "bert.encoder.layer", _BERT_LAYER, _BERT_ENDS, _TIED_BERT)
_MEGATRON_BERT = Naming(
    "bert",
    "bert.encoder.layer",
    _MEGATRON_BERT_LAYER,
    _BERT_ENDS | {"encoder.final_layernorm": ("bert.encoder.ln", "plain")},
    _TIED_BERT,
)
NAMINGS = {"gpt2": _GPT2, "bert": _BERT, "megatron-bert": _MEGATRON_BERT}

_LAYER = re.compile(r"(?:decoder|encoder)\.layers\.(\d+)\.(.+)\.(weight|bias)")


def naming_of(model_type: str) -> Naming:
    """The names of a model type."""
    return NAMINGS.get(model_type, _ROTARY)


def source_of(name: str, model_type: str, num_layers: int) -> Source:
    """What the parameter with Megatron's full name ``name`` is made of."""
    naming = naming_of(model_type)
    if name in naming.ends:
        there, layout = naming.ends[name]
        return Source((there,), layout)
    module, _, part = name.rpartition(".")
    if model_type == "bert" and (norm := _bert_norm(module, num_layers)):
        return Source((f"{norm}.{part}",))
    if match := _LAYER.fullmatch(name):
        there, layout = naming.layer[match[2]]
        prefix = f"{naming.layers}.{match[1]}."
        return Source(tuple(f"{prefix}{one}.{part}" for one in there.split()), layout)
    there, layout = naming.ends[module]
    return Source((f"{there}.{part}",), layout)


def _bert_norm(module: str, num_layers: int) -> str | None:
    """A norm of BERT's: there it ends what it begins here."""
    match = re.fullmatch(r"encoder\.(?:layers\.(\d+)\.(\w+_layernorm)|final_layernorm)", module)
    if match is None:
        return None
    layer = num_layers if match[1] is None else int(match[1])
    if match[2] == "pre_mlp_layernorm":
        return f"bert.encoder.layer.{layer}.attention.output.LayerNorm"
    return (
        f"bert.encoder.layer.{layer - 1}.output.LayerNorm" if layer else "bert.embeddings.LayerNorm"
    )


def canonical(name: str, naming: Naming) -> str:
    """A stored name as transformers writes it today."""
    name = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", name)
    name = re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", name)
    return name if name.split(".")[0] in naming.heads else f"{naming.base}.{name}"


# ---- layouts ----------------------------------------------------------------------------------


def join(config: ModelConfig, layout: Layout, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Megatron's parameter from the tensors that it is made of."""
    if layout.startswith("transposed"):
        parts = [part.t() if part.dim() == 2 else part for part in parts]
    if layout == "transposed qkv":
        parts = parts[0].chunk(3)
    if layout.endswith("qkv"):
        # Megatron keeps the queries of a group together with their keys and values.
        groups = config.num_query_groups
        grouped = [part.reshape(groups, -1, *part.shape[1:]) for part in parts]
        return torch.cat(grouped, 1).flatten(0, 1)
    if layout == "gated":
        return torch.cat(list(parts))
    return parts[0].contiguous()


def cut(config: ModelConfig, layout: Layout, tensor: torch.Tensor) -> list[torch.Tensor]:
    """The reverse of :func:`join`; rows that pad the vocabulary are left out."""
    if layout == "tokens":
        return [tensor[: config.vocab_size]]
    if layout == "gated":
        return list(tensor.chunk(2))
    parts = [tensor]
    if layout.endswith("qkv"):
        groups, width = config.num_query_groups, config.kv_channels
        queries = config.num_attention_heads // groups * width
        grouped = tensor.view(groups, -1, *tensor.shape[1:])
        parts = [part.flatten(0, 1) for part in grouped.split([queries, width, width], 1)]
    if layout == "transposed qkv":
        parts = [torch.cat(parts)]
    if layout.startswith("transposed"):
        parts = [part.t() if part.dim() == 2 else part for part in parts]
    return parts
