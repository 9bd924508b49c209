"""When training stops before its end: by interval, by duration, by signal."""

from __future__ import annotations

import signal
import time
from types import FrameType

from megatron_flex.config.training import TrainingOptions

AGAIN = 2.0
"""Seconds after which another Ctrl-C ends the worker without saving."""


class Stopping:
    """This worker's wish to stop, and the reason that all agree on.

    ``signals`` go into an iteration; what comes out of it is true where any worker's was, so
    all stop after the same iteration.
    """

    def __init__(self, options: TrainingOptions) -> None:
        self._options = options
        self._started = time.monotonic()
        self._terminated = False
        self._interrupted: float | None = None
        if options.exit_signal_handler:
            signal.signal(signal.SIGTERM, self._on_signal)
            signal.signal(signal.SIGINT, self._on_interrupt)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._terminated = True

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        # A terminal and a launcher may both pass on the same Ctrl-C. A later one is meant.
        now = time.monotonic()
        if self._interrupted is not None and now > self._interrupted + AGAIN:
            raise KeyboardInterrupt
        self._interrupted = self._interrupted or now

    @property
    def signals(self) -> tuple[bool, bool, bool]:
        """Whether this worker was asked to end, by SIGTERM or by Ctrl-C; whether its time is up."""
        minutes = self._options.exit_duration_in_mins
        elapsed = (time.monotonic() - self._started) / 60.0
        late = minutes is not None and elapsed > minutes
        return self._terminated, self._interrupted is not None, late

    def reason(self, iteration: int, agreed: tuple[bool, ...]) -> str | None:
        """Why to save and exit after ``iteration``, or ``None``."""
        terminated, interrupted, late = agreed[:3] or (False, False, False)
        if terminated or interrupted:
            name = "SIGTERM" if terminated else "SIGINT (Ctrl-C)"
            return f"exiting program after receiving {name}."
        if late:
            return f"exiting program after {self._options.exit_duration_in_mins} minutes"
        interval = self._options.exit_interval
        if interval is not None and iteration % interval == 0:
            return f"exiting program at iteration {iteration}"
        return None
