"""Flags that have no effect without another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from megatron_flex.config.config import Config, flag_of

Problems = Iterator[str]
"""Sentences that name the flags and say what to change."""


def without(config: Config, needs: str, met: object, fields: Iterable[str]) -> Problems:
    """One sentence for each given field that has no effect because ``needs`` is not met."""
    if not met:
        for name in fields:
            if name in config.given:
                yield f"{flag_of(name)} has no effect without {needs}: remove it, or add {needs}"
