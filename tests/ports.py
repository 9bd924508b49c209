"""Ports for workers that must know in advance where they meet."""

from __future__ import annotations

import socket


def held_port() -> socket.socket:
    """A socket that holds a free port of this machine: ``held.getsockname()[1]``.

    The kernel gives it to nobody else until the socket is closed, but a worker that is told the
    number can listen there: both sides allow the address to be used again, and this one does not
    listen.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held
