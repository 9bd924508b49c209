"""The error of the data room."""

from __future__ import annotations


class DataError(ValueError):
    """Data that cannot be used: the message names the file and says what to do."""
