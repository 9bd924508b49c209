"""In which order files are tested where several processes share them: what takes long begins.

``pytest -n N --dist loadfile`` keeps a file's tests in one process, since they share what is dear:
a cluster, a demo, pages, runs to compare with. Processes take files as they come, so what is long
must not come last, when the others have nothing left to do.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

LONG = (
    "end_to_end/test_slurm.py",
    "end_to_end/test_recovery.py",
    "distributed/test_tensor.py",
    "distributed/test_shards.py",
    "end_to_end/test_demo.py",
    "end_to_end/test_resume.py",
    "distributed/test_planned.py",
    "distributed/test_failures.py",
    "distributed/test_switching.py",
    "distributed/test_exactness.py",
    "end_to_end/test_documents.py",
    "distributed/test_split.py",
    "distributed/test_absolute.py",
    "distributed/test_cases.py",
    "end_to_end/test_wheel.py",
    "end_to_end/test_report.py",
    "unit/kernels/test_builds.py",
)
"""Those that take half a minute and more on two idle cores, and what builds or starts a browser."""


def longest_first(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Files of ``LONG``, the others of several processes, and those of one, in their order."""

    def rank(item: pytest.Item) -> int:
        path = "/".join(item.path.parts[-3:])
        return next((i for i, name in enumerate(LONG) if path.endswith(name)), len(LONG))

    return sorted(items, key=rank)
