"""Files that a run is to write, tried before it starts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron_flex.loop.outputs import check_outputs
from megatron_flex.telemetry.sink import TelemetryError
from tests.unit.config.commands import config
from tests.unit.disk import file_size_limit

FILES = ["--log-file", "--log-jsonl", "--flexpipe-record", "--flexpipe-trace"]


def refusal(flag: str, path: Path) -> str:
    with pytest.raises(TelemetryError) as caught:
        check_outputs(config(f"{flag} {path}"))
    return str(caught.value)


@pytest.mark.parametrize("flag", FILES)
def test_a_directory_is_no_file(flag: str, tmp_path: Path) -> None:
    assert refusal(flag, tmp_path).startswith(f"{flag} {tmp_path} cannot be written: Is a direct")


@pytest.mark.parametrize("flag", [*FILES, "--tensorboard-dir"])
def test_a_directory_that_cannot_be_made_is_said(flag: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "log"
    assert refusal(flag, path).startswith(f"{flag} {path} cannot be written: Not a directory")
    path = Path("/proc/log")
    assert refusal(flag, path).startswith(f"{flag} {path} cannot be written: ")


@pytest.mark.parametrize("flag", [*FILES, "--tensorboard-dir"])
def test_a_full_disk_is_said(flag: str, tmp_path: Path) -> None:
    with file_size_limit(100):
        said = refusal(flag, tmp_path / "log")
    assert "cannot be written: File too large; give a path with write permission and space" in said
    assert [name for _, _, names in os.walk(tmp_path) for name in names] == []


@pytest.mark.parametrize("flag", FILES)
def test_what_is_not_ours_is_refused_and_stays(flag: str, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("a note\n")
    assert f"{flag} {path} exists and is not" in refusal(flag, path)
    assert path.read_text() == "a note\n"


def test_good_paths_pass_and_nothing_is_left(tmp_path: Path) -> None:
    flags = " ".join(f"{flag} {tmp_path}/new/{flag[2:]}" for flag in FILES)
    check_outputs(config(f"{flags} --tensorboard-dir {tmp_path}/board"))
    assert [name for _, _, names in os.walk(tmp_path) for name in names] == []
    check_outputs(config("--log-jsonl /dev/null"))
