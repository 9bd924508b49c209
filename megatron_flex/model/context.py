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

from megatron_flex.data.microbatch import Slice
from megatron_flex.data.packed import PackedBatch, cut_slice
from megatron_flex.model.config import ModelConfig
from megatron_flex.model.keys import packed_positions, token_keys
from megatron_flex.model.prefix import PrefixStore, Tables
from megatron_flex.model.rotary import frequencies
from megatron_flex.model.tensor_group import TensorGroup


class PackedContext:
    """Derived tensors of a :class:`PackedBatch`; each is computed when first asked for.

    Attributes:
        lengths: tokens of each sample, as in the batch.
        counted: those of them that are not padding; empty: all.
        offsets: first token of each sample, and T: ``len(lengths) + 1`` integers.
    """

    def __init__(self, batch: PackedBatch, config: ModelConfig, device: torch.device) -> None:
        # The batch itself is not kept: it holds this context, and a cycle would outlive both.
        self.lengths = batch.lengths
        self.counted = batch.counted
        self.offsets = (0, *accumulate(batch.lengths))
        self.device = device
        self._samples = batch.samples
        self._starts = batch.starts
        self._config = config
        self._slices = batch.slices
        assert batch.prefixes is None or isinstance(batch.prefixes, PrefixStore)
        self._prefixes = batch.prefixes
        self._keys_here: torch.Tensor | None = None

    @cached_property
    def cut(self) -> Slice | None:
        """The slice of a sample that is cut, or ``None``.

        Raises ``ValueError`` if it is not the first.
        """
        return cut_slice(self._slices)

    @property
    def prefixes(self) -> PrefixStore:
        """What the run keeps of samples that are cut.

        Raises ``ValueError`` without a run: attention would see this micro-batch's keys only.
        """
        if self._prefixes is None:
            raise ValueError(
                "attention needs whole samples: without a run that keeps them, a slice would miss"
                " the keys of the slices before it"
            )
        return self._prefixes

    @property
    def tokens(self) -> int:
        """Tokens of all samples."""
        return self.offsets[-1]

    @property
    def longest(self) -> int:
        """The most keys that a query attends to."""
        cut = self.cut
        return max(*self.lengths, 0 if cut is None else cut.stop)

    @cached_property
    def offsets_array(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """``offsets`` in host memory, for the native kernels."""
        return np.array(self.offsets, dtype=np.int64)

    @cached_property
    def counted_array(self) -> np.ndarray[Any, np.dtype[np.int64]] | None:
        """``counted`` in host memory; ``None`` without padding."""
        return np.array(self.counted, dtype=np.int64) if self.counted else None

    @cached_property
    def key_mask(self) -> torch.Tensor:
        """``[samples, 1, 1, length]`` bool: which keys of padded samples are no padding."""
        places = torch.arange(self.lengths[0], device=self.device)
        counted = torch.tensor(self.counted, device=self.device)
        return (places < counted[:, None])[:, None, None]

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

    def keys_here(self, group: TensorGroup) -> torch.Tensor:
        """Those of the rows of a hidden state that a worker of ``group`` has."""
        if not group.sequence_parallel:
            return self.token_keys
        if self._keys_here is None:
            self._keys_here = group.share(self.token_keys)
        return self._keys_here

    @cached_property
    def cumulative_lengths(self) -> torch.Tensor:
        """``[samples + 1]`` int32 offsets, as variable-length kernels take them."""
        return torch.tensor(self.offsets, dtype=torch.int32, device=self.device)

    # Of whole samples; a slice's are in attention_cuda.py.

    @property
    def key_lengths(self) -> tuple[int, ...]:
        """Keys of each sample: as many as queries."""
        return self.lengths

    @property
    def cumulative_key_lengths(self) -> torch.Tensor:
        """Their offsets."""
        return self.cumulative_lengths

    @cached_property
    def first_tokens(self) -> torch.Tensor:
        """``[samples]`` int64 index of each sample's first token."""
        return torch.tensor(self.offsets[:-1], dtype=torch.int64, device=self.device)

    @cached_property
    def rotary(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine of each packed token, ``[T, rotary dimensions / 2]`` float32.

        The first half of a head's rotated channels is paired with the second, as in megatron-core.
        """
        return self._rotary_at(self.positions)

    @property
    def prefix_rotary(self) -> Tables:
        """The same for all positions of the sample that is cut."""
        cut = self.cut
        assert cut is not None

        def make() -> Tables:
            return self._rotary_at(torch.arange(cut.length, device=self.device))

        return self.prefixes.tables(cut.sample, make)

    def _rotary_at(self, positions: torch.Tensor) -> Tables:
        angles = torch.outer(positions.float(), frequencies(self._config, self.device))
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
