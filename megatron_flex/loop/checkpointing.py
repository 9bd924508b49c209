"""What of a run goes into a checkpoint and comes back: the glue between state and storage."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_flex.checkpoint.async_save import AsyncSaver
from megatron_flex.checkpoint.errors import CheckpointError
from megatron_flex.checkpoint.layout import Foreign, iterations_in, latest
from megatron_flex.checkpoint.load import load, read_common
from megatron_flex.checkpoint.manifest import MODEL
from megatron_flex.checkpoint.options import LoadOptions
from megatron_flex.checkpoint.parts import parts_of, written_by
from megatron_flex.checkpoint.ranks import DEFAULT_TIMEOUT
from megatron_flex.checkpoint.retention import KEEP_ALL, Retention
from megatron_flex.checkpoint.save import check_writable, save
from megatron_flex.config.checkpoint import CheckpointOptions
from megatron_flex.data.microbatches import CostCoefficients
from megatron_flex.learning_rate import LearningRateSchedule
from megatron_flex.loop.divergence import DivergedError, usable
from megatron_flex.loop.progress import Progress
from megatron_flex.runtime.holdings import Holdings
from megatron_flex.runtime.shards import filling, owned_state
from megatron_flex.runtime.world import World

COEFFICIENTS = "micro_batch_coefficients"
"""Key of a checkpoint's ``common``; a converted checkpoint lacks it."""


@dataclass(frozen=True)
class Restored:
    """What a run starts from: ``source`` is ``None`` when it starts from scratch.

    ``tensor_size``: how many workers shared each layer of a run that goes on, where that is known.
    """

    progress: Progress
    coefficients: CostCoefficients
    source: str | None = None
    tensor_size: int | None = None


class Checkpoints:
    """Saves and loads one run's state. All workers call each method together."""

    def __init__(
        self,
        options: CheckpointOptions,
        world: World,
        holdings: Holdings,
        arguments: dict[str, Any],
    ) -> None:
        self._options = options
        self._world = world
        self._holdings = holdings
        self._arguments = arguments
        self._group = (
            dist.new_group(backend="gloo", timeout=world.timeout) if world.processes > 1 else None
        )
        self._timeout = max(DEFAULT_TIMEOUT, world.timeout.total_seconds())
        self._retention = Retention(options.keep_last_n, options.save_retain_interval)
        self._background: AsyncSaver | None = None
        if options.save is not None:
            check_writable(options.save, group=self._group, timeout=self._timeout)
            self._foreign = Foreign(options.save)
            if options.async_save:
                self._background = AsyncSaver(
                    options.save,
                    group=self._group,
                    retention=self._retention,
                    timeout=self._timeout,
                    foreign=self._foreign,
                )

    @property
    def failed(self) -> bool:
        """Whether a save in the background failed on this worker; :meth:`close` raises why."""
        return self._background is not None and self._background.failed

    def save(
        self,
        progress: Progress,
        schedule: LearningRateSchedule,
        coefficients: CostCoefficients,
        *,
        rotate: bool = True,
    ) -> None:
        """Save after ``progress.iteration``; returns at once with ``--async-save``.

        Without ``rotate`` no earlier checkpoint is deleted. Raises :class:`DivergedError`, and
        saves nothing, when the state is of no use (:func:`usable`).
        """
        options = self._options
        assert options.save is not None
        tensors = owned_state(self._world, self._holdings, optimizer=options.save_optim)
        if self._world.sum(not usable(tensors)):
            raise DivergedError(
                f"the weights or the optimizer's state after iteration {progress.iteration} are not"
                f" finite, or too large to train on, and were not saved: {self.advice}"
            )
        group = self._world.tensor
        parts = parts_of(self._holdings.config, tensors, group.index, group.size)
        written = written_by(parts, group.index)
        common = self.common(progress, schedule, coefficients)
        if options.save_rng:
            common["rng"] = {"seed": self._holdings.config.seed}
        if self._background is not None:
            self._background.start(progress.iteration, written, common, rotate=rotate)
        else:
            save(
                options.save,
                progress.iteration,
                written,
                common,
                group=self._group,
                retention=self._retention if rotate else KEEP_ALL,
                timeout=self._timeout,
                foreign=self._foreign,
            )

    @property
    def advice(self) -> str:
        """What to do about a run that has diverged."""
        options = self._options
        found = [] if options.save is None else iterations_in(Path(options.save))
        if not found:
            return "start again with a lower --lr or a longer warm-up, and look at the data"
        listed = ", ".join(map(str, found[-8:]))
        return (
            f"go on from an earlier checkpoint (--load {options.save} --ckpt-step N; there is"
            f" {listed}) with a lower --lr, and look at the data"
        )

    def common(
        self, progress: Progress, schedule: LearningRateSchedule, coefficients: CostCoefficients
    ) -> dict[str, Any]:
        """What a run continues from beside the state of its slabs: JSON values."""
        return {
            "progress": progress.values(),
            "optimizer_steps": self._holdings.updates,
            "opt_param_scheduler": schedule.state_dict(),
            COEFFICIENTS: asdict(coefficients),
            MODEL: asdict(self._holdings.config),
            "arguments": self._arguments,
        }

    def resume(
        self,
        common: dict[str, Any],
        schedule: LearningRateSchedule | None,
        source: str,
        coefficients: CostCoefficients,
        *,
        optimizer: bool = True,
    ) -> Restored:
        """Continue from what :meth:`common` gave; the slabs' state is there already."""
        if optimizer:
            self._holdings.updates = common["optimizer_steps"]
        if schedule is not None:
            schedule.load_state_dict(common["opt_param_scheduler"])
        shared = common.get("arguments", {}).get("tensor_model_parallel_size")
        progress = Progress(**common["progress"])
        return Restored(progress, _coefficients(common) or coefficients, source, shared)

    def close(self) -> None:
        """Wait for the save in the background, and raise its error."""
        if self._background is not None:
            self._background.close()

    def load(
        self, schedule: LearningRateSchedule | None, coefficients: CostCoefficients
    ) -> Restored:
        """Fill the state that the flags name; without a checkpoint the run starts from scratch.

        A run that goes on takes the position of ``schedule`` too, which is no optimizer state
        (``--no-load-optim``); ``None``: it makes no updates.

        Raises :class:`CheckpointError` naming what does not fit.
        """
        found = find(self._options)
        if found is None:
            return Restored(Progress(), coefficients)
        directory, options, iteration = found
        with filling(self._holdings) as slabs:
            wanted: dict[str, torch.Tensor] = {}
            for whole in slabs.values():
                wanted.update(whole.named_state())
            chosen = {name: wanted[name] for name in options.wanted(wanted)}
            group = self._world.tensor
            common = load(
                directory,
                parts_of(self._holdings.config, chosen, group.index, group.size),
                iteration=iteration,
                group=self._group,
                timeout=self._timeout,
                model=asdict(self._holdings.config),
            )
        source = f"iteration {common['progress']['iteration']} of {directory}"
        if not options.optimizer:
            for slab in self._holdings:
                slab.masters_from_params()
        if options.finetune:
            return Restored(Progress(), coefficients, source)
        if options.rng and common.get("rng", {}).get("seed") != self._holdings.config.seed:
            raise CheckpointError(
                f"the checkpoint has {_seed(common)} and this run has --seed"
                f" {self._holdings.config.seed}, which keys dropout and the order of the data: give"
                " the same --seed, or --no-load-rng to go on with another"
            )
        if schedule is not None and "opt_param_scheduler" not in common:
            raise CheckpointError(
                f"{source} was converted: it has weights, but no optimizer state and no position in"
                " a schedule to go on from: give --finetune"
            )
        return self.resume(common, schedule, source, coefficients, optimizer=options.optimizer)


