"""Keys of dropout: counters hashed from (seed, sample, position, site), never a generator's state.

A mask bit is a pure function of the run's seed, the consumed-sample number, the place in the model
(site), the position within the sample and the channel. So it is the same in any packing, on any
device, under any plan, and again when a block is recomputed. The element hash is two rounds of
"lowbias32" with the row key split over them; the row key is splitmix64's finaliser.

The same functions are in ``kernels/src/dropout_hash.h``; a test compares their bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

EMBEDDING_SITE = 0
_GOLDEN = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1


def attention_site(layer: int) -> int:
    """Site of the attention probabilities of a 0-based layer (its heads are sites within it)."""
    return 3 * layer + 1


def hidden_site(layer: int, mlp: bool) -> int:
    """Site of the hidden dropout after the attention half or the MLP half of a layer."""
    return 3 * layer + (3 if mlp else 2)


def mix(z: int) -> int:
    """splitmix64's finaliser on one 64-bit word."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _WORD
    return z ^ (z >> 31)


def site_key(site: int, head: int = 0) -> int:
    """64-bit key of a site; for attention probabilities, of one of its heads."""
    return mix(((site + 1) * _GOLDEN + mix(head + 1)) & _WORD)


def packed_positions(
    starts: Sequence[int], lengths: Sequence[int]
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """``[T]`` position of each packed token within its sample."""
    sizes = np.asarray(lengths, dtype=np.int64)
    first = np.cumsum(sizes) - sizes
    return np.arange(int(sizes.sum())) + np.repeat(np.asarray(starts) - first, sizes)


def token_keys(
    seed: int, samples: Sequence[int], starts: Sequence[int], lengths: Sequence[int]
) -> torch.Tensor:
    """``[T]`` int64 key of each packed token, from its sample and its position in it."""
    keys = np.fromiter((mix(mix(seed + _GOLDEN & _WORD) ^ s) for s in samples), np.uint64)
    positions = packed_positions(starts, lengths)
    z = np.repeat(keys, lengths) + positions.astype(np.uint64) * np.uint64(_GOLDEN)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return torch.from_numpy(z.view(np.int64))


def threshold(probability: float) -> int:
    """An element is dropped if its 32-bit hash is below this."""
    return round(probability * (1 << 32))


def _signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


def row_keys(tokens: torch.Tensor, site: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The two int32 key words of each row, for a site key; any shape."""
    z = tokens ^ _signed(site, 64)
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * _signed(0xBF58476D1CE4E5B9, 64)
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * _signed(0x94D049BB133111EB, 64)
    z = z ^ ((z >> 31) & ((1 << 33) - 1))
    return z.to(torch.int32), (z >> 32).to(torch.int32)


def keep_mask(
    tokens: torch.Tensor, site: int, channels: torch.Tensor, probability: float
) -> torch.Tensor:
    """Which elements stay: ``[rows]`` keys, ``[columns]`` channels -> bool ``[rows, columns]``.

    Torch operations only. Integer arithmetic wraps, so the bits are the same on every device and
    equal the kernel's.
    """
    low, high = row_keys(tokens, site)
    x = channels.to(torch.int32) * _signed(0x9E3779B1, 32) + low.unsqueeze(-1)
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF) ^ high.unsqueeze(-1)) * _signed(0x846CA68B, 32)
    x = x ^ ((x >> 16) & 0xFFFF)
    # Unsigned comparison: flip the sign bits.
    return (x ^ _signed(1 << 31, 32)) >= threshold(probability) - (1 << 31)
