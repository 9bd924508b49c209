"""Flags of this package's own layouts, schedules and switches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_flex.config.option import option

Schedule = Literal[
    "auto",
    "gpipe",
    "1f1b",
    "seq1f1b",
    "interleaved",
    "zb-h1",
    "zb-h2",
    "zb-v",
    "v-half",
    "v-min",
    "zb",
]
Batching = Literal["auto", "pack", "slices", "pad", "pad-batch", "pad-all", "bucket", "dynapipe"]
MEASURE = "measure"
"""In the place of a file with a profile."""
PADDED = ("pad", "pad-batch", "pad-all", "bucket", "dynapipe")
"""Ways of batching that pad samples."""
Baseline = Literal[
    "megatron-pad",
    "megatron-pad-all",
    "zero-bubble-pad",
    "packed-1f1b",
    "packed-zero-bubble",
    "bucket",
    "dynapipe",
    "seq1f1b",
]
BASELINES: dict[str, tuple[Batching, Schedule | None]] = {
    "megatron-pad": ("pad-batch", None),
    "megatron-pad-all": ("pad-all", None),
    "zero-bubble-pad": ("pad-batch", "zb-h1"),
    "packed-1f1b": ("pack", None),
    "packed-zero-bubble": ("pack", "zb-h1"),
    "bucket": ("bucket", "1f1b"),
    "dynapipe": ("dynapipe", "1f1b"),
    "seq1f1b": ("slices", "seq1f1b"),
}
"""What ``--flexpipe-baseline`` stands for where other flags don't say it: batching and schedule."""
V_SCHEDULES = ("zb-v", "v-half", "v-min")
"""Schedules of a static plan with two stages a worker, in a V."""


