"""Megatron's text form of a pipeline layout, ``--pipeline-model-parallel-layout``.

As in ``megatron/core/transformer/pipeline_parallel_layer_layout.py``: ``E`` embedding, ``t`` a
layer, ``L`` the loss (here: the head), ``|`` between stages, ``x*n`` and ``(...)*n`` repeat; commas
are ignored. Example: ``Et*3|(tt|)*2t|L``.
"""

from __future__ import annotations

import re

_REPEATS = (re.compile(r"\(([^)]+)\)\*(\d+)"), re.compile(r"(.)\*(\d+)"))


def rows_of(layout: str) -> list[str]:
    """The letters of each stage."""
    text = layout.replace(",", "").replace(" ", "")
    for pattern in _REPEATS:
        text = pattern.sub(lambda m: m[1] * int(m[2]), text)
    return text.split("|")
