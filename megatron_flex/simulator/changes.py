"""What a change of plan costs in each way of switching that a simulation knows."""

from __future__ import annotations

from megatron_flex.planner.build import ModelCosts
from megatron_flex.planner.plan import Plan
from megatron_flex.planner.switching import GROUP_SETUP, Running, SwitchMode, switch

_MODES: dict[str, SwitchMode] = {
    "live": "live",
    "handover": "handover",
    "no-twin-layers": "stall",
    "stall": "stall",
    "restart": "restart",
}
WAYS = tuple(_MODES)
"""``live``: as much as fits joins early, the rest is handed over. ``handover``: all after the
update, through TwinLayers. ``no-twin-layers``: all after the update, copied out and then in.
``stall``: so, and communication groups are made then, too. ``restart``: a checkpoint and a new
start."""


def stall_seconds(costs: ModelCosts, running: Running, plan: Plan, way: str) -> float:
    """Seconds that the switch from the running plan to ``plan`` adds."""
    if running.plan.stages == plan.stages:
        return 0.0
    seconds = switch(costs, running, plan, _MODES[way]).seconds
    return seconds - GROUP_SETUP if way == "no-twin-layers" else seconds
