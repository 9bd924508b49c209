"""What is simulated: a model on a described cluster, and what an iteration takes there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from megatron_flex.cluster.cluster import Cluster
from megatron_flex.cluster.profile import Profile
from megatron_flex.data.microbatches import CostCoefficients
from megatron_flex.model.config import ModelConfig
from megatron_flex.model.tensor_cut import check
from megatron_flex.planner.build import Batch, ModelCosts
from megatron_flex.planner.closed_form import with_shared_layers
from megatron_flex.planner.flops import cost_coefficients
from megatron_flex.planner.options import PlannerOptions
from megatron_flex.planner.plan import Plan
from megatron_flex.planner.planner import Planner
from megatron_flex.planner.simulation import Placed, place_plan, static_bytes
from megatron_flex.planner.tensor import TensorParallel
from megatron_flex.planner.thin import thin_cluster, thin_profile, width_of
from megatron_flex.schedule.costs import OpCosts


@dataclass(frozen=True, eq=False)
class Setting:
    """A model on a cluster.

    Attributes:
        profile: what its units cost on the cluster's devices.
        base: options that hold for every configuration: budget, sharded optimizer state, and how
            many ranks are a device.
        whole: the same where every rank is a device, by which balance is measured; ``None``: this.
        origin: the same with all devices, where this has one of every :attr:`width`.
    """

    config: ModelConfig
    cluster: Cluster
    profile: Profile
    base: PlannerOptions = field(default_factory=PlannerOptions)
    whole: Setting | None = None
    origin: Setting | None = None
    _planners: dict[PlannerOptions, Planner] = field(default_factory=dict, init=False, repr=False)

    def shared(self, tensor: TensorParallel) -> Setting:
        """The same where ``tensor.size`` ranks of a server share each layer, and are one device.

        Raises ``ValueError`` where they cannot.
        """
        if tensor.size == 1:
            return self
        check(self.config, tensor.size, vocabulary=False)
        base = replace(self.base, tensor_size=tensor.size, sequence_parallel=tensor.sequence)
        cluster = self.cluster.grouped(tensor.size)
        profile = with_shared_layers(self.config, self.profile, cluster, tensor)
        return Setting(self.config, cluster, profile, base, self)

    @property
    def width(self) -> int:
        """Devices that each device stands for (``planner/thin.py``)."""
        return self.base.width

    @property
    def full(self) -> Setting:
        """The same with all devices."""
        return self if self.origin is None else self.origin

    @property
    def thinned(self) -> Setting:
        """The same where one device of a large cluster stands for several."""
        return self._thin(width_of(self.cluster, self.base.server_groups_above))

    def _thin(self, width: int) -> Setting:
        if width == 1:
            return self
        whole = None if self.whole is None else self.whole._thin(width)
        return Setting(
            self.config, thin_cluster(self.cluster, width),
            thin_profile(self.profile, self.cluster, width), replace(self.base, width=width),
            whole, self,
        )  # fmt: skip

    def of_groups(self, size: int, config: ModelConfig, profile: Profile) -> Setting:
        """The same batches where ``size`` devices of a server are one.

        ``config``, ``profile``: of one of them.
        """
        found = Setting(config, self.full.cluster.grouped(size), profile, self.full.base)
        return found._thin(self.width)

    def planner(self, **choices: object) -> Planner:
        """The planner with these options; the same one for the same options."""
        options = replace(self.base, **choices)  # type: ignore[arg-type]
        if options not in self._planners:
            self._planners[options] = Planner(self.config, self.profile, self.cluster, options)
        return self._planners[options]

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.cluster.world_size

    @property
    def budget(self) -> float:
        """Bytes of a device."""
        return self.planner().units.budget

    @property
    def cost(self) -> CostCoefficients:
        """What samples cost, as a run cuts its batches by."""
        return cost_coefficients(self.config)

    def balance(self, lengths: Sequence[int]) -> float:
        """Seconds of perfect balance: all work, without fixed costs, divided by all devices."""
        if self.whole is not None:
            return self.whole.balance(lengths)
        units = self.planner().units
        _, token, pair = (units.forward + units.backward).sum(axis=1)
        tokens = np.asarray(lengths, dtype=np.float64)
        return float((token * tokens + pair * tokens**2).sum()) / self.devices


def place(
    costs: ModelCosts,
    plan: Plan,
    batch: Batch,
    *,
    op: OpCosts | None = None,
    stop: float = math.inf,
) -> Placed | None:
    """One iteration of a plan as its schedule runs it; ``None``: it is not below ``stop`` seconds.

    Also where state alone does not fit. As
    :func:`~megatron_flex.planner.simulation.predict`, with costs of operations that may be given.
    """
    fixed = static_bytes(costs, plan, batch)
    if min(costs.budget - fixed[d] for d in plan.devices) < 0:
        return None
    return place_plan(costs, plan, batch, op=op, stop=stop, fixed=fixed)
