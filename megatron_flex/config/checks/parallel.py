"""Flags of the workers and of the static plan."""

from __future__ import annotations

from megatron_flex.config.checks.without import Problems, without
from megatron_flex.config.config import Config, flag_of
from megatron_flex.config.flexpipe import V_SCHEDULES
from megatron_flex.schedule.pipeline_layout import rows_of

_VIRTUAL = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")
"""Flags by which each worker holds several stages in turn."""


def tensor_problems(config: Config) -> Problems:
    """Workers that share each layer."""
    size, world = config.parallel.tensor_model_parallel_size, config.world_size
    needs = "--tensor-model-parallel-size of at least 2"
    yield from without(config, needs, size > 1, ("sequence_parallel",))
    if world % size:
        yield (
            f"{world} workers are no multiple of --tensor-model-parallel-size {size}: change one of"
            " them"
        )


def parallel_problems(config: Config) -> Problems:
    p, devices = config.parallel, config.devices
    layout = (
        "pipeline_model_parallel_size",
        "pipeline_model_parallel_layout",
        "decoder_first_pipeline_num_layers",
        "decoder_last_pipeline_num_layers",
        *_VIRTUAL,
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
    given = [flag_of(name) for name in _VIRTUAL if name in config.given]
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
