"""Measures what the units of a model cost on this machine: the input of the planner's profile.

The very modules and slabs that training uses run forward and backward on packed micro-batches over
a grid of token counts and sample lengths. Repeats are interleaved over all points in a new random
order each time, so that a disturbance does not fall on one point alone; a point's value is the
median. On a CPU the clock is this process's CPU time: what other processes take does not count.

Where ranks share each layer all of them measure together, each its own part. What they wait for
each other belongs to the costs, so the clock is the wall's then; of all ranks' medians the largest
counts.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from megatron_flex.cluster.cluster import Link
from megatron_flex.cluster.fit import FitError, Point, errors, fit_line
from megatron_flex.cluster.profile import KindProfile, Line, Profile, ProfileError, shape_of
from megatron_flex.data.packed import PackedBatch
from megatron_flex.model.config import ModelConfig
from megatron_flex.model.layers import Kind
from megatron_flex.model.tape import Tape, recording
from megatron_flex.model.tensor_group import SOLO, TensorGroup
from megatron_flex.planner.memory import boundary_bytes, unit_memory
from megatron_flex.planner.plan import Plan, Stage
from megatron_flex.planner.tensor import TensorParallel
from megatron_flex.runtime.holdings import Holdings
from megatron_flex.runtime.host_allocator import keep_freed_memory
from megatron_flex.runtime.machine import machine_name
from megatron_flex.runtime.optimizer import OptimizerConfig, StepSize, update

PARTS = ("forward", "backward_input", "backward")
Samples = dict[tuple[Kind, str], list[Point]]


@dataclass(frozen=True)
class Shape:
    """A micro-batch to measure: the lengths of its samples."""

    lengths: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return sum(self.lengths)

    @property
    def squares(self) -> int:
        """Token pairs."""
        return sum(n * n for n in self.lengths)


def grid(tokens: Sequence[int], lengths: Sequence[int]) -> list[Shape]:
    """Micro-batches of ``tokens`` tokens cut to samples of each length (and one sample alone)."""
    shapes: dict[Shape, None] = {}
    for total in tokens:
        for length in (*lengths, total):
            size = min(length, total)
            whole, rest = divmod(total, size)
            shapes[Shape((size,) * whole + ((rest,) if rest else ()))] = None
    return list(shapes)


def aligned(shapes: Sequence[Shape], multiple: int) -> list[Shape]:
    """The same with the padding behind them that training has (``MicroBatch.aligned``)."""
    tails = (-shape.tokens % multiple for shape in shapes)
    return [
        Shape((*shape.lengths, tail)) if tail else shape
        for shape, tail in zip(shapes, tails, strict=True)
    ]


def random_shapes(count: int, tokens: tuple[int, int], longest: int, seed: int) -> list[Shape]:
    """Micro-batches that no grid has: random totals, random lengths within both ranges."""
    draw = random.Random(seed)
    shapes = []
    for _ in range(count):
        total = round(tokens[0] * (tokens[1] / tokens[0]) ** draw.random())
        top = max(2, min(longest, total))
        lengths: list[int] = []
        while sum(lengths) < total:
            length = round(16 * (top / 16) ** draw.random()) if top > 16 else top
            lengths.append(min(length, total - sum(lengths)))
        shapes.append(Shape(tuple(lengths)))
    return shapes


class Workbench:
    """One unit of each kind, with slabs, as a worker of a running job has them.

    ``group`` are the workers that share the units; all do the same then.
    """

    def __init__(
        self, config: ModelConfig, device: torch.device, group: TensorGroup = SOLO
    ) -> None:
        self.config = replace(config, num_layers=1)
        self.device = device
        if device.type == "cpu":
            keep_freed_memory()  # as a worker does
        self.group = group
        self.tensor = TensorParallel(group.size, group.sequence_parallel)
        units = self.config.layers.num_units
        plan = Plan((Stage(0, units, (0,)),))
        self.holdings = Holdings(self.config, plan, 0, device, group=group)
        self.blocks = {u.kind: self.holdings.blocks[u.index] for u in self.config.layers.units}
        for block in self.blocks.values():
            block.train()

    def batch(self, shape: Shape) -> PackedBatch:
        """The tensors of a micro-batch, with random tokens."""
        generator = torch.Generator().manual_seed(shape.tokens)
        size = self.config.vocab_size
        tokens = torch.randint(size, (shape.tokens,), generator=generator)
        bert = self.config.architecture == "bert"
        return PackedBatch(
            lengths=shape.lengths,
            samples=tuple(range(len(shape.lengths))),
            starts=(0,) * len(shape.lengths),
            tokens=tokens,
            labels=tokens,
            loss_mask=torch.ones(shape.tokens),
            token_types=torch.zeros_like(tokens) if self.config.num_tokentypes else None,
            sentence_order=torch.zeros(len(shape.lengths), dtype=torch.long) if bert else None,
        ).to(self.device)

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            return time.perf_counter()
        return time.process_time() if self.group.size == 1 else time.perf_counter()

    def _together(self) -> None:
        """Wait for the other workers."""
        if self.group.size > 1:
            self.group.sum(torch.zeros(1, device=self.device))

    def agreed(self, values: Sequence[float]) -> list[float]:
        """The largest of all workers' values, one by one."""
        if self.group.size == 1:
            return list(values)
        mine = torch.tensor([values], dtype=torch.float64, device=self.device)
        found: list[float] = self.group.gather(mine).amax(0).tolist()
        return found

    def _input(self, shape: Shape, kind: Kind) -> Tensor | None:
        if kind is Kind.EMBEDDING:
            return None
        dtype = next(self.blocks[kind].parameters()).dtype
        size = (self.group.rows(shape.tokens), 1, self.config.hidden_size)
        return torch.randn(size, dtype=dtype, device=self.device, requires_grad=True)

    def run(self, shape: Shape) -> dict[Kind, dict[str, float]]:
        """Seconds of the parts of a pass over one micro-batch, of one unit of each kind.

        The units are a chain, as in training: what a backward needs was made some units before, so
        that it is no longer in a processor's caches.
        """
        batch, hidden = self.batch(shape), None
        chain: list[tuple[Kind, Tensor | None, Tensor, Tape]] = []
        found: dict[Kind, dict[str, float]] = {}
        for kind, block in self.blocks.items():
            tape = Tape()
            self._together()
            begin = self._now()
            with recording(tape):
                output = block(hidden, batch)
            found[kind] = {"forward": self._now() - begin}
            chain.append((kind, hidden, output, tape))
            hidden = output.detach().requires_grad_()
        gradient: Tensor | None = torch.ones_like(output)
        del output, hidden
        while chain:
            kind, hidden, output, tape = chain.pop()
            self._together()
            begin = self._now()
            torch.autograd.backward(output, gradient)
            found[kind]["backward_input"] = self._now() - begin
            tape.run()
            found[kind]["backward"] = self._now() - begin
            gradient = None if hidden is None else hidden.grad
        return found

    def activation(self, kind: Kind, shape: Shape) -> int:
        """Bytes that a forward keeps for the backward: unique storages, parameters apart."""
        block, batch = self.blocks[kind], self.batch(shape)
        own = {p.untyped_storage().data_ptr() for p in block.parameters()}
        kept: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if tensor.is_floating_point() and storage.data_ptr() not in own:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            block(self._input(shape, kind), batch)
        return sum(kept.values())

    def update(self, slab: int) -> float:
        """Seconds of one optimizer step of a slab."""
        self._together()
        begin = self._now()
        update(self.holdings.slabs[slab], OptimizerConfig(), StepSize(0.0, 0.0), 1.0, 0)
        return self._now() - begin


