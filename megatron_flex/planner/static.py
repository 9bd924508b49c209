"""A static plan from Megatron's flags: one layout for the whole run, cut by cost.

Every stage has the same data-parallel degree, ``world_size / pipeline_size``. Devices follow
Megatron's default rank order ``tp-cp-ep-dp-pp`` (pipeline outermost): with tensor-parallel groups
counted as one device, stage ``s`` is held by devices ``s * DP`` to ``(s + 1) * DP - 1``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from megatron_flex.model.config import ModelConfig
from megatron_flex.model.layers import Kind, LayerList
from megatron_flex.planner.flops import model_work
from megatron_flex.planner.plan import Plan, PlanError, Stage
from megatron_flex.planner.tables import prefix
from megatron_flex.schedule.pipeline_layout import rows_of

UnitChoice = Literal["block", "layer"]

REFERENCE_LENGTH = 1405.0
"""Sum of squares over sum of lengths, in tokens, of the published FLANv2 length statistics.

It weighs attention against the rest when no lengths are given.
"""


def static_plan(
    config: ModelConfig,
    pipeline_size: int,
    world_size: int,
    *,
    length: float = REFERENCE_LENGTH,
    costs: Sequence[float] | None = None,
    unit: UnitChoice = "block",
    first_layers: int | None = None,
    last_layers: int | None = None,
    layout: str | Sequence[int] | None = None,
    rounds: int = 1,
    v: bool = False,
) -> Plan:
    """The plan of ``--pipeline-model-parallel-size`` on ``world_size`` devices.

    Args:
        config: the model.
        pipeline_size: number of stages.
        world_size: number of devices (tensor-parallel groups); a multiple of ``pipeline_size``.
        length: token pairs per token, ``sum(l**2) / sum(l)`` over the samples, in tokens.
        costs: cost of each unit in any one measure, instead of the closed-form FLOPs.
        unit: cut between blocks (halves of a layer), or only between whole layers.
        first_layers: ``--decoder-first-pipeline-num-layers``: layers of the first stage, which
            also holds the embedding.
        last_layers: ``--decoder-last-pipeline-num-layers``: layers of the last stage, which also
            holds the head.
        layout: ``--pipeline-model-parallel-layout``, or the number of layers of each stage.
        rounds: stages on each device, which get them in turn (virtual pipeline stages).
        v: two stages on each device: the first device holds the first and the last, and so on.

    Raises:
        PlanError: when no such plan exists; the message says which flag to change.
    """
    if pipeline_size < 1:
        raise PlanError(f"--pipeline-model-parallel-size must be at least 1, not {pipeline_size}")
    if world_size < 1 or world_size % pipeline_size:
        raise PlanError(
            f"{world_size} devices are not divisible by --pipeline-model-parallel-size"
            f" {pipeline_size}: choose a divisor, or give a plan with uneven data parallelism"
            " with --flexpipe-plan"
        )
    layers = config.layers
    stages = pipeline_size * (2 if v else rounds)
    if layout is not None:
        if first_layers is not None or last_layers is not None:
            raise PlanError(
                "--pipeline-model-parallel-layout fixes every stage; remove"
                " --decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers"
            )
        cuts = layout_cuts(layers, layout, stages)
    else:
        if costs is None:
            costs = [w.forward(1.0, length) for w in model_work(config)]
        if len(costs) != layers.num_units:
            raise PlanError(f"{len(costs)} unit costs given, the model has {layers.num_units}")
        cuts = _cost_cuts(layers, costs, stages, unit, first_layers, last_layers)
    degree = world_size // pipeline_size
    groups = [tuple(range(s * degree, (s + 1) * degree)) for s in range(pipeline_size)]
    groups = groups + groups[::-1] if v else groups * rounds
    return Plan(tuple(Stage(cuts[s], cuts[s + 1], groups[s]) for s in range(stages)))


def recomputed(
    plan: Plan, layers: LayerList, kinds: Collection[Kind], first: int | None = None
) -> Plan:
    """The plan with all halves of layers of some kinds recomputed.

    ``first``: only so many layers of each stage, from its first on (two halves make a layer).
    """
    units: list[int] = []
    for stage in plan.stages:
        halves = [u for u in layers.units[stage.start : stage.stop] if u.layer is not None]
        most = len(halves) if first is None else 2 * first
        units += [u.index for u in halves[:most] if u.kind in kinds]
    return replace(plan, o_plan=replace(plan.o_plan, recompute=tuple(units)))


def cut_points(layers: LayerList, unit: UnitChoice) -> tuple[int, ...]:
    """Units before which a stage may start, with ``0`` and ``num_units`` at the ends.

    In whole layers these are the embedding, the attention half of each layer, and the head.
    """
    if unit == "block":
        return tuple(range(layers.num_units + 1))
    return (0, *range(1, layers.num_units, 2), layers.num_units)


def bottleneck_cuts(costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """Cut ``costs`` into ``stages`` non-empty runs with the least possible largest sum.

    Exact, by dynamic programming over (stage, end). Among the cuts with that bottleneck, the one
    with the least sum of squared run costs, and then the earliest cuts.

    Returns:
        ``stages + 1`` ascending positions, from ``0`` to ``len(costs)``.
    """
    count = len(costs)
    if not 1 <= stages <= count:
        raise PlanError(f"cannot cut {count} units into {stages} non-empty stages")
    sums = prefix(costs)
    run = sums[None, :] - sums[:, None]  # run[i, j]: cost of units i .. j - 1
    empty = np.tri(count + 1, dtype=bool)  # j <= i
    best = np.where(empty, np.inf, run)[0]
    for _ in range(1, stages):
        best = np.where(empty, np.inf, np.maximum(best[:, None], run)).min(axis=0)
    limit = best[count] + 1e-12 * sums[-1]
    squares = np.where(empty | (run > limit), np.inf, run * run)
    total = squares[0]
    choices = []
    for _ in range(1, stages):
        step = total[:, None] + squares
        choices.append(step.argmin(axis=0))
        total = step.min(axis=0)
    cuts = [count]
    for choice in reversed(choices):
        cuts.append(int(choice[cuts[-1]]))
    return (0, *reversed(cuts)) if stages > 1 else (0, count)


def _cost_cuts(
    layers: LayerList,
    costs: Sequence[float],
    stages: int,
    unit: UnitChoice,
    first_layers: int | None,
    last_layers: int | None,
) -> tuple[int, ...]:
    """Stage boundaries in units; stages with a given number of layers are set aside first."""
    begin, end = 0, layers.num_units
    head: tuple[int, ...] = ()
    tail: tuple[int, ...] = ()
    for flag, number in (("first", first_layers), ("last", last_layers)):
        if number is not None and not 0 <= number <= layers.num_layers:
            raise PlanError(
                f"--decoder-{flag}-pipeline-num-layers must be between 0 and the model's"
                f" {layers.num_layers} layers, not {number}"
            )
    if stages > 1:
        if first_layers is not None:
            begin, head = 1 + 2 * first_layers, (0,)
        if last_layers is not None:
            end, tail = layers.num_units - 1 - 2 * last_layers, (layers.num_units,)
    elif (first_layers or last_layers) not in (None, layers.num_layers):
        raise PlanError(
            "--decoder-first/last-pipeline-num-layers need --pipeline-model-parallel-size of at"
            " least 2"
        )
    points = [p for p in cut_points(layers, unit) if begin <= p <= end]
    free = stages - len(head) - len(tail)
    if begin > end or (free == 0) != (begin == end) or free > len(points) - 1:
        name = "blocks" if unit == "block" else "whole layers, embedding and head"
        given = "".join(
            f" after --decoder-{flag}-pipeline-num-layers {number}"
            for flag, number in (("first", first_layers), ("last", last_layers))
            if number is not None
        )
        raise PlanError(
            f"{free} stages{given} cannot share {max(0, len(points) - 1)} units ({name}): every"
            f" stage needs at least one and every unit a stage. Change"
            f" --pipeline-model-parallel-size {stages}{' or these flags' if given else ''}"
        )
    if free == 0:
        return (*head, begin, *tail)
    inner = bottleneck_cuts(np.diff(prefix(costs)[points]).tolist(), free)
    return (*head, *(points[i] for i in inner), *tail)


def layout_cuts(layers: LayerList, layout: str | Sequence[int], stages: int) -> tuple[int, ...]:
    """Stage boundaries in units of a layout in whole layers.

    ``layout`` is the number of layers of each stage, or Megatron's text form
    (:mod:`~megatron_flex.schedule.pipeline_layout`).
    """
    if not isinstance(layout, str):
        counts = [int(n) for n in layout]
        rows = ["t" * n for n in counts]
        if rows:
            rows[0] = "E" + rows[0]
            rows[-1] += "L"
    else:
        rows = rows_of(layout)
    name = f"--pipeline-model-parallel-layout {layout}"
    flat = "".join(rows)
    unknown = sorted(set(flat) - set("EtL"))
    if unknown:
        raise PlanError(f"{name}: unknown layer letters {unknown}; use E, t and L")
    if flat != "E" + "t" * layers.num_layers + "L":
        raise PlanError(
            f"{name}: must be one E, then {layers.num_layers} t (it has {flat.count('t')}), then"
            " one L, in this order"
        )
    if len(rows) != stages:
        raise PlanError(
            f"{name}: has {len(rows)} stages, not {stages}: give as many as"
            " --pipeline-model-parallel-size, or a multiple of that (virtual pipeline stages)"
        )
    cuts = [0]
    for number, row in enumerate(rows):
        if not row:
            raise PlanError(f"{name}: stage {number} is empty; every stage needs a layer")
        cuts.append(cuts[-1] + sum(2 if letter == "t" else 1 for letter in row))
    return tuple(cuts)
