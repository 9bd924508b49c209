"""A schedule can be looked at: in the terminal, or as a picture."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_flex.model.layers import LayerList
from megatron_flex.planner.plan import Plan
from megatron_flex.schedule import draw
from megatron_flex.schedule.costs import OpCosts
from megatron_flex.schedule.list_scheduler import policy, simulate
from tests.unit.schedule.building import build

TOOL = Path(__file__).resolve().parents[3] / "tools" / "draw_schedule.py"


def tool(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(TOOL), *words], capture_output=True, text=True, timeout=60, check=False
    )


def test_the_grid_of_1f1b_is_the_picture_of_the_textbook() -> None:
    plan = Plan.parse("0:1@0 | 1:2@1")
    placed = simulate(plan, OpCosts.uniform(2, 2), policy("1f1b"))
    assert draw.grid(placed, width=27).splitlines()[:2] == [
        "device 0 |F0-F1-······B0----···B1----|",
        "device 1 |···F0-B0----F1-B1----······|",
    ]


def test_later_stages_of_a_device_are_in_small_letters_and_halves_have_names() -> None:
    plan = Plan.parse("0:1@0 | 1:2@1 | 2:3@1 | 3:4@0")
    placed = simulate(plan, OpCosts.uniform(4, 3), policy("zb-v"))
    rows = draw.grid(placed).splitlines()
    for row in rows[:2]:
        for name in ("F0", "f0", "I2", "i2", "W1", "w1"):
            assert name in row
    assert "mean bubble" in rows[-1]


def test_a_width_is_kept_whatever_the_times() -> None:
    plan = Plan.parse("0:2@0 | 2:5@1,2 | 5:6@0")
    costs = OpCosts.scaled([2, 3, 1], [1, 900, 3, 70, 11])
    for width in (10, 60, 133):
        rows = draw.grid(simulate(plan, costs, policy("zb")), width).splitlines()[:3]
        assert {len(row) for row in rows} == {len("device 0 ||") + width}


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_a_picture_is_written_whole(tmp_path: Path, suffix: str) -> None:
    layers = LayerList(3, tied=True)
    plan = Plan.parse("0:2@0,1 | 2:6@2 | 6:8@0,1")
    costs = OpCosts.uniform(3, 4, reduce=[0.5] * 9, update=[0.2] * 9)
    line = build(plan, layers, costs, (1, 1, 1, 1), policy("zb"), world_size=3).timeline
    path = tmp_path / f"schedule{suffix}"
    draw.save(line, path, "three devices")
    head = path.read_bytes()[:200]
    assert head.startswith(b"\x89PNG") or b"<svg" in path.read_bytes()[:2000]
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    if suffix == ".svg":
        assert "gradient reduction" in _texts(line)


def _texts(line: object) -> str:
    figure = draw.figure(line)  # type: ignore[arg-type]
    return " ".join(text.get_text() for text in figure.legends[0].get_texts())


def test_the_tool_draws_several_schedules_and_says_their_figures() -> None:
    done = tool("--devices", "4", "--micro-batches", "8", "--schedule", "1f1b", "zb-h1", "zb-v")
    assert done.returncode == 0, done.stderr
    for figures in ("makespan 33 s, mean bubble 27.3 %", "makespan 27 s, mean bubble 11.1 %",
                    "makespan 25.5 s, mean bubble 5.9 %"):  # fmt: skip
        assert figures in done.stdout
    assert done.stdout.count("on one device 4 micro-batches") == 3


def test_the_tool_says_what_is_wrong_with_a_plan() -> None:
    done = tool("--plan", "0:2@0 | 3:5@1")
    assert done.returncode == 2
    assert "stage 1 (3:5@1) must start at unit 2" in done.stderr
