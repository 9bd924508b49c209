"""How the C library keeps memory, for workers that compute on a CPU."""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of ``mallopt``, in glibc's malloc.h."""
_NEVER = -1
_LARGEST, _LARGEST_BEFORE_2_35 = 1 << 30, 32 << 20
"""Bytes that are taken from freed memory at most; older versions of glibc refuse more."""


def keep_freed_memory() -> None:
    """Tensors on a CPU take the memory that others have freed. For the whole process.

    By default glibc maps tensors of 32 MB and more anew, and gives back what lies free at the end
    of its memory, so that the system clears the same pages in every micro-batch. With another C
    library nothing is changed.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        if not mallopt(_MMAP_THRESHOLD, _LARGEST):
            mallopt(_MMAP_THRESHOLD, _LARGEST_BEFORE_2_35)
        mallopt(_TRIM_THRESHOLD, _NEVER)
