"""Described clusters."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_flex.cluster.cluster import (
    DESCRIBED,
    ClusterError,
    Link,
    Rates,
    described,
    described_as,
    load,
    parse,
)


def test_every_description_in_the_package_is_read() -> None:
    assert described() == ("a100", "cpu", "h200")
    for name in described():
        cluster = load(name)
        assert cluster.world_size == cluster.servers * cluster.devices_per_server
        assert 0 < cluster.usable_memory <= cluster.device.memory


def test_devices_are_known_by_the_name_that_cuda_has_for_them() -> None:
    assert described_as("NVIDIA A100-SXM4-80GB") == "a100"
    assert described_as("NVIDIA H200") == "h200"
    for other in ("NVIDIA A100-SXM4-40GB", "NVIDIA H100 80GB HBM3", "NVIDIA GH100"):
        assert described_as(other) is None


def test_the_papers_testbed() -> None:
    cluster = load("a100")
    assert (cluster.servers, cluster.devices_per_server) == (8, 4)
    assert cluster.device.memory == 80 * 10**9
    assert cluster.intra.bytes_per_second == 300e9
    # InfiniBand is 50 GB/s a server, which its four devices share.
    assert cluster.inter.bytes_per_second * 4 == 50e9


def test_the_first_devices_are_part_of_a_server_or_whole_servers() -> None:
    assert load("a100x16").servers == 4
    assert load("a100x2").world_size == load("a100x2").devices_per_server == 2
    assert load("h200x4096").servers == 512
    assert replace(load("a100x8"), name="dgx-a100x8").first(2).name == "dgx-a100x2"
    for name in ("a100x6", "a100x0", "a100x38"):
        with pytest.raises(ClusterError, match="cannot take"):
            load(name)


def test_devices_are_numbered_by_server() -> None:
    cluster = load("a100x8")
    assert [cluster.server_of(d) for d in range(8)] == [0] * 4 + [1] * 4


def test_the_example_of_the_documents_is_one_also_with_short_numbers(tmp_path: Path) -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "simulator.md").read_text()
    found = re.search(r"^```yaml\n(.*?)^```", page, re.M | re.S)
    assert found is not None
    path = tmp_path / "ours.yaml"
    path.write_text(found[1])
    cluster = load(str(path))
    assert cluster.world_size == 32
    path.write_text(found[1].replace(".0e+", "e"))  # a text to YAML
    assert load(str(path)) == cluster


def test_a_description_may_be_a_file(tmp_path: Path) -> None:
    data = yaml.safe_load((DESCRIBED / "a100.yaml").read_text())
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(data))
    assert load(str(path)) == load("a100")
    path.write_text("{")
    with pytest.raises(ClusterError, match="not readable"):
        load(str(path))
    with pytest.raises(ClusterError, match="no cluster 'b200'"):
        load("b200")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("servers",), 0, "at least one server"),
        (("servers",), 2.5, "not a whole number"),
        (("servers",), "many", "is not a whole number"),
        (("device", "memory_bytes"), -1, "memory must be positive"),
        (("device", "memory_bytes"), float("nan"), "not a whole number"),
        (("device", "peak_flops"), float("nan"), "peak_flops must be finite and not negative"),
        (("device", "matmul"), [], "at least one"),
        (("device", "matmul"), [[1e9, float("nan")]], "sustained speed must be positive"),
        (("device", "matmul"), [[1e9, 1e12], [1e9, 1e12]], "must ascend"),
        (("device", "matmul"), [[1e9, 1e12], [2e9, 1e13]], "cannot take less time"),
        (("links", "intra", "bytes_per_second"), 0.0, "must be positive"),
        (("links", "intra", "latency"), float("inf"), "finite"),
        (("reserved_bytes",), 10**12, "less than the device's"),
        (("colour",), "red", "unknown fields"),
        (("links",), {}, "missing fields"),
    ],
)
def test_nonsense_is_refused(path: tuple[str, ...], value: Any, message: str) -> None:
    data = yaml.safe_load((DESCRIBED / "a100.yaml").read_text())
    part = data
    for name in path[:-1]:
        part = part[name]
    part[path[-1]] = value
    with pytest.raises(ClusterError, match=message):
        parse(data)


def test_the_line_through_sustained_speeds() -> None:
    assert Rates(((1e9, 1e12),)).line() == (0.0, 1e-12)
    # Two points are met exactly.
    fixed, per_flop = Rates(((1e9, 1e12), (1e12, 2e12))).line()
    assert fixed + per_flop * 1e9 == pytest.approx(1e-3)
    assert fixed + per_flop * 1e12 == pytest.approx(0.5)


def test_a_link_takes_its_latency_and_its_bytes() -> None:
    assert Link(1e9, 1e-3).seconds(1e6) == pytest.approx(2e-3)
