"""The planner's front: given the coming batches and what runs now, a decision.

    planner = Planner(config, profile, cluster, PlannerOptions())
    decision = planner.decide([batch], running)

Everything is a value: equal input gives an equal decision, on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron_flex.cluster.cluster import Cluster
from megatron_flex.cluster.profile import Profile
from megatron_flex.model.config import ModelConfig
from megatron_flex.planner.build import Batch
from megatron_flex.planner.choose import Chooser
from megatron_flex.planner.decision import Decision
from megatron_flex.planner.options import PlannerOptions
from megatron_flex.planner.plan import Plan, PlanError
from megatron_flex.planner.pool import Pool
from megatron_flex.planner.pricing import Pricer
from megatron_flex.planner.search import Searcher
from megatron_flex.planner.switching import Running
from megatron_flex.planner.workbench import Workbench, running_of


class Planner(Workbench):
    """Plans for one model on one cluster; arguments as :class:`Workbench`'s."""

    def __init__(
        self, config: ModelConfig, profile: Profile, cluster: Cluster, options: PlannerOptions
    ) -> None:
        super().__init__(config, profile, cluster, options)
        chooser = Chooser(self)
        self.choose = chooser.choose
        self.search = Searcher(self, chooser).search

    def running(self, plan: Plan, batch: Batch, seconds: float | None = None) -> Running:
        """What is known of an iteration of ``plan`` on ``batch`` while it runs.

        ``seconds``: its measured time; default the predicted one.
        """
        return self.running_in(plan, self.finder([batch]).pricers[0], seconds)

    def running_in(self, plan: Plan, pricer: Pricer, seconds: float | None = None) -> Running:
        """:meth:`running` on a batch whose tables there are."""
        price = pricer.price(plan)
        if self.fitter is not None:
            price = self.fitter.fit(pricer, price, plan)
        return running_of(self.units, price, seconds)

    def best_static(self, batches: Sequence[Sequence[Batch]]) -> Plan:
        """The one plan that takes least time over all given batches and fits each of them.

        Out of every even layout and of the exact search's plan for each batch.
        """
        finders = [self.finder(ways) for ways in batches]
        plans = list(self.even_plans)
        for finder in finders:
            plans.extend(c.plan for c in finder.searched(None))
        best, best_seconds = None, math.inf
        for plan in dict.fromkeys(Plan(p.stages) for p in plans):
            total = 0.0
            for finder in finders:
                total += finder.best_of(plan, None).price.seconds
                if total >= best_seconds:
                    break
            if total < best_seconds:
                best, best_seconds = plan, total
        if best is None:
            for finder in finders:
                if not any(c.price.fits for c in finder.searched(None)):
                    raise finder.infeasible()
            raise PlanError(
                "no single plan fits all batches; plan every iteration, or limit the longest sample"
            )
        return best

    def decide(
        self,
        batches: Sequence[Batch],
        running: Running | None,
        others: Sequence[Plan] = (),
    ) -> Decision:
        """:meth:`decide_with` without plans of earlier batches."""
        return self.decide_with(Pool.empty(), batches, running, others)[0]

    def decide_with(
        self,
        pool: Pool,
        batches: Sequence[Batch],
        running: Running | None,
        others: Sequence[Plan] = (),
        count: int | None = None,
    ) -> tuple[Decision, Pool]:
        """The best plan for the next iteration, whatever follows it, and the pool after it.

        Args:
            pool: plans that were good for the batches before it.
            batches: the ways of cutting its batch to micro-batches.
            running: the iteration before it; ``None`` at the start.
            others: further plans to consider.
            count: simulations; default what the options say.

        Raises:
            Infeasible: no plan fits.
        """
        finder = self.finder(batches)
        found = list(finder.searched(running))
        if running is not None:
            found += finder.searched(running, switching=False)
            found.append(finder.best_of(running.plan, running))
        if not self.options.split:
            # A fused backward runs best on equal degrees, which the closed form does not know.
            found += [finder.best_of(plan, running) for plan in self.even_plans]
        found += [finder.best_of(plan, running) for plan in others]
        return self.search(finder, found, running, pool, count)
