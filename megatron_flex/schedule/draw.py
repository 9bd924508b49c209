"""Pictures of a schedule: a grid of characters, or an SVG or PNG file.

In both, a row is a device and time runs to the right. ``F3`` is the forward of micro-batch 3,
``B3`` its backward; where the backward is split, ``I3`` is the gradient of the input and ``W3``
that of the weights. Where a device holds several stages, the later ones are in small letters (in
pictures: in darker colours).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_flex.schedule.operations import OpKind
from megatron_flex.schedule.placement import Placement
from megatron_flex.schedule.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Forward, backward (or its input half), weight half; the later stages of a device are darker.
COLOURS = {
    "F": ("#9ecae1", "#4292c6"),
    "B": ("#a1d99b", "#41ab5d"),
    "I": ("#a1d99b", "#41ab5d"),
    "W": ("#fdd0a2", "#f16913"),
}
REDUCTION, UPDATE = "#9e9ac8", "#bdbdbd"
IDLE = "·"


def letter(placement: Placement, kind: OpKind) -> str:
    """``F``, ``B``, ``I`` or ``W``."""
    return "FIW"[kind] if placement.problem.split else "FB"[kind]


def grid(placement: Placement, width: int | None = None, unit: str = "bytes") -> str:
    """A schedule as text, one line for each device that holds a stage.

    Args:
        width: characters for the whole makespan; default so that a short operation shows its
            name, between 60 and 240.
        unit: what the costs count activations in.

    Below the rows: what the letters mean, makespan, mean bubble, peak activations.
    """
    problem = placement.problem
    devices = problem.plan.devices
    if width is None:
        width = _width(placement)
    scale = width / placement.makespan if placement.makespan > 0 else 0.0
    left = max(len(str(d)) for d in devices)
    lines = []
    for device in devices:
        row = [IDLE] * width
        for code in placement.order[device]:
            kind, stage, micro_batch = problem.decode(code)
            first = round(placement.start[code] * scale)
            last = max(first + 1, round(placement.finish[code] * scale))
            name = letter(placement, kind) + str(micro_batch)
            if stage != problem.plan.stages_of(device)[0]:
                name = name.lower()
            text = name if len(name) <= last - first else name[: last - first]
            row[first:last] = text.ljust(last - first, "-")[: max(0, width - first)]
        lines.append(f"device {device:>{left}} |{''.join(row[:width])}|")
    return "\n".join([*lines, _summary(placement, unit)])


def _width(placement: Placement) -> int:
    """Characters so that most operations have room for their names."""
    lengths = np.sort(placement.finish - placement.start)
    short = float(lengths[len(lengths) // 10])
    room = 1 + len(str(placement.problem.costs.num_micro_batches - 1))
    wanted = placement.makespan / short * (room + 1) if short > 0 else 0
    return int(min(240, max(60, wanted)))


def _summary(placement: Placement, unit: str) -> str:
    backward = "I gradient of inputs, W of weights" if placement.problem.split else "B backward"
    if placement.problem.forward_only:
        backward = "no backward"
    peak = max(placement.peak)
    amount = _bytes(peak) if unit == "bytes" else f"{peak:.3g} {unit}"
    held = f", most activations on one device {amount}" if peak else ""
    bubble = f"{100 * placement.mean_bubble:.1f} %"
    return (
        f"F forward, {backward}, {IDLE} waiting; small letters: the device's later stages\n"
        f"makespan {placement.makespan:.4g} s, mean bubble {bubble}{held}"
    )


def _bytes(count: float) -> str:
    for unit in ("bytes", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.4g} {unit}"
        count /= 1000
    return f"{count:.4g} TB"


def figure(schedule: Placement | Timeline, title: str = "") -> Figure:
    """A schedule as a matplotlib figure.

    Each device has a row of operations. Of a timeline there is also, below each row, a thin row
    of gradient reductions, and a dashed line at the global norm, after which the updates (grey)
    follow. Raises ``ImportError`` when matplotlib is missing.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    placement = schedule.placement if isinstance(schedule, Timeline) else schedule
    problem = placement.problem
    devices = problem.plan.devices
    fig = Figure(figsize=(14, 1.2 + 0.62 * len(devices)), layout="constrained")
    axes = fig.add_subplot()
    span = schedule.makespan or 1.0
    for row, device in enumerate(devices):
        _draw_operations(axes, placement, device, row, span)
        if isinstance(schedule, Timeline):
            _draw_reductions(axes, schedule, device, row)
    if isinstance(schedule, Timeline):
        axes.axvline(schedule.norm, linestyle="--", linewidth=0.8, color="#636363")
    axes.set_yticks([r + 0.4 for r in range(len(devices))], [f"device {d}" for d in devices])
    axes.set_ylim(len(devices) + 0.05, -0.05)
    axes.set_xlim(0, span)
    axes.set_xlabel("seconds")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    names = {"F": "forward", "I": "gradient of inputs", "W": "gradient of weights"}
    if not problem.split:
        names = {"F": "forward", "B": "backward"}
    handles = [Patch(facecolor=COLOURS[key][0], label=name) for key, name in names.items()]
    if isinstance(schedule, Timeline):
        handles.append(Patch(facecolor=REDUCTION, label="gradient reduction"))
        handles.append(Patch(facecolor=UPDATE, label="update"))
    if any(len(problem.plan.stages_of(d)) > 1 for d in devices):
        handles.append(Patch(facecolor="none", label="darker: the device's later stages"))
    fig.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    figures = f"makespan {span:.4g} s, mean bubble {100 * placement.mean_bubble:.1f} %"
    axes.set_title(f"{title}: {figures}" if title else figures, loc="left", fontsize=11)
    return fig


def _draw_operations(axes: Any, placement: Placement, device: int, row: int, span: float) -> None:
    problem = placement.problem
    first_stage = problem.plan.stages_of(device)[0]
    for code in placement.order[device]:
        kind, stage, micro_batch = problem.decode(code)
        start, seconds = placement.start[code], placement.finish[code] - placement.start[code]
        later = stage != first_stage
        axes.broken_barh([(start, seconds)], (row + 0.04, 0.74), edgecolor="white", linewidth=0.4,
                         facecolor=COLOURS[letter(placement, kind)][later])  # fmt: skip
        if seconds > span * 0.006 * len(str(micro_batch)):
            axes.text(start + seconds / 2, row + 0.41, str(micro_batch), ha="center", va="center",
                      fontsize=7, color="white" if later else "black")  # fmt: skip


def _draw_reductions(axes: Any, timeline: Timeline, device: int, row: int) -> None:
    for interval in timeline.reduces[device]:
        axes.broken_barh([(interval.start, interval.finish - interval.start)],
                         (row + 0.8, 0.14), facecolor=REDUCTION, edgecolor="none")  # fmt: skip
    if timeline.update[device]:
        axes.broken_barh([(timeline.norm, timeline.update[device])], (row + 0.04, 0.74),
                         facecolor=UPDATE, edgecolor="white", linewidth=0.4)  # fmt: skip


def save(schedule: Placement | Timeline, path: str | Path, title: str = "") -> None:
    """Write a picture; the suffix decides the format (.svg, .png, .pdf).

    The file appears whole or not at all.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.stem}.part{path.suffix}")
    try:
        figure(schedule, title).savefig(temporary, dpi=150)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
