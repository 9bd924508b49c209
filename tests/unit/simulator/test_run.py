"""Simulated runs: the same bytes for the same arguments, resumed or not."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from megatron_flex.cluster.cluster import load
from megatron_flex.planner import thin
from megatron_flex.planner.closed_form import closed_form_profile
from megatron_flex.planner.options import PlannerOptions
from megatron_flex.planner.presets import model
from megatron_flex.planner.ways import ways
from megatron_flex.simulator.changes import WAYS, stall_seconds
from megatron_flex.simulator.files import SimulationFile
from megatron_flex.simulator.presets import PLANNED, open_cut
from megatron_flex.simulator.run import Span, open_simulation
from megatron_flex.simulator.setting import Setting
from megatron_flex.simulator.sources import Mixture
from megatron_flex.simulator.summary import Summary
from megatron_flex.telemetry.sink import TelemetryError
from tests.unit.planner.instances_real import small_cluster, small_model

SPAN = Span(Mixture(8, longest=4096, share=0.1, median=2000), 5, tuning=3, simulations=4)


@cache
def setting(name: str = "gpt-3.35b", devices: int = 4) -> Setting:
    config, cluster = model(name), load(f"a100x{devices}")
    return Setting(config, cluster, closed_form_profile(config, cluster))


def run(name: str, span: Span = SPAN, where: Setting | None = None) -> list[dict[str, Any]]:
    simulation = open_simulation(name, where or setting(), span)
    return [simulation.step(k) for k in range(span.iterations)]


@cache
def flexpipe() -> tuple[dict[str, Any], ...]:
    return tuple(run("flexpipe"))


def test_flexpipe_is_never_slower_than_the_plan_it_returns_to() -> None:
    """But for one switch, which is less than a hundredth of these few iterations."""
    static = run("static-slices")
    own = sum(r["elapsed"] for r in flexpipe())
    assert own <= sum(r["elapsed"] for r in static) * 1.01
    assert Summary.of(static).balance > Summary.of(flexpipe()).balance * 0.99 > 0.99


def test_a_record_adds_up() -> None:
    for record in (*flexpipe(), *run("packed-1f1b")):
        parts = ("compute", "bubble", "message", "reduce", "update", "host")
        spent = [record[f"seconds-{p}"] for p in parts]
        assert min(spent) >= 0.0
        assert sum(spent) + record.get("switch-stall", 0.0) == pytest.approx(record["elapsed"])
        assert sum(spent[:4]) == pytest.approx(record["seconds-to-norm"])
        assert 0.0 <= record["bubble"] < 1.0
        assert record["tokens_per_second"] == pytest.approx(record["tokens"] / record["elapsed"])
        assert record["seconds-perfect"] <= record["seconds-balanced"] <= record["elapsed"]
        assert record["memory-measured"] == pytest.approx(max(record["memory-by-worker"]), abs=1)
        assert record["memory-over-budget"] == 0


@pytest.mark.parametrize("name", sorted(set(PLANNED) - {"flexpipe"}))
def test_every_ablation_runs(name: str) -> None:
    span = Span(SPAN.source, 2, tuning=1, simulations=2)
    records = run(name, span)
    assert [r["iteration"] for r in records] == [1, 2]
    assert all(r["tokens"] == sum(SPAN.source.batch(k)) for k, r in enumerate(records))
    if name == "no-slices":
        assert not any(r["slices"] for r in records)


@pytest.mark.parametrize("name", ["flexpipe-untuned", "hbsa", "dynapipe"])
def test_an_interrupted_run_goes_on_with_the_same_bytes(name: str, tmp_path: Path) -> None:
    header = {"configuration": name}

    def go(directory: Path, stop: int) -> bytes:
        file = SimulationFile(directory / "a.jsonl", header)
        simulation = open_simulation(name, setting(), SPAN)
        if file.state is not None:
            simulation.restore(file.state)
        for k in range(file.start, stop):
            file.add(simulation.step(k))
            if (k + 1) % 2 == 0 or k + 1 == SPAN.iterations:
                file.save(k + 1, simulation.state())
        file.close()
        return (directory / "a.jsonl").read_bytes()

    whole = go(tmp_path / "whole", SPAN.iterations)
    go(tmp_path / "broken", 3)
    with (tmp_path / "broken" / "a.jsonl").open("ab") as torn:
        torn.write(b'{"event": "iter')
    assert go(tmp_path / "broken", SPAN.iterations) == whole
    assert json.loads(whole.splitlines()[0]) == {
        "event": "run", "iteration": 0, "kind": "simulation", **header,
    }  # fmt: skip


def test_between_searches_the_best_known_plans_are_taken() -> None:
    span = Span(SPAN.source, 4, tuning=1, simulations=3, every=3)
    records = run("flexpipe", span)
    assert records[0]["simulations"] >= 50
    assert all(r["simulations"] <= 3 for r in records[1:])
    assert records == run("flexpipe", span)


def test_another_simulations_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    SimulationFile(path, {"seed": 1}).close()
    before = path.read_bytes()
    with pytest.raises(TelemetryError, match="is not this simulation, with the same arguments"):
        SimulationFile(path, {"seed": 2})
    assert path.read_bytes() == before


def test_ways_of_switching_cost_more_the_less_they_overlap() -> None:
    planner = setting(devices=8).planner(schedule="auto")
    cut = ways(open_cut(setting(devices=8)), SPAN.source.batch(0), 8)[0]
    deep, flat = planner.even_plans[2], planner.even_plans[1]
    running = planner.running(flat, cut)
    costs = planner.units
    seconds = [stall_seconds(costs, running, deep, way) for way in WAYS]
    assert seconds == sorted(seconds)
    assert seconds[0] < seconds[-1]
    assert [stall_seconds(costs, running, flat, way) for way in WAYS] == [0.0] * len(WAYS)


def test_one_device_stands_for_several(monkeypatch: pytest.MonkeyPatch) -> None:
    """Totals are those of all devices; how long it takes is about what they take."""
    monkeypatch.setattr(thin, "MOST", 4)
    config, cluster = small_model(4), small_cluster(16)
    base = PlannerOptions(server_groups_above=8)
    full = Setting(config, cluster, closed_form_profile(config, cluster), base)
    some = full.thinned
    assert (some.devices, some.width, some.full) == (4, 4, full)
    span = Span(Mixture(256, 1, longest=2048), 2, 1, 4)
    for name in ("flexpipe-untuned", "packed-1f1b", "tensor-parallel", "context-parallel"):
        whole = open_simulation(name, full, span).step(0)
        part = open_simulation(name, some, span.of(some)).step(0)
        for field in ("tokens", "global_batch_size", "consumed_samples", "flops", "longest"):
            assert part[field] == whole[field]
        assert part["elapsed"] == pytest.approx(whole["elapsed"], rel=0.1), name
        assert len(part["lengths"]) < len(whole["lengths"])
