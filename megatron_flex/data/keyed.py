"""A counter-based random generator: the value depends on (key, counter) only.

SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014) read
at any place of its stream. NumPy guarantees its bit generators but not what ``Generator`` makes of
them, and one object a sample is slow; this is vectorised over counters *and* keys, and
it stays the same with any NumPy, so that a run resumed years later sees the same data.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
KeyArray = npt.NDArray[np.uint64]
Key = int | KeyArray

_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15
_MUL1 = 0xBF58476D1CE4E5B9
_MUL2 = 0x94D049BB133111EB


def derive(*words: int) -> int:
    """A 64-bit key from integers, such as (seed, purpose, epoch)."""
    key = 0
    for word in words:
        z = (key + _STEP * ((word & _MASK) + 1)) & _MASK
        z = ((z ^ (z >> 30)) * _MUL1) & _MASK
        z = ((z ^ (z >> 27)) * _MUL2) & _MASK
        key = z ^ (z >> 31)
    return key


def bits(key: Key, counter: npt.NDArray[np.integer]) -> KeyArray:
    """64 random bits for each counter (an array of at least one dimension, values >= 0).

    ``key`` is one key or an array that broadcasts against ``counter``. The result may serve as
    keys: ``bits(derive(a), n)[i] == derive(a, n[i])``.
    """
    z = (counter.astype(np.uint64) + np.uint64(1)) * np.uint64(_STEP)
    z = z + (key if isinstance(key, np.ndarray) else np.uint64(key))
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_MUL1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_MUL2)
    result: KeyArray = z ^ (z >> np.uint64(31))
    return result


def uniform(key: Key, counter: npt.NDArray[np.integer]) -> npt.NDArray[np.float64]:
    """Uniform numbers in [0, 1) with 53 bits, one for each counter."""
    return (bits(key, counter) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def below(key: Key, counter: npt.NDArray[np.integer], limit: int | IntArray) -> IntArray:
    """Integers in [0, limit), one for each counter (bias below ``limit / 2**64``)."""
    modulus = np.asarray(limit, dtype=np.uint64)
    return (bits(key, counter) % modulus).astype(np.int64)
