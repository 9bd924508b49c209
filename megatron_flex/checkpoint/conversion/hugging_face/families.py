"""Fields of Hugging Face's ``config.json`` by model type, from and to a model's configuration.

Each field is understood, has no influence on what the model computes, or is refused by name. The
defaults are those of transformers' configuration classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_flex.checkpoint.errors import CheckpointError
from megatron_flex.model.config import (
    HIGH_FREQUENCY_FACTOR,
    LOW_FREQUENCY_FACTOR,
    ORIGINAL_POSITIONS,
    ModelConfig,
)

_HARMLESS = frozenset(
    """
    architectures auto_map bos_token_id chunk_size_feed_forward classifier_dropout decoder_start_token_id
    directionality do_sample dtype embd_pdrop eos_token_id finetuning_task forced_bos_token_id
    forced_eos_token_id gradient_checkpointing id2label initializer_range label2id max_length
    max_window_layers min_length model_type n_ctx num_labels output_attentions output_hidden_states
    output_past pad_token_id pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers
    pooler_size_per_head pooler_type prefix pretraining_tp problem_type remove_invalid_values
    reorder_and_upcast_attn return_dict sep_token_id cls_token_id summary_activation
    summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
    task_specific_params tokenizer_class torch_dtype torchscript transformers_version unk_token_id
    use_bfloat16 use_cache
    """.split()  # noqa: E501
)
"""Fields that say nothing about what the model computes."""

_FIXED: Mapping[str, tuple[Any, ...]] = {
    "add_cross_attention": (False, None),
    "cross_attention_hidden_size": (None,),
    "is_decoder": (False,),
    "is_encoder_decoder": (False,),
    "position_embedding_type": ("absolute",),
    "pruned_heads": ({}, None),
    "scale_attn_by_inverse_layer_idx": (False,),
    "scale_attn_weights": (True,),
    "tie_encoder_decoder": (False,),
    "use_mrope": (False,),
    "use_sliding_window": (False,),
}
"""Fields of which only these values are understood."""


class Fields:
    """The fields of a ``config.json``, with a note of those that were understood."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self._used = {n for n in values if n in _HARMLESS or n.startswith("_")}

    def take(self, name: str, default: Any = ...) -> Any:
        """The value of a field; without a default it must be there."""
        self._used.add(name)
        value = self._values.get(name, default)
        if value is ...:
            raise CheckpointError(f"config.json lacks {name}")
        return value

    def given(self, name: str, default: Any) -> Any:
        """The value of a field; null is the default too."""
        value = self.take(name, None)
        return default if value is None else value

    def only(self, name: str, *known: Any) -> None:
        """Refuse a field that has another value than those known; absent means the first."""
        if self.take(name, known[0]) not in known:
            self._refuse(name, f"this program knows {' or '.join(map(repr, known))}")

    def _refuse(self, name: str, why: str) -> None:
        raise CheckpointError(f"config.json has {name}={self._values[name]!r}: {why}")

    def finish(self, ignored: tuple[str, ...] = ()) -> None:
        """Refuse what nobody asked for, but for the fields that the user wants ``ignored``."""
        for name, known in _FIXED.items():
            if name in self._values and name not in self._used and name not in ignored:
                self.only(name, *known)
        for name in sorted(self._values):
            if name not in self._used and name not in ignored:
                self._refuse(
                    name,
                    "this field is not known, and may change what the model computes"
                    f" (--ignore-fields {name} if it does not)",
                )


@dataclass(frozen=True)
class Family:
    """A model type.

    Attributes:
        model_type: as in ``config.json``.
        architecture: transformers' class of the model with its head.
        bert: whether it is a BERT.
        read: from the fields to those of :class:`ModelConfig`, but for precision and vocabulary.
        write: the reverse: the fields that the configuration decides.
        fits: values that a configuration must have for this family.
    """

    model_type: str
    architecture: str
    bert: bool
    read: Callable[[Fields], dict[str, Any]]
    write: Callable[[ModelConfig], dict[str, Any]]
    fits: Mapping[str, Any]

    def misfit(self, config: ModelConfig) -> str | None:
        """The first value of a configuration that this family cannot have."""
        for name, value in self.fits.items():
            if (found := getattr(config, name)) != value:
                return f"{name} is {found}, {self.model_type} has {value}"
        return None


