"""The shape of a model, as a value that the planner, the data and the modules share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, Literal

from megatron_flex.model.layers import LayerList

PositionEmbedding = Literal["learned_absolute", "rope", "none"]
Implementation = Literal["local", "transformer_engine"]
Fp8Format = Literal["e4m3", "hybrid"]
Fp8Recipe = Literal["tensorwise", "mxfp8", "blockwise"]

FP8_ALIGNMENT: dict[str, int] = {"tensorwise": 16, "mxfp8": 32, "blockwise": 128}
"""Rows and columns of every matrix that an fp8 product takes are multiples of this: what the tensor
cores want, and the blocks of tokens and of channels that have a scale each."""


def fp8_alignment(fp8_format: Fp8Format | None, recipe: Fp8Recipe) -> int:
    """What the tokens of a micro-batch must be a multiple of."""
    return 1 if fp8_format is None else FP8_ALIGNMENT[recipe]


IMPLEMENTATION = ("transformer_impl", "fp8_format", "fp8_recipe", "persist_layer_norm")
"""Fields that say how a model is computed. Its parameters, and what they mean, are the same."""

LOW_FREQUENCY_FACTOR = 1.0
HIGH_FREQUENCY_FACTOR = 4.0
ORIGINAL_POSITIONS = 8192
"""Llama 3.1's numbers for scaled rotary frequencies, which are fixed in megatron-core too."""


@dataclass(frozen=True)
class ModelConfig:
    """Everything that decides a model's parameters and its function.

    Names and meaning follow Megatron-LM's arguments. ``vocab_size`` is the tokenizer's size;
    ``padded_vocab_size`` has the rows that ``--make-vocab-size-divisible-by`` adds, which take
    no part in the loss. ``binary_head`` is BERT's sentence-order head, with which Megatron sets
    ``num_tokentypes`` to 2. ``openai_gelu`` is GELU by tanh, as in GPT-2.
    ``apply_residual_connection_post_layernorm`` is the first BERT's order: each half of a layer
    adds to its normalized input. With ``apply_layernorm_1p`` norms multiply by one plus their
    weight. ``transformer_impl`` is whose modules the layers are made of;
    with ``fp8_format`` Transformer Engine's multiply in fp8. ``persist_layer_norm`` chooses
    between two kernels of Apex, where that is installed.
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
    use_rope_scaling: bool = False
    rope_scaling_factor: float = 8.0
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    norm_epsilon: float = 1e-5
    swiglu: bool = False
    openai_gelu: bool = False
    apply_residual_connection_post_layernorm: bool = False
    apply_layernorm_1p: bool = False
    untie_embeddings_and_output_weights: bool = False
    add_bias_linear: bool = True
    add_qkv_bias: bool = False
    qk_layernorm: bool = False
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.1
    init_method_std: float = 0.02
    params_dtype: Literal["float32", "bfloat16"] = "float32"
    seed: int = 1234
    causal: bool = True
    architecture: Literal["gpt", "bert"] = "gpt"
    num_tokentypes: int = 0
    binary_head: bool = False
    transformer_impl: Implementation = "local"
    fp8_format: Fp8Format | None = None
    fp8_recipe: Fp8Recipe = "tensorwise"
    persist_layer_norm: bool = True

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_query_groups:
            raise ValueError(
                f"{self.num_attention_heads} attention heads cannot be shared evenly among"
                f" {self.num_query_groups} query groups: change --num-query-groups"
            )
        if self.padded_vocab_size < self.vocab_size:
            raise ValueError(
                f"the padded vocabulary ({self.padded_vocab_size}) is smaller than the tokenizer's"
                f" ({self.vocab_size}): change --padded-vocab-size"
            )
        if self.architecture == "bert" and self.causal:
            raise ValueError("BERT attends in both directions: set causal to false")
        if self.architecture == "gpt" and (self.binary_head or self.num_tokentypes):
            raise ValueError("token types and a sentence-order head belong to BERT")
        if self.swiglu and self.openai_gelu:
            raise ValueError("a gated MLP has SiLU: give --swiglu or --openai-gelu, not both")
        if self.fp8_format is not None and self.transformer_impl == "local":
            raise ValueError(
                "fp8 needs Transformer Engine: add --transformer-impl transformer_engine"
            )
        for flag, probability in (
            ("--hidden-dropout", self.hidden_dropout),
            ("--attention-dropout", self.attention_dropout),
        ):
            if not 0.0 <= probability < 1.0:
                raise ValueError(f"{flag} must be at least 0 and below 1, not {probability}")

    @property
    def alignment(self) -> int:
        """The tokens of a micro-batch must be a multiple of this."""
        return fp8_alignment(self.fp8_format, self.fp8_recipe)

    @property
    def qkv_bias(self) -> bool:
        """Whether the projection to queries, keys and values has a bias."""
        return self.add_bias_linear or self.add_qkv_bias

    @property
    def layers(self) -> LayerList:
        """The layer list of this model."""
        return LayerList(self.num_layers, tied=not self.untie_embeddings_and_output_weights)


def local(config: ModelConfig) -> ModelConfig:
    """The same model of modules that run anywhere."""
    return replace(config, transformer_impl="local", fp8_format=None)


def completed(values: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration as it was saved, with defaults for fields that did not exist yet."""
    return {f.name: f.default for f in fields(ModelConfig) if f.default is not MISSING} | {**values}


def loss_names(config: ModelConfig) -> tuple[str, ...]:
    """Names of the losses that the head returns, as Megatron logs them, in order."""
    return ("lm loss", "sop loss") if config.binary_head else ("lm loss",)
