"""Flags of the model's shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_flex.config.option import option


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The model's shape, in Megatron's names."""

    num_layers: int = option(required=True, at_least=1)
    """Number of transformer layers."""

    hidden_size: int = option(required=True, at_least=1)
    """Width of the residual stream."""

    ffn_hidden_size: int = option(
        derived="4 x hidden-size; with --swiglu 8/3 x hidden-size, down to a multiple of 64",
        at_least=1,
    )
    """Width inside the MLP."""

    num_attention_heads: int = option(required=True, at_least=1)
    """Number of attention heads."""

    kv_channels: int = option(derived="hidden-size / num-attention-heads", at_least=1)
    """Width of one attention head."""

    group_query_attention: bool = False
    """Share keys and values among groups of query heads; see --num-query-groups."""

    num_query_groups: int = option(1, at_least=1)
    """Number of groups of query heads, with --group-query-attention."""

    seq_length: int = option(derived="max-sample-length", at_least=1)
    """Length of the longest sample in tokens, unless --max-sample-length says otherwise. Shorter
    samples stay as short as they are."""

    max_position_embeddings: int = option(
        derived="the larger of seq-length and max-sample-length", at_least=1
    )
    """Number of positions, in tokens. No sample may be longer, except with
    --position-embedding-type none."""

    position_embedding_type: Literal["learned_absolute", "rope", "none"] = "learned_absolute"
    """How a token's position enters the model."""

    rotary_base: int = option(10000, at_least=1)
    """Base of the rotary frequencies, with --position-embedding-type rope."""

    rotary_percent: float = option(1.0, above=0, at_most=1)
    """Share of a head's channels that is rotated, with --position-embedding-type rope."""

    use_rope_scaling: bool = False
    """Stretch the rotary frequencies as in Llama 3.1, with --position-embedding-type rope."""

    rope_scaling_factor: float = option(8.0, above=0)
    """How far --use-rope-scaling stretches the low frequencies."""

    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    """Kind of normalization."""

    norm_epsilon: float = option(1e-5, above=0)
    """Added to the variance inside a normalization."""

    swiglu: bool = False
    """Gated linear units with SiLU in the MLP, instead of GELU."""

    openai_gelu: bool = False
    """GELU by its approximation with tanh, as in GPT-2."""

    apply_residual_connection_post_layernorm: bool = False
    """Add what attention and MLP give to their normalized input, as in the first BERT."""

    apply_layernorm_1p: bool = False
    """Let norms multiply by one plus their weight, which begins at zero."""

    untie_embeddings_and_output_weights: bool = False
    """Give the output layer weights of its own instead of the word embedding's."""

    add_bias_linear: bool = option(True, flags=("--disable-bias-linear",))
    """Linear layers without bias."""

    add_qkv_bias: bool = False
    """A bias in the projection to queries, keys and values, also with --disable-bias-linear."""

    qk_layernorm: bool = False
    """Normalize queries and keys."""

    hidden_dropout: float = option(0.1, at_least=0, below=1)
    """Dropout after the embedding and after each half of a layer. It is keyed by seed, sample and
    layer, so that it does not depend on the plan."""

    attention_dropout: float = option(0.1, at_least=0, below=1)
    """Dropout on the attention probabilities, keyed in the same way."""

    init_method_std: float = option(0.02, above=0)
    """Standard deviation of the normal distribution that weights are drawn from."""

    make_vocab_size_divisible_by: int = option(128, at_least=1)
    """Pad the vocabulary to a multiple of this. Padded rows take no part in the loss."""

    bert_binary_head: bool = option(True, flags=("--bert-no-binary-head",))
    """BERT without the sentence-order head: for documents of a single sentence."""

    persist_layer_norm: bool = option(True, flags=("--no-persist-layer-norm",))
    """Where LayerNorm is Apex's (it is on GPUs where Apex is installed), do without its persistent
    kernel, which there is for some widths."""

    transformer_impl: Literal["local", "transformer_engine"] = "local"
    """Which megatron-core modules the layers are built from. transformer_engine needs GPUs and the
    package transformer-engine. Checkpoints are the same. Megatron-LM's default is
    transformer_engine."""

    attention_backend: Literal["auto"] = "auto"
    """Attention kernel: the fastest variable-length one that the device has."""
