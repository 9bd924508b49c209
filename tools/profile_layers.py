#!/usr/bin/env python3
"""Measure what each kind of layer costs here, fit it, and write a profile for the planner.

    python tools/profile_layers.py --model gpt-3.35b --output a100.json          # on a GPU
    python tools/profile_layers.py --hidden-size 256 --num-attention-heads 8 \\
        --vocab-size 2000 --output cpu.json                                      # on a CPU

    python tools/profile_layers.py --output runs/mine/profile.json FLAGS-OF-A-TRAINING-COMMAND

The last measures the layers of a run, as its flags or (--load, --use-checkpoint-args) a checkpoint
have it, on micro-batches as large as its own. Where workers share each layer
(--tensor-model-parallel-size) so many processes measure together, on as many GPUs or cores.

Forward, input half and weight half of the backward, activation bytes and optimizer updates of each
kind of unit over a grid of token counts and sample lengths, and the bandwidth of the links; then
the errors of the fit on the grid and on random micro-batches that it has not seen. Use it with
tools/plan.py --profile, or with the trainer's --flexpipe-profile.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megatron_flex.cluster.cluster import Link
from megatron_flex.cluster.profile import Profile, ProfileError
from megatron_flex.data.bar import progress_bar
from megatron_flex.data.errors import DataError
from megatron_flex.link_speed import host_link, link, there_and_back
from megatron_flex.loop.iteration import tensor_of
from megatron_flex.loop.measuring import measured_model, measured_tokens
from megatron_flex.loop.questions import ABOUT, read_run
from megatron_flex.model.check_layers import check_layers
from megatron_flex.model.config import ModelConfig
from megatron_flex.model.tensor_cut import check
from megatron_flex.model.tensor_group import SOLO, TensorGroup
from megatron_flex.planner.plan import PlanError
from megatron_flex.planner.presets import MODELS, model
from megatron_flex.planner.tensor import TensorParallel
from megatron_flex.profiling import (
    Samples,
    Workbench,
    aligned,
    fit,
    grid,
    held_out,
    measure,
    pooled,
    random_shapes,
    runs,
    whole,
)
from megatron_flex.runtime.world import World
from megatron_flex.signals import end_quietly, run_tool, withheld
from megatron_flex.telemetry.files import try_file
from megatron_flex.telemetry.sink import TelemetryError
from megatron_flex.tokenizers.base import TokenizerError

TOKENS = [64, 128, 256, 512, 1024, 2048]


def parser(beside_a_run: bool = False) -> argparse.ArgumentParser:
    """All flags, or those that go with a training command's."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False, epilog=ABOUT,
    )  # fmt: skip
    if not beside_a_run:
        _model(p)
    p.add_argument("--device", help="default: cuda where there is one, else cpu")
    p.add_argument(
        "--tokens", type=int, nargs="+",
        help="tokens of the measured micro-batches; default: 64 to 2048, or what fits the run",
    )  # fmt: skip
    p.add_argument("--lengths", type=int, nargs="+", default=[32, 128, 512],
                   help="lengths of their samples, besides one sample alone")  # fmt: skip
    p.add_argument("--repeats", type=int, default=9, help="interleaved repeats; medians are kept")
    p.add_argument("--held-out", type=int, default=24, help="random micro-batches to predict")
    p.add_argument("--no-links", action="store_true", help="do not measure links")
    p.add_argument("--output", type=Path, default=Path("profile.json"),
                   help="where the profile is written; default: profile.json")  # fmt: skip
    return p


def _model(p: argparse.ArgumentParser) -> None:
    p.add_argument("--model", help=f"one of {', '.join(MODELS)}; or give its sizes:")
    p.add_argument("--hidden-size", type=int, default=256)
    p.add_argument("--ffn-hidden-size", type=int, help="default: four times the hidden size")
    p.add_argument("--num-attention-heads", type=int, default=8)
    p.add_argument("--num-query-groups", type=int, help="default: one for each attention head")
    p.add_argument("--vocab-size", type=int, default=2000)
    p.add_argument("--swiglu", action="store_true")
    p.add_argument("--normalization", choices=["LayerNorm", "RMSNorm"], default="LayerNorm")
    p.add_argument("--position-embedding-type", choices=["learned_absolute", "rope"],
                   default="learned_absolute")  # fmt: skip
    p.add_argument("--hidden-dropout", type=float, default=0.1)
    p.add_argument("--attention-dropout", type=float, default=0.1)
    p.add_argument("--bf16", action="store_true")
    p.add_argument("--tensor-model-parallel-size", type=int, default=1)
    p.add_argument("--sequence-parallel", action="store_true")


