"""Managers of host copies of layers on this server, for people.

    python -m megatron_flex.twinlayer status [--json]     what each of this user's managers holds
    python -m megatron_flex.twinlayer start --job NAME --bank-gb 4 --room-gb 1
    python -m megatron_flex.twinlayer stop --job NAME

A job starts its own manager and ends it; ``start`` is for jobs that shall find one, ``NAME`` is
then "<run id> at <address>:<port>" as ``status`` prints it.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from megatron_flex.twinlayer.client import status_of
from megatron_flex.twinlayer.errors import TwinError
from megatron_flex.twinlayer.location import socket_of, sockets
from megatron_flex.twinlayer.manager import PATIENCE, Shape, start, stop


def main(words: list[str] | None = None) -> int:
    """Run one command; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m megatron_flex.twinlayer", description=(__doc__ or "").split("\n")[0]
    )
    commands = parser.add_subparsers(dest="command", required=True)
    status = commands.add_parser("status", help="what each of this user's managers here holds")
    status.add_argument("--json", action="store_true", help="one JSON object a line")
    starting = commands.add_parser("start", help="start a manager for a job")
    stopping = commands.add_parser("stop", help="end the manager of a job")
    for command in (starting, stopping):
        command.add_argument("--job", required=True, help="<run id> at <address>:<port>")
    starting.add_argument("--banks", type=int, default=2, help="versions kept for recovery")
    starting.add_argument("--bank-gb", type=float, default=0.0, help="10^9 bytes of a version")
    starting.add_argument("--room-gb", type=float, default=0.0, help="10^9 bytes for hand-overs")
    starting.add_argument(
        "--patience", type=float, default=PATIENCE, help="seconds to wait for workers"
    )
    arguments = parser.parse_args(words)
    try:
        if arguments.command == "status":
            return _status(as_json=arguments.json)
        if arguments.command == "stop":
            return _stop(arguments.job)
        shape = Shape(arguments.banks, int(arguments.bank_gb * 1e9), int(arguments.room_gb * 1e9))
        fresh = start(socket_of(arguments.job), arguments.job, shape, arguments.patience)
        print(f"{'started' if fresh else 'there is one already'}: {arguments.job}")
        return 0
    except TwinError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _status(*, as_json: bool) -> int:
    found = [status for path in sockets() if (status := status_of(path)) is not None]
    if as_json:
        for status in found:
            print(json.dumps(status))
        return 0
    for status in found:
        print("\n".join(_lines(status)))
    if not found:
        print("no manager of host copies runs on this server")
    return 0


def _lines(s: dict[str, Any]) -> list[str]:
    """A status for people; sizes in MB of 10^6 bytes."""
    workers = ", ".join(map(str, s["workers"])) or f"none (ends after {s['linger_ms'] / 1e3:g} s)"
    lines = [
        f"{s['job']}: process {s['pid']}, {s['bytes'] / 1e6:.1f} MB, up {s['seconds']} s",
        f"  workers: {workers}",
        f"  for recovery: {s['banks']} versions of up to {s['bank_bytes'] / 1e6:.1f} MB,"
        f" {s['snapshots']} begun so far",
    ]
    for version in sorted(s["versions"], key=lambda v: int(v["version"])):
        note = ", complete on all servers" if version["version"] == s["committed"] else ""
        lines.append(
            f"    iteration {version['version']}: {version['complete']} of {version['slabs']} slabs"
            f" complete, {version['bytes'] / 1e6:.1f} MB{note}"
        )
    lines += [
        f"  hand-overs: {s['handed_over']} so far, {s['room_used'] / 1e6:.1f} of"
        f" {s['room_bytes'] / 1e6:.1f} MB in use; {s['without_room']} found no room",
        f"  copies now: {s['copying']} of {s['bytes_under_way'] / 1e6:.1f} MB together,"
        f" {s['waiting']} wait for their turn",
    ]
    return lines


def _stop(job: str) -> int:
    if stop(socket_of(job)):
        return 0
    print(f"error: no manager runs for '{job}' on this server", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
