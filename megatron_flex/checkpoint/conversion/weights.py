"""A model between two formats: its configuration and its whole, unsharded weights."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from megatron_flex.checkpoint.errors import CheckpointError
from megatron_flex.checkpoint.options import OPTIMIZER
from megatron_flex.checkpoint.vocabulary import token_rows
from megatron_flex.model.config import ModelConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

WORD_EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT_LAYER = "output_layer.weight"


def state_name(kind: str, name: str) -> str:
    """The name of a parameter's optimizer state: ``exp_avg``, ``exp_avg_sq`` or ``master``."""
    return f"{OPTIMIZER}state.{kind}.{name}"


def parameters_in(names: Iterable[str]) -> list[str]:
    """Those of a model's tensors that are its parameters."""
    return [name for name in names if not name.startswith(OPTIMIZER)]


@dataclass(frozen=True)
class Training:
    """What a run goes on from, beside tensors, where both formats have a place for it.

    ``steps``: updates of the optimizer. ``schedule``: the state of megatron-core's
    ``OptimizerParamScheduler``, its position included. ``betas`` and ``eps`` are Adam's. ``flops``:
    floating-point operations so far.
    """

    steps: int
    schedule: Mapping[str, Any]
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    flops: float = 0.0


@dataclass(frozen=True)
class Weights:
    """A model's weights with Megatron's names (of its local layer specification).

    ``tensors`` are on the host and may be read from disk only when used. A tied model has no
    ``output_layer.weight``. With ``training`` they have the optimizer's state too, by the names of
    :func:`state_name`. ``iteration`` and ``consumed_samples`` say how far it was trained.
    ``arguments`` are the Megatron-LM arguments that came with it, if any. The parallel sizes are
    those of the source, for savers that default to them. ``companions`` is a directory with
    Hugging Face's configuration and tokenizer files of this model.
    """

    config: ModelConfig
    tensors: Mapping[str, torch.Tensor]
    iteration: int = 0
    consumed_samples: int = 0
    arguments: Namespace = field(default_factory=Namespace)
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    companions: Path | None = None
    training: Training | None = None

    @property
    def stack(self) -> str:
        """What Megatron calls the stack of layers: ``decoder`` in GPT, ``encoder`` in BERT."""
        return "encoder" if self.config.architecture == "bert" else "decoder"

    def layer(self, number: int) -> str:
        """The beginning of the names of layer ``number``'s tensors."""
        return f"{self.stack}.layers.{number}."

    def cast(self) -> Weights:
        """The same with all tensors in the configuration's precision."""
        dtype = DTYPES[self.config.params_dtype]
        tensors = dict(self.tensors)
        tensors |= {name: tensors[name].to(dtype) for name in parameters_in(tensors)}
        return replace(self, tensors=tensors)

    def padded(self, size: int) -> Weights:
        """The same with a vocabulary padded to ``size`` rows; the last token's row is repeated.

        (As Megatron-LM's converter does. The rows take no part in anything.)
        """
        if size < self.config.vocab_size:
            raise CheckpointError(
                f"a vocabulary of {self.config.vocab_size} cannot be cut to {size} rows"
            )
        if size == self.config.padded_vocab_size:
            return self
        shape = {"vocab_size": self.config.vocab_size,
                 "padded_vocab_size": self.config.padded_vocab_size}  # fmt: skip
        tensors = dict(self.tensors)
        for name, tensor in self.tensors.items():
            rows = token_rows(name, tensor.shape, shape)
            if rows is not None:
                filler = tensor[rows - 1 : rows].expand(size - rows, *tensor.shape[1:])
                tensors[name] = torch.cat([tensor[:rows], filler])
        return replace(self, config=replace(self.config, padded_vocab_size=size), tensors=tensors)


def padded_size(vocab_size: int, divisible_by: int, tensor_parallel_size: int) -> int:
    """Megatron's padded size of a vocabulary."""
    multiple = divisible_by * tensor_parallel_size
    return -(-vocab_size // multiple) * multiple
