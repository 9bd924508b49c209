"""Shared fixtures: the worker pool, the counts of property-based tests, the soak mark."""

from __future__ import annotations

import os

# Before anything imports numpy or torch: tests and workers share few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, settings

from megatron_flex import native
from tests.distributed.pool import WorkerPool
from tests.order import longest_first

_SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile(
    "ci", max_examples=25, deadline=None, derandomize=True, suppress_health_check=_SLOW
)
settings.register_profile(
    "soak", max_examples=1000, deadline=None, print_blob=True, suppress_health_check=_SLOW
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--soak",
        action="store_true",
        help="run the properties with their large counts, and the tests marked soak",
    )


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("soak" if config.getoption("--soak") else "ci")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items[:] = longest_first(items)
    if config.getoption("--soak"):
        return
    for item in items:
        if "soak" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="large counts run in `make soak`"))


@pytest.fixture(scope="session")
def count(request: pytest.FixtureRequest) -> Callable[[int, int], int]:
    """``count(few, many)``: the first in CI, the second under ``--soak``."""
    soak = request.config.getoption("--soak")
    return lambda few, many: many if soak else few


@pytest.fixture(scope="module", params=native.LEVELS)
def cpu_level(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs a module's tests once for each instruction set that the processor has."""
    if native.cap_cpu(request.param) == request.param:
        yield request.param
    else:
        pytest.skip(f"no {request.param} here")
    native.cap_cpu(os.environ.get(native.CPU_CAP) or "avx512")


@pytest.fixture(scope="session")
def workers() -> Iterator[WorkerPool]:
    """The pool of gloo workers: ``workers.run(world_size, function, *arguments)``."""
    pool = WorkerPool()
    yield pool
    pool.close()