# ---- rotary models ----------------------------------------------------------------------------


def _rope(fields: Fields) -> dict[str, Any]:
    """Rotary fields: ``rope_parameters`` of transformers 5, or what it had before."""
    theta = fields.given("rope_theta", 10000.0)
    scaling = fields.given("rope_scaling", {})
    values = {"rope_theta": theta, **scaling, **fields.given("rope_parameters", {})}
    kind = values.pop("rope_type", None) or values.pop("type", None) or "default"
    values.pop("type", None)
    base = values.pop("rope_theta")
    if base != int(base):
        raise CheckpointError(f"config.json has rope_theta={base}: --rotary-base is a whole number")
    found: dict[str, Any] = {"position_embedding_type": "rope", "rotary_base": int(base)}
    known: dict[str, Any] = {"partial_rotary_factor": 1.0}
    if kind == "llama3":
        found |= {"use_rope_scaling": True, "rope_scaling_factor": float(values.pop("factor"))}
        known |= {
            "low_freq_factor": LOW_FREQUENCY_FACTOR,
            "high_freq_factor": HIGH_FREQUENCY_FACTOR,
            "original_max_position_embeddings": ORIGINAL_POSITIONS,
        }
    elif kind != "default":
        raise CheckpointError(
            f"config.json has the rotary embedding rope_type={kind!r}: this program knows 'default'"
            " and 'llama3'"
        )
    for name, value in values.items():
        if name not in known or value != known[name]:
            raise CheckpointError(
                f"config.json has {name}={value!r} in its rotary embedding: this program knows"
                f" {known.get(name, 'no such field')}"
            )
    return found


def _rope_fields(c: ModelConfig) -> dict[str, Any]:
    scaling = None
    if c.use_rope_scaling:
        scaling = {
            "rope_type": "llama3",
            "factor": c.rope_scaling_factor,
            "low_freq_factor": LOW_FREQUENCY_FACTOR,
            "high_freq_factor": HIGH_FREQUENCY_FACTOR,
            "original_max_position_embeddings": ORIGINAL_POSITIONS,
        }
    # As before transformers 5, which reads them too.
    return {"rope_theta": float(c.rotary_base), "rope_scaling": scaling}


def _windows(fields: Fields, positions: int, default: int | None) -> None:
    """Refuse a sliding window that a sample may be longer than."""
    window = fields.take("sliding_window", default)
    kinds = fields.given("layer_types", [])
    sliding = [kind for kind in kinds if kind != "full_attention"]
    if fields.take("use_sliding_window", bool(default) or bool(sliding)) and (
        window is not None and window < positions
    ):
        raise CheckpointError(
            f"config.json has sliding_window={window} for {positions} positions: attention sees the"
            " whole sample here, which is the same up to the window: give"
            f" --max-position-embeddings {window}"
        )
    other = [kind for kind in sliding if kind != "sliding_attention"]
    if other:
        raise CheckpointError(f"config.json has layer_types with {other[0]!r}, which is not known")