@dataclass(frozen=True, kw_only=True)
class FlexpipeOptions:
    """Layout, schedule, and how they change from iteration to iteration."""

    flexpipe_plan: str | None = option(None, own=True)
    """The layout in full: for each stage its units and its workers, such as "0:5@0,1 | 5:9@2".
    Units are the embedding, then the attention half and the MLP half of each layer, then the output
    layer. Stages may have different numbers of workers."""

    flexpipe_schedule: Schedule | None = option(None, own=True)
    """Order of the operations on each worker. gpipe: all forwards first; 1f1b: one forward, one
    backward; seq1f1b: the same over slices of samples; interleaved: the same with several stages a
    worker; zb-h1, zb-h2: the backward in two halves, the weights' later, in the memory of 1f1b or
    twice that; zb-v, v-half, v-min: such on two stages a worker, in a V, in the memory of 1f1b,
    about a half or a third of it; zb: the best order that a search finds for such halves; auto:
    zb, or 1f1b where only that fits. Not set: auto with --flexpipe; interleaved with virtual
    pipeline stages; else 1f1b."""

    flexpipe: bool = option(False, own=True)
    """Plan the layout of every iteration anew from its samples' lengths, and switch live."""

    flexpipe_slice_tokens: str = option("auto", own=True)
    """Cut longer samples to slices of so many tokens, which go through the pipeline one after the
    other: a long sample does not block it then. 0: never. auto: with --flexpipe or
    --flexpipe-bitwise, GPT's samples are cut to slices that cost as much as other micro-batches do:
    as a sample of --micro-batch-tokens, or without that flag as suits the iteration; else never."""

    flexpipe_batching: Batching = option("auto", own=True)
    """How a batch is cut to micro-batches. auto: as the flags of micro-batches and slices say.
    pack: whole samples, packed without padding. slices: long samples of a GPT in slices, all
    micro-batches as dear as a sample of --micro-batch-tokens. pad: --micro-batch-size samples each,
    padded to the longest of them, as without packing; pad-batch: to the longest of the batch;
    pad-all: to --seq-length. bucket: samples of like length together, padded, up to
    --micro-batch-tokens computed tokens. dynapipe: sorted samples in runs, padded, which take least
    time by DynaPipe's dynamic programming, within the memory of a worker."""

    flexpipe_align_tokens: int | None = option(None, own=True, at_least=1, at_most=65536)
    """Pad each micro-batch to a multiple of so many tokens, behind its samples. Padding counts in
    no loss and changes no gradient; plans count it. Not set: what --fp8-recipe needs with
    --fp8-format (tensorwise 16, mxfp8 32, blockwise 128), else none."""

    flexpipe_baseline: Baseline | None = option(None, own=True)
    """Train as another system does, on the plan of the other flags, for comparison: sets
    --flexpipe-batching and --flexpipe-schedule where they are not given (docs/simulator.md)."""

    flexpipe_planner: Literal["lookahead", "hbsa", "exhaustive", "static", "given"] = option(
        "lookahead", own=True
    )
    """Who plans: the best sequence over the coming batches; the paper's algorithm; every layout
    (for a few workers and layers); the best single layout, which then stays; or given, the layout
    of the other flags, for which only the cut of each batch is chosen, and what is recomputed."""

    flexpipe_lookahead: int = option(4, own=True, at_least=1, at_most=1000)
    """Coming batches that are planned together; with --flexpipe-planner static, the batches that
    the layout is chosen for."""

    flexpipe_simulations: str = option("auto", own=True)
    """Plans that a decision of the planner simulates before it chooses; 0: none, it goes by its
    closed form. auto: as many as fit into 30 % of an iteration's time, or 3 % where training
    leaves no core of the server free; the log has the number."""

    flexpipe_unit: Literal["block", "layer"] = option("block", own=True)
    """What stages are cut between: halves of layers, or whole layers as in the paper."""

    flexpipe_memory_budget_gb: float | None = option(None, own=True, above=0, at_most=1e9)
    """Memory of a worker that training may fill, in 10^9 bytes. The planner keeps to it (not set:
    to what --flexpipe-cluster says); iterations that use more are counted in the log."""

    flexpipe_cluster: str | None = option(None, own=True)
    """The devices and links: a described cluster such as a100x16, or a YAML or JSON file. Not set:
    CPU workers, or what the name of the GPU says (A100-SXM4-80GB, H200)."""

    flexpipe_profile: str | None = option(None, own=True)
    """Measured costs of the model's parts: a file of tools/profile_layers.py, or the word measure:
    they are measured for some seconds before training, and kept in --save for when the run is
    resumed. Those of another model are refused, those of another machine are warned of. Not set:
    they follow from the description of the cluster."""

    flexpipe_plans: str | None = option(None, own=True)
    """File with the layout of every iteration, one a line in the form of --flexpipe-plan; what
    follows a # is ignored, and the last line stays. The run switches between them."""

    flexpipe_record: str | None = option(None, own=True)
    """File that gets the layout of every iteration and why it was chosen. --flexpipe-plans reads
    it."""

    flexpipe_switch: Literal["live", "handover", "stall", "restart"] = option("live", own=True)
    """How a layout becomes the next. live: state moves while the iteration computes; handover:
    after its update; stall: between iterations, while all wait; restart: through a checkpoint in
    the --save directory, with new processes. All but live are for comparison."""

    flexpipe_twin: bool = option(True, own=True, flags=("--flexpipe-no-twin",))
    """Hand layers over from worker to worker by messages, not through the host memory of their
    server. For comparison."""

    flexpipe_twin_snapshot: int | None = option(None, own=True, at_least=1)
    """Iterations between versions of all weights and optimizer state that are kept in host memory.
    When workers die and torchrun starts them again (--max-restarts), they continue from the newest;
    if it is lost too, from --load. Takes the memory of two versions (three when it is 1)."""

    flexpipe_twin_timeout: float = option(300.0, own=True, above=0, at_most=1e9)
    """Seconds for which versions in host memory outlast the workers, until these are started
    again."""

    flexpipe_bitwise: bool = option(False, own=True)
    """Sum gradients exactly: losses and weights have the same bits under any layouts and numbers
    of workers. Takes 8 more bytes a parameter and twice the volume of gradients."""

    flexpipe_trace: str | None = option(None, own=True)
    """File for a trace of every instruction of every worker, in the Chrome trace format (Perfetto,
    chrome://tracing)."""

    flexpipe_trace_interval: int = option(1, own=True, at_least=1)
    """Trace the iterations whose number is a multiple of this."""

    @property
    def plans_change(self) -> bool:
        """Whether a run ever changes its plan."""
        return self.flexpipe or self.flexpipe_plans is not None

    @property
    def measures(self) -> bool:
        """Whether a run begins by measuring its layers."""
        return self.flexpipe_profile == MEASURE

    @property
    def slice_tokens(self) -> int | None:
        """``flexpipe_slice_tokens`` as a number; ``None``: by cost."""
        return None if self.flexpipe_slice_tokens == "auto" else int(self.flexpipe_slice_tokens)

    @property
    def simulations(self) -> int | None:
        """``flexpipe_simulations`` as a number; ``None``: as many as fit."""
        return None if self.flexpipe_simulations == "auto" else int(self.flexpipe_simulations)

    @property
    def memory_budget(self) -> int | None:
        """``flexpipe_memory_budget_gb`` in bytes."""
        gigabytes = self.flexpipe_memory_budget_gb
        return None if gigabytes is None else round(gigabytes * 1e9)
