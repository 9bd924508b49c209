"""Sizes, counts and times as people read them."""

from __future__ import annotations

import math


def size(number: float) -> str:
    """Bytes in powers of ten: ``1.23 GB``, ``45.6 MB``, ``7.8 kB``, ``120 bytes``."""
    for unit, scale, digits in (("GB", 1e9, 2), ("MB", 1e6, 1), ("kB", 1e3, 1)):
        if abs(number) >= scale:
            return f"{number / scale:.{digits}f} {unit}"
    return f"{number:.0f} bytes"


def count(number: float) -> str:
    """``12,345``, and from a million on ``1.23 million`` or ``1.23 billion``."""
    for word, scale in (("billion", 1e9), ("million", 1e6)):
        if number >= scale:
            return f"{number / scale:.2f} {word}"
    return f"{number:,.0f}"


def duration(seconds: float) -> str:
    """``45 s``, ``12 min 5 s``, ``3 h 20 min``, ``2 d 3 h``."""
    whole = max(0, round(seconds))
    for (large, scale), (small, part) in (
        (("d", 86400), ("h", 3600)),
        (("h", 3600), ("min", 60)),
        (("min", 60), ("s", 1)),
    ):
        if whole >= scale:
            return f"{whole // scale} {large} {whole % scale // part} {small}"
    return f"{whole} s"


def memory_budget(gigabytes: float | None, flag: str) -> int | None:
    """Bytes of what ``flag`` gives in units of 10^9; ``ValueError`` where that is no size."""
    if gigabytes is None:
        return None
    if not 0.0 < gigabytes < math.inf:
        raise ValueError(f"{flag} must be a finite number above 0, not {gigabytes}")
    return round(gigabytes * 1e9)
