"""What the modules of a block need to know about a micro-batch, on the device that runs it.

Built once for each micro-batch and device and kept with it, so that all blocks of a stage share
the positions, rotary tables and dropout keys, and recomputation sees the same ones.
"""

from __future__ import annotations

from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from megatron_flex.data.packed import PackedBatch
from megatron_flex.model.config import ModelConfig
from megatron_flex.model.keys import packed_positions, token_keys
from megatron_flex.model.rotary import frequencies


class PackedContext:
    """Derived tensors of a :class:`PackedBatch`; each is computed when first asked for.

    Attributes:
        lengths: tokens of each sample, as in the batch.
        offsets: first token of each sample, and T: ``len(lengths) + 1`` integers.
    """

    def __init__(self, batch: PackedBatch, config: ModelConfig, device: torch.device) -> None:
        # The batch itself is not kept: it holds this context, and a cycle would outlive both.
        self.lengths = batch.lengths
        self.offsets = (0, *accumulate(batch.lengths))
        self.device = device
        self._samples = batch.samples
        self._starts = batch.starts
        self._config = config

    def check_whole_samples(self) -> None:
        """Raise ``ValueError`` if a sample is cut: attention sees this micro-batch's keys only."""
        if any(self._starts):
            raise ValueError(
                "attention needs whole samples: a slice that does not start at position 0 would"
                " miss the keys of the slices before it"
            )

    @cached_property
    def offsets_array(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """``offsets`` in host memory, for the native kernels."""
        return np.array(self.offsets, dtype=np.int64)

    @cached_property
    def positions(self) -> torch.Tensor:
        """``[T]`` int64 position of each token within its sample."""
        positions = torch.from_numpy(packed_positions(self._starts, self.lengths))
        return positions.to(self.device, non_blocking=True)

    @cached_property
    def token_keys(self) -> torch.Tensor:
        """``[T]`` int64 dropout key of each token."""
        keys = token_keys(self._config.seed, self._samples, self._starts, self.lengths)
        return keys.to(self.device, non_blocking=True)

    @cached_property
    def cumulative_lengths(self) -> torch.Tensor:
        """``[samples + 1]`` int32 offsets, as variable-length kernels take them."""
        return torch.tensor(self.offsets, dtype=torch.int32, device=self.device)

    @cached_property
    def first_tokens(self) -> torch.Tensor:
        """``[samples]`` int64 index of each sample's first token."""
        return torch.tensor(self.offsets[:-1], dtype=torch.int64, device=self.device)

    @cached_property
    def rotary(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine of each packed token, ``[T, rotary dimensions / 2]`` float32.

        The first half of a head's rotated channels is paired with the second, as in megatron-core.
        """
        angles = torch.outer(self.positions.float(), frequencies(self._config, self.device))
        return angles.cos(), angles.sin()


def context_of(batch: PackedBatch, config: ModelConfig, device: torch.device) -> PackedContext:
    """The context of ``batch``, made on the first call and kept on the batch itself."""
    kept: dict[tuple[int, torch.device], PackedContext] = batch.__dict__.setdefault("_contexts", {})
    # The context holds the configuration, so its id stays taken.
    key = (id(config), device)
    context = kept.get(key)
    if context is None:
        context = kept[key] = PackedContext(batch, config, device)
    return context
