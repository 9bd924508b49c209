"""``--flexpipe-profile measure``: what the layers cost here, measured before a run starts.

All workers measure at the same time, as they will train at the same time, the median counts, and
all get the same profile. It is kept beside the checkpoints, so that a run that is resumed on the
same kind of device goes on with it and starts at once.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron_flex.cluster.cluster import Link
from megatron_flex.cluster.fit import Point
from megatron_flex.cluster.profile import Profile, ProfileError
from megatron_flex.config.config import Config
from megatron_flex.config.flexpipe import MEASURE
from megatron_flex.link_speed import host_link, link, there_and_back
from megatron_flex.loop.assemble import Parts
from megatron_flex.loop.iteration import tensor_of
from megatron_flex.loop.questions import Run
from megatron_flex.model.config import ModelConfig
from megatron_flex.planner.plan import PlanError
from megatron_flex.planner.tensor import check_profile
from megatron_flex.profiling import Samples, Shape, Workbench, aligned, fit, grid, measure
from megatron_flex.runtime.machine import machine_name
from megatron_flex.runtime.world import World, server_size

FILE = "flexpipe_profile.json"
"""In the directory of --save."""
SECONDS = 6.0
"""That a measurement may take, about."""
LENGTHS = (32, 128, 512)
"""Of the samples in a micro-batch, besides one sample alone."""
BATCHES = 8
"""First batches that say how large micro-batches are."""
LEAST, LARGEST = 1024, 8192
"""Tokens of the largest micro-batch: enough to see costs grow, and not more than fit beside."""
FEWEST, MOST = 3, 9
"""Repeats of each point."""


def with_measured(config: Config, world: World, parts: Parts) -> Parts:
    """The parts of a run, with the costs of its layers where they are to be measured. Collective.

    Where what is measured makes no sense, since the machine is disturbed, they follow from the
    description of the devices, which is said.

    Raises:
        PlanError: they cannot be kept.
    """
    if not config.flexpipe.measures or parts.train is None:
        return parts
    profile, line = _profile(config, world, parts)
    if world.process == world.processes - 1:
        print(f" costs of layers: {line}", flush=True)
    return replace(parts, profile=profile)


def _profile(config: Config, world: World, parts: Parts) -> tuple[Profile | None, str]:
    kept = world.broadcast(_kept(config, parts, world) if world.process == 0 else None)
    if kept is not None:
        assert isinstance(kept, str)
        return Profile.from_json(kept), f"kept in {config.checkpoint.load}/{FILE}"
    began = time.perf_counter()
    profile, problem = _measure(config, world, parts)
    if profile is None:
        return None, f"as the devices are described, since what was measured is no use: {problem}"
    low, high = profile.tokens
    line = f"measured on {low} to {high} tokens, {time.perf_counter() - began:.0f} s"
    save = config.checkpoint.save
    if save is None:
        return profile, line
    if world.process == 0:
        _keep(profile, Path(save))
    return profile, f"{line}, kept in {save}/{FILE}"


def measured_tokens(run: Run) -> list[int]:
    """Token counts up to the largest micro-batch of a run, each half of the next."""
    data = run.config.data
    batches = (
        [m.tokens for m in run.micro_batches(n, run.parts.plan)] for n in run.lengths(BATCHES)
    )
    largest = min(LARGEST, max(LEAST, data.micro_batch_tokens or 0, *map(max, batches)))
    return sorted({max(16, largest >> i) for i in range(6)})


def measured_model(model: ModelConfig, longest: int) -> ModelConfig:
    """A run's model, with positions for ``longest`` tokens."""
    return replace(model, max_position_embeddings=max(model.max_position_embeddings, longest))


def _kept(config: Config, parts: Parts, world: World) -> str | None:
    """The profile of a run that is resumed, if it is of this model, device and way of sharing."""
    if config.checkpoint.load is None:
        return None
    try:
        profile = Profile.load(Path(config.checkpoint.load) / FILE)
        profile.check_model(parts.model)
        check_profile(profile, tensor_of(config))
    except ProfileError:
        return None
    return None if profile.doubt(machine_name(world.device)) else profile.to_json()


def _keep(profile: Profile, directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        profile.save(directory / FILE)
    except OSError as error:
        raise PlanError(
            f"--flexpipe-profile {MEASURE}: cannot write {directory / FILE}: {error.strerror}"
        ) from error


def _measure(config: Config, world: World, parts: Parts) -> tuple[Profile | None, str]:
    device = world.device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        links = _links(world)
        tokens = measured_tokens(Run(config, parts))
        bench = Workbench(measured_model(parts.model, max(tokens)), device, world.tensor)
        shapes, repeats = _affordable(bench, world, tokens)
        samples = _medians(world, measure(bench, shapes, repeats))
        found: tuple[str | None, str] = None, ""
        if world.rank == 0:  # all that share its layers: what is measured here is measured together
            name = f"this run on {machine_name(device) or device.type}"
            try:
                found = fit(bench, samples, shapes, name, links).to_json(), ""
            except ProfileError as error:
                found = None, str(error)
        said: Any = world.broadcast(found)
    del bench
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    text, problem = said
    return (None if text is None else Profile.from_json(text)), problem


def _affordable(bench: Workbench, world: World, tokens: Sequence[int]) -> tuple[list[Shape], int]:
    """Micro-batches that can be measured in time, and how often. Equal on all workers.

    Larger ones follow along the fitted lines.
    """
    sizes: list[int] = []
    for size in tokens:
        (shape,) = aligned([Shape((size,))], bench.config.alignment)
        for _ in range(2):  # the first warms up
            began = time.perf_counter()
            bench.run(shape)
            seconds = max(world.gather(time.perf_counter() - began))
        sizes.append(size)
        if len(sizes) >= 3 and 2 * FEWEST * len(LENGTHS) * seconds > SECONDS:
            break
    shapes = aligned(grid(sizes, LENGTHS), bench.config.alignment)
    began = time.perf_counter()
    for shape in shapes:
        bench.run(shape)
    a_round = max(world.gather(time.perf_counter() - began))
    return shapes, min(MOST, max(FEWEST, int(SECONDS / a_round) - 1))


def _medians(world: World, mine: Samples) -> Samples:
    """Of all workers' seconds, point by point."""
    values = [[p.value for p in points] for points in mine.values()]
    every = world.gather(values)
    found: Samples = {}
    for number, (key, points) in enumerate(mine.items()):
        columns = zip(points, *(worker[number] for worker in every), strict=True)
        found[key] = [
            Point(p.tokens, p.squares, statistics.median(seconds)) for p, *seconds in columns
        ]
    return found


def _links(world: World) -> dict[str, Link]:
    """Between a device and its host's memory, and between two devices of a server."""
    found = {"host": host_link(world.device)}
    other = world.tensor.size  # the first worker of the second device
    if server_size(world.size, world.tensor.size) < 2 or world.size < 2:
        return found
    if world.process in (0, other):
        peer = other - world.process
        times = there_and_back(world.process == 0, peer, world.device, lambda: None)
        found["intra"] = link(times)
    return found
