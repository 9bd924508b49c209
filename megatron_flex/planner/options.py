"""What a user can choose about planning, as one value."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from megatron_flex.planner.static import UnitChoice
from megatron_flex.planner.tensor import TensorParallel
from megatron_flex.schedule.list_scheduler import policy
from megatron_flex.schedule.policies.policy import Shape

AUTO = "auto"
"""The schedule that is the fastest that fits: a split backward, or a fused one where only that
fits."""
PlannerName = Literal["lookahead", "hbsa", "exhaustive", "static", "given"]
TimeModel = Literal["pipeline", "paper"]


@dataclass(frozen=True)
class PlannerOptions:
    """Choices of the planner; most have a flag of the trainer or of ``tools/plan.py``.

    Attributes:
        planner: who decides; ``given``: the layout stays, and how each batch is cut is chosen.
        unit: stages are cut between blocks (halves of layers), or between whole layers.
        schedule: name of the schedule that executes a plan that names none: of
            ``megatron_flex/schedule``, or ``auto``.
        time_model: ``pipeline`` (ours) or ``paper`` (eq. 1; ``hbsa`` only).
        memory_optimisation: recompute and offload may be used at all (the paper's ablation).
        recompute, offload_optimizer, offload_activations: which of them.
        bounds: HBSA's bounds on layers and devices of a stage (the paper's ablation).
        lookahead: batches that are planned together; 1 is no look-ahead (ablation).
        margin: a switch must save at least this part of the iteration's time.
        folds: plans in a V may be considered at all (ablation).
        shard_optimizer: optimizer state is split over the replicas of a stage.
        budget: bytes of a device that training may use; ``None``: what the cluster says.
        whole_budget: what that was before measured memory made it smaller; ``None``: the same.
        exact_memory: fit the plans that a decision is between by their instruction lists; else by
            the searches' bound.
        bitwise: gradients are summed exactly, which takes 8 more bytes a parameter.
        simulations: plans whose schedule a decision simulates, all together; 0: none. ``None``:
            as many as fit into a part of the iteration (``planner/pace.py``).
        server_groups_above: with more devices than this, groups are whole servers.
        message_busy: part of a message's time that keeps its receiver from computing.
        host_exposed: part of a host transfer's time that computing does not hide.
        travel: part of an iteration in which links are free for the next plan's state.
        tensor_size: ranks that share each layer; devices are groups of so many.
        sequence_parallel: they share what lies between the products, too.
        width: devices that each device of a plan stands for (:mod:`thin`).
    """

    planner: PlannerName = "lookahead"
    unit: UnitChoice = "block"
    schedule: str = "1f1b"
    time_model: TimeModel = "pipeline"
    memory_optimisation: bool = True
    recompute: bool = True
    offload_optimizer: bool = True
    offload_activations: bool = True
    bounds: bool = True
    lookahead: int = 4
    margin: float = 0.02
    folds: bool = True
    shard_optimizer: bool = False
    budget: int | None = None
    whole_budget: int | None = None
    exact_memory: bool = False
    bitwise: bool = False
    simulations: int | None = 50
    server_groups_above: int = 128
    message_busy: float = 0.0
    host_exposed: float = 0.3
    travel: float = 0.8
    tensor_size: int = 1
    sequence_parallel: bool = False
    width: int = 1

    @property
    def tensor(self) -> TensorParallel:
        """How layers are shared."""
        return TensorParallel(self.tensor_size, self.sequence_parallel)

    @property
    def split(self) -> bool:
        """Whether the schedule splits the backward, which the closed form of time must know."""
        return self.schedule == AUTO or policy(self.schedule).split

    @property
    def v(self) -> bool:
        """Whether plans in a V are considered: two stages on each group of devices."""
        if not self.folds:
            return False
        return self.schedule == AUTO or policy(self.schedule).placement in (Shape.V, Shape.ANY)

    @property
    def straight(self) -> bool:
        """Whether plans with one stage on each group of devices are considered."""
        return self.schedule == AUTO or policy(self.schedule).placement is not Shape.V

    @property
    def shapes(self) -> tuple[tuple[int, bool], ...]:
        """Stages on each group of devices, and whether in a V, of the even plans to consider."""
        found = [(1, False)] if self.straight else []
        if self.v:
            found.append((1, True))
        if self.schedule != AUTO and policy(self.schedule).placement is Shape.INTERLEAVED:
            found.append((2, False))
        return tuple(found)

    def __post_init__(self) -> None:
        if self.lookahead < 1:
            raise ValueError(f"the look-ahead must be at least 1 batch, not {self.lookahead}")
        if not 0.0 <= self.margin < 1.0:
            raise ValueError(f"the margin must be at least 0 and below 1, not {self.margin}")
        if self.width < 1:
            raise ValueError(f"a device stands for at least 1 device, not {self.width}")
        if self.budget is not None and not 0 < self.budget < math.inf:
            raise ValueError(f"the memory budget must be positive, not {self.budget} bytes")
        if self.time_model == "paper" and self.planner != "hbsa":
            raise ValueError("the paper's time model belongs to the planner hbsa")
        for name in ("message_busy", "host_exposed", "travel"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} must be between 0 and 1, not {getattr(self, name)}")
        for name in ("simulations", "server_groups_above"):
            number = getattr(self, name)
            if number is not None and number < 0:
                raise ValueError(f"{name} must not be negative: {number}")
