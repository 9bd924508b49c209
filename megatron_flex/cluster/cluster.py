"""A described cluster: devices, memory, sustained speed and links, read from a small file.

Descriptions are YAML or JSON (``megatron_flex/cluster/described/``). ``load("a100x16")`` takes 16
devices of the description ``a100``, whose servers may be more than it has;
``load("path/to/file.yaml")`` reads a file.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

DESCRIBED = Path(__file__).with_name("described")
KNOWN = (("A100-SXM4-80GB", "a100"), ("H200", "h200"))
"""Parts of devices' names, and their descriptions."""


class ClusterError(ValueError):
    """A description that cannot be: the message names the file's field and the value."""


@dataclass(frozen=True)
class Link:
    """A path for bytes: ``seconds = latency + bytes / bytes_per_second``, per device and way."""

    bytes_per_second: float
    latency: float

    def __post_init__(self) -> None:
        _positive("bytes_per_second", self.bytes_per_second)
        if not (0.0 <= self.latency < math.inf):
            raise ClusterError(f"latency must be finite and not negative, not {self.latency}")

    def seconds(self, size: float) -> float:
        """Seconds for ``size`` bytes."""
        return self.latency + size / self.bytes_per_second


@dataclass(frozen=True)
class Rates:
    """Sustained speed against the size of the operation.

    ``points`` are (FLOPs of one operation, FLOP/s reached), ascending in size. Larger operations
    never take less time.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        if not self.points:
            raise ClusterError("sustained speeds need at least one [flops, flops_per_second] pair")
        before = (0.0, 0.0)
        for size, rate in self.points:
            _positive("the size of an operation", size)
            _positive("a sustained speed", rate)
            if size <= before[0]:
                raise ClusterError(f"sizes of operations must ascend: {size} after {before[0]}")
            if before[1] and size / rate < before[0] / before[1]:
                raise ClusterError(
                    f"an operation of {size:g} FLOPs cannot take less time than one of"
                    f" {before[0]:g}: check the sustained speeds"
                )
            before = (size, rate)

    def line(self) -> tuple[float, float]:
        """``(fixed, per_flop)`` seconds of the line ``fixed + per_flop * FLOPs``.

        Least squares of the relative error over the points; a constant speed has ``fixed`` 0.
        """
        if len(self.points) == 1:
            return 0.0, 1.0 / self.points[0][1]
        # Minimise sum((fixed + per_flop * f) / t - 1)^2 with t = f / rate.
        saa = sab = sbb = sa = sb = 0.0
        for size, rate in self.points:
            a, b = rate / size, rate
            saa, sab, sbb = saa + a * a, sab + a * b, sbb + b * b
            sa, sb = sa + a, sb + b
        determinant = saa * sbb - sab * sab
        fixed = (sa * sbb - sb * sab) / determinant if determinant > 0 else 0.0
        if fixed <= 0.0:
            return 0.0, sb / sbb
        return fixed, (sb * saa - sa * sab) / determinant


@dataclass(frozen=True)
class Device:
    """One device (with tensor parallelism: one group).

    Attributes:
        memory: bytes.
        matmul: speed of matrix products.
        attention: speed of the attention kernel, forward and backward.
        memory_bytes_per_second: bandwidth of the device's own memory; the optimizer's update is
            bound by it.
        peak_flops: the data sheet's FLOP/s, for MFU; 0 when unknown.
    """

    name: str
    memory: int
    matmul: Rates
    attention: Rates
    memory_bytes_per_second: float
    peak_flops: float = 0.0

    def __post_init__(self) -> None:
        _positive("memory", self.memory)
        _positive("memory_bytes_per_second", self.memory_bytes_per_second)
        if not (0.0 <= self.peak_flops < math.inf):
            raise ClusterError(f"peak_flops must be finite and not negative, not {self.peak_flops}")


@dataclass(frozen=True)
class Cluster:
    """``servers`` servers with ``devices_per_server`` devices each; devices are numbered by server.

    Attributes:
        intra: between two devices of a server.
        inter: between two devices of different servers; a device's share of the network.
        host: between a device and its server's memory.
        reserved: bytes on each device that training cannot use (context, libraries, fragments).
    """

    name: str
    servers: int
    devices_per_server: int
    device: Device
    intra: Link
    inter: Link
    host: Link
    reserved: int = 0

    def __post_init__(self) -> None:
        if self.servers < 1 or self.devices_per_server < 1:
            raise ClusterError("a cluster needs at least one server with one device")
        if not 0 <= self.reserved < self.device.memory:
            raise ClusterError(
                f"reserved ({self.reserved}) must be less than the device's {self.device.memory}"
                " bytes of memory"
            )

    @property
    def world_size(self) -> int:
        """Number of devices."""
        return self.servers * self.devices_per_server

    @property
    def usable_memory(self) -> int:
        """Bytes of a device that training can use."""
        return self.device.memory - self.reserved

    def server_of(self, device: int) -> int:
        """The server that holds ``device``."""
        return device // self.devices_per_server

    def grouped(self, size: int) -> Cluster:
        """The cluster whose devices are groups of ``size`` neighbouring devices of a server."""
        if size < 1 or self.devices_per_server % size:
            raise ClusterError(
                f"groups of {size} devices do not divide a server's {self.devices_per_server}"
            )
        return replace(self, devices_per_server=self.devices_per_server // size)

    def first(self, devices: int) -> Cluster:
        """The cluster of so many devices: part of one server, or whole servers.

        There may be more of these than are described: they are alike.
        """
        per_server = self.devices_per_server
        if devices < 1 or (devices > per_server and devices % per_server):
            raise ClusterError(
                f"cannot take {devices} devices of {self.name}: its servers have {per_server}; take"
                f" up to {per_server}, or a multiple of that"
            )
        name = f"{re.sub('x[0-9]+$', '', self.name)}x{devices}"
        if devices <= per_server:
            return replace(self, name=name, servers=1, devices_per_server=devices)
        return replace(self, name=name, servers=devices // per_server)


def _positive(name: str, value: float) -> None:
    if not (0.0 < value < math.inf):
        raise ClusterError(f"{name} must be positive and finite, not {value}")


def _take(data: Mapping[str, Any], where: str, **types: type) -> dict[str, Any]:
    """The named fields, each of its type; unknown and missing fields are errors."""
    if not isinstance(data, Mapping):
        raise ClusterError(f"{where} must be a mapping")
    unknown = sorted(set(data) - set(types))
    missing = sorted(set(types) - set(data))
    if unknown or missing:
        raise ClusterError(f"{where}: unknown fields {unknown}, missing fields {missing}")
    values = {}
    for name, kind in types.items():
        value = data[name]
        what = {int: "whole number", float: "number", list: "list", dict: "mapping"}
        try:
            # YAML takes 80e9 for a text; its own form is 80.0e+9.
            values[name] = int(float(value)) if kind is int else kind(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise ClusterError(f"{where}.{name}: '{value}' is not a {what[kind]}") from error
        if kind is int and float(value) != values[name]:
            raise ClusterError(f"{where}.{name}: '{value}' is not a whole number")
    return values


def _rates(data: Any, where: str) -> Rates:
    if not isinstance(data, Sequence) or isinstance(data, str):
        raise ClusterError(f"{where} must be a list of [flops, flops_per_second]")
    try:
        return Rates(tuple((float(size), float(rate)) for size, rate in data))
    except (TypeError, ValueError) as error:
        raise ClusterError(f"{where}: {error}") from error


def parse(data: Mapping[str, Any], where: str = "cluster") -> Cluster:
    """A cluster from a description's fields; :class:`ClusterError` says what is wrong."""
    top = _take(
        data, where, name=str, servers=int, devices_per_server=int, reserved_bytes=int,
        device=dict, links=dict,
    )  # fmt: skip
    device = _take(
        top["device"], f"{where}.device", name=str, memory_bytes=int, peak_flops=float,
        memory_bytes_per_second=float, matmul=list, attention=list,
    )  # fmt: skip
    links = _take(top["links"], f"{where}.links", intra=dict, inter=dict, host=dict)
    made = {}
    for name, fields in links.items():
        link = _take(fields, f"{where}.links.{name}", bytes_per_second=float, latency=float)
        made[name] = Link(**link)
    return Cluster(
        name=top["name"],
        servers=top["servers"],
        devices_per_server=top["devices_per_server"],
        device=Device(
            name=device["name"],
            memory=device["memory_bytes"],
            matmul=_rates(device["matmul"], f"{where}.device.matmul"),
            attention=_rates(device["attention"], f"{where}.device.attention"),
            memory_bytes_per_second=device["memory_bytes_per_second"],
            peak_flops=device["peak_flops"],
        ),
        reserved=top["reserved_bytes"],
        **made,
    )


