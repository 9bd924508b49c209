"""Switches between the plans of neighbouring iterations, as look-ahead counts them."""

from __future__ import annotations

from megatron_flex.planner.candidates import Candidate
from megatron_flex.planner.plan import Plan
from megatron_flex.planner.planner import Planner
from megatron_flex.planner.switching import Running
from megatron_flex.planner.workbench import running_of


class Edges:
    """Prices of switches; ``static``: the plan that a run is measured by."""

    def __init__(self, planner: Planner, static: Plan) -> None:
        self.static = Plan(static.stages)
        self._planner = planner
        self._switches = planner.switches

    def running_of(self, candidate: Candidate) -> Running:
        """An iteration of a candidate, as the switch after it sees it."""
        return running_of(self._planner.units, candidate.price)

    def margin(self, running: Running) -> float:
        """Seconds that a switch must be worth besides its own."""
        return self._planner.options.margin * running.seconds

    def switch(self, running: Running, plan: Plan) -> float:
        """Seconds of a switch."""
        return self._switches.price(running, plan).seconds

    def edge(self, running: Running, plan: Plan) -> float:
        """Seconds of a switch, and the margin that every switch must be worth on top."""
        if running.plan.stages == plan.stages:
            return 0.0
        return self.switch(running, plan) + self.margin(running)
