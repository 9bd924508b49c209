"""Programs as text: one file a program, readable, and read back exactly.

megatron-flex program 1
plan 0:5@0 | 5:8@1
tokens 120 64
route 0 0
route 1 1
device 0
  Forward micro_batch=0 stage=0
  ...
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from megatron_flex.planner.plan import Plan
from megatron_flex.schedule.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    GatherParameters,
    GlobalNorm,
    Instruction,
    Program,
    RecvActivation,
    RecvGradient,
    ReduceGradient,
    ScatterGradient,
    SendActivation,
    SendGradient,
    SlabOp,
    SquaredNorm,
    Transfer,
    UpdateOrSkip,
    parse,
)

HEADER = "megatron-flex program 1"


def dumps(program: Program) -> str:
    """The text form of a program."""
    lines = [HEADER, f"plan {program.plan}", f"tokens {' '.join(map(str, program.tokens))}"]
    lines.extend(f"route {' '.join(map(str, row))}" for row in program.route)
    if program.next_plan is not None:
        lines.append(f"next {program.next_plan}")
    if program.held is not None:
        lines.append(f"held {program.held}")
    lines.extend(f"chain {' '.join(map(str, chain))}" for chain in program.chains)
    if program.elements:
        lines.append(f"elements {' '.join(map(str, program.elements))}")
    for device, instructions in enumerate(program.instructions):
        lines.append(f"device {device}")
        lines.extend(f"  {instruction}" for instruction in instructions)
    return "\n".join(lines) + "\n"


def loads(text: str) -> Program:
    """Read a program back; ``ValueError`` names the line that is wrong."""
    lines = text.splitlines()
    if not lines or lines[0] != HEADER:
        raise ValueError(f"not a program: line 1 must be '{HEADER}'")
    plan: Plan | None = None
    next_plan: Plan | None = None
    held: Plan | None = None
    tokens: tuple[int, ...] = ()
    elements: tuple[int, ...] = ()
    route: list[tuple[int, ...]] = []
    chains: list[tuple[int, ...]] = []
    lists: list[list[Instruction]] = []
    for number, line in enumerate(lines[1:], 2):
        word, _, rest = line.strip().partition(" ")
        try:
            if word == "plan":
                plan = Plan.parse(rest)
            elif word == "next":
                next_plan = Plan.parse(rest)
            elif word == "held":
                held = Plan.parse(rest)
            elif word == "tokens":
                tokens = tuple(map(int, rest.split()))
            elif word == "elements":
                elements = tuple(map(int, rest.split()))
            elif word == "chain":
                chains.append(tuple(map(int, rest.split())))
            elif word == "route":
                route.append(tuple(map(int, rest.split())))
            elif word == "device":
                if int(rest) != len(lists):
                    raise ValueError(f"expected device {len(lists)}")
                lists.append([])
            elif word:
                if not lists:
                    raise ValueError("an instruction before the first device")
                lists[-1].append(parse(line))
        except ValueError as error:
            raise ValueError(f"line {number}, '{line.strip()}': {error}") from error
    if plan is None:
        raise ValueError("the program has no line 'plan ...'")
    instructions = tuple(map(tuple, lists))
    return Program(
        plan, tokens, tuple(route), instructions, next_plan, held, elements, tuple(chains)
    )


def save(program: Program, path: str | Path) -> None:
    """Write a program's text form; the file appears whole or not at all."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(dumps(program), encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def load(path: str | Path) -> Program:
    """Read a file that :func:`save` wrote; ``ValueError`` names the file and the line."""
    try:
        return loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


_SHORT: dict[type[Instruction], str] = {
    Forward: "F", Backward: "B", BackwardInput: "I", BackwardWeight: "W",
    SendActivation: "sendA", RecvActivation: "recvA", SendGradient: "sendG", RecvGradient: "recvG",
    ReduceGradient: "reduce", ScatterGradient: "scatter", SquaredNorm: "norm",
    GlobalNorm: "all-norm", UpdateOrSkip: "update", GatherParameters: "gather",
}  # fmt: skip


def short(instruction: Instruction) -> str:
    """A few characters for grids: ``F3.1`` is the forward of micro-batch 3 on stage 1."""
    name = _SHORT.get(type(instruction), type(instruction).__name__)
    if isinstance(instruction, Transfer):
        arrow = ">" if name.startswith("send") else "<"
        return f"{name}{instruction.micro_batch}.{instruction.stage}{arrow}{instruction.peer}"
    if isinstance(instruction, (ReduceGradient, SlabOp)):
        return f"{name}({instruction.slab})"
    if isinstance(instruction, GlobalNorm):
        return name
    return f"{name}{getattr(instruction, 'micro_batch', '')}.{getattr(instruction, 'stage', '')}"


def excerpt(program: Program, steps: Sequence[int], devices: Sequence[int], around: int = 3) -> str:
    """A grid of devices and steps around ``steps[device]``, which is put in brackets."""
    rows = []
    for device in devices:
        instructions = program.instructions[device]
        at = steps[device]
        first = max(0, at - around)
        cells = []
        for step in range(first, min(len(instructions), at + around + 1)):
            text = short(instructions[step])
            cells.append(f"[{text}]" if step == at else text)
        if at >= len(instructions):
            cells.append("[end]")
        rows.append((f"device {device}", f"step {first}:", cells))
    columns = max((len(cells) for _, _, cells in rows), default=0)
    widths = [max((len(c[i]) for _, _, c in rows if i < len(c)), default=0) for i in range(columns)]
    left = max((len(a) for a, _, _ in rows), default=0)
    middle = max((len(b) for _, b, _ in rows), default=0)
    lines = []
    for name, step_, cells in rows:
        padded = "  ".join(c.ljust(w) for c, w in zip(cells, widths, strict=False))
        lines.append(f"  {name.ljust(left)}  {step_.ljust(middle)}  {padded}".rstrip())
    return "\n".join(lines)