def description(cluster: Cluster) -> dict[str, Any]:
    """The fields that :func:`parse` makes an equal cluster from; JSON and YAML can hold them."""
    device = cluster.device
    return {
        "name": cluster.name,
        "servers": cluster.servers,
        "devices_per_server": cluster.devices_per_server,
        "reserved_bytes": cluster.reserved,
        "device": {
            "name": device.name,
            "memory_bytes": device.memory,
            "peak_flops": device.peak_flops,
            "memory_bytes_per_second": device.memory_bytes_per_second,
            "matmul": [list(point) for point in device.matmul.points],
            "attention": [list(point) for point in device.attention.points],
        },
        "links": {
            name: {"bytes_per_second": link.bytes_per_second, "latency": link.latency}
            for name, link in (
                ("intra", cluster.intra),
                ("inter", cluster.inter),
                ("host", cluster.host),
            )
        },
    }


def described() -> tuple[str, ...]:
    """Names of the descriptions in the package."""
    return tuple(sorted(p.stem for p in DESCRIBED.glob("*.yaml")))


def described_as(device: str) -> str | None:
    """The description of devices of this name, as CUDA says it; ``None`` where there is none."""
    return next((name for known, name in KNOWN if known in device), None)


def load(name: str) -> Cluster:
    """A described cluster by name (``a100``, ``a100x16``) or by the path of a file."""
    match = re.fullmatch(r"([a-z0-9-]+?)(?:x(\d+))?", name)
    if match and (DESCRIBED / f"{match[1]}.yaml").exists():
        cluster = parse(yaml.safe_load((DESCRIBED / f"{match[1]}.yaml").read_text()), match[1])
        return cluster.first(int(match[2])) if match[2] else cluster
    path = Path(name)
    if not path.exists():
        raise ClusterError(
            f"no cluster '{name}': give a file, or one of {', '.join(described())}, with xN for N"
            " devices"
        )
    text = path.read_text()
    try:
        data = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (json.JSONDecodeError, yaml.YAMLError) as error:
        raise ClusterError(f"{name} is not readable: {error}") from error
    return parse(data, name)