def find(o: CheckpointOptions) -> tuple[Path, LoadOptions, int] | None:
    """Directory, options and iteration to load; ``None`` where the run starts from scratch.

    Raises :class:`CheckpointError` when a checkpoint that must be there is not, or when
    checkpoints are there, of ``--load`` or of ``--save``, that no tracker names.
    """
    chosen = o.ckpt_step is not None and o.load is not None
    if o.save is not None and not (chosen and Path(o.save) == Path(str(o.load))):
        latest(o.save)
    options = LoadOptions(
        finetune=o.finetune,
        load_optim=o.load_optim,
        load_rng=o.load_rng,
        ckpt_step=o.ckpt_step,
        exit_on_missing_checkpoint=o.exit_on_missing_checkpoint,
    )
    if o.load is not None:
        iteration = options.iteration(o.load)
        if iteration is not None:
            return Path(o.load), options, iteration
    if o.pretrained_checkpoint is not None:
        iteration = latest(o.pretrained_checkpoint)
        if iteration is None:
            raise CheckpointError(
                f"--pretrained-checkpoint {o.pretrained_checkpoint} holds no checkpoint"
            )
        return Path(o.pretrained_checkpoint), LoadOptions(finetune=True), iteration
    return None


@dataclass(frozen=True)
class Position:
    """What the run to be started has behind it.

    Attributes:
        iteration: iterations.
        samples: training samples. Not always those of so many of its own iterations: the run before
            may have had another batch size (``--override-opt_param-scheduler``).
        coefficients: what it has cut micro-batches by; ``None``: nothing yet.
    """

    iteration: int = 0
    samples: int = 0
    coefficients: CostCoefficients | None = None


def position_of(options: CheckpointOptions) -> Position:
    """Where the run to be started goes on from; errors as of :func:`find`."""
    found = find(options)
    if found is None or found[1].finetune:
        return Position()
    common = read_common(found[0], found[2])
    return Position(found[2], int(common["progress"]["consumed_samples"]), _coefficients(common))


def _coefficients(common: dict[str, Any]) -> CostCoefficients | None:
    saved = common.get(COEFFICIENTS)
    return None if saved is None else CostCoefficients(**saved)


def _seed(common: dict[str, Any]) -> str:
    seed = common.get("rng", {}).get("seed")
    return "no seed (it was saved with --no-save-rng)" if seed is None else f"--seed {seed}"
