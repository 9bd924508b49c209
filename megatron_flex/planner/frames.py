"""Messages between a worker and the planner's process: a line of JSON, then raw bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, BinaryIO


def write(stream: BinaryIO, data: Mapping[str, Any], blob: bytes = b"") -> None:
    """Write one message and flush. ``OSError`` if nobody reads."""
    line = json.dumps({**data, "blob": len(blob)}).encode()
    stream.write(line + b"\n" + blob)
    stream.flush()


def read(stream: BinaryIO) -> tuple[dict[str, Any], bytes] | None:
    """The next message; ``None`` where the stream ends, also within one."""
    line = stream.readline()
    if not line.endswith(b"\n"):
        return None
    data: dict[str, Any] = json.loads(line)
    size = data.pop("blob")
    blob = stream.read(size)
    return None if len(blob) < size else (data, blob)
