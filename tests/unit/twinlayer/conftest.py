"""Every test has a directory of sockets of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_flex.twinlayer.location import DIRECTORY


@pytest.fixture(autouse=True)
def runtime(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory; at the end nothing is left in it."""
    path = tmp_path_factory.mktemp("runtime")
    monkeypatch.setenv(DIRECTORY, str(path))
    return path
