"""Which worker speaks when a job fails."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from megatron_flex.runtime import failure
from megatron_flex.runtime.failure import CommunicationError, FirstFailure, SaidElsewhere, describe


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """No waiting; the seconds that would have been waited."""
    slept: list[float] = []
    monkeypatch.setattr(failure.time, "sleep", slept.append)
    before = signal.getsignal(signal.SIGTERM)
    yield slept
    signal.signal(signal.SIGTERM, before)


def watched(worker: FirstFailure, error: BaseException) -> BaseException:
    """What comes out of ``watch`` when ``error`` is raised within."""
    try:
        with worker.watch():
            raise error
    except BaseException as caught:
        return caught


def test_the_first_failure_comes_out_at_once_and_others_name_it(quick: list[float]) -> None:
    store = dist.HashStore()
    cause = KeyError("the cause")
    assert watched(FirstFailure(store, 2), cause) is cause
    assert quick == []
    lost = watched(FirstFailure(store, 0), CommunicationError("'Recv' failed"))
    assert isinstance(lost, CommunicationError)
    assert str(lost) == "worker 0 ends because worker 2 failed: KeyError: 'the cause'"
    assert quick == [failure.GRACE]


def test_what_was_said_already_is_not_said_again() -> None:
    store = dist.HashStore()
    words = "data set 'x' does not exist"
    assert str(watched(FirstFailure(store, 1), SystemExit(words))) == words
    silent = watched(FirstFailure(store, 0), SystemExit(words))
    assert isinstance(silent, SaidElsewhere)
    assert (silent.code, silent.words) == (1, words)


def test_another_failure_of_its_own_is_said_too() -> None:
    store = dist.HashStore()
    watched(FirstFailure(store, 1), KeyError("one"))
    second = ValueError("two")
    assert watched(FirstFailure(store, 0), second) is second


def test_a_lost_peer_that_said_nothing_leaves_the_message_of_the_wait(quick: list[float]) -> None:
    lost = CommunicationError("worker 0: 'RecvActivation' failed")
    assert watched(FirstFailure(dist.HashStore(), 0), lost) is lost
    assert quick == [failure.GRACE]


def test_while_it_gives_way_sigterm_ends_a_worker_as_usual() -> None:
    signal.signal(signal.SIGTERM, lambda *_: None)  # as with --exit-signal-handler
    watched(FirstFailure(dist.HashStore(), 0), CommunicationError("lost"))
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_the_host_of_the_store_lingers_so_that_others_can_ask(quick: list[float]) -> None:
    watched(FirstFailure(dist.HashStore(), 0, hosts=True), KeyError("cause"))
    assert quick == [failure.LINGER]


class Gone:
    """A store whose host has ended."""

    def __getattr__(self, name: str) -> Any:
        def fail(*_: object) -> None:
            raise RuntimeError("Broken pipe")

        return fail


def test_without_the_store_everyone_speaks() -> None:
    gone: Any = Gone()
    cause, lost = KeyError("cause"), CommunicationError("lost")
    assert watched(FirstFailure(gone, 1), cause) is cause
    assert watched(FirstFailure(gone, 0), lost) is lost


@pytest.mark.parametrize("error", [SystemExit(0), SystemExit(), KeyboardInterrupt()])
def test_a_regular_end_is_no_failure(error: BaseException) -> None:
    store = dist.HashStore()
    assert watched(FirstFailure(store, 0), error) is error
    assert not store.check(["first failure"])


def test_a_job_of_one_worker_asks_nobody() -> None:
    error = CommunicationError("lost")
    assert watched(FirstFailure(None, 0), error) is error


def test_expected_errors_are_described_by_their_words_alone() -> None:
    assert describe(SystemExit("give --data-path")) == "give --data-path"
    assert describe(KeyError("x")) == "KeyError: 'x'"
    assert describe(OSError("no number")) == "OSError: no number"


def test_a_path_that_cannot_be_used_is_one_line() -> None:
    """Also where nobody has thought of it."""
    script = (
        "import sys; from pathlib import Path; from megatron_flex.signals import run_tool\n"
        "from megatron_flex.runtime.failure import run\n"
        "{'worker': run, 'tool': run_tool}[sys.argv[1]](lambda: Path('x' * 300).exists())"
    )
    for kind in ("worker", "tool"):
        done = subprocess.run(
            [sys.executable, "-c", script, kind], capture_output=True, text=True, check=False
        )
        words = f"error: {'x' * 300}: File name too long: give another\n"
        assert (done.returncode, done.stderr) == (1, words)