def config_of(args: argparse.Namespace) -> ModelConfig:
    """The model whose layers are measured."""
    longest = max(args.tokens)
    if args.model:
        return measured_model(model(args.model), longest)
    heads = args.num_attention_heads
    if heads < 1 or args.hidden_size % heads:
        raise ValueError(
            f"--hidden-size {args.hidden_size} is no multiple of --num-attention-heads {heads}"
        )
    return ModelConfig(
        num_layers=1,
        hidden_size=args.hidden_size,
        num_attention_heads=heads,
        vocab_size=args.vocab_size,
        padded_vocab_size=args.vocab_size,
        max_position_embeddings=longest,
        ffn_hidden_size=args.ffn_hidden_size or 4 * args.hidden_size,
        kv_channels=args.hidden_size // heads,
        num_query_groups=args.num_query_groups or heads,
        position_embedding_type=args.position_embedding_type,
        normalization=args.normalization,
        swiglu=args.swiglu,
        hidden_dropout=args.hidden_dropout,
        attention_dropout=args.attention_dropout,
        params_dtype="bfloat16" if args.bf16 else "float32",
    )


def _exchange(rank: int, path: str, backend: str, queue: mp.SimpleQueue) -> None:
    end_quietly()
    dist.init_process_group(backend, init_method=f"file://{path}", rank=rank, world_size=2)
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)  # that of barriers
    times = there_and_back(rank == 0, 1 - rank, device, dist.barrier)
    if rank == 0:
        queue.put(times)
    dist.destroy_process_group()


def intra_link(device: torch.device) -> Link | None:
    """Messages between two processes here; ``None`` on a machine with a single GPU."""
    if device.type == "cuda" and torch.cuda.device_count() < 2:
        return None
    backend = "nccl" if device.type == "cuda" else "gloo"
    context = mp.get_context("spawn")
    queue = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        with withheld(signal.SIGINT):
            spawned = mp.spawn(_exchange, (f"{folder}/store", backend, queue), 2, join=False)
        while not spawned.join():
            pass
    return link(queue.get())


@dataclass(frozen=True)
class Work:
    """What is measured, in a process or in several together."""

    config: ModelConfig
    tokens: Sequence[int]
    lengths: Sequence[int]
    held_out: int
    repeats: int
    name: str
    links: dict[str, Link]

    def __call__(
        self, device: torch.device, group: TensorGroup = SOLO
    ) -> tuple[Profile, Samples, Samples]:
        """The profile, and what was measured: what it is fitted to, and the rest."""
        bench = Workbench(self.config, device, group)
        align = self.config.alignment
        shapes = aligned(grid(self.tokens, self.lengths), align)
        low, high = min(self.tokens), max(self.tokens)
        unseen = aligned(random_shapes(self.held_out, (low, high), high, seed=1), align)
        every = [*shapes, *unseen]
        if group.index == 0:
            with progress_bar(runs(every, self.repeats), "measure", unit=" runs") as bar:
                everything = measure(bench, every, self.repeats, bar.update)
        else:
            everything = measure(bench, every, self.repeats)
        known = {(s.tokens, s.squares) for s in shapes}
        seen = {k: [p for p in v if (p.tokens, p.squares) in known] for k, v in everything.items()}
        rest = {
            k: [p for p in v if (p.tokens, p.squares) not in known] for k, v in everything.items()
        }
        return fit(bench, seen, shapes, self.name, self.links), seen, rest


def shared(
    work: Work, device: torch.device, tensor: TensorParallel
) -> tuple[Profile, Samples, Samples]:
    """The same by ranks that share each layer."""
    if device.type == "cuda" and torch.cuda.device_count() < tensor.size:
        raise ValueError(
            f"{tensor} needs {tensor.size} GPUs: there are {torch.cuda.device_count()}"
        )
    context = mp.get_context("spawn")
    queue = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        words = (f"{folder}/store", device.type, tensor, work, queue)
        with withheld(signal.SIGINT):
            spawned = mp.spawn(_rank, words, tensor.size, join=False)
        while queue.empty() and not spawned.join(0.2):  # an error of a rank is raised here
            pass
        found: tuple[Profile, Samples, Samples] = queue.get()
        while not spawned.join():
            pass
    return found


