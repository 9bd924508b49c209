"""Small models of transformers with random weights, and what converting them takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open

from megatron_flex.checkpoint.conversion.flex import read_flex
from megatron_flex.checkpoint.conversion.weights import Weights
from megatron_flex.data.packed import PackedBatch
from megatron_flex.model.head import HeadBlock
from tests.unit.model.support import build_model, hidden_states, named_parameters, split_batch
from tools.checkpoint import convert

_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 90,
    "max_position_embeddings": 64,
}
_GROUPED = _SIZES | {"num_key_value_heads": 2}
_STRETCHED = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_theta": 500000.0,
}
_GPT2 = {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 90, "n_positions": 64}
_GPT2 |= {"bos_token_id": 0, "eos_token_id": 0}

MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama 3": (
        "LlamaForCausalLM",
        "LlamaConfig",
        _GROUPED | {"head_dim": 16, "rope_parameters": _STRETCHED},
    ),
    "llama 3, tied": (
        "LlamaForCausalLM",
        "LlamaConfig",
        _GROUPED | {"rope_parameters": _STRETCHED, "tie_word_embeddings": True},
    ),
    "llama 2": ("LlamaForCausalLM", "LlamaConfig", _SIZES),
    "llama with biases": (
        "LlamaForCausalLM",
        "LlamaConfig",
        _GROUPED | {"attention_bias": True, "mlp_bias": True},
    ),
    "mistral": (
        "MistralForCausalLM",
        "MistralConfig",
        _GROUPED | {"sliding_window": None, "rms_norm_eps": 1e-5},
    ),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", _GROUPED),
    "qwen2, tied": ("Qwen2ForCausalLM", "Qwen2Config", _GROUPED | {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", _GROUPED | {"head_dim": 16}),
    "qwen3, tied": (
        "Qwen3ForCausalLM",
        "Qwen3Config",
        _GROUPED | {"head_dim": 8, "tie_word_embeddings": True},
    ),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", _GPT2),
    "gpt2, untied": (
        "GPT2LMHeadModel",
        "GPT2Config",
        _GPT2 | {"tie_word_embeddings": False, "activation_function": "gelu", "n_inner": 48},
    ),
    "bert": ("BertForPreTraining", "BertConfig", _SIZES),
    "bert, masked only": ("BertForMaskedLM", "BertConfig", _SIZES),
    "megatron-bert": ("MegatronBertForPreTraining", "MegatronBertConfig", _SIZES),
}
"""Class of the model, class of its configuration, and values."""


def make(name: str, **changes: Any) -> Any:
    """A model in evaluation mode, all of its parameters random."""
    model, config, values = MODELS[name]
    built = getattr(transformers, model)(getattr(transformers, config)(**{**values, **changes}))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in built.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                parameter.add_(noise, alpha=0.1)
            else:
                parameter.copy_(0.2 * noise)
        if name == "bert, masked only":  # there are no token types here without the other head
            built.bert.embeddings.token_type_embeddings.weight.zero_()
    return built.eval()


def run(*words: object) -> int:
    """Run convert.py."""
    return convert.main([str(word) for word in words])


def to_flex(source: Path, target: Path, *words: object, bert: bool = False) -> int:
    """Convert a Hugging Face directory."""
    kind = "BERT" if bert else "GPT"
    names = ("--model-type", kind, "--loader", "hf", "--saver", "flex")
    return run(*names, "--load-dir", source, "--save-dir", target, *words)


def to_hf(source: Path, target: Path, *words: object, bert: bool = False) -> int:
    """Convert back."""
    kind = "BERT" if bert else "GPT"
    names = ("--model-type", kind, "--loader", "flex", "--saver", "hf")
    return run(*names, "--load-dir", source, "--save-dir", target, *words)


def stored(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a directory's safetensors files."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(str(path), framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                assert name not in found
                found[name] = file.get_tensor(name)
    return found


def assert_same_bits(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Names, types and values are equal."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, name
        assert torch.equal(actual[name], tensor), name


def our_logits(weights: Weights, batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Logits of a model ``[T, vocabulary]``, and of the sentence-order head."""
    blocks = build_model(weights.config)
    parameters = named_parameters(blocks)
    assert parameters.keys() == weights.tensors.keys()
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights.tensors[name])
        for block in blocks:
            block.eval()
        hidden = hidden_states(blocks, batch)
        head = blocks[-1]
        assert isinstance(head, HeadBlock)
        normed = head.final_layernorm(hidden.squeeze(1))
        order = head.binary_logits(normed, batch) if weights.config.binary_head else None
        return head.logits(hidden), order


def their_logits(
    model: Any, batch: PackedBatch, *, token_types: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The same from transformers, one sample at a time."""
    logits, orders = [], []
    for part in split_batch(batch):
        assert part.tokens is not None
        inputs = {"input_ids": part.tokens[None]}
        if token_types and part.token_types is not None:
            inputs["token_type_ids"] = part.token_types[None]
        with torch.no_grad():
            out = model(**inputs)
        logits.append((out.prediction_logits if "prediction_logits" in out else out.logits)[0])
        if "seq_relationship_logits" in out:
            orders.append(out.seq_relationship_logits)
    return torch.cat(logits), torch.cat(orders) if orders else None


def flex_weights(directory: Path) -> Weights:
    """The weights of a converted checkpoint, all read."""
    weights = read_flex(directory)
    return Weights(weights.config, dict(weights.tensors.items()), companions=weights.companions)
