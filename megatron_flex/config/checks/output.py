"""Flags of checkpoints, logs and files."""

from __future__ import annotations

from pathlib import Path

from megatron_flex.config.checks.without import Problems, without
from megatron_flex.config.config import Config, flag_of


def checkpoint_problems(config: Config) -> Problems:
    c = config.checkpoint
    saving = ("save_interval", "save_optim", "save_rng", "save_retain_interval", "keep_last_n")
    yield from without(config, "--save", c.save, (*saving, "async_save", "log_progress"))
    if c.save_retain_interval and c.save_interval and c.save_retain_interval % c.save_interval:
        yield (
            f"--save-retain-interval {c.save_retain_interval} must be a multiple of --save-interval"
            f" {c.save_interval}"
        )
    yield from without(config, "--load", c.load, ("ckpt_step", "exit_on_missing_checkpoint"))
    yield from without(
        config,
        "--load (or --pretrained-checkpoint)",
        c.load or c.pretrained_checkpoint,
        ("finetune", "load_optim", "load_rng", "use_checkpoint_args"),
    )
    loaded = c.load and not c.finetune
    yield from without(
        config,
        "--load of a run that goes on (no --finetune)",
        loaded,
        ("override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler"),
    )
    if c.pretrained_checkpoint and c.exit_on_missing_checkpoint:
        yield (
            "--pretrained-checkpoint is for a --load directory that is still empty, which"
            " --exit-on-missing-checkpoint forbids: remove one of them"
        )


def logging_problems(config: Config) -> Problems:
    g = config.logging
    board = (
        "tensorboard_log_interval",
        "tensorboard_queue_size",
        "log_timers_to_tensorboard",
        "log_loss_scale_to_tensorboard",
        "log_validation_ppl_to_tensorboard",
        "log_memory_to_tensorboard",
        "log_world_size_to_tensorboard",
    )
    yield from without(
        config,
        "--tensorboard-dir (or --wandb-project)",
        g.tensorboard_dir or g.wandb_project,
        board,
    )
    yield from without(config, "--log-throughput", g.log_throughput, ("device_peak_tflops",))
    wandb = ("wandb_exp_name", "wandb_save_dir", "wandb_entity")
    yield from without(config, "--wandb-project", g.wandb_project, wandb)
    if g.wandb_project:
        if not g.wandb_exp_name:
            yield "--wandb-project needs --wandb-exp-name"
        if not g.wandb_save_dir and not config.checkpoint.save:
            yield "--wandb-project needs --wandb-save-dir, or --save to put its files in"
    p = config.profiling
    names = ("profile_step_start", "profile_step_end", "use_pytorch_profiler", "profile_ranks")
    yield from without(config, "--profile", p.profile, names)
    if p.profile:
        if p.profile_step_end <= p.profile_step_start:
            yield "--profile-step-end must be above --profile-step-start"
        if p.use_pytorch_profiler and not g.tensorboard_dir:
            yield "--use-pytorch-profiler writes its trace to --tensorboard-dir: give that"
        absent = [rank for rank in p.profile_ranks if rank >= config.world_size]
        if absent:
            yield f"--profile-ranks names worker {absent[0]}, but there are {config.world_size}"


_DIRECTORIES = ("save", "tensorboard_dir", "wandb_save_dir")
_WRITTEN = (*_DIRECTORIES, "log_file", "log_jsonl", "flexpipe_record", "flexpipe_trace")
_READ = (
    "flexpipe_plans",
    "flexpipe_profile",
    "flexpipe_cluster",
    "tokenizer_model",
    "vocab_file",
    "merge_file",
    "data_args_path",
    "per_split_data_args_path",
    "eval_generate",
    "chat_template",
)


def files_problems(config: Config) -> Problems:
    """No file is written that is read, or written twice."""
    values = config.values()
    uses: dict[Path, str] = {}
    for name in (*_READ, *_WRITTEN):
        path = values[name]
        if path is None or (name == "flexpipe_profile" and config.flexpipe.measures):
            continue
        place = Path(path).resolve()
        if place.exists() and not (place.is_file() or place.is_dir()):
            continue  # /dev/null takes all
        other = uses.setdefault(place, name)
        if name in _WRITTEN and other != name and not {name, other} <= {*_DIRECTORIES}:
            yield (
                f"{flag_of(name)} {path} is the path of {flag_of(other)} too, and would overwrite"
                " it: give another"
            )
