"""Ranks that share layers save their parts of tensors, and any number of them loads."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from megatron_flex.checkpoint.async_save import AsyncSaver
from megatron_flex.checkpoint.errors import CheckpointError
from megatron_flex.checkpoint.load import load, verify
from megatron_flex.checkpoint.parts import Value, parts_of, written_by
from megatron_flex.checkpoint.save import save
from megatron_flex.model.tensor_cut import cut_of, local_shape
from tests.distributed.pool import WorkerPool
from tests.distributed.test_checkpoint import new_group
from tests.unit.checkpoint.test_parts import GPT, MODEL, model_state, of_rank

State = dict[str, torch.Tensor]


def _seeded() -> State:
    torch.manual_seed(5)
    return model_state()


def _mine(size: int, state: State) -> dict[str, Value]:
    """What this rank owns where ``size`` ranks are a device: every other tensor."""
    device, index = divmod(dist.get_rank(), size)
    devices = dist.get_world_size() // size
    own = {
        name: of_rank(tensor, cut_of(GPT, name), index, size)
        for number, (name, tensor) in enumerate(state.items())
        if number % devices == device
    }
    return written_by(parts_of(GPT, own, index, size), index)


def _save(directory: str, size: int) -> None:
    group, common = new_group(), {"model": MODEL}
    save(directory, 1, _mine(size, _seeded()), common, group=group)
    saver = AsyncSaver(directory, group=group)
    state = _seeded()
    mine = _mine(size, state)
    saver.start(2, mine, common)
    for value in mine.values():  # as soon as the copy is there
        (value if isinstance(value, torch.Tensor) else value.local).zero_()
    saver.close()


def _load(directory: str, size: int) -> int:
    """Counts tensors that are as they were; each device has all of them."""
    state, index, found = _seeded(), dist.get_rank() % size, 0
    for iteration in (1, 2):
        own = {n: torch.zeros(local_shape(t.shape, cut_of(GPT, n), size)) for n, t in state.items()}
        parts = parts_of(GPT, own, index, size)
        load(directory, parts, iteration=iteration, group=new_group(), model=MODEL)
        found += sum(
            torch.equal(own[name], of_rank(tensor, cut_of(GPT, name), index, size))
            for name, tensor in state.items()
        )
    return found


def test_saved_by_two_devices_of_two_and_loaded_by_any(workers: WorkerPool, tmp_path: Path) -> None:
    workers.run(4, _save, str(tmp_path), 2)
    count = 2 * len(_seeded())
    assert workers.run(4, _load, str(tmp_path), 4) == [count] * 4
    assert workers.run(3, _load, str(tmp_path), 1) == [count] * 3
    first, second = (verify(tmp_path, iteration).tensors for iteration in (1, 2))
    assert first == second
    assert len(first["decoder.layers.0.mlp.linear_fc1.weight"].chunks) == 4  # gate and up of each
    assert not first["decoder.layers.0.mlp.linear_fc2.bias"].chunks


def _incomplete(directory: str) -> str:
    mine = _mine(2, _seeded())
    if dist.get_rank() == 3:
        mine.popitem()
    try:
        save(directory, 1, mine, {}, group=new_group())
    except CheckpointError as error:
        return str(error)
    return ""


def test_a_rank_that_lacks_its_part_fails_all(workers: WorkerPool, tmp_path: Path) -> None:
    said = workers.run(4, _incomplete, str(tmp_path))
    assert all("parts of optimizer.state.exp_avg." in text for text in said), said
    assert not list(tmp_path.glob("iter_*"))
