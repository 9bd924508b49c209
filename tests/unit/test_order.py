"""The order of the suite: what takes long begins, and is there."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.order import LONG, longest_first

TESTS = Path(__file__).resolve().parents[1]


def test_the_long_files_are_there_and_begin() -> None:
    assert all((TESTS / name).is_file() for name in LONG)
    names = ["unit/test_mutants.py", LONG[1], "distributed/test_pool.py", LONG[0], LONG[1]]
    items: list[Any] = [SimpleNamespace(path=TESTS / name) for name in names]
    found = [str(item.path.relative_to(TESTS)) for item in longest_first(items)]
    assert found == [LONG[0], LONG[1], LONG[1], "unit/test_mutants.py", "distributed/test_pool.py"]
