"""What goes wrong with host copies of layers."""

from __future__ import annotations


class TwinError(RuntimeError):
    """Host copies of layers cannot be kept as asked; the message says what to change."""


class ManagerLost(TwinError):
    """The manager of this server does not answer: it was killed, or it hangs."""