def measure(
    bench: Workbench,
    shapes: Sequence[Shape],
    repeats: int,
    progress: Callable[[int], object] = lambda _: None,
    seed: int = 0,
) -> Samples:
    """Median seconds of every part of every kind on every shape.

    ``progress`` is called with the number of runs done since the last call.
    """
    found: dict[tuple[Kind, str, Shape], list[float]] = defaultdict(list)
    order, draw = list(shapes), random.Random(seed)
    for repeat in range(repeats + 1):
        draw.shuffle(order)
        for shape in order:
            units = bench.run(shape)
            if repeat:  # the first round warms caches and allocators up
                for kind, parts in units.items():
                    for part, seconds in parts.items():
                        found[kind, part, shape].append(seconds)
            progress(1)
    samples: Samples = defaultdict(list)
    medians = bench.agreed([statistics.median(values) for values in found.values()])
    for (kind, part, shape), value in zip(found, medians, strict=True):
        samples[kind, part].append(Point(float(shape.tokens), float(shape.squares), value))
    return dict(samples)


def runs(shapes: Sequence[Shape], repeats: int) -> int:
    """How often :func:`measure` calls its progress."""
    return len(shapes) * (repeats + 1)


def fit(
    bench: Workbench,
    samples: Samples,
    shapes: Sequence[Shape],
    name: str,
    links: dict[str, Link],
    update_repeats: int = 7,
) -> Profile:
    """A profile from measured points; activations and updates are measured here."""
    memory = unit_memory(bench.config, bench.tensor)
    kinds = {}
    for kind in Kind:
        pairs = kind is Kind.ATTENTION
        lines = {
            part: fit_line(samples[kind, part], f"{kind.value}.{part}", pairs=pairs)
            for part in PARTS
        }
        unit = next(u for u in bench.config.layers.units if u.kind is kind)
        kinds[kind] = KindProfile(
            forward=lines["forward"],
            backward_input=lines["backward_input"],
            backward_weight=_rest(lines["backward"], lines["backward_input"]),
            activation=_per_token(bench, kind, shapes),
            transient=memory[kind].transient,
            update=_update(bench, unit.index, update_repeats),
        )
    tied = bench.config.layers.tied_slab
    tokens = [s.tokens for s in shapes]
    return Profile(
        name=name,
        kinds=kinds,
        boundary=boundary_bytes(bench.config, bench.tensor),
        tied_update=0.0 if tied is None else _update(bench, tied, update_repeats),
        tokens=(min(tokens), max(tokens)),
        longest=max(max(s.lengths) for s in shapes),
        links=links,
        model=shape_of(bench.config),
        machine=machine_name(bench.device),
        tensor=bench.tensor.size,
        sequence=bench.tensor.sequence,
    )


