"""When training stops before its end: by interval, by duration, by signal."""

from __future__ import annotations

import signal
import time
from types import FrameType

from megatron_flex.config.training import TrainingOptions


class Stopping:
    """This worker's wish to stop, and the reason that all agree on.

    ``signals`` go into an iteration; what comes out of it is true where any worker's was, so
    all stop after the same iteration.
    """

    def __init__(self, options: TrainingOptions) -> None:
        self._options = options
        self._started = time.monotonic()
        self._terminated = False
        if options.exit_signal_handler:
            signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._terminated = True

    @property
    def signals(self) -> tuple[bool, bool]:
        """Whether this worker was asked to end, and whether its time is up."""
        minutes = self._options.exit_duration_in_mins
        elapsed = (time.monotonic() - self._started) / 60.0
        return self._terminated, minutes is not None and elapsed > minutes

    def reason(self, iteration: int, agreed: tuple[bool, ...]) -> str | None:
        """Why to save and exit after ``iteration``, or ``None``."""
        terminated, late = agreed[:2] or (False, False)
        if terminated:
            return "exiting program after receiving SIGTERM."
        if late:
            return f"exiting program after {self._options.exit_duration_in_mins} minutes"
        interval = self._options.exit_interval
        if interval is not None and iteration % interval == 0:
            return f"exiting program at iteration {iteration}"
        return None
