"""Check a program before anything runs: replay all instruction lists together.

The replay is native (``kernels/src/program_validate.cpp``). It reads the words that workers get,
and what it knows comes from plans and routing: not from the operations that lists are written from.
Whatever would make the iteration hang or its result wrong is refused with the device and the step.
The tests have it in Python.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from megatron_flex.model.layers import LayerList
from megatron_flex.native import Array, function, pointers, structure
from megatron_flex.schedule.compact import Lists, rows
from megatron_flex.schedule.instructions import PieceOp, Program, Recut, Transfer
from megatron_flex.schedule.operations import check_chains
from megatron_flex.schedule.residency import POSTED
from megatron_flex.schedule.routing import check_route
from megatron_flex.schedule.shards import Owners, cuts, sharded_slabs
from megatron_flex.schedule.slabs import slab_holders, slab_stages
from megatron_flex.schedule.text import excerpt

_Problem = structure(
    "devices stages batches units slabs groups train switches posted",
    arrays="words word_offset sizes group_offset group tokens route before after stage_offset"
    " holder unit slab_offset slab user_offset user now_offset now next_offset next cut scattered"
    " old_offset old_part new_offset new_part",
)
"""``mflex_validate_problem`` of ``kernels/src/program_validate.h``, field by field."""
_Failure = structure("device step num_shown capacity", arrays="steps shown reason")
"""``mflex_validate_failure``."""
_REASON = 1 << 20  # bytes; what is longer is cut off


class ProgramError(ValueError):
    """A program that would hang or train wrongly.

    Attributes:
        device: the device at which it was found, -1 for the program as a whole.
        step: the index in that device's list.
    """

    def __init__(self, message: str, device: int = -1, step: int = -1) -> None:
        super().__init__(message)
        self.device = device
        self.step = step


def validate(program: Program, layers: LayerList, *, forward_only: bool = False) -> None:
    """Raise :class:`ProgramError` unless the program runs to its end and trains rightly.

    Args:
        forward_only: the program is an evaluation: no backward, reductions or updates belong in.
    """
    try:
        program.plan.check(layers.num_units, len(program.instructions))
        check_route(program.plan, program.route, len(program.tokens))
        check_chains(program.chains, len(program.tokens), program.route)
        if program.next_plan is not None:
            program.next_plan.check(layers.num_units, len(program.instructions))
        if program.held is not None:
            program.held.check(layers.num_units, len(program.instructions))
        arrays = _arrays(program, layers)
    except ValueError as error:
        raise ProgramError(str(error)) from error
    if forward_only and program.next_plan is not None:
        raise ProgramError("an evaluation does not switch: leave out the next plan")
    stages, batches = arrays["route"].shape
    problem = _Problem(
        devices=len(program.instructions),
        stages=stages,
        batches=batches,
        units=layers.num_units,
        slabs=layers.num_slabs,
        groups=len(arrays["group_offset"]) - 1,
        train=not forward_only,
        switches=program.next_plan is not None,
        posted=POSTED,
        **pointers(arrays),
    )
    if function("mflex_program_validate")(ctypes.addressof(problem), 0):
        _refuse(program, problem)


def _arrays(program: Program, layers: LayerList) -> dict[str, Array]:
    """What the replay reads. ``ValueError`` where sharded slabs cannot be cut."""
    plan = program.plan
    now = program.held or plan
    after = program.next_plan or now
    anew = cuts(now, after, layers, program.elements)
    scattered = sharded_slabs(now, layers) - anew.keys()
    lists = Lists.of(program.instructions, program.tokens, clipped=True)
    before = np.full(len(program.tokens), -1)
    later = np.full(len(program.tokens), -1)
    for chain in program.chains:
        for a, b in pairwise(chain):
            before[b], later[a] = a, b
    slabs = range(layers.num_slabs)
    found: dict[str, Array] = {
        "words": lists.words,
        "word_offset": lists.offset,
        "tokens": np.array(program.tokens, dtype=np.int64),
        "route": np.array(program.route, dtype=np.int64),
        "before": before,
        "after": later,
        "unit": np.array([*(s.start for s in plan.stages), plan.num_units]),
        "cut": np.array([1 + anew[s].sharded if s in anew else 0 for s in slabs]),
        "scattered": np.array([int(s in scattered) for s in slabs]),
    }
    sizes = _sizes(program, lists)
    if sizes is not None:
        found["sizes"] = sizes
    for name, values in (
        ("group", lists.groups),
        ("holder", [s.group for s in plan.stages]),
        ("slab", [unit.slabs for unit in layers.units]),
        ("user", slab_stages(plan, layers)),
        ("now", slab_holders(now, layers)),
        ("next", slab_holders(after, layers)),
    ):
        offset = "stage_offset" if name == "holder" else f"{name}_offset"
        found[offset], found[name] = rows(values)
    none: Owners = {}
    for name, parts in (
        ("old", [anew[s].before if s in anew else none for s in slabs]),
        ("new", [anew[s].after if s in anew else none for s in slabs]),
    ):
        found[f"{name}_offset"], _ = rows([list(owners) for owners in parts])
        flat = [(device, *part) for owners in parts for device, part in owners.items()]
        found[f"{name}_part"] = np.array(flat, dtype=np.int64)
    return found


def _sizes(program: Program, lists: Lists) -> Array | None:
    """Tokens of every message, word by word; ``None``: all are those of their micro-batches."""
    if program.instructions is lists and lists.tokens == program.tokens:
        return None
    sizes: list[int] = []
    for steps in program.instructions:
        for step in steps:
            wide = isinstance(step, Recut | PieceOp)
            sizes += [step.tokens if isinstance(step, Transfer) else 0, *(0, 0) * wide]
    return np.array(sizes, dtype=np.int64)


def _refuse(program: Program, problem: ctypes.Structure) -> None:
    """Raise with the device, the step and the lists around it."""
    devices = len(program.instructions)
    arrays = {name: np.zeros(devices, dtype=np.int64) for name in ("steps", "shown")}
    reason = ctypes.create_string_buffer(_REASON)
    failure = _Failure(device=0, step=0, num_shown=0, capacity=len(reason), **pointers(arrays))
    failure.reason = ctypes.addressof(reason)
    function("mflex_program_validate")(ctypes.addressof(problem), ctypes.addressof(failure))
    device, step = int(failure.device), int(failure.step)
    lists = program.instructions

    def instruction(match: re.Match[str]) -> str:
        return str(lists[int(match[1])][int(match[2])])

    text = re.sub(r"\{(\d+)\.(\d+)\}", instruction, reason.value.decode())
    what = str(lists[device][step]) if step < len(lists[device]) else "end"
    steps = arrays["steps"].tolist()
    steps[device] = step
    shown = arrays["shown"][: failure.num_shown].tolist() or _neighbours(program, device, step)
    raise ProgramError(
        f"device {device}, step {step} ({what}): {text}\n{excerpt(program, steps, shown)}",
        device,
        step,
    )


def _neighbours(program: Program, device: int, step: int) -> Sequence[int]:
    """The failing device and those that it exchanges messages with nearby."""
    found = {device}
    for instruction in program.instructions[device][max(0, step - 3) : step + 4]:
        if isinstance(instruction, Transfer) and 0 <= instruction.peer < len(program.instructions):
            found.add(instruction.peer)
    return sorted(found)
