"""Whether all workers start from the same, asked before anything is allocated.

Each worker reads the flags and files of its own server. What follows from them has to be the same
everywhere: how many workers share a layer, what a batch is cut to, where a run goes on. So workers
compare what they start from by name; where something differs, all end with the same words.
"""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

Facts = Mapping[str, str]
"""What a worker starts from, by a name that people know; values are short."""

ABSENT = "absent"
"""The value of what is not there."""
_NAMED = 6
"""Differences that a message names."""
_SHOWN = 3
"""Values of each."""
_CHOSEN = "--tensor-model-parallel-size"


@dataclass(frozen=True)
class View:
    """What one worker says of itself: its machine, what it starts from, what it finds wrong."""

    machine: str
    facts: Facts
    problem: str = ""


def check_alike(group: dist.ProcessGroup | None, facts: Facts, problem: str = "") -> None:
    """Raise ``SystemExit``, on all workers alike, if they start from different ``facts``.

    Args:
        group: a gloo group of all workers; ``None``: there is one.
        facts: what this one starts from.
        problem: what is wrong on this worker, in words.
    """
    if group is None:
        if problem:
            raise SystemExit(problem)
        return
    text = json.dumps(sorted(facts.items())).encode()
    digest = int.from_bytes(hashlib.sha256(text).digest()[:7], "big")
    found = torch.tensor([digest, -digest, bool(problem)])
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    largest, smallest, wrong = found.tolist()
    if largest == -smallest and not wrong:
        return
    views: list[View] = [View("", {})] * dist.get_world_size(group)
    dist.all_gather_object(views, View(socket.gethostname(), dict(facts), problem), group=group)
    raise SystemExit(disagreement(views))


def disagreement(views: Sequence[View]) -> str:
    """What the workers do not agree about, or what is wrong on one of them, in words."""
    for view in views:
        if view.problem:
            return view.problem
    names = dict.fromkeys(name for view in views for name in view.facts)
    found = [
        text
        for name in names
        if (text := _difference(name, [view.facts.get(name, ABSENT) for view in views], views))
    ]
    more = len(found) - _NAMED
    rest = [f"and {more} more"] if more > 0 else []
    listed = "; ".join(found[:_NAMED] + rest)
    chosen = any(text.startswith(f"{_CHOSEN} ") for text in found)
    number = (
        f"; auto of {_CHOSEN} follows from them, and from how many workers a server has: a number"
        " does not"
    )
    return (
        f"the workers do not start from the same: {listed}: give all the same flags, and the same"
        f" files on every server{number if chosen else ''}"
    )


def _difference(name: str, values: Sequence[str], views: Sequence[View]) -> str:
    """Who has which value; empty if all have the same."""
    different = dict.fromkeys(values)
    if len(different) == 1:
        return ""
    machines = len({view.machine for view in views}) > 1
    who = []
    for value in list(different)[:_SHOWN]:
        ranks = [rank for rank, own in enumerate(values) if own == value]
        where = f" of {views[ranks[0]].machine}" if machines else ""
        others = f" and {len(ranks) - 1} more" if len(ranks) > 1 else ""
        who.append(f"{value} on worker {ranks[0]}{where}{others}")
    return f"{name} is {', '.join(who)}"
