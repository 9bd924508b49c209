"""The shape of a model, as a value that the planner, the data and the modules share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_flex.model.layers import LayerList

PositionEmbedding = Literal["learned_absolute", "rope", "none"]


@dataclass(frozen=True)
class ModelConfig:
    """Everything that decides a model's parameters and its function.

    Names and meaning follow Megatron-LM's arguments. ``vocab_size`` is the tokenizer's size;
    ``padded_vocab_size`` has the rows that ``--make-vocab-size-divisible-by`` adds, which take
    no part in the loss.
    """

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    vocab_size: int
    padded_vocab_size: int
    max_position_embeddings: int
    ffn_hidden_size: int
    kv_channels: int
    num_query_groups: int
    position_embedding_type: PositionEmbedding = "learned_absolute"
    rotary_base: int = 10000
    rotary_percent: float = 1.0
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    norm_epsilon: float = 1e-5
    swiglu: bool = False
    untie_embeddings_and_output_weights: bool = False
    add_bias_linear: bool = True
    qk_layernorm: bool = False
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.1
    init_method_std: float = 0.02
    params_dtype: Literal["float32", "bfloat16"] = "float32"
    seed: int = 1234
    causal: bool = True

    @property
    def layers(self) -> LayerList:
        """The layer list of this model."""
        return LayerList(self.num_layers, tied=not self.untie_embeddings_and_output_weights)
