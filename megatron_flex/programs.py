"""Programs of a plan without a planner's process: for tools, benchmarks and tests."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import lru_cache

from megatron_flex.cluster.cluster import load
from megatron_flex.data.microbatch import MicroBatch
from megatron_flex.model.config import ModelConfig
from megatron_flex.planner.build import Batch, ModelCosts
from megatron_flex.planner.closed_form import closed_form_profile
from megatron_flex.planner.maker import Maker
from megatron_flex.planner.options import PlannerOptions
from megatron_flex.planner.plan import Plan
from megatron_flex.planner.tensor import ALONE, TensorParallel
from megatron_flex.schedule.instructions import Program
from megatron_flex.schedule.transition import Transition


@lru_cache(32)
def described_maker(config: ModelConfig, world_size: int, options: PlannerOptions) -> Maker:
    """A maker of programs by the closed form of costs, for CPU workers on one server."""
    cluster = replace(load("cpu"), servers=1, devices_per_server=world_size)
    profile = closed_form_profile(config, cluster, options.tensor)
    return Maker(ModelCosts(config, profile, cluster, replace(options, unit="block")))


def build_program(
    config: ModelConfig,
    plan: Plan,
    micro_batches: Sequence[MicroBatch],
    world_size: int,
    *,
    policy: str = "1f1b",
    forward_only: bool = False,
    switch: Transition | None = None,
    moved: Collection[int] | None = (),
    tensor: TensorParallel = ALONE,
) -> Program:
    """The instruction lists of one iteration for all devices.

    Args:
        policy: the schedule of a plan that names none.
        forward_only: an evaluation.
        switch: leads to the next iteration's plan.
        moved: micro-batches that run by the next plan already (live migration); ``None`` moves
            some where the simulated iteration gains from it.
        tensor: how the workers of a device share layers.

    Raises ``ValueError`` if the policy is unknown or the plan does not fit the model and the world.
    """
    options = PlannerOptions(
        schedule=policy, tensor_size=tensor.size, sequence_parallel=tensor.sequence
    )
    maker = described_maker(config, world_size, options)
    batch = Batch.of(micro_batches)
    if switch is None or forward_only:
        return maker.keep(plan, batch, forward_only=forward_only).program
    return maker.switch(plan, batch, switch, moved=moved).program
