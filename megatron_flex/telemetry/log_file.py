"""``--log-file``: everything that a run says, with log lines in Megatron-LM's form."""

from __future__ import annotations

import os
from pathlib import Path

from megatron_flex.telemetry.sink import TelemetryError


class LogFile:
    """A text file that grows by whole lines; a resumed run goes on in the same file.

    Raises:
        TelemetryError: the file cannot be written.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        except OSError as error:
            raise self._error(error) from error

    def write(self, text: str) -> None:
        """Append a line."""
        if self._file < 0:
            return
        data = (text + "\n").encode()
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            raise self._error(error) from error

    def close(self) -> None:
        """Close the file; what is written later is lost."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _error(self, error: OSError) -> TelemetryError:
        return TelemetryError(
            f"--log-file {self._path} cannot be written: {error.strerror or error}; give a file in"
            " a directory with write permission and space"
        )
