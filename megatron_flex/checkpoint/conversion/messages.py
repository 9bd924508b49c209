"""The messages between the loader and the saver of a conversion: Megatron-LM's protocol.

First a namespace that describes the model, then dictionaries of whole tensors: "embeddings",
"transformer layer N", "final norm", "output layer", "pooler", "lm head", "binary head", as far as
the model has them, then the word "done"; "exit" says that the loader failed. What Megatron-LM's
own protocol lacks is added: norms of query and key, BERT's token types and its output bias. To a
saver that takes the optimizer's state, it follows in messages of the same names behind a prefix.

Source: Megatron-LM core_r0.16.0, tools/checkpoint/{convert,loader_base,saver_base}.py.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from tqdm import tqdm

from megatron_flex.checkpoint.conversion.arguments import config_of, megatron_arguments
from megatron_flex.checkpoint.conversion.optimizer import kinds_of
from megatron_flex.checkpoint.conversion.shapes import (
    check_weight,
    check_weights,
    weight_shapes,
    with_state,
)
from megatron_flex.checkpoint.conversion.weights import (
    DTYPES,
    WORD_EMBEDDING,
    Training,
    Weights,
    state_name,
)
from megatron_flex.checkpoint.errors import CheckpointError
from megatron_flex.checkpoint.lazy import LazyTensors
from megatron_flex.checkpoint.options import OPTIMIZER
from megatron_flex.model.config import ModelConfig

_EMBEDDINGS = {
    "word embeddings": WORD_EMBEDDING,
    "position embeddings": "embedding.position_embeddings.weight",
    "tokentype embeddings": "embedding.tokentype_embeddings.weight",
}
_LAYER = {
    "input norm weight": "input_layernorm.weight",
    "input norm bias": "input_layernorm.bias",
    "qkv weight": "self_attention.linear_qkv.weight",
    "qkv bias": "self_attention.linear_qkv.bias",
    "q norm weight": "self_attention.q_layernorm.weight",
    "q norm bias": "self_attention.q_layernorm.bias",
    "k norm weight": "self_attention.k_layernorm.weight",
    "k norm bias": "self_attention.k_layernorm.bias",
    "dense weight": "self_attention.linear_proj.weight",
    "dense bias": "self_attention.linear_proj.bias",
    "post norm weight": "pre_mlp_layernorm.weight",
    "post norm bias": "pre_mlp_layernorm.bias",
    "mlp l0 weight": "mlp.linear_fc1.weight",
    "mlp l0 bias": "mlp.linear_fc1.bias",
    "mlp l1 weight": "mlp.linear_fc2.weight",
    "mlp l1 bias": "mlp.linear_fc2.bias",
}
# With SwiGLU the first matrix travels as its two halves.
_GATED = ("mlp l0 weight", "mlp l0 bias")
_TAIL = {
    "output layer": {"weight": "output_layer.weight", "bias": "output_layer.bias"},
    "pooler": {"weight": "pooler.dense.weight", "bias": "pooler.dense.bias"},
    "lm head": {
        "dense weight": "lm_head.dense.weight",
        "dense bias": "lm_head.dense.bias",
        "norm weight": "lm_head.layer_norm.weight",
        "norm bias": "lm_head.layer_norm.bias",
    },
    "binary head": {"weight": "binary_head.weight", "bias": "binary_head.bias"},
}
_LAYER_MESSAGE = re.compile(r"transformer layer (\d+)")
_PREFIXED = re.compile(r"(optimizer\.state\.\w+\.|)(.*)", re.DOTALL)


class Queue(Protocol):
    """What a conversion asks of its queue."""

    def get(self) -> Any:
        """Wait for the next message."""

    def put(self, item: Any) -> None:
        """Send a message; waits when the queue is full."""


def send(queue: Queue, weights: Weights) -> None:
    """Send a model. Raises :class:`CheckpointError` when the weights are incomplete."""
    check_weights(weights)
    queue.put(_describe(weights))
    for prefix in _prefixes(weights.config, weights.training):
        for message in _messages(weights, prefix):
            queue.put(message)
    queue.put("done")


def _prefixes(config: ModelConfig, training: Training | None) -> list[str]:
    """What comes before the names of parameters, and of each kind of their optimizer state."""
    kinds = () if training is None else kinds_of(config)
    return ["", *(state_name(kind, "") for kind in kinds)]


def receive(queue: Queue, *, checking: bool = True) -> Weights:
    """Receive a whole model. ``checking``: values that have no place are an error, not ignored."""
    weights = receive_lazily(queue, checking=checking)
    return replace(weights, tensors=dict(weights.tensors.items()))


def receive_lazily(queue: Queue, *, checking: bool = True) -> Weights:
    """Receive a model whose tensors arrive while they are asked for, each once and in order."""
    metadata = _next(queue)
    config, arguments = _understand(metadata)
    first = _next(queue)
    words = first.get("word embeddings") if isinstance(first, Mapping) else None
    if words is None:
        raise CheckpointError("the loader sent no word embeddings")
    config = replace(config, padded_vocab_size=words.shape[0])
    companions = getattr(metadata, "companions", None)
    training = getattr(metadata, "training", None)
    return Weights(
        config,
        _Arriving(queue, config, first, checking, training),
        iteration=int(_iteration(metadata)),
        consumed_samples=int(getattr(metadata, "consumed_train_samples", 0) or 0),
        arguments=arguments,
        tensor_parallel_size=getattr(metadata, "previous_tensor_parallel_size", None) or 1,
        pipeline_parallel_size=getattr(metadata, "previous_pipeline_parallel_size", None) or 1,
        companions=None if companions is None else Path(companions),
        training=training,
    )


class _Arriving(LazyTensors):
    """The tensors of the messages, in the model's precision.

    What is asked for is waited for; what arrives before that is held. With the last tensor the
    loader must be done.
    """

    def __init__(
        self,
        queue: Queue,
        config: ModelConfig,
        first: dict[str, Any],
        checking: bool,
        training: Training | None,
    ) -> None:
        self._queue = queue
        self._stack = "encoder" if config.architecture == "bert" else "decoder"
        self._checking = checking
        self._dtype = DTYPES[config.params_dtype]
        self._expected = weight_shapes(config)
        if training is not None:
            self._expected = with_state(self._expected, config)
        self._held: dict[str, torch.Tensor] = {}
        self.forms = {
            name: torch.empty(shape, dtype=self._type(name), device="meta")
            for name, shape in self._expected.items()
        }
        self._missing = set(self.forms)
        self._progress = tqdm(
            total=config.num_layers * len(_prefixes(config, training)),
            unit="layer",
            delay=2,
            disable=None,
            leave=False,
        )
        self._take(first)

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self.forms:
            raise KeyError(name)
        while name not in self._held:
            message = _next(self._queue)
            if message == "done":
                raise CheckpointError(f"the weights lack {name}, which the model's shape asks for")
            self._take(message)
        tensor = self._held.pop(name).to(self._type(name))
        self._missing.discard(name)
        if not self._missing:
            while (message := _next(self._queue)) != "done":
                self._take(message)
            self._progress.close()
        return tensor

    def _type(self, name: str) -> torch.dtype:
        return torch.float32 if name.startswith(OPTIMIZER) else self._dtype

    def _take(self, message: dict[str, Any]) -> None:
        before, name = _PREFIXED.fullmatch(message["name"]).groups()  # type: ignore[union-attr]
        if match := _LAYER_MESSAGE.fullmatch(name):
            prefix = f"{self._stack}.layers.{match[1]}."
            names = {key: prefix + local for key, local in _LAYER.items()}
            for key in _GATED:
                if f"{key} W" in message:
                    halves = [message.pop(f"{key} {half}") for half in "WV"]
                    message[key] = torch.cat(halves)
            self._progress.update()
        elif name == "embeddings":
            names = _EMBEDDINGS
        elif name in ("final norm", "final layer norm"):
            names = {part: f"{self._stack}.final_layernorm.{part}" for part in ("weight", "bias")}
        else:
            names = _TAIL.get(name, {})
        for key, tensor in message.items():
            if key in names and tensor is not None:
                full = before + names[key]
                check_weight(full, tensor, self._expected)
                self._held[full] = tensor
            elif key != "name" and tensor is not None and self._checking:
                raise CheckpointError(
                    f"the loader sent {key!r} in {name!r}, which has no place in the model"
                    " (--no-checking ignores it)"
                )


def _next(queue: Queue) -> Any:
    message = queue.get()
    if message == "exit":
        raise CheckpointError("the loader failed; its own message says why")
    return message


def _iteration(metadata: Any) -> int:
    value = getattr(metadata, "iteration", 0)
    return value if isinstance(value, int) else 0  # "release"


def _describe(weights: Weights) -> SimpleNamespace:
    c = weights.config
    arguments = megatron_arguments(weights, ckpt_format="torch")
    return SimpleNamespace(
        model_type="BERT" if c.architecture == "bert" else "GPT",
        num_layers=c.num_layers,
        hidden_size=c.hidden_size,
        seq_length=arguments.seq_length,
        num_attention_heads=c.num_attention_heads,
        max_position_embeddings=c.max_position_embeddings,
        tokenizer_type=arguments.tokenizer_type,
        iteration=weights.iteration,
        params_dtype=DTYPES[c.params_dtype],
        bert_binary_head=c.binary_head,
        output_layer=c.untie_embeddings_and_output_weights,
        position_embedding_type=c.position_embedding_type,
        linear_bias=c.add_bias_linear,
        qkv_bias=c.qkv_bias,
        norm_has_bias=c.normalization == "LayerNorm",
        swiglu=c.swiglu,
        previous_tensor_parallel_size=weights.tensor_parallel_size,
        previous_pipeline_parallel_size=weights.pipeline_parallel_size,
        true_vocab_size=c.vocab_size,
        make_vocab_size_divisible_by=arguments.make_vocab_size_divisible_by,
        consumed_train_samples=weights.consumed_samples,
        consumed_valid_samples=0,
        checkpoint_args=arguments,
        companions=None if weights.companions is None else str(weights.companions),
        training=weights.training,
    )


def _understand(metadata: Any) -> tuple[Any, Namespace]:
    """The configuration, and the arguments that came along."""
    if isinstance(metadata, str | Mapping):
        raise CheckpointError(f"the loader sent {metadata!r} instead of the model's description")
    arguments = Namespace(**vars(getattr(metadata, "checkpoint_args", Namespace())))
    for theirs, ours in (
        ("num_layers", "num_layers"),
        ("hidden_size", "hidden_size"),
        ("num_attention_heads", "num_attention_heads"),
        ("max_position_embeddings", "max_position_embeddings"),
        ("position_embedding_type", "position_embedding_type"),
        ("params_dtype", "params_dtype"),
        ("bert_binary_head", "bert_binary_head"),
        ("output_layer", "untie_embeddings_and_output_weights"),
        ("linear_bias", "add_bias_linear"),
        ("qkv_bias", "add_qkv_bias"),
        ("swiglu", "swiglu"),
        ("make_vocab_size_divisible_by", "make_vocab_size_divisible_by"),
        ("tokenizer_type", "tokenizer_type"),
        ("seq_length", "seq_length"),
    ):
        if getattr(metadata, theirs, None) is not None:
            setattr(arguments, ours, getattr(metadata, theirs))
    if getattr(metadata, "norm_has_bias", None) is not None:
        arguments.normalization = "LayerNorm" if metadata.norm_has_bias else "RMSNorm"
    true_size = getattr(metadata, "true_vocab_size", None)
    if not getattr(arguments, "padded_vocab_size", None):
        arguments.padded_vocab_size = true_size  # until the word embeddings say it
    return config_of(arguments, metadata.model_type, true_size), arguments


def _messages(weights: Weights, before: str) -> Iterator[dict[str, Any]]:
    tensors = weights.tensors

    def message(name: str, names: Mapping[str, str], prefix: str = "") -> dict[str, Any]:
        full = {k: before + prefix + n for k, n in names.items()}
        return {"name": before + name, **{k: tensors[n] for k, n in full.items() if n in tensors}}

    yield message("embeddings", _EMBEDDINGS)
    for number in range(weights.config.num_layers):
        layer = message(f"transformer layer {number}", _LAYER, weights.layer(number))
        for key in _GATED:
            if weights.config.swiglu and key in layer:
                layer[f"{key} W"], layer[f"{key} V"] = layer.pop(key).chunk(2)
        yield layer
    norm = f"{weights.stack}.final_layernorm."
    yield message("final norm", {part: norm + part for part in ("weight", "bias")})
    for name, names in _TAIL.items():
        tail = message(name, names)
        if len(tail) > 1:
            yield tail
