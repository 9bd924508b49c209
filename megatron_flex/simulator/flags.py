"""What the trainer is told to run as a configuration was simulated, as flags."""

from __future__ import annotations

from dataclasses import replace

from megatron_flex.data.cut import Cut
from megatron_flex.planner.plan import Plan
from megatron_flex.planner.static import static_plan
from megatron_flex.planner.thin import wide_plan
from megatron_flex.schedule.list_scheduler import POLICIES
from megatron_flex.schedule.policies.policy import Shape
from megatron_flex.simulator.batching import ByCut, ByDynaPipe
from megatron_flex.simulator.context import ContextRunner
from megatron_flex.simulator.presets import Planned
from megatron_flex.simulator.setting import Setting
from megatron_flex.simulator.static import Tuned
from megatron_flex.simulator.tensor import TensorRunner

_PAD = {"micro-batch": "pad", "batch": "pad-batch", "bucket": "bucket", "dynapipe": "dynapipe"}
_OPTIONS = {
    "planner": "--flexpipe-planner",
    "unit": "--flexpipe-unit",
    "schedule": "--flexpipe-schedule",
    "lookahead": "--flexpipe-lookahead",
}


def static_flags(setting: Setting, tuned: Tuned) -> list[str]:
    """Of a plan that stays; none where the trainer has no such configuration."""
    runner, variant = tuned.runner, tuned.runner.variant
    if isinstance(runner, ContextRunner | TensorRunner):
        return []
    plan = replace(tuned.plan, o_plan=tuned.settled or tuned.plan.o_plan)
    words = [*_layout(setting, plan, variant.schedule), *_shared(setting),
             "--flexpipe-schedule", variant.schedule]  # fmt: skip
    if isinstance(variant.batching, ByDynaPipe):
        return [*words, "--flexpipe-batching", "dynapipe"]
    assert isinstance(variant.batching, ByCut)
    cut = variant.batching.cut
    if cut.open and not cut.pad:
        return [*words, "--flexpipe", "--flexpipe-planner", "given"]
    return [*words, *_batching(cut)]


def planned_flags(setting: Setting, preset: Planned, static: Plan | None) -> list[str]:
    """Of a planner; none where it has what only the simulator does."""
    if preset.paper or preset.switch != "live" or preset.options.keys() - _OPTIONS.keys():
        return []
    words = ["--flexpipe", *_shared(setting)]
    for name, value in preset.options.items():
        words += [_OPTIONS[name], str(value)]
    if not preset.sliced:
        words += ["--flexpipe-slice-tokens", "0"]
    if static is None:
        return words
    # The layout of numbers alone is straight, whatever the planner may choose.
    straight = len({s.group for s in static.stages}) == len(static.stages)
    layout = ["--flexpipe-plan", str(wide_plan(static, setting.width))]
    return [*words, *(_layout(setting, static, "1f1b") if straight else layout)]


def _layout(setting: Setting, plan: Plan, schedule: str) -> list[str]:
    """The plan by numbers where these give it, else in full."""
    shape = POLICIES[schedule].placement if schedule in POLICIES else Shape.STRAIGHT
    v = shape is Shape.V
    stages = len({s.group for s in plan.stages})
    rounds = len(plan.stages) // stages
    if not plan.o_plan and len(plan.stages) == stages * rounds:
        even = setting.devices % stages == 0 and (not v or rounds == 2)
        given = (
            static_plan(setting.config, stages, setting.devices, rounds=rounds, v=v)
            if even
            else None
        )
        if given is not None and given.stages == plan.stages:
            words = ["--pipeline-model-parallel-size", str(stages)]
            more = ["--num-virtual-stages-per-pipeline-rank", str(rounds)]
            return [*words, *more] if rounds > 1 and not v else words
    return ["--flexpipe-plan", str(wide_plan(plan, setting.width))]


def _shared(setting: Setting) -> list[str]:
    """How devices share layers."""
    tensor = setting.base.tensor
    if tensor.size == 1:
        return []
    words = ["--tensor-model-parallel-size", str(tensor.size)]
    return [*words, "--sequence-parallel"] if tensor.sequence else words


def _batching(cut: Cut) -> list[str]:
    size = (
        ["--micro-batch-size", str(cut.count)]
        if cut.count is not None
        else ["--micro-batch-tokens", str(cut.tokens)]
    )
    if cut.pad:
        how = "pad-all" if cut.pad_to else _PAD[cut.pad]
        return ["--flexpipe-batching", how, *size]
    return ["--flexpipe-batching", "slices" if cut.sliced else "pack", *size]
