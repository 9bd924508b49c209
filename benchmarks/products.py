"""Data for benchmarks, made by the repository's own programs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def make(product: Path, program: str, *words: object) -> None:
    """Have a program of the repository write ``product``, unless it is there."""
    if not product.exists():
        subprocess.run([sys.executable, str(ROOT / program), *map(str, words)], check=True)
