"""Programs on their way: read back as they were made, refused where they do not belong."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from megatron_flex.data.microbatch import MicroBatch, Slice
from megatron_flex.planner import maker as maker_module
from megatron_flex.planner.build import Batch
from megatron_flex.planner.maker import Made
from megatron_flex.planner.messages import Task
from megatron_flex.planner.package import (
    Package,
    Received,
    StampError,
    computes,
    digest,
    pack,
    unpack,
)
from megatron_flex.planner.service import Service
from megatron_flex.planner.ways import micro_batches
from megatron_flex.schedule.instructions import Compute, SendState
from megatron_flex.schedule.list_scheduler import Schedule, finish
from megatron_flex.schedule.part import part_of
from tests.unit.planner.test_service import LONG, SETUP, SHORT

FROM, TO = "0:5@0,1 | 5:10@2,3", "0:7@0,1,3 | 7:10@2"
TASK = Task("train 3", FROM, SHORT, TO, ((0, 3), (1, 3)))


Parts = tuple[MicroBatch, ...]


def made(task: Task = TASK) -> tuple[Made, Parts]:
    """A program that switches, and its micro-batches."""
    parts = micro_batches(SETUP.cut, task.lengths)
    return Service(SETUP).make(task, Batch.of(parts)), parts


def packed(found: Made, parts: Parts, name: str = TASK.name, *, times: bool = False) -> Package:
    return pack(found, name, digest(parts), times=times)


def read(package: Package, device: int, parts: Parts) -> Received:
    return unpack(package.header, package.parts[device], device, TASK.name, parts)


def test_every_device_reads_its_own_part() -> None:
    found, parts = made()
    package = packed(found, parts, times=True)
    assert any(isinstance(i, SendState) for steps in found.program.instructions for i in steps)
    for device in range(4):
        told = read(package, device, parts)
        assert told.part == part_of(found.program, device)
        assert told.memory == found.memory[device]
        assert (told.seconds, told.schedule) == (found.seconds, found.schedule)
        own = computes(told.part.instructions)
        placement = found.timeline.placement
        order = placement.order[device]
        assert len(told.planned) == len(own) == len(order)
        for op, (start, stop), code in zip(own, told.planned, order, strict=True):
            assert placement.problem.decode(code)[1:] == (op.stage, op.micro_batch)
            assert (start, stop) == (placement.start[code], placement.finish[code])


def test_groups_and_hand_overs_are_those_of_all_devices() -> None:
    found, parts = made()
    package = packed(found, parts)
    told = [read(package, device, parts).part for device in range(4)]
    assert len({part.groups for part in told}) == 1
    assert {(slab, target) for slab, _, target in told[0].hand_overs} == set(TASK.late)


def test_a_program_of_another_iteration_is_refused() -> None:
    found, parts = made()
    with pytest.raises(StampError, match=r"is for 'train 2', this worker is at 'train 3'"):
        read(packed(found, parts, "train 2"), 1, parts)


def test_a_program_for_another_cut_is_refused() -> None:
    found, parts = made()
    package = packed(found, parts)
    whole = parts[0].slices[0]
    half = Slice(whole.sample, 0, whole.length // 2, whole.length)
    firsts = [MicroBatch((changed, *parts[0].slices[1:])) for changed in
              (half, Slice.all_of(whole.sample, half.stop))]  # fmt: skip
    for first in (*firsts, replace(parts[0], tail=8)):
        other = (first, *parts[1:])
        with pytest.raises(StampError, match="is for other micro-batches than this worker has"):
            read(package, 0, other)


def test_samples_are_told_apart_by_their_place_in_the_batch_only() -> None:
    _, parts = made()
    later = [MicroBatch(tuple(replace(s, sample=s.sample + 96) for s in m.slices)) for m in parts]
    assert digest(later) == digest(parts)


def test_a_program_of_another_version_is_refused() -> None:
    found, parts = made()
    package = packed(found, parts)
    header = json.dumps({**json.loads(package.header), "version": 99})
    with pytest.raises(StampError, match="version 99"):
        read(replace(package, header=header), 0, parts)


def test_a_program_in_the_wrong_order_is_refused_by_device_and_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def swapped(*arguments: object, **named: object) -> Schedule:
        schedule = finish(*arguments, **named)  # type: ignore[arg-type]
        lists = list(schedule.program.instructions)
        steps = list(lists[2])
        last = max(i for i, s in enumerate(steps) if isinstance(s, Compute))
        steps[0], steps[last] = steps[last], steps[0]
        lists[2] = tuple(steps)
        return replace(schedule, program=replace(schedule.program, instructions=tuple(lists)))

    monkeypatch.setattr(maker_module, "finish", swapped)
    done = Service(SETUP).done(Task("train 0", FROM, LONG))
    assert done.package is None
    assert "device 2, step 0" in done.problem


def test_a_packed_program_is_small() -> None:
    found, parts = made(Task("train 0", FROM, SHORT * 20))
    package = packed(found, parts, "train 0")
    for part, steps in zip(package.parts, found.program.instructions, strict=True):
        assert len(part) < 4 * len(steps) + 100
