"""The learning rate and the weight decay over a run.

A thin layer over megatron-core's ``OptimizerParamScheduler``, which counts in samples. What it
adds: an optimizer of its own to write into, one clear error where megatron-core asserts, and the
parts of a schedule that megatron-core leaves out of its state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_flex.config.learning_rate import LearningRateOptions
from megatron_flex.config.training import TrainingOptions

_NAMES = {
    "max_lr": "--lr",
    "min_lr": "--min-lr",
    "lr_warmup_steps": "the length of the warm-up (--lr-warmup-*, in samples)",
    "lr_decay_steps": "the length of the schedule (--lr-decay-* or --train-*, in samples)",
    "lr_decay_style": "--lr-decay-style",
    "start_wd": "--weight-decay or --start-weight-decay",
    "end_wd": "--weight-decay or --end-weight-decay",
    "wd_incr_steps": "the length of the run (--train-iters or --train-samples, in samples)",
    "wd_incr_style": "--weight-decay-incr-style",
    # Not in megatron-core's own state.
    "init_lr": "--lr-warmup-init",
    "wsd_decay_steps": "--lr-wsd-decay-* (in samples)",
    "lr_wsd_decay_style": "--lr-wsd-decay-style",
}


class ScheduleError(ValueError):
    """A checkpoint's schedule differs from the flags'; the message says in what."""


class _Optimizer:
    """What megatron-core's scheduler needs of an optimizer."""

    def __init__(self) -> None:
        self.param_groups: list[dict[str, Any]] = [{}]


class LearningRateSchedule:
    """Learning rate and weight decay after a number of samples.

    :meth:`step` is called once after each update that was applied, not after a skipped one, as in
    Megatron-LM's ``train_step``.
    """

    def __init__(self, options: LearningRateOptions, training: TrainingOptions) -> None:
        # Imported here: it takes seconds, and the command line is checked before.
        from megatron_flex.imports import quick_import

        with quick_import():
            from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

        self._optimizer = _Optimizer()
        self._override = options.override_opt_param_scheduler
        self._use_checkpoint = options.use_checkpoint_opt_param_scheduler
        self._scheduler = OptimizerParamScheduler(
            self._optimizer,
            use_checkpoint_opt_param_scheduler=self._use_checkpoint,
            override_opt_param_scheduler=self._override,
            **_schedule(options, training),
        )

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next update."""
        return float(self._optimizer.param_groups[0]["lr"])

    @property
    def weight_decay(self) -> float:
        """Weight decay of the next update, for the tensors that have any."""
        return float(self._optimizer.param_groups[0]["weight_decay"])

    @property
    def samples(self) -> int:
        """Samples of all updates so far."""
        return int(self._scheduler.num_steps)

    def step(self, samples: int) -> None:
        """Go on by the samples of one global batch."""
        self._scheduler.step(samples)

    def state_dict(self) -> dict[str, Any]:
        """Position and schedule; plain values. megatron-core reads it too."""
        more = ("init_lr", "wsd_decay_steps", "lr_wsd_decay_style")
        state: dict[str, Any] = self._scheduler.state_dict()
        return state | {name: getattr(self._scheduler, name) for name in more}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the position, and check or take the schedule.

        With ``--override-opt_param-scheduler`` the schedule stays that of the flags, with
        ``--use-checkpoint-opt_param-scheduler`` it becomes that of ``state``. With neither the two
        must be equal.

        Args:
            state: what :meth:`state_dict` returned, or megatron-core's scheduler.

        Raises:
            ScheduleError: when they differ; nothing is changed then.
        """
        here = self.state_dict()
        differences = {k: v for k, v in state.items() if k in _NAMES and v != here[k]}
        if self._use_checkpoint:
            for name, value in differences.items():
                setattr(self._scheduler, name, value)
        elif differences and not self._override:
            lines = [
                f"{_NAMES[k]}: checkpoint {v}, flags {here[k]}" for k, v in differences.items()
            ]
            raise ScheduleError(
                f"the checkpoint has another schedule ({'; '.join(lines)}): give the same flags, or"
                " --override-opt_param-scheduler to keep the flags, or"
                " --use-checkpoint-opt_param-scheduler to keep the checkpoint"
            )
        # megatron-core adds the position to the present one: start from none.
        self._scheduler.num_steps = 0
        self._scheduler.step(int(state["num_steps"]))


def _schedule(r: LearningRateOptions, t: TrainingOptions) -> dict[str, Any]:
    """Arguments of megatron-core's scheduler (Megatron's ``get_optimizer_param_scheduler``)."""
    if t.train_samples is None:
        decay = (r.lr_decay_iters or t.train_iters) * t.global_batch_size
        run = t.train_iters * t.global_batch_size
        warmup: float = r.lr_warmup_iters * t.global_batch_size
        wsd = None if r.lr_wsd_decay_iters is None else r.lr_wsd_decay_iters * t.global_batch_size
    else:
        decay, run = r.lr_decay_samples or t.train_samples, t.train_samples
        warmup, wsd = r.lr_warmup_samples, r.lr_wsd_decay_samples
    if r.lr_warmup_fraction is not None:
        warmup = r.lr_warmup_fraction * decay
    grows = r.weight_decay_incr_style != "constant"
    return {
        "init_lr": r.lr_warmup_init,
        "max_lr": r.lr,
        "min_lr": r.min_lr,
        "lr_warmup_steps": warmup,
        "lr_decay_steps": decay,
        "lr_decay_style": r.lr_decay_style,
        "start_wd": r.start_weight_decay if grows else t.weight_decay,
        "end_wd": r.end_weight_decay if grows else t.weight_decay,
        "wd_incr_steps": run,
        "wd_incr_style": r.weight_decay_incr_style,
        "wsd_decay_steps": wsd,
        "lr_wsd_decay_style": r.lr_wsd_decay_style,
    }
