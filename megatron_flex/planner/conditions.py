"""Conditions A to D of the paper, with which a decision says why."""

from __future__ import annotations

from megatron_flex.planner.build import ModelCosts
from megatron_flex.planner.candidates import Candidate
from megatron_flex.planner.decision import Predicted, Reason


def conditions(
    costs: ModelCosts,
    kept: Candidate | None,
    mine: Predicted | None,
    other: Predicted | None,
    margin: float,
    at_least: bool = False,
) -> tuple[Reason, ...]:
    """Conditions A to D of the paper, device by device instead of in total.

    ``kept`` is the current plan (``mine``: judged, when it fits; with ``at_least`` estimated
    from below), ``other`` the plan that it is compared with, if there is one. Without a current
    plan there is nothing to compare.
    """
    if kept is None:
        return ()
    price, budget = kept.price, costs.budget
    needed = budget + price.missing if price.missing > 0 else max(price.device_bytes)
    a = price.missing <= 0
    reasons = [
        Reason("A", "the batch fits the current plan: bytes of its fullest device <= budget",
               needed, budget, "bytes", a),
    ]  # fmt: skip
    if not a:
        after = budget + price.shortfall if price.shortfall > 0 else max(price.device_bytes)
        reasons.append(
            Reason("C", "memory optimisation makes it fit: bytes after it <= budget",
                   after, budget, "bytes", price.fits)
        )  # fmt: skip
    if mine is not None and other is not None:
        switched, stayed = other.total, mine.total
        text = "switching does not pay: other plan and switch >= current plan"
        if at_least:
            text += ", estimated from below"
        if a:
            reasons.append(Reason("B", text, switched, stayed, "seconds", switched >= stayed))
        else:
            text += " with recompute and swap"
            reasons.append(Reason("D", text, switched, stayed, "seconds", switched >= stayed))
        bar = (1.0 - margin) * stayed
        reasons.append(
            Reason("margin", f"a switch saves at least {margin:.1%}: other plan and switch <= bar",
                   switched, bar, "seconds", switched <= bar)
        )  # fmt: skip
    return tuple(reasons)
