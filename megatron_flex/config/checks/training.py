"""Flags of the learning rate, of recompute and of evaluations."""

from __future__ import annotations

from megatron_flex.config.checks.without import Problems, without
from megatron_flex.config.config import Config, flag_of


def schedule_problems(config: Config) -> Problems:
    t, r, given = config.training, config.learning_rate, config.given
    by_samples = t.train_samples is not None
    wrong, right, other = (
        ("iters", "--train-samples", "samples")
        if by_samples
        else ("samples", "--train-iters", "iters")
    )
    for stem in ("lr_decay", "lr_warmup", "lr_wsd_decay"):
        if f"{stem}_{wrong}" in given:
            yield (
                f"{flag_of(f'{stem}_{wrong}')} does not go with {right}: use"
                f" {flag_of(f'{stem}_{other}')}"
            )
    if t.rampup_batch_size and not by_samples:
        yield "--rampup-batch-size counts in samples: use --train-samples instead of --train-iters"
    if r.lr_warmup_fraction is not None and given & {"lr_warmup_iters", "lr_warmup_samples"}:
        yield "give --lr-warmup-fraction or a number of warm-up iterations or samples, not both"
    warmup, total = _steps(config)
    if warmup >= total:
        yield (
            f"the warm-up ({warmup} samples) must be shorter than the schedule ({total} samples):"
            " change --lr-warmup-* or --lr-decay-*"
        )
    yield from without(
        config,
        "a warm-up (--lr-warmup-iters, --lr-warmup-samples or --lr-warmup-fraction)",
        warmup > 0,
        ("lr_warmup_init",),
    )
    if r.min_lr > r.lr or r.lr_warmup_init > r.lr:
        yield "--min-lr and --lr-warmup-init must not be above --lr"
    if r.lr_decay_style == "constant":
        ineffective = ["min_lr"]
        if r.lr_warmup_fraction is None:
            ineffective += ["lr_decay_iters", "lr_decay_samples"]
        for name in ineffective:
            if name in given:
                yield f"{flag_of(name)} has no effect with --lr-decay-style constant: remove it"
    wsd = r.lr_decay_style == "WSD"
    names = ("lr_wsd_decay_style", "lr_wsd_decay_iters", "lr_wsd_decay_samples")
    yield from without(config, "--lr-decay-style WSD", wsd, names)
    if wsd:
        length = r.lr_wsd_decay_samples if by_samples else r.lr_wsd_decay_iters
        flag = f"--lr-wsd-decay-{other}"
        if length is None:
            yield f"--lr-decay-style WSD needs {flag}"
        elif (length if by_samples else length * t.global_batch_size) > total - warmup:
            yield f"{flag} {length} is longer than what the warm-up leaves of the schedule"
    if r.override_opt_param_scheduler and r.use_checkpoint_opt_param_scheduler:
        yield (
            "give either --override-opt_param-scheduler or --use-checkpoint-opt_param-scheduler,"
            " not both"
        )
    yield from _weight_decay(config)


def _steps(config: Config) -> tuple[float, int]:
    """Samples of the warm-up and of the whole learning-rate schedule."""
    t, r = config.training, config.learning_rate
    if t.train_samples is not None:
        total, warmup = r.lr_decay_samples or t.train_samples, r.lr_warmup_samples
    else:
        total = (r.lr_decay_iters or t.train_iters) * t.global_batch_size
        warmup = r.lr_warmup_iters * t.global_batch_size
    if r.lr_warmup_fraction is not None:
        return r.lr_warmup_fraction * total, total
    return warmup, total


def _weight_decay(config: Config) -> Problems:
    r = config.learning_rate
    grows = r.weight_decay_incr_style != "constant"
    names = ("start_weight_decay", "end_weight_decay")
    yield from without(config, "--weight-decay-incr-style linear or cosine", grows, names)
    if not grows:
        return
    if r.start_weight_decay is None or r.end_weight_decay is None:
        yield (
            f"--weight-decay-incr-style {r.weight_decay_incr_style} needs --start-weight-decay and"
            " --end-weight-decay"
        )
    elif r.start_weight_decay > r.end_weight_decay:
        yield "--start-weight-decay must not be above --end-weight-decay"
    if "weight_decay" in config.given:
        yield (
            "--weight-decay has no effect with --weight-decay-incr-style"
            f" {r.weight_decay_incr_style}: use --start-weight-decay and --end-weight-decay"
        )


def recompute_problems(config: Config) -> Problems:
    r, f, given = config.recompute, config.flexpipe, config.given
    chosen = [flag_of(n) for n in sorted(given) if n.startswith("recompute_")]
    if not chosen:
        return
    if config.asks_planner:
        flag = f"--flexpipe-batching {f.flexpipe_batching}" if config.cut_by_batch else "--flexpipe"
        yield (
            f"{', '.join(chosen)}: with {flag} the planner chooses what is recomputed,"
            " within --flexpipe-memory-budget-gb; remove it"
        )
        return
    if f.flexpipe_plans is not None:
        yield f"{', '.join(chosen)}: the plans in --flexpipe-plans say what is recomputed"
        return
    if f.flexpipe_plan is not None and "recompute" in f.flexpipe_plan:
        yield f"{', '.join(chosen)}: --flexpipe-plan says what is recomputed; remove one of them"
    full = r.recompute_granularity == "full"
    if full and r.recompute_activations:
        yield (
            "--recompute-activations means --recompute-granularity selective, not full: remove one"
            " of them"
        )
        return
    yield from without(
        config, "--recompute-granularity full", full, ("recompute_method", "recompute_num_layers")
    )
    yield from without(
        config, "--recompute-granularity selective", r.selective, ("recompute_modules",)
    )
    if full and (r.recompute_method is None or r.recompute_num_layers is None):
        yield (
            "--recompute-granularity full needs --recompute-method and --recompute-num-layers:"
            " uniform and 1 recompute all layers"
        )
    elif full and r.recompute_method == "uniform" and r.recompute_num_layers != 1:
        yield (
            f"--recompute-num-layers {r.recompute_num_layers} with --recompute-method uniform would"
            " keep one input for several layers, but each half of a layer keeps its own here: use 1"
        )


def evaluation_problems(config: Config) -> Problems:
    e = config.evaluation
    if e.full_validation and "eval_iters" in config.given:
        yield "--eval-iters has no effect with --full-validation: remove one of them"
    if e.skip_train and "eval_interval" in config.given:
        yield "--eval-interval has no effect with --skip-train: remove one of them"
    yield from without(
        config, "--eval-generate", e.eval_generate, ("eval_generate_tokens", "chat_template")
    )
    if e.eval_generate is None:
        return
    if config.architecture == "bert":
        yield "--eval-generate is for GPT: a BERT fills in masks, it completes no texts"
    if e.eval_interval is None and not e.skip_train:
        yield "--eval-generate has no effect without --eval-interval: add it"
