"""TensorBoard's event files, written and cut: one point a step, also where iterations repeat.

``torch.utils.tensorboard.SummaryWriter`` can ask readers to forget points (``purge_step``), but by
one number for all series, and ours go over iterations and over samples. So the files of an earlier
run are cut themselves, as the JSON lines are. They are known by the end of their names.
"""

from __future__ import annotations

import os
import re
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

from megatron_flex.telemetry.files import GrowingFile, replace, said, set_aside
from megatron_flex.telemetry.scalars import BY_SAMPLES

FLAG = "--tensorboard-dir"
OURS = ".megatron_flex"

_HEADER = struct.Struct("<QI")  # bytes of the record, and a checksum of that number
_CHECKSUM = struct.Struct("<I")
_AT_MOST = 120.0  # seconds that an event is kept in memory, as in SummaryWriter
_BEGUN = re.compile(r"events\.out\.tfevents\.(\d+)\.")


class EventFile:
    """A new event file of a directory.

    Args:
        queue_size: events that are kept in memory before they are written.

    Raises:
        TelemetryError: it cannot be written.
    """

    def __init__(self, directory: Path, queue_size: int) -> None:
        # Readers take files by name: one that was begun later comes later, whatever the clock says.
        begun = map(_BEGUN.match, (path.name for path in directory.glob(f"*{OURS}")))
        newest = max((int(found[1]) for found in begun if found), default=0)
        place = f"{max(int(time.time()), newest + 1):010d}.{socket.gethostname()}.{os.getpid()}"
        self._file = GrowingFile(directory / f"events.out.tfevents.{place}{OURS}", FLAG)
        self._queue_size = queue_size
        self._queue: list[bytes] = []
        self._add(event_pb2.Event(wall_time=time.time(), file_version="brain.Event:2"))
        self.flush()

    def add(self, summary: summary_pb2.Summary, step: int) -> None:
        """Add points at a step; those of series over iterations and over samples apart."""
        self._add(event_pb2.Event(wall_time=time.time(), step=step, summary=summary))

    def flush(self) -> None:
        """Write what is kept in memory."""
        data, self._queue = b"".join(self._queue), []
        self._flushed = time.monotonic()
        self._file.append(data)

    def close(self) -> None:
        """Write what is kept in memory, and close the file."""
        self.flush()
        self._file.close()

    def _add(self, event: event_pb2.Event) -> None:
        self._queue.append(_record(event.SerializeToString()))
        if len(self._queue) > self._queue_size or time.monotonic() > self._flushed + _AT_MOST:
            self.flush()

    _flushed = 0.0


def keep_until(directory: Path, iteration: int, samples: int) -> str | None:
    """Remove our points after ``iteration``, or ``samples``, from a directory; a word on it.

    With ``iteration`` 0 all our files are moved into a directory within.

    Raises:
        TelemetryError: a file cannot be read or written.
    """
    paths = sorted(directory.glob(f"events.out.tfevents.*{OURS}"))
    if not paths:
        return None
    with said(directory, FLAG):
        if iteration == 0:
            earlier = directory / "earlier"
            if earlier.exists():
                set_aside(earlier)
            earlier.mkdir()
            for path in paths:
                os.rename(path, earlier / path.name)
            return f"{FLAG}: the files of an earlier run are now in {earlier}"
        late = sum(_cut(path, iteration, samples) for path in paths)
    if not late:
        return None
    return (
        f"{FLAG}: {late} points of iterations after {iteration}, which are trained again, were"
        " removed"
    )


def _cut(path: Path, iteration: int, samples: int) -> int:
    """Number of points that were removed from a file."""
    late, kept, length = 0, [], 0
    for event, record in _records(path):
        points = _late(event, iteration, samples)
        late += points
        length += len(record)
        if not points:
            kept.append(record)
    if late or length != path.stat().st_size:
        replace(path, kept)
    return late


def _late(event: event_pb2.Event, iteration: int, samples: int) -> int:
    """Number of points of an event that come too late. All its series go over the same steps."""
    tags = [value.tag for value in event.summary.value]
    by_samples = any(tag.endswith(BY_SAMPLES) for tag in tags)
    return len(tags) if event.step > (samples if by_samples else iteration) else 0


def _records(path: Path) -> Iterator[tuple[event_pb2.Event, bytes]]:
    """The whole events of a file, with their bytes there; it may be torn at its end."""
    data = path.read_bytes()
    at = 0
    while at + _HEADER.size <= len(data):
        size, _ = _HEADER.unpack_from(data, at)
        begin, end = at + _HEADER.size, at + _HEADER.size + size + _CHECKSUM.size
        if end > len(data):
            return
        yield event_pb2.Event.FromString(data[begin : begin + size]), data[at:end]
        at = end


def _record(data: bytes) -> bytes:
    """The framing of TensorFlow's record files."""
    header = struct.pack("<Q", len(data))
    return b"".join(
        (
            header,
            _CHECKSUM.pack(masked_crc32c(header)),
            data,
            _CHECKSUM.pack(masked_crc32c(data)),
        )
    )
