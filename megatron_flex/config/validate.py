"""Flags that contradict each other or have no effect, found before anything is allocated.

Each check returns sentences that name the flags and say what to change.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from megatron_flex.cluster.cluster import load as load_cluster
from megatron_flex.cluster.profile import Profile
from megatron_flex.config.config import Config, flag_of
from megatron_flex.config.data import DataOptions
from megatron_flex.config.flexpipe import CHOSEN_BY_BATCH, PADDED, V_SCHEDULES
from megatron_flex.config.layers import layer_problems
from megatron_flex.config.tokenizer import NEEDS
from megatron_flex.data.paths import (
    Split,
    parse_blend,
    split_bounds,
)
from megatron_flex.schedule.pipeline_layout import rows_of

Problems = Iterator[str]

LEGACY_SPLIT = "969, 30, 1"
_MANY_DOCUMENTS = 10**9  # only whether a share is zero counts here


def problems(config: Config) -> list[str]:
    """Everything that is wrong with a configuration whose values are each allowed."""
    return [problem for check in _CHECKS for problem in check(config)]


def _without(config: Config, needs: str, met: object, fields: Iterable[str]) -> Problems:
    """One sentence for each given field that has no effect because ``needs`` is not met."""
    if not met:
        for name in fields:
            if name in config.given:
                yield f"{flag_of(name)} has no effect without {needs}: remove it, or add {needs}"


def _model(config: Config) -> Problems:
    m = config.model
    rope = m.position_embedding_type == "rope"
    yield from _without(
        config,
        "--position-embedding-type rope",
        rope,
        ("rotary_base", "rotary_percent", "use_rope_scaling"),
    )
    yield from _without(config, "--use-rope-scaling", m.use_rope_scaling, ("rope_scaling_factor",))
    if m.swiglu and m.openai_gelu:
        yield "--openai-gelu has no effect with --swiglu, whose gate has SiLU: remove one of them"
    yield from _without(
        config, "--group-query-attention", m.group_query_attention, ("num_query_groups",)
    )
    groups = m.num_query_groups if m.group_query_attention else m.num_attention_heads
    if m.num_attention_heads % groups:
        yield (
            f"--num-attention-heads {m.num_attention_heads} is not a multiple of"
            f" --num-query-groups {groups}"
        )
    if rope and (int(m.kv_channels * m.rotary_percent) % 2 or m.kv_channels * m.rotary_percent < 2):
        yield (
            f"rotary embeddings need an even number of channels, not"
            f" {int(m.kv_channels * m.rotary_percent)} (--rotary-percent of {m.kv_channels}"
            " channels a head): change --kv-channels or --rotary-percent"
        )
    longest = config.data.max_sample_length
    if m.position_embedding_type != "none" and m.max_position_embeddings < max(
        longest, m.seq_length
    ):
        most = f"--max-position-embeddings is {m.max_position_embeddings}: raise it, or"
        if config.checkpoint.load_hf is not None or config.checkpoint.use_checkpoint_args:
            most = f"the model has {m.max_position_embeddings} positions:"
        yield (
            f"samples may have {max(longest, m.seq_length)} tokens, but {most} lower --seq-length"
            " and --max-sample-length"
        )
    if config.architecture != "bert":
        for name in ("bert_binary_head", "mask_prob"):
            if name in config.given:
                yield f"{flag_of(name)} is for BERT: remove it, or start pretrain_bert.py"


def _data(config: Config) -> Problems:
    d, given = config.data, config.given
    parts = {"train_data_path", "valid_data_path", "test_data_path"} & given
    listed = "per_split_data_args_path" in given
    sources = (
        "data_path" in given,
        "data_args_path" in given,
        bool(parts),
        listed,
        d.mock_data,
    )
    if sum(sources) != 1:
        yield (
            "give one source of data: --data-path, --data-args-path, --train-data-path and its"
            " like, --per-split-data-args-path, or --mock-data"
            + (", not several" if any(sources) else "")
        )
        return
    if parts and not d.train_data_path and not config.evaluation.skip_train:
        yield "give --train-data-path beside --valid-data-path and --test-data-path"
    if (parts or listed) and "split" in given:
        yield "--split has no effect on data sets for each split: it divides --data-path"
    try:
        shares = _shares(d)
    except ValueError as error:
        yield str(error)
        return
    if not shares[Split.TRAIN] and not config.evaluation.skip_train:
        yield "the data flags leave nothing for training: change --split or the data paths"
    if "eval_interval" in given and not shares[Split.VALID]:
        yield (
            "--eval-interval needs validation data: give --valid-data-path or a share in --split,"
            " or remove it"
        )
    pair = d.sample_format == "pair"
    yield from _without(config, "--sample-format pair", pair, ("pair_keys",))
    if pair and (config.architecture == "bert" or d.mock_data):
        yield "--sample-format pair is for GPT and data on disk: remove it"
    if d.sample_format == "chat":
        if config.architecture == "bert" or d.mock_data:
            yield "--sample-format chat is for GPT and data on disk: remove it"
        if d.overlong == "split":
            yield (
                "--overlong split is not for --sample-format chat, since later parts would answer"
                " to nothing: choose truncate, which cuts after an answer, or drop"
            )


def _shares(d: DataOptions) -> tuple[bool, bool, bool]:
    """Whether there is training, validation and test data; ``ValueError`` if paths are wrong."""
    parts = (d.train_data_path, d.valid_data_path, d.test_data_path)
    if any(parts):
        for name, prefixes in zip(("train", "valid", "test"), parts, strict=True):
            if prefixes:
                parse_blend(prefixes, f"--{name}-data-path")
        return bool(parts[0]), bool(parts[1]), bool(parts[2])
    if d.data_path:
        parse_blend(d.data_path, "--data-args-path" if d.data_args_path else "--data-path")
    bounds = split_bounds(LEGACY_SPLIT if d.split is None else d.split, _MANY_DOCUMENTS)
    train, valid, test = (start < stop for start, stop in bounds)
    return train, valid, test


def _tokenizer(config: Config) -> Problems:
    t = config.tokenizer
    for name in NEEDS[t.tokenizer_type]:
        if getattr(t, name) is None:
            yield f"--tokenizer-type {t.tokenizer_type} needs {flag_of(name)}"
    for name in ("tokenizer_model", "vocab_file", "merge_file", "vocab_size"):
        if name in config.given and name not in NEEDS[t.tokenizer_type]:
            yield f"{flag_of(name)} has no effect with --tokenizer-type {t.tokenizer_type}"
    if t.padded_vocab_size and "make_vocab_size_divisible_by" in config.given:
        yield "--make-vocab-size-divisible-by has no effect with --padded-vocab-size"


def _schedule(config: Config) -> Problems:
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
    yield from _without(
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
    yield from _without(config, "--lr-decay-style WSD", wsd, names)
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
    yield from _without(config, "--weight-decay-incr-style linear or cosine", grows, names)
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


def _checkpoint(config: Config) -> Problems:
    c = config.checkpoint
    saving = ("save_interval", "save_optim", "save_rng", "save_retain_interval", "keep_last_n")
    yield from _without(config, "--save", c.save, (*saving, "async_save", "log_progress"))
    if c.save_retain_interval and c.save_interval and c.save_retain_interval % c.save_interval:
        yield (
            f"--save-retain-interval {c.save_retain_interval} must be a multiple of --save-interval"
            f" {c.save_interval}"
        )
    yield from _without(
        config,
        "--load",
        c.load,
        ("ckpt_step", "exit_on_missing_checkpoint"),
    )
    yield from _without(
        config,
        "--load (or --pretrained-checkpoint)",
        c.load or c.pretrained_checkpoint,
        ("finetune", "load_optim", "load_rng", "use_checkpoint_args"),
    )
    loaded = c.load and not c.finetune
    yield from _without(
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


def _logging(config: Config) -> Problems:
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
    yield from _without(
        config,
        "--tensorboard-dir (or --wandb-project)",
        g.tensorboard_dir or g.wandb_project,
        board,
    )
    yield from _without(config, "--log-throughput", g.log_throughput, ("device_peak_tflops",))
    wandb = ("wandb_exp_name", "wandb_save_dir", "wandb_entity")
    yield from _without(config, "--wandb-project", g.wandb_project, wandb)
    if g.wandb_project:
        if not g.wandb_exp_name:
            yield "--wandb-project needs --wandb-exp-name"
        if not g.wandb_save_dir and not config.checkpoint.save:
            yield "--wandb-project needs --wandb-save-dir, or --save to put its files in"
    p = config.profiling
    names = ("profile_step_start", "profile_step_end", "use_pytorch_profiler", "profile_ranks")
    yield from _without(config, "--profile", p.profile, names)
    if p.profile:
        if p.profile_step_end <= p.profile_step_start:
            yield "--profile-step-end must be above --profile-step-start"
        if p.use_pytorch_profiler and not g.tensorboard_dir:
            yield "--use-pytorch-profiler writes its trace to --tensorboard-dir: give that"
        absent = [rank for rank in p.profile_ranks if rank >= config.world_size]
        if absent:
            yield f"--profile-ranks names worker {absent[0]}, but there are {config.world_size}"


def _evaluation(config: Config) -> Problems:
    e = config.evaluation
    if e.full_validation and "eval_iters" in config.given:
        yield "--eval-iters has no effect with --full-validation: remove one of them"
    if e.skip_train and "eval_interval" in config.given:
        yield "--eval-interval has no effect with --skip-train: remove one of them"
    yield from _without(
        config, "--eval-generate", e.eval_generate, ("eval_generate_tokens", "chat_template")
    )
    if e.eval_generate is None:
        return
    if config.architecture == "bert":
        yield "--eval-generate is for GPT: a BERT fills in masks, it completes no texts"
    if e.eval_interval is None and not e.skip_train:
        yield "--eval-generate has no effect without --eval-interval: add it"


VIRTUAL = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")
"""Flags by which each worker holds several stages in turn."""


def _tensor(config: Config) -> Problems:
    """Workers that share each layer."""
    size, world = config.parallel.tensor_model_parallel_size, config.world_size
    needs = "--tensor-model-parallel-size of at least 2"
    yield from _without(config, needs, size > 1, ("sequence_parallel",))
    if world % size:
        yield (
            f"{world} workers are no multiple of --tensor-model-parallel-size {size}: change one of"
            " them"
        )


def _parallel(config: Config) -> Problems:
    p, devices = config.parallel, config.devices
    layout = (
        "pipeline_model_parallel_size",
        "pipeline_model_parallel_layout",
        "decoder_first_pipeline_num_layers",
        "decoder_last_pipeline_num_layers",
        *VIRTUAL,
    )
    f = config.flexpipe
    whole = "--flexpipe-plan" if f.flexpipe_plans is None else "--flexpipe-plans"
    if f.flexpipe_plan is not None or f.flexpipe_plans is not None:
        for name in (*layout, *(("flexpipe_plan",) if f.flexpipe_plans is not None else ())):
            if name in config.given:
                yield f"{flag_of(name)} has no effect with {whole}: remove one of them"
    elif devices % p.pipeline_model_parallel_size:
        size = p.tensor_model_parallel_size
        groups = f"{devices} groups of {size} workers" if size > 1 else f"{devices} workers"
        yield (
            f"{groups} are no multiple of --pipeline-model-parallel-size"
            f" {p.pipeline_model_parallel_size}: change one of them, or give stages of different"
            " sizes with --flexpipe-plan"
        )
    else:
        yield from _virtual(config)


def _virtual(config: Config) -> Problems:
    """Several stages on each worker of a static plan."""
    p, layers = config.parallel, config.model.num_layers
    size, schedule = p.pipeline_model_parallel_size, config.schedule
    given = [flag_of(name) for name in VIRTUAL if name in config.given]
    if len(given) > 1:
        yield f"{given[0]} and {given[1]} say the same: remove one of them"
    stages = (
        None
        if p.pipeline_model_parallel_layout is None
        else len(rows_of(p.pipeline_model_parallel_layout))
    )
    if stages is not None and given:
        yield f"{given[0]} has no effect with --pipeline-model-parallel-layout: remove it"
    if stages is not None and stages % size:
        yield (
            f"--pipeline-model-parallel-layout has {stages} stages, which is no multiple of"
            f" --pipeline-model-parallel-size {size}"
        )
    per_stage = p.num_layers_per_virtual_pipeline_stage
    if per_stage is not None and layers % (size * per_stage):
        yield (
            f"--num-layers {layers} is no multiple of --pipeline-model-parallel-size {size} times"
            f" --num-layers-per-virtual-pipeline-stage {per_stage}"
        )
    rounds = p.virtual_stages(layers)
    if rounds > 1 and size == 1:
        flag = given[0] if given else "--pipeline-model-parallel-layout"
        yield f"{flag} needs a pipeline: give --pipeline-model-parallel-size of at least 2"
    if schedule in V_SCHEDULES:
        if given:
            yield (
                f"{given[0]} has no effect with --flexpipe-schedule {schedule}, which puts two"
                " stages on each worker in a V: remove one of them"
            )
        elif stages is not None and stages != 2 * size:
            yield (
                f"--flexpipe-schedule {schedule} puts two stages on each worker:"
                f" --pipeline-model-parallel-layout must have {2 * size} stages, not {stages}"
            )
    elif schedule == "interleaved" and rounds == 1 and not config.flexpipe.flexpipe:
        yield (
            "--flexpipe-schedule interleaved needs several stages on each worker: give"
            " --num-layers-per-virtual-pipeline-stage"
        )


def _recompute(config: Config) -> Problems:
    r, f, given = config.recompute, config.flexpipe, config.given
    chosen = [flag_of(n) for n in sorted(given) if n.startswith("recompute_")]
    if not chosen:
        return
    chosen_by_batch = config.cut_by_batch
    if f.flexpipe or f.flexpipe_plans is not None or chosen_by_batch:
        if f.flexpipe or chosen_by_batch:
            flag = f"--flexpipe-batching {f.flexpipe_batching}" if chosen_by_batch else "--flexpipe"
            yield (
                f"{', '.join(chosen)}: with {flag} the planner chooses what is recomputed,"
                " within --flexpipe-memory-budget-gb; remove it"
            )
        else:
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
    yield from _without(
        config,
        "--recompute-granularity full",
        full,
        ("recompute_method", "recompute_num_layers"),
    )
    yield from _without(
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


def _slices(config: Config) -> Problems:
    given = config.flexpipe.flexpipe_slice_tokens
    if given != "auto" and not re.fullmatch(r"0|[1-9][0-9]{0,8}", given):
        yield f"--flexpipe-slice-tokens {given}: expected auto, 0 for never, or a number of tokens"
    elif given not in ("auto", "0") and config.architecture == "bert":
        yield (
            f"--flexpipe-slice-tokens {given}: BERT looks at all tokens of a sample at once, so its"
            " samples cannot be cut: leave the flag out"
        )


def _batching(config: Config) -> Problems:
    f, given, how = config.flexpipe, config.given, config.flexpipe.flexpipe_batching
    flag = f"--flexpipe-batching {how}"
    if f.flexpipe_baseline is not None:
        if "flexpipe_batching" not in given:
            flag = f"--flexpipe-baseline {f.flexpipe_baseline}"
        for name in ("flexpipe", "flexpipe_plans"):
            if name in given:
                yield f"--flexpipe-baseline keeps one plan: remove it, or {flag_of(name)}"
    size, tokens = config.training.micro_batch_size, config.data.micro_batch_tokens
    if how in ("pad", "pad-batch", "pad-all") and size is None:
        yield f"{flag} takes --micro-batch-size samples to a micro-batch: give that"
    if how in ("bucket", "slices") and (tokens is None and not (how == "slices" and f.flexpipe)):
        yield f"{flag} needs --micro-batch-tokens, the size of a micro-batch"
    if how == "dynapipe" and (size is not None or tokens is not None):
        yield (
            f"{flag} chooses the size of every micro-batch: remove --micro-batch-size and"
            " --micro-batch-tokens"
        )
    if how in (*PADDED, "pack") and f.flexpipe_slice_tokens not in ("auto", "0"):
        yield f"{flag} keeps samples whole: remove --flexpipe-slice-tokens"
    if how == "slices" and config.architecture == "bert":
        yield f"{flag}: BERT looks at all tokens of a sample at once, so none can be cut"
    if how in CHOSEN_BY_BATCH:
        changing = [n for n in ("flexpipe", "flexpipe_plans", "flexpipe_bitwise") if n in given]
        for name in changing:
            yield f"{flag} is for one plan that stays, and {flag_of(name)} is not: remove one"


def _switching(config: Config) -> Problems:
    f = config.flexpipe
    changing = f.flexpipe or f.flexpipe_plans is not None
    switches = ("flexpipe_switch", "flexpipe_twin")
    yield from _without(config, "--flexpipe or --flexpipe-plans", changing, switches)
    planned = (
        "flexpipe_planner",
        "flexpipe_lookahead",
        "flexpipe_simulations",
        "flexpipe_unit",
    )
    yield from _without(config, "--flexpipe", f.flexpipe, planned)
    if not re.fullmatch(r"auto|\d{1,6}", f.flexpipe_simulations):
        yield (
            f"--flexpipe-simulations {f.flexpipe_simulations}: expected a number of simulations,"
            " such as 50, or auto"
        )
    if f.flexpipe and f.flexpipe_plans is not None:
        yield "--flexpipe chooses the plans that --flexpipe-plans would give: remove one of them"
    for given, flag in ((f.flexpipe, "--flexpipe"), (f.flexpipe_record, "--flexpipe-record")):
        if given and config.evaluation.skip_train:
            yield f"{flag} has no effect with --skip-train: remove one of them"
    for flag, path, read in (
        ("--flexpipe-cluster", f.flexpipe_cluster, load_cluster),
        ("--flexpipe-profile", None if f.measures else f.flexpipe_profile, _read_profile),
    ):
        try:
            if path is not None:
                read(path)
        except (OSError, ValueError) as error:
            yield f"{flag}: {error}"
    yield from _without(config, "--flexpipe-trace", f.flexpipe_trace, ("flexpipe_trace_interval",))
    keeps = f.flexpipe_twin_snapshot is not None
    yield from _without(config, "--flexpipe-twin-snapshot", keeps, ("flexpipe_twin_timeout",))
    if keeps and not f.flexpipe_twin:
        yield "--flexpipe-twin-snapshot keeps what --flexpipe-no-twin forbids: remove one of them"
    c = config.checkpoint
    if keeps and c.save is not None and (c.load is None or Path(c.load) != Path(c.save)):
        yield (
            "--flexpipe-twin-snapshot goes on from the disk where host memory is lost too: give"
            " --load the directory of --save (and begin with another by --pretrained-checkpoint)"
        )
    if keeps and config.evaluation.skip_train:
        yield "--flexpipe-twin-snapshot has no effect with --skip-train: remove one of them"
    if f.flexpipe_switch == "restart" and not config.checkpoint.save:
        yield "--flexpipe-switch restart goes through checkpoints: give --save"


def _read_profile(path: str) -> Profile:
    return Profile.load(Path(path))


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
)


def _files(config: Config) -> Problems:
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


_CHECKS: tuple[Callable[[Config], Problems], ...] = (
    _model,
    layer_problems,
    _data,
    _tokenizer,
    _schedule,
    _checkpoint,
    _logging,
    _evaluation,
    _tensor,
    _parallel,
    _recompute,
    _slices,
    _batching,
    _switching,
    _files,
)
