"""What can be simulated, by name: FlexPipe, baselines, and FlexPipe without one of its parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_flex.data.cut import Cut
from megatron_flex.simulator.batching import Batching, ByCut, ByDynaPipe, by_bucket, by_count
from megatron_flex.simulator.context import ContextRunner, Shared
from megatron_flex.simulator.setting import Setting
from megatron_flex.simulator.sources import Lengths
from megatron_flex.simulator.static import Runner, Variant
from megatron_flex.simulator.tensor import TensorRunner, divides

ZERO_BUBBLE = ("zb-h1", "zb-h2", "zb-v")
LEAST_BUDGET = 512
"""Tokens of the smallest micro-batches that packing is tuned over."""


@dataclass(frozen=True)
class Static:
    """A plan that stays, out of all that ``runners`` offer.

    ``runners(setting, sample)``: one for each variant.
    """

    about: str
    runners: Callable[[Setting, Sequence[Lengths]], list[Runner]]


@dataclass(frozen=True)
class Planned:
    """A planner decides before every iteration.

    Attributes:
        options: of :class:`~megatron_flex.planner.options.PlannerOptions`.
        sliced: long samples of a GPT are cut.
        tokens: whole samples are packed to so many tokens; ``None``: cut as the plan says.
        paper: HBSA with the paper's totals of memory, where it gives them.
        switch: how plans change (:mod:`~megatron_flex.simulator.changes`).
        tuned: the plan that windows end with is the best static one, else the best by the closed
            form for the first window.
    """

    about: str
    options: Mapping[str, Any] = field(default_factory=dict)
    sliced: bool = True
    tokens: int | None = None
    paper: bool = False
    switch: str = "live"
    tuned: bool = True


def budgets(sample: Sequence[Lengths]) -> list[int]:
    """Token budgets to tune over: powers of two up to what a whole batch has, or 65,536."""
    most = max(sum(lengths) for lengths in sample)
    found: list[int] = []
    budget = LEAST_BUDGET
    while budget <= 65536 and (not found or found[-1] < most):
        found.append(budget)
        budget *= 2
    return found


def _sizes(sample: Sequence[Lengths]) -> list[int]:
    """Numbers of samples of a micro-batch to tune over."""
    most = max(map(len, sample))
    return [1 << k for k in range(most.bit_length()) if 1 << k <= most]


def _runners(
    setting: Setting, schedules: Sequence[str], rules: Sequence[Batching], **choices: Any
) -> list[Runner]:
    return [
        Runner(setting, Variant(schedule, rule, **choices))
        for schedule in schedules
        for rule in rules
    ]


def _padded(*schedules: str, length: bool = False) -> Static:
    names = ", ".join(schedules)

    def runners(setting: Setting, sample: Sequence[Lengths]) -> list[Runner]:
        longest = max(map(max, sample)) if length else 0
        rules = [by_count(size, longest) for size in _sizes(sample)]
        return _runners(setting, schedules, rules)

    to = "the longest sample of all" if length else "the longest of the batch"
    return Static(f"samples padded to {to}; {names}", runners)


def _whole(setting: Setting, budget: int) -> ByCut:
    return ByCut(Cut(budget, cost=setting.cost), f"{budget} tokens packed")


def _packed(setting: Setting, sample: Sequence[Lengths]) -> list[Runner]:
    rules = [_whole(setting, budget) for budget in budgets(sample)]
    return _runners(setting, ("1f1b", "interleaved"), rules)


def _packed_zero_bubble(setting: Setting, sample: Sequence[Lengths]) -> list[Runner]:
    rules = [_whole(setting, budget) for budget in budgets(sample)]
    return _runners(setting, ZERO_BUBBLE, rules)


def _bucket(setting: Setting, sample: Sequence[Lengths]) -> list[Runner]:
    rules = [by_bucket(budget) for budget in budgets(sample)]
    return _runners(setting, ("1f1b",), rules)


def _dynapipe(setting: Setting, sample: Sequence[Lengths]) -> list[Runner]:
    return _runners(setting, ("1f1b",), (ByDynaPipe(),), adaptive=True)


def _seq1f1b(setting: Setting, sample: Sequence[Lengths]) -> list[Runner]:
    causal = setting.config.architecture == "gpt"
    rules = [
        ByCut(
            Cut(budget, by_cost=True, sliced=causal, cost=setting.cost),
            f"slices of {budget} tokens",
        )
        for budget in budgets(sample)
    ]
    return _runners(setting, ("seq1f1b",), rules)


def _context(setting: Setting, sample: Sequence[Lengths]) -> list[Runner]:
    found: list[Runner] = []
    for degree in _degrees(setting):
        for budget in budgets(sample):
            rule = Shared(Cut(budget, cost=setting.cost), degree)
            found.append(ContextRunner(setting, Variant("1f1b", rule), degree))
    return found


def _degrees(setting: Setting) -> list[int]:
    """Numbers of devices of a server that may work as one: powers of two."""
    most = setting.full.cluster.devices_per_server
    return [1 << k for k in range(most.bit_length()) if most % (1 << k) == 0]


def _tensor(setting: Setting, sample: Sequence[Lengths]) -> list[Runner]:
    found: list[Runner] = []
    for degree in _degrees(setting):
        if not divides(setting.config, degree):
            continue
        for schedule in ("1f1b", "interleaved", "zb-v"):
            for budget in budgets(sample):
                rule = replace(_whole(setting, budget), name=f"{budget} tokens over {degree}")
                found.append(TensorRunner(setting, Variant(schedule, rule), degree))
    return found


def open_cut(setting: Setting, sliced: bool = True) -> Cut:
    """As a run with ``--flexpipe`` cuts: the plan says by what."""
    causal = setting.config.architecture == "gpt"
    return Cut(by_cost=True, sliced=sliced and causal, cost=setting.cost)


def one_plan(setting: Setting, preset: Planned | None = None) -> Static:
    """One plan for a run with FlexPipe's operations, or with those that a preset leaves of them."""
    options = {} if preset is None else preset.options
    schedule = options.get("schedule", "zb")
    rule = ByCut(open_cut(setting, preset is None or preset.sliced), "cut as suits each batch")
    variant = Variant(
        schedule, rule, options.get("unit", "block"), even=False, adaptive=True, offload=True,
        saves=options.get("memory_optimisation", True), folds=options.get("folds", True),
    )  # fmt: skip
    return Static("one plan with slices", lambda setting, sample: [Runner(setting, variant)])


