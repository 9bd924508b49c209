"""When training stops before its end."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest

from megatron_flex.config.training import TrainingOptions
from megatron_flex.loop import stopping
from megatron_flex.loop.stopping import Stopping
from tests.unit.config.commands import config


@pytest.fixture
def options() -> Iterator[TrainingOptions]:
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    yield config("--exit-signal-handler --exit-interval 7").training
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("number", "name"), [(signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "SIGINT (Ctrl-C)")]
)
def test_a_signal_is_a_wish_to_stop(
    options: TrainingOptions, number: signal.Signals, name: str
) -> None:
    stop = Stopping(options)
    assert stop.reason(1, stop.signals) is None
    assert stop.reason(7, stop.signals) == "exiting program at iteration 7"
    for _ in range(2):  # a launcher and the terminal may both pass it on
        signal.raise_signal(number)
    assert stop.reason(1, stop.signals) == f"exiting program after receiving {name}."


def test_a_later_ctrl_c_ends_at_once(
    options: TrainingOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    Stopping(options)
    signal.raise_signal(signal.SIGINT)
    later = time.monotonic() + stopping.AGAIN + 1
    monkeypatch.setattr(time, "monotonic", lambda: later)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_without_the_flag_signals_are_as_before() -> None:
    before = signal.getsignal(signal.SIGINT)
    Stopping(config("").training)
    assert signal.getsignal(signal.SIGINT) is before
