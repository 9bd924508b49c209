"""A decision in words and numbers: the table that ``tools/plan.py`` prints and the log can show."""

from __future__ import annotations

from megatron_flex.model.layers import Kind, LayerList
from megatron_flex.planner.decision import Decision, Predicted, Reason

GB = 1e9


def explain(decision: Decision, layers: LayerList) -> str:
    """Several lines: the decision, its stages, why, and the runner-up."""
    plan, predicted = decision.plan, decision.predicted
    action = decision.action
    lines = [
        f"{action.label}, by {decision.planner}:"
        f" {len(plan.stages)} stage{'s' if len(plan.stages) != 1 else ''} {plan.shape}",
        f"plan: {plan}",
        f"predicted: {_time(predicted)}",
        "",
        *stage_table(decision, layers),
    ]
    if predicted.recomputed_bytes or predicted.offloaded_bytes:
        lines += [
            "",
            f"O_plan: r = {predicted.recomputed_bytes / GB:.2f} GB recomputed"
            f" ({predicted.recompute_seconds:.4f} s), s = {predicted.offloaded_bytes / GB:.2f} GB"
            f" on the host ({predicted.swap_seconds:.4f} s)",
        ]
    if decision.reasons:
        lines += ["", "why:", *(f"  {reason_text(reason)}" for reason in decision.reasons)]
    if decision.current is not None:
        lines.append(f"current plan: {_time(decision.current)}")
    if decision.runner_up is not None:
        other, cost = decision.runner_up
        lines.append(f"runner-up: {other.shape} {_time(cost)}: {other}")
    return "\n".join(lines)


def reason_text(reason: Reason) -> str:
    """One condition with both sides."""
    answer = "yes" if reason.holds else "no"
    return f"{reason.condition:<6} {answer:<3} {reason.text} ({reason.sides})"


def _time(predicted: Predicted) -> str:
    kind = "simulated" if predicted.simulated else "closed form"
    text = f"{predicted.seconds:.4f} s an iteration ({kind})"
    if predicted.switch_seconds:
        text += f" + {predicted.switch_seconds:.4f} s for the switch"
    return text


def stage_table(decision: Decision, layers: LayerList) -> list[str]:
    """One row a stage: units, what they are, devices, bytes of the fullest device."""
    rows = [("stage", "units", "holds", "devices", "peak GB", "recompute", "offload")]
    o = decision.plan.o_plan
    for number, stage in enumerate(decision.plan.stages):
        units = range(stage.start, stage.stop)
        peak = max(decision.predicted.device_bytes[d] for d in stage.group)
        rows.append(
            (
                str(number),
                f"{stage.start}-{stage.stop - 1}",
                contents(layers, stage.start, stage.stop),
                ",".join(map(str, stage.group)),
                f"{peak / GB:.2f}",
                str(sum(u in units for u in o.recompute)),
                str(sum(u in units for u in (*o.optimizer, *o.activations))),
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def contents(layers: LayerList, start: int, stop: int) -> str:
    """What a run of units is, such as ``embedding + 3.5 layers``."""
    kinds = [unit.kind for unit in layers.units[start:stop]]
    halves = sum(kind in (Kind.ATTENTION, Kind.MLP) for kind in kinds)
    parts = []
    if Kind.EMBEDDING in kinds:
        parts.append("embedding")
    if halves:
        parts.append(f"{halves / 2:g} layer{'s' if halves != 2 else ''}")
    if Kind.HEAD in kinds:
        parts.append("head")
    return " + ".join(parts)