def _rest(whole: Line, part: Line) -> Line:
    """What is left of a line, term by term, not below 0."""
    return Line(
        max(0.0, whole.fixed - part.fixed),
        max(0.0, whole.per_token - part.per_token),
        max(0.0, whole.per_pair - part.per_pair),
    )


def _per_token(bench: Workbench, kind: Kind, shapes: Sequence[Shape]) -> float:
    shape = max(shapes, key=lambda s: s.tokens)
    return bench.agreed([bench.activation(kind, shape) / shape.tokens])[0]


def _update(bench: Workbench, slab: int, repeats: int) -> float:
    bench.update(slab)
    return bench.agreed([statistics.median(bench.update(slab) for _ in range(repeats))])[0]


def held_out(profile: Profile, samples: Samples) -> dict[tuple[Kind, str], FitError]:
    """Errors of a profile on points it was not fitted to; parts that are nothing are left out."""
    found = {}
    for (kind, part), points in samples.items():
        costs = profile.kinds[kind]
        line = costs.backward if part == "backward" else getattr(costs, part)
        kept = [p for p in points if p.value > 0]
        if kept:
            found[kind, part] = errors(line, kept)
    return found


def pooled(profile: Profile, samples: Samples) -> FitError:
    """Error over all points of all parts of all kinds together."""
    sizes = []
    for (kind, part), points in samples.items():
        costs = profile.kinds[kind]
        line = costs.backward if part == "backward" else getattr(costs, part)
        sizes += [abs(line(p.tokens, p.squares) / p.value - 1.0) for p in points if p.value > 0]
    if not sizes:
        raise ProfileError("no points to compare with")
    return FitError(float(np.median(sizes)), float(np.percentile(sizes, 90)))


def whole(profile: Profile, samples: Samples) -> FitError:
    """Error of one unit of each kind together, forward and backward, over the shapes."""
    measured: dict[tuple[float, float], float] = defaultdict(float)
    for (_, part), points in samples.items():
        if part in ("forward", "backward"):
            for p in points:
                measured[p.tokens, p.squares] += p.value
    line = Line()
    for costs in profile.kinds.values():
        line = line + costs.forward + costs.backward
    return errors(line, [Point(t, s, value) for (t, s), value in measured.items()])