def _static_slices(setting: Setting, sample: Sequence[Lengths]) -> list[Runner]:
    return one_plan(setting).runners(setting, sample)


STATIC: dict[str, Static] = {
    "megatron-pad": _padded("1f1b", "interleaved"),
    "megatron-pad-all": _padded("1f1b", "interleaved", length=True),
    "zero-bubble-pad": _padded(*ZERO_BUBBLE),
    "packed-1f1b": Static("whole samples packed; 1f1b, interleaved", _packed),
    "packed-zero-bubble": Static("whole samples packed; zero bubble", _packed_zero_bubble),
    "bucket": Static("samples of like length padded together; 1f1b", _bucket),
    "dynapipe": Static("DynaPipe's micro-batches for every batch; 1f1b", _dynapipe),
    "seq1f1b": Static("slices of equal cost, always the same target; seq1f1b", _seq1f1b),
    "context-parallel": Static("packed, ring attention inside a server; 1f1b", _context),
    "tensor-parallel": Static("packed, layers shared inside a server; 1f1b to zb-v", _tensor),
    "static-slices": Static("one plan with slices, cut as suits each batch", _static_slices),
}

PLANNED: dict[str, Planned] = {
    "flexpipe": Planned("a plan for every iteration, as in training"),
    "flexpipe-untuned": Planned("windows end with a plan that nobody has tuned", tuned=False),
    "no-lookahead": Planned("each iteration by itself", {"lookahead": 1}),
    "no-o-plan": Planned("neither recompute nor offload", {"memory_optimisation": False}),
    "no-slices": Planned("whole samples", sliced=False),
    "fused-backward": Planned("no split backward", {"schedule": "1f1b"}),
    "no-v": Planned("one stage on each group of devices", {"folds": False}),
    "whole-layers": Planned("stages are cut between whole layers", {"unit": "layer"}),
    "no-switches": Planned("the first plan stays where it fits", {"margin": 0.99}),
    "hbsa": Planned(
        "the paper's planner, time model and memory", paper=True, tokens=2048,
        options={"planner": "hbsa", "time_model": "paper", "unit": "layer", "schedule": "1f1b"},
    ),
    "hbsa-no-o-plan": Planned(
        "the same without memory optimisation", paper=True, tokens=2048,
        options={"planner": "hbsa", "time_model": "paper", "unit": "layer", "schedule": "1f1b",
                 "memory_optimisation": False},
    ),
    "hbsa-no-bounds": Planned(
        "the same without bounds", paper=True, tokens=2048,
        options={"planner": "hbsa", "time_model": "paper", "unit": "layer", "schedule": "1f1b",
                 "bounds": False},
    ),
    "no-join-early": Planned("all state after the update, through TwinLayers", switch="handover"),
    "no-twin-layers": Planned("state is copied out and in again", switch="no-twin-layers"),
    "iteration-stalling": Planned("the same, and groups are made then", switch="stall"),
    "suspend-resume": Planned("a checkpoint and a new start at every switch", switch="restart"),
}  # fmt: skip

CONFIGURATIONS = (*PLANNED, *STATIC)
