"""What of a run is saved and restored, by one process."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from megatron_flex.checkpoint.errors import CheckpointError
from megatron_flex.checkpoint.layout import iterations_in
from megatron_flex.config.checkpoint import CheckpointOptions
from megatron_flex.data.microbatches import CostCoefficients
from megatron_flex.learning_rate import LearningRateSchedule
from megatron_flex.loop.checkpointing import (
    Checkpoints,
    Position,
    Restored,
    position_of,
)
from megatron_flex.loop.divergence import DivergedError
from megatron_flex.loop.progress import Progress
from megatron_flex.model.config import ModelConfig
from megatron_flex.planner.plan import Plan
from megatron_flex.runtime.holdings import Holdings
from megatron_flex.runtime.world import World
from tests.unit.config.commands import config
from tests.unit.model.support import make_config

CPU = torch.device("cpu")
DONE = Progress(3, 48, 1, 0, 5000, 1e9)
COEFFICIENTS = CostCoefficients(1.0, 0.25)
MIXED = make_config(params_dtype="bfloat16")


class Run:
    """One worker's state and the checkpoints of its flags."""

    def __init__(self, options: CheckpointOptions, model: ModelConfig = MIXED) -> None:
        self.options = options
        self.holdings = Holdings(model, Plan.parse("0:6@0"), 0, CPU)
        flags = config(world_size=1)
        self.schedule = LearningRateSchedule(flags.learning_rate, flags.training)
        world = World(0, 1, CPU, timedelta(seconds=10))
        self.checkpoints = Checkpoints(options, world, self.holdings, {})

    def load(self) -> Restored:
        return self.checkpoints.load(self.schedule, CostCoefficients())

    def state(self) -> dict[str, torch.Tensor]:
        return self.holdings.named_state(owned=True)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[str, Run]:
    """The directory of a checkpoint of weights, masters and moments of any values; its run."""
    run = Run(CheckpointOptions(save=str(tmp_path)))
    for number, tensor in enumerate(run.state().values()):
        tensor.detach().normal_(generator=torch.Generator().manual_seed(number))
    run.holdings.updates = 7
    run.schedule.step(32)
    run.checkpoints.save(DONE, run.schedule, COEFFICIENTS)
    return str(tmp_path), run


def test_all_of_a_run_comes_back(saved: tuple[str, Run]) -> None:
    directory, before = saved
    run = Run(CheckpointOptions(load=directory))
    restored = run.load()
    assert restored == Restored(DONE, COEFFICIENTS, f"iteration 3 of {directory}")
    assert run.holdings.updates == 7
    assert run.schedule.state_dict() == before.schedule.state_dict()
    assert run.schedule.samples == 32
    for name, tensor in before.state().items():
        assert torch.equal(run.state()[name], tensor), name
    assert position_of(run.options) == Position(3, 48, COEFFICIENTS)


@pytest.mark.parametrize("flags", [{"finetune": True}, {"load_optim": False}])
def test_masters_are_made_from_weights_that_are_loaded_alone(
    saved: tuple[str, Run], flags: dict[str, bool]
) -> None:
    directory, before = saved
    run = Run(CheckpointOptions(load=directory, **flags))  # type: ignore[arg-type]
    run.load()
    for slab in run.holdings:
        assert torch.equal(slab.params, before.holdings.slabs[slab.index].params)
        assert torch.equal(slab.master, slab.params.float())
        assert not slab.exp_avg.any()
    assert run.holdings.updates == 0


def test_a_fine_tuning_has_nothing_behind_it(saved: tuple[str, Run]) -> None:
    run = Run(CheckpointOptions(load=saved[0], finetune=True))
    assert run.load().progress == Progress()
    assert run.schedule.samples == 0
    assert position_of(run.options) == Position()


def test_without_the_optimizer_the_position_stays(saved: tuple[str, Run]) -> None:
    run = Run(CheckpointOptions(load=saved[0], load_optim=False))
    assert run.load().progress == DONE
    assert run.schedule.samples == 32
    assert run.holdings.updates == 0


@pytest.mark.parametrize("name", ["decoder.final_layernorm.weight", "optimizer.state.exp_avg"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_state_that_is_not_finite_is_not_saved(
    saved: tuple[str, Run], name: str, asynchronous: bool
) -> None:
    directory, _ = saved
    run = Run(CheckpointOptions(save=directory, keep_last_n=1, async_save=asynchronous))
    next(t for n, t in run.state().items() if n.startswith(name)).detach()[-1] = float("nan")
    later = replace(DONE, iteration=4)
    with pytest.raises(DivergedError, match=r"after iteration 4 are not finite.*there is 3\)"):
        run.checkpoints.save(later, run.schedule, COEFFICIENTS)
    run.checkpoints.close()
    assert iterations_in(Path(directory)) == [3]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_no_checkpoint_is_given_up_for_one_under_suspicion(
    saved: tuple[str, Run], asynchronous: bool
) -> None:
    directory, _ = saved
    run = Run(CheckpointOptions(save=directory, keep_last_n=1, async_save=asynchronous))
    for iteration, rotate, left in ((4, False, [3, 4]), (5, False, [3, 4, 5]), (6, True, [6])):
        later = replace(DONE, iteration=iteration)
        run.checkpoints.save(later, run.schedule, COEFFICIENTS, rotate=rotate)
        run.checkpoints.close()
        assert iterations_in(Path(directory)) == left


def test_another_seed_is_refused_unless_it_is_wanted(saved: tuple[str, Run]) -> None:
    other = make_config(params_dtype="bfloat16", seed=8)
    with pytest.raises(CheckpointError, match=r"has --seed 7 and this run has --seed 8"):
        Run(CheckpointOptions(load=saved[0]), other).load()
    assert Run(CheckpointOptions(load=saved[0], load_rng=False), other).load().progress == DONE
    assert Run(CheckpointOptions(load=saved[0], finetune=True), other).load().source is not None


def test_what_is_not_saved_is_not_there(tmp_path: Path) -> None:
    run = Run(CheckpointOptions(save=str(tmp_path), save_optim=False, save_rng=False))
    run.checkpoints.save(DONE, run.schedule, COEFFICIENTS)
    with pytest.raises(CheckpointError, match="load with --no-load-optim"):
        Run(CheckpointOptions(load=str(tmp_path))).load()
    with pytest.raises(CheckpointError, match="no seed"):
        Run(CheckpointOptions(load=str(tmp_path), load_optim=False)).load()


def test_without_a_checkpoint_a_run_starts_from_scratch(tmp_path: Path) -> None:
    run = Run(CheckpointOptions(load=str(tmp_path)))
    assert run.load() == Restored(Progress(), CostCoefficients())
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        Run(CheckpointOptions(load=str(tmp_path), exit_on_missing_checkpoint=True)).load()
    empty = CheckpointOptions(pretrained_checkpoint=str(tmp_path))
    with pytest.raises(CheckpointError, match=r"--pretrained-checkpoint .* holds no checkpoint"):
        Run(empty).load()
