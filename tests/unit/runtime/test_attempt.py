"""Workers of several torchruns agree about the number of an attempt, whatever earlier ones left."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from megatron_flex.runtime import attempt

SHORT = timedelta(seconds=0.3)
LONG = timedelta(seconds=30)


def join(store: dist.Store, ranks: list[int], size: int, timeout: timedelta) -> list[object]:
    """What each of the workers hears, side by side: a number, or an error."""

    def one(rank: int) -> object:
        try:
            return attempt.agree(store, rank, size, timeout)
        except RuntimeError as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(one, ranks))


@pytest.fixture
def store() -> dist.Store:
    return dist.HashStore()


def test_all_workers_count_the_same_attempts(store: dist.Store) -> None:
    for number in range(5):
        assert join(store, [0, 1, 2, 3], 4, LONG) == [number] * 4


def test_attempts_that_some_workers_never_joined_are_no_matter(store: dist.Store) -> None:
    assert join(store, [0, 1, 2], 3, LONG) == [0] * 3
    first, second = join(store, [0, 1], 3, SHORT)
    assert "nothing from workers 2" in str(first)
    assert second == 1
    assert all(isinstance(heard, RuntimeError) for heard in join(store, [1, 2], 3, SHORT))
    numbers = join(store, [2, 0, 1], 3, LONG)
    assert numbers == [2] * 3


def test_the_agreed_number_names_the_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"GROUP_WORLD_SIZE": "2", "TORCHELASTIC_RESTART_COUNT": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(attempt.AGREED, raising=False)
    monkeypatch.delenv(attempt.ATTEMPT, raising=False)
    assert attempt.several_torchruns()
    assert attempt.is_first_attempt()
    monkeypatch.setenv(attempt.AGREED, "1")
    assert not attempt.several_torchruns()
    assert not attempt.is_first_attempt()
    assert attempt.attempt() == "attempt 1.0"
    monkeypatch.setenv("GROUP_WORLD_SIZE", "1")
    monkeypatch.delenv(attempt.AGREED)
    assert not attempt.several_torchruns()
