"""One execution of a program: what it works on, its state on this device, what it gave."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.autograd.graph import GradientEdge

from megatron_flex.data.packed import PackedBatch
from megatron_flex.model.prefix import PrefixStore
from megatron_flex.model.tape import Tape
from megatron_flex.runtime.clock import Measured
from megatron_flex.runtime.memory import Expected
from megatron_flex.runtime.optimizer import StepSize
from megatron_flex.schedule.instructions import BackwardWeight, Compute
from megatron_flex.schedule.part import Part
from megatron_flex.schedule.residency import Key, Travels, at_once, travels


@dataclass(frozen=True)
class StepInputs:
    """What an iteration works on.

    Attributes:
        packed: ``packed(micro_batch, inputs, targets)`` gives the tensors of a micro-batch, tokens
            only where ``inputs`` is set and labels only where ``targets`` is.
        denominators: for each loss, what its sum over the whole global batch is divided by.
        step_size: learning rate and weight decay; ``None`` for a forward-only program.
        signals: what this worker wants all to know at the end of the iteration (time to stop, a
            failed save); they travel with the norms and cost nothing.
        count_zeros: count the zeros in the reduced gradient.
        memory: what this device is expected to have in use, and may.
        read: seconds that it took to receive and read its list.
    """

    packed: Callable[[int, bool, bool], PackedBatch]
    denominators: tuple[int, ...]
    step_size: StepSize | None = None
    signals: tuple[bool, ...] = ()
    count_zeros: bool = False
    memory: Expected = field(default_factory=Expected)
    read: float = 0.0


@dataclass(frozen=True)
class StepResult:
    """What an iteration gave, the same on every worker.

    ``losses`` are means over the global batch (0.0 where a denominator is 0), ``skipped`` says
    that no update was made, ``finite`` is false if the gradient norm was NaN or infinite.
    ``signals`` are true where any worker's was. ``zeros`` is the number of zero gradients.
    ``measured`` are times and memory of each device.
    """

    losses: tuple[float, ...]
    grad_norm: float
    skipped: bool
    finite: bool
    signals: tuple[bool, ...] = ()
    zeros: int | None = None
    measured: tuple[Measured, ...] = field(default=(), compare=False)


@dataclass
class Run:
    """State of one execution. Keys are (stage, micro-batch).

    Attributes:
        losses: ``[micro-batches, losses]`` float64.
        squares: squared norm of each slab's gradient, float64.
        zeros: number of zero gradients.
        saved: the input, and where the backward begins: the output itself is not kept for it.
        tapes: of passes whose backward is split.
        recompute, at_once: units that run again, and units whose weight half is in the input half.
        scattered: slabs of whose gradient this device has the sum of its own part only, and the
            first holder.
        prefixes: keys and values of samples that are cut to slices.
        ahead: operations that each micro-batch still has on this device.
        travels: which activations go to the host; ``leaving`` those that do next.
    """

    part: Part
    inputs: StepInputs
    losses: torch.Tensor
    squares: torch.Tensor
    zeros: torch.Tensor
    batches: dict[int, PackedBatch] = field(default_factory=dict)
    activations: dict[Key, torch.Tensor] = field(default_factory=dict)
    gradients: dict[Key, torch.Tensor] = field(default_factory=dict)
    saved: dict[Key, tuple[torch.Tensor | None, GradientEdge]] = field(default_factory=dict)
    outgoing: dict[Key, torch.Tensor] = field(default_factory=dict)
    reductions: dict[int, dist.Work] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)
    scattered: dict[int, int] = field(default_factory=dict)
    result: StepResult | None = None

    def __post_init__(self) -> None:
        plan = self.part.plan
        computes = [i for i in self.part.instructions if isinstance(i, Compute)]
        self.ahead = Counter(i.micro_batch for i in computes)
        self.prefixes = PrefixStore(training=self.training)
        self.tapes: dict[Key, Tape] = {}
        self.recompute: frozenset[int] = frozenset()
        self.at_once = at_once(plan.o_plan)
        self.travels = Travels()
        self.leaving: Key | None = None
        if self.training:
            halves = (i for i in computes if isinstance(i, BackwardWeight))
            self.tapes = {(i.stage, i.micro_batch): Tape() for i in halves}
            self.recompute = frozenset(plan.o_plan.recompute)
            self.travels = travels(self.part.instructions, plan)

    @property
    def training(self) -> bool:
        """Whether it updates; else it evaluates."""
        return self.inputs.step_size is not None
