"""Programs on their way: read back as they were made, refused where they do not belong."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from megatron_flex.planner import maker as maker_module
from megatron_flex.planner.maker import Made
from megatron_flex.planner.package import Package, Received, StampError, computes, pack, unpack
from megatron_flex.planner.service import Service, Task
from megatron_flex.schedule.instructions import Compute, SendState
from megatron_flex.schedule.list_scheduler import Schedule, finish
from megatron_flex.schedule.part import part_of
from tests.unit.planner.test_service import LONG, SETUP, SHORT

FROM, TO = "0:5@0,1 | 5:10@2,3", "0:7@0,1,3 | 7:10@2"
TASK = Task("train 3", FROM, SHORT, TO, ((0, 3), (1, 3)))


def made(task: Task = TASK) -> tuple[Made, list[int]]:
    """A program that switches, and the token pairs of its micro-batches."""
    service = Service(SETUP)
    batch = SETUP.cut.batch(task.lengths)
    return service.make(task, batch), [int(s) for s in batch.squares]


def read(package: Package, device: int, squares: list[int], **changes: object) -> Received:
    given: dict[str, object] = {"name": TASK.name, "tokens": made()[0].program.tokens, **changes}
    return unpack(package.header, package.parts[device], device, squares=squares, **given)  # type: ignore[arg-type]


def test_every_device_reads_its_own_part() -> None:
    found, squares = made()
    package = pack(found, TASK.name, squares, times=True)
    assert any(isinstance(i, SendState) for steps in found.program.instructions for i in steps)
    for device in range(4):
        told = read(package, device, squares)
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
    found, squares = made()
    package = pack(found, TASK.name, squares)
    parts = [read(package, device, squares).part for device in range(4)]
    assert len({part.groups for part in parts}) == 1
    assert {(slab, target) for slab, _, target in parts[0].hand_overs} == set(TASK.late)


def test_a_program_of_another_iteration_is_refused() -> None:
    found, squares = made()
    with pytest.raises(StampError, match=r"is for 'train 2', this worker is at 'train 3'"):
        read(pack(found, "train 2", squares), 1, squares)


def test_a_program_for_another_cut_is_refused() -> None:
    found, squares = made()
    package = pack(found, TASK.name, squares)
    other = [squares[0] + 1, *squares[1:]]
    with pytest.raises(StampError, match="is for other micro-batches than this worker has"):
        read(package, 0, other)


def test_a_program_of_another_version_is_refused() -> None:
    found, squares = made()
    package = pack(found, TASK.name, squares)
    header = json.dumps({**json.loads(package.header), "version": 99})
    with pytest.raises(StampError, match="version 99"):
        read(replace(package, header=header), 0, squares)


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
    found, squares = made(Task("train 0", FROM, SHORT * 20))
    package = pack(found, "train 0", squares)
    for part, steps in zip(package.parts, found.program.instructions, strict=True):
        assert len(part) < 4 * len(steps) + 100
