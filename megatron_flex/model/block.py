"""The base of all units: named parameters by slab, and their replacement by views of a slab."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from megatron_flex.data.packed import PackedBatch
from megatron_flex.model.config import ModelConfig
from megatron_flex.model.context import PackedContext, context_of
from megatron_flex.model.layers import Unit
from megatron_flex.model.tensor_group import SOLO, TensorGroup

WORD_EMBEDDING = "embedding.word_embeddings.weight"
MAIN_GRAD = "main_grad"
"""Where Transformer Engine adds a weight's gradient: that of one slab, never of the next."""


def decays(name: str, shape: Iterable[int]) -> bool:
    """Megatron's rule: no weight decay for biases and one-dimensional parameters."""
    return not name.endswith(".bias") and len(tuple(shape)) > 1


class Block(nn.Module):
    """One unit. ``forward(hidden, batch)`` maps ``[T, 1, H]`` to ``[T, 1, H]``.

    The embedding takes ``None``; the head gives a 1-D float32 tensor of loss sums. Where the
    workers of ``group`` divide the tokens (sequence parallelism), T is the number of rows here.
    """

    def __init__(self, unit: Unit, config: ModelConfig, group: TensorGroup = SOLO) -> None:
        super().__init__()
        self.unit = unit
        self.config = config
        self.group = group

    def context(self, batch: PackedBatch, device: torch.device) -> PackedContext:
        """The derived tensors of ``batch`` on ``device``."""
        return context_of(batch, self.config, device)

    @property
    def stack(self) -> str:
        """What Megatron calls the stack of layers: ``decoder`` in GPT, ``encoder`` in BERT."""
        return "encoder" if self.config.architecture == "bert" else "decoder"

    def full_names(self) -> dict[str, str]:
        """Megatron's full parameter name -> name within this module, in a fixed order."""
        return {name: name for name, _ in self.named_parameters()}

    def slab_parameters(self) -> dict[int, dict[str, nn.Parameter]]:
        """Slab -> Megatron's full parameter name -> parameter. A slab may be empty."""
        slabs: dict[int, dict[str, nn.Parameter]] = {slab: {} for slab in self.unit.slabs}
        for full, local in self.full_names().items():
            tied = full == WORD_EMBEDDING and self.config.layers.tied_slab is not None
            slab = self.unit.slabs[-1] if tied else self.unit.slabs[0]
            slabs[slab][full] = self.get_parameter(local)
        return slabs

    def bind(self, name: str, parameter: nn.Parameter) -> None:
        """Use ``parameter`` (a view of a slab) as the parameter with Megatron's name ``name``."""
        local = self.full_names().get(name)
        if local is None:
            raise KeyError(f"unit {self.unit.index} has no parameter '{name}'")
        path, _, attribute = local.rpartition(".")
        old = self.get_parameter(local)
        if old.shape != parameter.shape or old.dtype != parameter.dtype:
            raise ValueError(
                f"'{name}' is {tuple(old.shape)} {old.dtype}, not {tuple(parameter.shape)}"
                f" {parameter.dtype}"
            )
        # megatron-core's marks (how a parameter is cut over tensor-parallel ranks) move along.
        for mark, value in vars(old).items():
            if mark != MAIN_GRAD and not hasattr(parameter, mark):
                setattr(parameter, mark, value)
        self.get_submodule(path)._parameters[attribute] = parameter
