"""Megatron-LM's arguments, as its checkpoints hold them, from and to a model's configuration."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

import torch

from megatron_flex.checkpoint.conversion.weights import DTYPES, Weights
from megatron_flex.checkpoint.errors import CheckpointError
from megatron_flex.model.config import ModelConfig

# What a model may be in Megatron-LM and cannot be here: the only values that are understood.
_REQUIRED: dict[str, tuple[Any, ...]] = {
    "num_experts": (None, 0),
    "multi_latent_attention": (False,),
    "mtp_num_layers": (None, 0),
    "hybrid_override_pattern": (None,),
    "heterogeneous_layers_config_path": (None,),
    "rotary_interleaved": (False,),
    "rotary_scaling_factor": (1.0, None),
    "squared_relu": (False,),
    "quick_geglu": (False,),
    "onnx_safe": (None, False),
    "position_embedding_type": ("learned_absolute", "rope", "none"),
    "normalization": ("LayerNorm", "RMSNorm"),
}


KEPT = (
    "tokenizer_type",
    "tokenizer_model",
    "vocab_file",
    "merge_file",
    "vocab_extra_ids",
    "make_vocab_size_divisible_by",
    "seq_length",
    "sample_format",
)
"""Arguments that the weights do not show, by names that are Megatron's and ours."""


def _beside_the_flag(arguments: Mapping[str, Any]) -> int:
    """Token ids that a model has beyond Megatron's ``vocab_size``: ``vocab_extra_ids``.

    For a NullTokenizer ``vocab_size`` is the flag, to which the tokenizer adds an end token.
    """
    ends = arguments.get("tokenizer_type") == "NullTokenizer"
    return int(arguments.get("vocab_extra_ids") or 0) + (1 if ends else 0)


def config_of(
    arguments: Namespace, model_type: str, true_vocab_size: int | None = None
) -> ModelConfig:
    """The configuration of a model that was trained with these Megatron-LM arguments.

    ``model_type`` is ``GPT`` or ``BERT``. ``true_vocab_size`` is the tokenizer's size, which
    Megatron-LM's arguments often lack. Raises :class:`CheckpointError` for a model that cannot be
    represented.
    """
    given = vars(arguments)
    for name, values in _REQUIRED.items():
        if given.get(name, values[0]) not in values:
            raise CheckpointError(
                f"the model has {name}={given[name]!r}; this program knows"
                f" {' or '.join(map(repr, values))}"
            )
    bias = given.get("add_bias_linear", True)
    try:
        hidden, heads = given["hidden_size"], given["num_attention_heads"]
        padded = given["padded_vocab_size"]
        bert = model_type == "BERT"
        binary = bert and given.get("bert_binary_head", True)
        grouped = given.get("group_query_attention", False)
        return ModelConfig(
            num_layers=given["num_layers"],
            hidden_size=hidden,
            num_attention_heads=heads,
            vocab_size=true_vocab_size or _true_size(given) or padded,
            padded_vocab_size=padded,
            max_position_embeddings=given["max_position_embeddings"],
            ffn_hidden_size=given.get("ffn_hidden_size") or 4 * hidden,
            kv_channels=given.get("kv_channels") or hidden // heads,
            num_query_groups=given["num_query_groups"] if grouped else heads,
            position_embedding_type=given.get("position_embedding_type", "learned_absolute"),
            rotary_base=given.get("rotary_base", 10000),
            rotary_percent=given.get("rotary_percent", 1.0),
            use_rope_scaling=given.get("use_rope_scaling", False),
            rope_scaling_factor=given.get("rope_scaling_factor", 8.0),
            normalization=given.get("normalization", "LayerNorm"),
            norm_epsilon=given.get("norm_epsilon", given.get("layernorm_epsilon", 1e-5)),
            swiglu=given.get("swiglu", False),
            openai_gelu=given.get("openai_gelu", False),
            apply_residual_connection_post_layernorm=given.get(
                "apply_residual_connection_post_layernorm", False
            ),
            apply_layernorm_1p=given.get("apply_layernorm_1p", False),
            untie_embeddings_and_output_weights=given.get(
                "untie_embeddings_and_output_weights", False
            ),
            add_bias_linear=bias,
            add_qkv_bias=given.get("add_qkv_bias", False) and not bias,
            qk_layernorm=given.get("qk_layernorm", False),
            hidden_dropout=given.get("hidden_dropout", 0.1),
            attention_dropout=given.get("attention_dropout", 0.1),
            init_method_std=given.get("init_method_std", 0.02),
            params_dtype=_precision(given.get("params_dtype", torch.float32)),
            seed=given.get("seed", 1234),
            causal=not bert,
            architecture="bert" if bert else "gpt",
            num_tokentypes=2 if binary else 0,
            binary_head=binary,
        )
    except KeyError as error:
        raise CheckpointError(f"the checkpoint's arguments lack {error.args[0]}") from error
    except ValueError as error:
        raise CheckpointError(f"the checkpoint's arguments: {error}") from error