def _rank(
    index: int, path: str, kind: str, tensor: TensorParallel, work: Work, queue: mp.SimpleQueue
) -> None:
    end_quietly()
    cuda = kind == "cuda"
    device = torch.device("cuda", index) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)  # where kernels of ours run
    else:
        torch.set_num_threads(1)
    backend = "nccl" if cuda else "gloo"
    dist.init_process_group(
        backend, init_method=f"file://{path}", rank=index, world_size=tensor.size
    )
    world = World.create(
        device, timedelta(minutes=10), tensor.size, sequence_parallel=tensor.sequence
    )
    found = work(device, world.tensor)
    if index == 0:
        queue.put(found)
    world.barrier()
    dist.destroy_process_group()


def checked(args: argparse.Namespace) -> torch.device:
    """Where to measure. Raises ``ValueError`` or ``TelemetryError`` for what cannot be."""
    for name, least in (("tokens", 1), ("lengths", 1), ("repeats", 1), ("held_out", 0)):
        given = getattr(args, name)
        smallest = min(given) if isinstance(given, list) else given
        if smallest is not None and smallest < least:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {least}")
    try_file(args.output, "--output")  # before minutes are spent on what goes there
    usable = torch.cuda.is_available()
    try:
        device = torch.device(args.device or ("cuda" if usable else "cpu"))
    except RuntimeError as error:
        raise ValueError(f"--device {args.device}: {error}") from error
    if device.type != "cpu" and not (device.type == "cuda" and usable):
        raise ValueError(f"--device {args.device}: there is none here")
    return device


def main(argv: Sequence[str] | None = None) -> int:
    try:
        args, run = read_run(parser, argv)
        device = checked(args)
        args.tokens = args.tokens or (TOKENS if run is None else measured_tokens(run))
    except (DataError, PlanError, TelemetryError, TokenizerError, ValueError, OSError) as error:
        print(f"profile: {error}", file=sys.stderr)
        return 1
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        config = (
            config_of(args) if run is None else measured_model(run.parts.model, max(args.tokens))
        )
        tensor = (
            TensorParallel(args.tensor_model_parallel_size, args.sequence_parallel)
            if run is None
            else tensor_of(run.config)
        )
        check(config, tensor.size)
        check_layers(config, device)
        links = {} if args.no_links else {"host": host_link(device)}
        between = None if args.no_links else intra_link(device)
        if between is not None:
            links["intra"] = between
        title = "this run" if run is not None else args.model or "model"
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU core"
        work = Work(
            config, args.tokens, args.lengths, args.held_out, args.repeats, f"{title} on {name}",
            links,
        )  # fmt: skip
        profile, seen, rest = shared(work, device, tensor) if tensor.size > 1 else work(device)
    except (ProfileError, ValueError) as error:
        print(f"profile: {error}", file=sys.stderr)
        return 1
    except mp.ProcessExitedException as error:
        print(f"profile: a process that measured has died: {error}", file=sys.stderr)
        return 1
    args.output.parent.mkdir(parents=True, exist_ok=True)
    profile.save(args.output)
    print(f"\n{'unit':<10} {'part':<15} {'fitted (median, p90)':<22} unseen (median, p90)")
    fitted, unfitted = held_out(profile, seen), held_out(profile, rest)
    for key in fitted:
        a, b = fitted[key], unfitted.get(key)
        tail = "" if b is None else f"{b.median:.1%}, {b.p90:.1%}"
        print(f"{key[0].value:<10} {key[1]:<15} {f'{a.median:.1%}, {a.p90:.1%}':<22} {tail}")
    for label, compare in (("everything pooled", pooled), ("all units together", whole)):
        a, b = compare(profile, seen), compare(profile, rest)
        print(f"{label:<26} {f'{a.median:.1%}, {a.p90:.1%}':<22} {b.median:.1%}, {b.p90:.1%}")
    for label, one in links.items():
        print(f"link {label}: {one.bytes_per_second / 1e9:.2f} GB/s, {one.latency * 1e6:.1f} us")
    print(f"wrote {args.output}")
    return 0


if __name__ == "__main__":
    run_tool(main)
