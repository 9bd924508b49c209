"""``--log-file``: everything that a run says, with log lines in Megatron-LM's form."""

from __future__ import annotations

from pathlib import Path

from megatron_flex.telemetry.files import GrowingFile, not_ours, said, try_file

FLAG = "--log-file"
TITLE = b"------------------------ arguments"
"""How a log file begins: see ``arguments.dump``."""


class LogFile:
    """A text file that grows by whole lines; a resumed run goes on in the same file.

    Raises:
        TelemetryError: the file cannot be written, or is another's.
    """

    def __init__(self, path: str) -> None:
        check(Path(path))
        self._file = GrowingFile(Path(path), FLAG)

    def write(self, text: str) -> None:
        """Append a line."""
        self._file.append((text + "\n").encode(errors="backslashreplace"))

    def close(self) -> None:
        """Close the file; what is written later is lost."""
        self._file.close()


def check(path: Path) -> None:
    """Raise ``TelemetryError`` unless a run may write there."""
    try_file(path, FLAG)
    if path.is_file():
        with said(path, FLAG), path.open("rb") as file:
            begin = file.read(len(TITLE))
        if begin and not TITLE.startswith(begin):
            raise not_ours(path, FLAG, "a log")