def check_known_to_core(config: ModelConfig) -> None:
    """Raise :class:`CheckpointError` for a model that megatron-core cannot compute."""
    if config.apply_residual_connection_post_layernorm:
        raise CheckpointError(
            "the model has --apply-residual-connection-post-layernorm, which megatron-core accepts"
            " and ignores: it would compute another one"
        )


def _true_size(given: Mapping[str, Any]) -> int | None:
    size = given.get("vocab_size")
    return size and size + _beside_the_flag(given)


def _precision(dtype: Any) -> Any:
    for name, known in DTYPES.items():
        if dtype in (known, str(known)):
            return name
    if dtype == torch.float16:
        return "float32"  # holds every float16 value; training in float16 is not possible here
    raise CheckpointError(f"weights of type {dtype} are not known")


def megatron_arguments(weights: Weights, *, ckpt_format: str) -> Namespace:
    """Megatron-LM's arguments for ``weights``, for ``--use-checkpoint-args`` and its checks.

    Arguments that came with the weights stay, where the configuration does not decide them.
    """
    c = weights.config
    dtype = DTYPES[c.params_dtype]
    result = Namespace(**vars(weights.arguments))
    decided: dict[str, Any] = {
        "num_layers": c.num_layers,
        "encoder_num_layers": c.num_layers,
        "hidden_size": c.hidden_size,
        "ffn_hidden_size": c.ffn_hidden_size,
        "num_attention_heads": c.num_attention_heads,
        "kv_channels": c.kv_channels,
        "group_query_attention": c.num_query_groups != c.num_attention_heads,
        "num_query_groups": c.num_query_groups,
        "max_position_embeddings": c.max_position_embeddings,
        "position_embedding_type": c.position_embedding_type,
        "add_position_embedding": c.position_embedding_type == "learned_absolute",
        "use_rotary_position_embeddings": c.position_embedding_type == "rope",
        "rotary_base": c.rotary_base,
        "rotary_percent": c.rotary_percent,
        "use_rope_scaling": c.use_rope_scaling,
        "rope_scaling_factor": c.rope_scaling_factor,
        "normalization": c.normalization,
        "norm_epsilon": c.norm_epsilon,
        "swiglu": c.swiglu,
        "openai_gelu": c.openai_gelu,
        "apply_residual_connection_post_layernorm": c.apply_residual_connection_post_layernorm,
        "apply_layernorm_1p": c.apply_layernorm_1p,
        "untie_embeddings_and_output_weights": c.untie_embeddings_and_output_weights,
        "add_bias_linear": c.add_bias_linear,
        "add_qkv_bias": c.qkv_bias,
        "qk_layernorm": c.qk_layernorm,
        "hidden_dropout": c.hidden_dropout,
        "attention_dropout": c.attention_dropout,
        "init_method_std": c.init_method_std,
        "vocab_size": c.vocab_size,
        "padded_vocab_size": c.padded_vocab_size,
        "params_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": False,
        "bert_binary_head": c.binary_head,
        "tensor_model_parallel_size": weights.tensor_parallel_size,
        "pipeline_model_parallel_size": weights.pipeline_parallel_size,
        "iteration": weights.iteration,
        "consumed_train_samples": weights.consumed_samples,
        "ckpt_format": ckpt_format,
        "use_dist_ckpt": ckpt_format != "torch",
        "no_save_optim": weights.training is None,
    }
    defaults: dict[str, Any] = {
        "seed": c.seed,
        "seq_length": c.max_position_embeddings,
        "encoder_seq_length": c.max_position_embeddings,
        "make_vocab_size_divisible_by": 128,
        "tokenizer_type": "NullTokenizer",
        "tokenizer_model": None,
        "vocab_file": None,
        "consumed_valid_samples": 0,
        "skipped_train_samples": 0,
        "sequence_parallel": False,
        "apply_query_key_layer_scaling": False,
        "virtual_pipeline_model_parallel_size": None,
        "num_layers_per_virtual_pipeline_stage": None,
        "context_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "num_experts": None,
        "data_parallel_random_init": False,
        "phase_transition_iterations": None,
        "use_distributed_optimizer": False,
        "no_save_rng": True,
    }
    for name, value in defaults.items():
        if not hasattr(result, name):
            setattr(result, name, value)
    if weights.training is not None:
        beta1, beta2 = weights.training.betas
        decided |= {"adam_beta1": beta1, "adam_beta2": beta2, "adam_eps": weights.training.eps}
    for name, value in decided.items():
        setattr(result, name, value)
    result.vocab_size -= _beside_the_flag(vars(result))
    return result