def _rotary(
    *, groups: int | None, positions: int, window: int | None = None, width: int | None = None
) -> Callable[[Fields], dict[str, Any]]:
    """Reads what Llama and its like share; the arguments are defaults of absent fields."""

    def read(f: Fields) -> dict[str, Any]:
        hidden, heads = f.take("hidden_size"), f.take("num_attention_heads")
        f.only("hidden_act", "silu")
        longest = f.given("max_position_embeddings", positions)
        _windows(f, longest, window)
        return {
            "num_layers": f.take("num_hidden_layers"),
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_query_groups": f.given("num_key_value_heads", groups or heads),
            "kv_channels": f.given("head_dim", width or hidden // heads),
            "ffn_hidden_size": f.take("intermediate_size"),
            "max_position_embeddings": longest,
            "normalization": "RMSNorm",
            "norm_epsilon": f.given("rms_norm_eps", 1e-6),
            "swiglu": True,
            "add_bias_linear": False,
            "untie_embeddings_and_output_weights": not f.given("tie_word_embeddings", False),
            "hidden_dropout": 0.0,
            "attention_dropout": f.given("attention_dropout", 0.0),
            "init_method_std": f.given("initializer_range", 0.02),
            **_rope(f),
        }

    return read


def _rotary_fields(c: ModelConfig) -> dict[str, Any]:
    return {
        "num_hidden_layers": c.num_layers,
        "hidden_size": c.hidden_size,
        "num_attention_heads": c.num_attention_heads,
        "num_key_value_heads": c.num_query_groups,
        "head_dim": c.kv_channels,
        "intermediate_size": c.ffn_hidden_size,
        "max_position_embeddings": c.max_position_embeddings,
        "hidden_act": "silu",
        "rms_norm_eps": c.norm_epsilon,
        "attention_dropout": c.attention_dropout,
        "initializer_range": c.init_method_std,
        "tie_word_embeddings": not c.untie_embeddings_and_output_weights,
        **_rope_fields(c),
    }


_llama_core = _rotary(groups=None, positions=2048)


def _read_llama(f: Fields) -> dict[str, Any]:
    found = _llama_core(f)
    attention, mlp = f.given("attention_bias", False), f.given("mlp_bias", False)
    if attention != mlp:
        raise CheckpointError(
            f"config.json has attention_bias={attention} and mlp_bias={mlp}: biases are in all"
            " linear layers here, or in none"
        )
    return found | {"add_bias_linear": attention}


def _read_qwen2(f: Fields) -> dict[str, Any]:
    return _rotary(groups=32, positions=32768)(f) | {"add_qkv_bias": True}


def _read_qwen3(f: Fields) -> dict[str, Any]:
    f.only("attention_bias", False)
    return _rotary(groups=32, positions=32768, width=128)(f) | {"qk_layernorm": True}


def _llama_fields(c: ModelConfig) -> dict[str, Any]:
    biases = {"attention_bias": c.add_bias_linear, "mlp_bias": c.add_bias_linear}
    return _rotary_fields(c) | biases


def _mistral_fields(c: ModelConfig) -> dict[str, Any]:
    return _rotary_fields(c) | {"sliding_window": None}


def _qwen_fields(c: ModelConfig) -> dict[str, Any]:
    return _rotary_fields(c) | {"use_sliding_window": False, "sliding_window": None}


_ROTARY = {
    "position_embedding_type": "rope",
    "rotary_percent": 1.0,
    "normalization": "RMSNorm",
    "swiglu": True,
    "apply_residual_connection_post_layernorm": False,
    "apply_layernorm_1p": False,
}
_PLAIN = _ROTARY | {"add_bias_linear": False, "add_qkv_bias": False, "qk_layernorm": False}


# ---- GPT-2 ------------------------------------------------------------------------------------

_BY_TANH = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")


def _read_gpt2(f: Fields) -> dict[str, Any]:
    hidden, heads = f.take("n_embd"), f.take("n_head")
    f.only("activation_function", _BY_TANH[0], "gelu", *_BY_TANH[1:])
    return {
        "num_layers": f.take("n_layer"),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": heads,
        "kv_channels": hidden // heads,
        "ffn_hidden_size": f.given("n_inner", 4 * hidden),
        "max_position_embeddings": f.given("n_positions", 1024),
        "norm_epsilon": f.given("layer_norm_epsilon", 1e-5),
        "openai_gelu": f.take("activation_function", _BY_TANH[0]) in _BY_TANH,
        "untie_embeddings_and_output_weights": not f.given("tie_word_embeddings", True),
        "hidden_dropout": f.given("resid_pdrop", 0.1),
        "attention_dropout": f.given("attn_pdrop", 0.1),
        "init_method_std": f.given("initializer_range", 0.02),
    }


def _check_heads(c: ModelConfig, name: str) -> None:
    if c.kv_channels * c.num_attention_heads != c.hidden_size:
        raise CheckpointError(
            f"{name}'s heads are as wide as the model together: not --kv-channels"
        )
    if c.num_query_groups != c.num_attention_heads:
        raise CheckpointError(f"{name}'s heads have keys of their own: not --num-query-groups")


def _gpt2_fields(c: ModelConfig) -> dict[str, Any]:
    _check_heads(c, "GPT-2")
    return {
        "n_layer": c.num_layers,
        "n_embd": c.hidden_size,
        "n_head": c.num_attention_heads,
        "n_inner": c.ffn_hidden_size,
        "n_positions": c.max_position_embeddings,
        "activation_function": _BY_TANH[0] if c.openai_gelu else "gelu",
        "layer_norm_epsilon": c.norm_epsilon,
        "tie_word_embeddings": not c.untie_embeddings_and_output_weights,
        "resid_pdrop": c.hidden_dropout,
        "embd_pdrop": c.hidden_dropout,
        "attn_pdrop": c.attention_dropout,
        "initializer_range": c.init_method_std,
    }


_ABSOLUTE = {
    "position_embedding_type": "learned_absolute",
    "normalization": "LayerNorm",
    "swiglu": False,
    "add_bias_linear": True,
    "qk_layernorm": False,
    "apply_layernorm_1p": False,
}

# ---- BERT -------------------------------------------------------------------------------------


def _read_bert(f: Fields) -> dict[str, Any]:
    """``bert`` and ``megatron-bert``, which differ in where the norms are."""
    hidden, heads = f.take("hidden_size"), f.take("num_attention_heads")
    f.only("hidden_act", "gelu")
    f.only("type_vocab_size", 2)
    return {
        "num_layers": f.take("num_hidden_layers"),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": heads,
        "kv_channels": hidden // heads,
        "ffn_hidden_size": f.take("intermediate_size"),
        "max_position_embeddings": f.given("max_position_embeddings", 512),
        "norm_epsilon": f.given("layer_norm_eps", 1e-12),
        "apply_residual_connection_post_layernorm": f.take("model_type") == "bert",
        "untie_embeddings_and_output_weights": not f.given("tie_word_embeddings", True),
        "hidden_dropout": f.given("hidden_dropout_prob", 0.1),
        "attention_dropout": f.given("attention_probs_dropout_prob", 0.1),
        "init_method_std": f.given("initializer_range", 0.02),
    }


def _bert_fields(c: ModelConfig) -> dict[str, Any]:
    _check_heads(c, "BERT")
    return {
        "num_hidden_layers": c.num_layers,
        "hidden_size": c.hidden_size,
        "num_attention_heads": c.num_attention_heads,
        "intermediate_size": c.ffn_hidden_size,
        "max_position_embeddings": c.max_position_embeddings,
        "type_vocab_size": 2,
        "hidden_act": "gelu",
        "layer_norm_eps": c.norm_epsilon,
        "tie_word_embeddings": not c.untie_embeddings_and_output_weights,
        "hidden_dropout_prob": c.hidden_dropout,
        "attention_probs_dropout_prob": c.attention_dropout,
        "initializer_range": c.init_method_std,
    }


_BERT = _ABSOLUTE | {"openai_gelu": False}

FAMILIES: Mapping[str, Family] = {
    family.model_type: family
    for family in (
        Family("qwen3", "Qwen3ForCausalLM", False, _read_qwen3, _qwen_fields,
               _PLAIN | {"qk_layernorm": True}),
        Family("qwen2", "Qwen2ForCausalLM", False, _read_qwen2, _qwen_fields,
               _PLAIN | {"add_qkv_bias": True}),
        Family("llama", "LlamaForCausalLM", False, _read_llama, _llama_fields,
               _ROTARY | {"add_qkv_bias": False, "qk_layernorm": False}),
        Family("mistral", "MistralForCausalLM", False,
               _rotary(groups=8, positions=131072, window=4096), _mistral_fields, _PLAIN),
        Family("gpt2", "GPT2LMHeadModel", False, _read_gpt2, _gpt2_fields,
               _ABSOLUTE | {"apply_residual_connection_post_layernorm": False}),
        Family("bert", "BertForPreTraining", True, _read_bert, _bert_fields,
               _BERT | {"apply_residual_connection_post_layernorm": True}),
        Family("megatron-bert", "MegatronBertForPreTraining", True, _read_bert, _bert_fields,
               _BERT | {"apply_residual_connection_post_layernorm": False}),
    )
}  # fmt: skip


def family_of(model_type: Any) -> Family:
    """The family with that name."""
    if model_type not in FAMILIES:
        raise CheckpointError(
            f"Hugging Face's model type {model_type!r} is not known: there are"
            f" {', '.join(FAMILIES)}"
        )
    return FAMILIES[model_type]


def family_for(config: ModelConfig) -> Family:
    """The first family that can have such a model."""
    reasons = []
    for family in FAMILIES.values():
        if family.bert == (config.architecture == "bert"):
            if (misfit := family.misfit(config)) is None:
                return family
            reasons.append(misfit)
    raise CheckpointError(f"no Hugging Face model has this shape: {'; '.join(reasons)}")
