"""A program on its way to the workers: a header for all, and each one's own list.

The header is stamped with the name of the iteration, its plans and a digest of how its batch was
cut: a worker that is somewhere else stops before it runs anything.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from megatron_flex.data.microbatch import MicroBatch
from megatron_flex.planner.maker import Made
from megatron_flex.planner.plan import Plan
from megatron_flex.schedule.compact import VERSION, Lists, decode
from megatron_flex.schedule.instructions import Compute, Instruction
from megatron_flex.schedule.part import Part, hand_overs

_HEAD = struct.Struct("<ddII")
"""Before a list: both memory peaks in bytes, number of words, number of planned operations."""


class StampError(ValueError):
    """A program for something else than what is to be run."""


@dataclass(frozen=True)
class Package:
    """One program. ``header`` is JSON; ``parts`` has the list of each device, deflated."""

    header: str
    parts: tuple[bytes, ...]

    @property
    def name(self) -> str:
        """Of the task that it was made for."""
        return str(json.loads(self.header)["name"])


@dataclass(frozen=True)
class Received:
    """What a worker has been told to do.

    Attributes:
        part: its list.
        memory: bytes that it is predicted to use up to the global norm, and after it.
        seconds: predicted time of the iteration.
        schedule: name of the policy that ordered it.
        planned: predicted start and finish of its operations, seconds; empty unless asked for.
    """

    part: Part
    memory: tuple[float, float]
    seconds: float
    schedule: str
    planned: tuple[tuple[float, float], ...] = ()


def digest(micro_batches: Sequence[MicroBatch]) -> str:
    """Of the micro-batches that a batch was cut to: their slices, samples numbered from 0, and
    padding."""
    first = min(s.sample for m in micro_batches for s in m.slices)
    rows = [
        (number, s.sample - first, s.start, s.stop, s.length, m.padded, m.tail)
        for number, m in enumerate(micro_batches)
        for s in m.slices
    ]
    return xxhash.xxh64_hexdigest(np.array(rows, dtype=np.int64).tobytes())


def pack(made: Made, name: str, batch: str, *, times: bool = False, divided: int = 0) -> Package:
    """Pack a program.

    Args:
        name: of the task, such as ``train 12``.
        batch: :func:`digest` of its micro-batches.
        times: send each worker the predicted times of its operations.
        divided: see :attr:`~megatron_flex.schedule.part.Part.divided`.
    """
    program = made.program
    lists = Lists.of(program.instructions, program.tokens)
    placement = made.timeline.placement
    parts = []
    for device in range(len(lists)):
        words = lists.of_device(device)
        spans: NDArray[np.float64] = np.zeros((0, 2))
        if times and device < len(placement.order):
            own = placement.order[device]
            spans = np.stack([placement.start[own], placement.finish[own]], axis=1)
        head = _HEAD.pack(*made.memory[device], len(words), len(spans))
        parts.append(head + zlib.compress(words.tobytes() + spans.tobytes(), 1))
    header = {
        "version": VERSION,
        "name": name,
        "plan": str(program.plan),
        "next": None if program.next_plan is None else str(program.next_plan),
        "batch": batch,
        "groups": lists.groups,
        "hand_overs": hand_overs(program),
        "divided": divided,
        "seconds": made.seconds,
        "schedule": made.schedule,
    }
    return Package(json.dumps(header), tuple(parts))


def unpack(
    header: str, part: bytes, device: int, name: str, micro_batches: Sequence[MicroBatch]
) -> Received:
    """What ``device`` does.

    Args:
        name: of the task that is to be run.
        micro_batches: as this worker has cut them.

    Raises :class:`StampError` when the program is for another task, batch or version.
    """
    data: dict[str, Any] = json.loads(header)
    if data["version"] != VERSION:
        raise StampError(
            f"the program has version {data['version']}, this worker reads version {VERSION}: all"
            " workers must run the same release"
        )
    if data["name"] != name:
        raise StampError(f"the program is for '{data['name']}', this worker is at '{name}'")
    if data["batch"] != digest(micro_batches):
        raise StampError(
            f"the program of '{name}' is for other micro-batches than this worker has: its data or"
            " its flags differ from those of the first worker"
        )
    tokens = tuple(m.tokens for m in micro_batches)
    peak, updates, count, planned = _HEAD.unpack_from(part)
    raw = zlib.decompress(part[_HEAD.size :])
    words = np.frombuffer(raw, dtype=np.uint64, count=count)
    groups = tuple(tuple(group) for group in data["groups"])
    next_plan = data["next"]
    found = Part(
        device,
        Plan.parse(data["plan"]),
        tokens,
        decode(words, tokens, groups),
        None if next_plan is None else Plan.parse(next_plan),
        groups,
        tuple((slab, source, target) for slab, source, target in data["hand_overs"]),
        data["divided"],
    )
    spans = np.frombuffer(raw, dtype=np.float64, offset=8 * count, count=2 * planned)
    times = tuple((a, b) for a, b in spans.reshape(-1, 2).tolist())
    return Received(found, (peak, updates), data["seconds"], data["schedule"], times)


def computes(instructions: Sequence[Instruction]) -> list[Compute]:
    """The operations among instructions: what :attr:`Received.planned` has times for."""
    return [i for i in instructions if isinstance(i, Compute)]
