"""Workers that fail of the same cause before they have met: the first one speaks."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_flex.runtime import words
from megatron_flex.runtime.words import say_once


@pytest.fixture(autouse=True)
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Sets the environment of a worker of four; files lie in a directory of their own."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name in (*words._START, "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def set_(**environment: str) -> None:
        for name, value in {"WORLD_SIZE": "4", **environment}.items():
            monkeypatch.setenv(name, value)

    set_()
    return set_


def said(capfd: pytest.CaptureFixture[str], text: str, about: str | None = None) -> bool:
    say_once(text, about)
    return capfd.readouterr().err == text + "\n"


def test_the_same_is_said_once_and_another_thing_too(capfd: pytest.CaptureFixture[str]) -> None:
    assert said(capfd, "error: a")
    assert not said(capfd, "error: a")
    assert said(capfd, "error: b")
    assert said(capfd, "error in worker 1: c", "c")
    assert not said(capfd, "error in worker 2: c", "c")


@pytest.mark.parametrize("name", words._START)
def test_every_start_server_and_job_speaks_for_itself(
    capfd: pytest.CaptureFixture[str], start: Callable[..., None], name: str
) -> None:
    assert said(capfd, "error")
    start(**{name: "1"})
    assert said(capfd, "error")
    assert not said(capfd, "error")


def test_what_was_said_before_this_worker_began_is_of_another_start(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert said(capfd, "error")
    now = time.clock_gettime(time.CLOCK_BOOTTIME)
    monkeypatch.setattr(words, "_began", lambda: now + 1)
    assert said(capfd, "error")


def test_a_process_knows_when_it_began() -> None:
    def child(pipe: multiprocessing.connection.Connection) -> None:
        pipe.send(words._began())

    before = time.clock_gettime(time.CLOCK_BOOTTIME)
    mine, its = multiprocessing.get_context("fork").Pipe()
    process = multiprocessing.get_context("fork").Process(target=child, args=(its,))
    process.start()
    began = mine.recv()
    process.join()
    assert before - 0.02 <= began <= time.clock_gettime(time.CLOCK_BOOTTIME)


def test_one_worker_always_speaks(
    capfd: pytest.CaptureFixture[str], start: Callable[..., None]
) -> None:
    start(WORLD_SIZE="1")
    assert said(capfd, "error")
    assert said(capfd, "error")


@pytest.mark.parametrize("harm", ["open to others", "a file", "a link"])
def test_where_nothing_can_be_agreed_everyone_speaks(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, harm: str
) -> None:
    directory = tmp_path / f"megatron-flex-words-{os.getuid()}"
    if harm == "a file":
        directory.write_text("")
    elif harm == "a link":
        directory.symlink_to(tmp_path)
    else:
        directory.mkdir()
        directory.chmod(0o777)
    assert said(capfd, "error")
    assert said(capfd, "error")


def test_a_worker_that_hangs_while_it_prints_is_not_waited_for(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(words, "PATIENCE", 0.05)
    with words._locked(words._path(os.environ)):
        assert said(capfd, "error")


def test_files_of_earlier_starts_are_removed(
    capfd: pytest.CaptureFixture[str], start: Callable[..., None]
) -> None:
    assert said(capfd, "error")
    old = words._path(os.environ)
    os.utime(old, (0, 0))
    start(MASTER_PORT="2")
    assert said(capfd, "error")
    assert not old.exists()


def _speaker(barrier: object) -> None:
    barrier.wait()  # type: ignore[attr-defined]
    say_once("error: the same")


def test_workers_at_the_same_moment_speak_once(
    capfd: pytest.CaptureFixture[str], start: Callable[..., None]
) -> None:
    context = multiprocessing.get_context("fork")
    for attempt in range(10):
        start(MASTER_PORT=str(attempt))
        barrier = context.Barrier(4)
        processes = [context.Process(target=_speaker, args=(barrier,)) for _ in range(4)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        assert capfd.readouterr().err == "error: the same\n"
