#!/usr/bin/env python3
"""Kernels, links, attention and training on this machine's GPU.

    python benchmarks/gpu.py [--out results.json]      about 4 minutes
    python benchmarks/gpu.py --device cpu --mebibytes 8 --repeats 2 --iterations 3

The second form is a rehearsal where there is no GPU: it runs every line but those that only CUDA
has, and its figures mean nothing.

Figures are medians of interleaved repeats, timed by CUDA events. GB/s count each byte once that is
copied; a kernel that casts or computes counts half of what it reads and writes together, which is
what a copy of as much traffic copies. The reference of a row is one cudaMemcpyAsync (PyTorch's
copy of contiguous memory) of as many bytes on the same way.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import secrets
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import torch
from torch import Tensor

from benchmarks.attention import mixture
from megatron_flex import kernels
from megatron_flex.data.packed import PackedBatch
from megatron_flex.model import attention_cpu, attention_cuda
from megatron_flex.model.attention_options import AttentionOptions
from megatron_flex.model.block import Block
from megatron_flex.model.check_layers import check_layers
from megatron_flex.model.config import ModelConfig
from megatron_flex.model.context import PackedContext
from megatron_flex.model.dropout import masked_scale
from megatron_flex.model.keys import token_keys
from megatron_flex.planner.plan import Plan
from megatron_flex.runtime.holdings import Holdings
from megatron_flex.runtime.optimizer import OptimizerConfig, StepSize, update
from megatron_flex.runtime.slab import Buffers, Slab, SlabLayout
from megatron_flex.twinlayer import manager
from megatron_flex.twinlayer.hand_overs import HandOver
from megatron_flex.twinlayer.location import DIRECTORY, socket_of
from megatron_flex.twinlayer.manager import Shape, entry_bytes
from megatron_flex.twinlayer.worker import Member, TwinLayers
from tests.gpu.launch import Launch

Arm = Callable[[], object]
MIB = 1 << 20
GENERATIONS = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""GB/s of one PCIe lane, one way."""


@dataclass(frozen=True)
class Row:
    """One figure: ``seconds`` for ``bytes``, beside the reference's seconds for as many."""

    table: str
    name: str
    seconds: float
    bytes: float = 0.0
    reference: float | None = None
    note: str = ""

    def line(self) -> str:
        """For people."""
        text = f"{self.name:<52}{self.seconds * 1e3:10.3f} ms"
        if self.bytes:
            text += f"{self.bytes / self.seconds / 1e9:9.1f} GB/s"
        if self.reference is not None:
            text += f"{self.reference / self.seconds:7.0%} of the reference"
        return f"{text}  {self.note}".rstrip()


class Bench:
    """Where and how long everything runs, and what was found."""

    def __init__(self, device: torch.device, size: int, repeats: int, iterations: int) -> None:
        self.device, self.size, self.repeats = device, size, repeats
        self.iterations = iterations
        self.cuda = device.type == "cuda"
        self.rows: list[Row] = []

    def add(self, *row: object, **more: object) -> None:
        """Keep a row, and print it."""
        found = Row(*row, **more)  # type: ignore[arg-type]
        if not any(r.table == found.table for r in self.rows):
            print(f"\n{found.table}")
        self.rows.append(found)
        print(f"  {found.line()}", flush=True)

    def seconds(self, arms: dict[str, Arm]) -> dict[str, float]:
        """Median seconds of each arm on the device; the arms take turns."""
        times: dict[str, list[float]] = {name: [] for name in arms}
        for repeat in range(self.repeats + 2):
            for name, arm in arms.items():
                taken = self._once(arm)
                if repeat > 1:  # the first ones warm up
                    times[name].append(taken)
        return {name: statistics.median(values) for name, values in times.items()}

    def _once(self, arm: Arm) -> float:
        if not self.cuda:
            began = time.perf_counter()
            arm()
            return time.perf_counter() - began
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        arm()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def bytes(self, size: int) -> Tensor:
        """``size`` random bytes on the device."""
        return torch.randint(0, 256, (size,), dtype=torch.uint8, device=self.device)

    def against_copy(self, table: str, arms: dict[str, tuple[Arm, int]]) -> None:
        """A row for each arm, against a copy on the device of the bytes beside it."""
        for name, (arm, size) in arms.items():
            source, target = self.bytes(size), self.bytes(size)
            found = self.seconds({"arm": arm, "copy": lambda s=source, t=target: t.copy_(s)})  # type: ignore[misc]
            self.add(table, name, found["arm"], size, found["copy"])


def segments(bench: Bench) -> None:
    """Many tensors and one buffer."""
    whole, buffer = bench.bytes(bench.size), bench.bytes(bench.size)
    for each in (bench.size, MIB, 64 << 10, 4 << 10):
        copy = kernels.SegmentCopy(list(whole.split(each)), buffer)
        label = f"{each // MIB} MiB" if each >= MIB else f"{each >> 10} KiB"
        bench.against_copy("segment copy on the device", {
            f"gather, segments of {label}": (copy.gather, bench.size),
            f"scatter, segments of {label}": (copy.scatter, bench.size),
        })  # fmt: skip


def dropout(bench: Bench) -> None:
    """Dropout."""
    length, hidden = 256, 1024
    batch = max(2, bench.size // (4 * length * hidden))
    lengths = torch.randint(1, length + 1, (batch,), dtype=torch.int32)
    packed = torch.randn(int(lengths.sum()), hidden, device=bench.device)
    keys = token_keys(1, range(batch), [0] * batch, lengths.tolist()).to(bench.device)
    for dtype in (torch.float32, torch.bfloat16):
        x, residual = packed.to(dtype), torch.ones_like(packed, dtype=dtype)
        bias = torch.ones(hidden, dtype=dtype, device=bench.device)
        name = str(dtype).removeprefix("torch.")
        bench.against_copy("hidden dropout on the device", {
            f"bias, dropout and residual, {name}": (
                lambda x=x, b=bias, r=residual: masked_scale(x, b, r, keys, 3, 0.1),  # type: ignore[misc]
                x.nbytes * 3 // 2,
            )
        })  # fmt: skip


def link_peak() -> tuple[float | None, str]:
    """GB/s of the link to the host one way, as its generation and width say."""
    query = "pcie.link.gen.max,pcie.link.width.max"
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits", "-i", "0"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        generation, width = (int(word) for word in done.stdout.split(","))
        return GENERATIONS[generation] * width, f"PCIe {generation}.0 x{width}"
    except (OSError, subprocess.CalledProcessError, ValueError, KeyError):
        return None, "the link does not say what it is"


def link(bench: Bench) -> None:
    """Host memory that was registered, as the arena is, and the device."""
    peak, name = link_peak()
    size = bench.size
    host = torch.zeros(size + 8 * kernels.chunk_count(size, MIB), dtype=torch.uint8)
    host.fill_(0)  # touched, and no chunk is there
    began = time.perf_counter()
    if bench.cuda:
        kernels.register_host(host)
    table = f"link to the host ({name}{f', {peak:.0f} GB/s' if peak else ''})"
    bench.add(table, "registering host memory", time.perf_counter() - began, host.nbytes)
    arena, flags = host[:size], host[size:].view(torch.int64)
    device, other = bench.bytes(size), bench.bytes(size)
    pageable = torch.zeros(size, dtype=torch.uint8)
    versions = iter(range(1, 10**6))
    found = bench.seconds({
        "device to host": lambda: arena.copy_(device, non_blocking=True),
        "host to device": lambda: other.copy_(arena, non_blocking=True),
        "device to pageable host memory": lambda: pageable.copy_(device),
        "chunked write, chunks of 1 MiB": lambda: kernels.write_chunks(
            device, arena, flags, next(versions), MIB
        ),
    })  # fmt: skip
    for arm, seconds in found.items():
        share = f"{size / seconds / 1e9 / peak:.0%} of the link" if peak else ""
        one_way = found["host to device" if arm == "host to device" else "device to host"]
        bench.add(table, arm, seconds, size, one_way, share)
    if bench.cuda:
        torch.cuda.synchronize()
        kernels.unregister_host(host)


def hand_over(bench: Bench) -> None:
    """A slab from one worker to another of the same GPU through the manager's arena."""
    state = bench.bytes(bench.size).view(torch.float32)
    got, host = (
        torch.zeros_like(state),
        torch.empty_like(state, device="cpu", pin_memory=bench.cuda),
    )
    with tempfile.TemporaryDirectory() as directory:
        os.environ[DIRECTORY] = directory
        socket = socket_of(secrets.token_hex(4))
        manager.start(socket, "benchmark", Shape(0, 0, 2 * entry_bytes(state.nbytes)), 60.0)
        writer, reader = (
            TwinLayers(socket, Member(rank, "first", 2, 10.0, 60.0), bench.device)
            for rank in range(2)
        )
        times: dict[str, list[float]] = {"in then out": [], "pipelined": []}
        for serial in range(1, bench.repeats + 3):
            for one in (writer, reader):
                one.hand_overs.reserve(serial, [HandOver(0, 1, state.nbytes, 1)])
            places = [one.hand_overs.entry(0, 1) for one in (writer, reader)]
            assert places[0] is not None
            assert places[1] is not None
            began = time.perf_counter()
            host.copy_(state)
            got.copy_(host)
            middle = time.perf_counter()
            read = reader.hand_overs.read(places[1], got)
            writer.hand_overs.write(places[0], state).result(60.0)
            read.result(60.0)
            times["in then out"].append(middle - began)
            times["pipelined"].append(time.perf_counter() - middle)
        assert torch.equal(got.view(torch.int32), state.view(torch.int32))
        plain, pipelined = (statistics.median(values[2:]) for values in times.values())
        for one in (writer, reader):
            one.close()
        manager.stop(socket)
    table = "hand-over between two workers of the GPU"
    bench.add(table, "PyTorch: to the host, then back", plain, state.nbytes)
    bench.add(table, "chunk by chunk", pipelined, state.nbytes, plain)


def attention(bench: Bench) -> None:
    """Packed samples of the length mixture: the kernel, one call a sample, and padding."""
    dtype = torch.bfloat16 if bench.cuda else torch.float32
    heads, depth = 16, 128
    options = AttentionOptions(0, True, depth**-0.5, 0.0, False)

    def setting(tokens: int) -> tuple[PackedContext, PackedContext, tuple[Tensor, Tensor, Tensor]]:
        lengths = tuple(mixture(tokens, 1))
        model = ModelConfig(
            num_layers=1, hidden_size=heads * depth, num_attention_heads=heads, vocab_size=8,
            padded_vocab_size=8, max_position_embeddings=tokens, ffn_hidden_size=8,
            kv_channels=depth, num_query_groups=heads,
        )  # fmt: skip
        batch = PackedBatch(lengths, tuple(range(len(lengths))), (0,) * len(lengths))
        contexts = [PackedContext(batch, model, d) for d in (bench.device, torch.device("cpu"))]
        shape = (tokens, heads, depth)
        q, k, v = (
            torch.randn(shape, device=bench.device, dtype=dtype, requires_grad=True)
            for _ in range(3)
        )
        return contexts[0], contexts[1], (q, k, v)

    context, on_cpu, qkv = setting(512 if not bench.cuda else 4096)
    got = attention_cuda.attend(*qkv, context, options)
    q, k, v = (t.detach().float().cpu() for t in qkv)
    exact = attention_cpu.attend(q, k, v, on_cpu, options)
    error = float((got.detach().float().cpu() - exact).abs().max())
    assert error < (0.03 if bench.cuda else 1e-4), f"attention differs from the CPU's by {error}"
    context, _, qkv = setting(1024 if not bench.cuda else 32768)
    grad, longest = torch.ones_like(qkv[0]), max(context.lengths)
    padded = [
        torch.randn(len(context.lengths), heads, longest, depth, device=bench.device, dtype=dtype)
        .requires_grad_()
        for _ in range(3)
    ]  # fmt: skip

    def in_padding() -> None:
        sdpa = torch.nn.functional.scaled_dot_product_attention
        out = sdpa(padded[0], padded[1], padded[2], is_causal=True, scale=options.scale)
        torch.autograd.grad(out, padded, torch.ones_like(out))

    def by(form: Callable[..., Tensor]) -> Arm:
        return lambda: torch.autograd.grad(form(*qkv, context, options), qkv, grad)

    found = bench.seconds({
        "packed": by(attention_cuda.attend),
        "one call a sample": by(attention_cuda.attend_per_sample),
        "padded to the longest": in_padding,
    })  # fmt: skip
    table = f"attention, forward and backward, {len(qkv[0])} tokens, {len(context.lengths)} samples"
    # 2 products of 2 operations forward, 5 backward, half of them under the causal mask.
    flops = sum(n * n for n in context.lengths) * heads * depth * 7
    for arm, seconds in found.items():
        note = f"{flops / seconds / 1e12:.1f} TFLOP/s" if arm != "padded to the longest" else ""
        if arm == "packed":
            note += f"; largest difference from the CPU's {error:.1e}"
        bench.add(table, arm, seconds, 0.0, found["padded to the longest"], note)


def training(bench: Bench) -> None:
    """One to four workers on one GPU over gloo, against one worker on the CPU."""
    flags = shlex.split(
        "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 512 --mock-data"
        " --vocab-size 2000 --micro-batch-tokens 1024 --global-batch-size 16 --lr 1e-4"
        f" --attention-dropout 0 --distributed-backend gloo --train-iters {bench.iterations}"
        " --adam-eps 1e-6"
    )
    plans = {1: "0:10@0", 2: "0:5@0 | 5:10@1", 4: "0:5@0,1 | 5:10@2,3"}
    losses: list[float] = []
    table = "training, an iteration of 16 samples (gloo, float32)"
    for name, size, gpu in [("1 worker on the CPU", 1, False)] + [
        (
            f"{size} worker{'s' if size > 1 else ''} on the {'GPU' if bench.cuda else 'CPU'}",
            size,
            bench.cuda,
        )
        for size in plans
    ]:
        with (
            tempfile.TemporaryDirectory() as directory,
            Launch(
                Path(directory), [*flags, "--flexpipe-plan", plans[size]], size=size, gpu=gpu
            ) as job,
        ):
            job.wait(240.0)
            found, records = job.losses(), job.iterations()
        losses = losses or found
        far = max(abs(a - b) / abs(b) for a, b in zip(found, losses, strict=True))
        seconds = statistics.median(record["elapsed"] for record in records[1:])
        bench.add(table, name, seconds, 0.0, None, f"losses within {far:.1e} of the first row's")


def fused_adams() -> dict[str, Any]:
    """Transformer Engine's and Apex's, where they are installed."""
    found = {}
    for name, module in (
        ("Transformer Engine's FusedAdam", "transformer_engine.pytorch.optimizers"),
        ("Apex's FusedAdam", "apex.optimizers"),
    ):
        try:
            found[name] = importlib.import_module(module).FusedAdam
        except ImportError:
            print(f"  {name}: not installed", flush=True)
    return found


def updates(bench: Bench) -> None:
    """AdamW on a bfloat16 slab against the optimizers that Megatron-LM takes, one tensor each.

    34 bytes a parameter are read and written: gradient, master weight and both moments, of which
    three are changed, and the cast to bfloat16 (which Megatron-LM does beside them, as here).
    """
    numel = max(1024, bench.size // 16)
    layout = SlabLayout.of([("weight", torch.Size((numel // 1024, 1024)))], lambda *_: True)
    slab = Slab(0, layout, Buffers.allocate(layout.numel, torch.bfloat16, bench.device, False))
    numel = layout.numel
    slab.grads.normal_()
    constants = OptimizerConfig()
    arms: dict[str, tuple[Arm, int]] = {
        "of a slab (PyTorch's fused AdamW)": (
            lambda: update(slab, constants, StepSize(1e-4, 0.1), 1.0, 1), 17 * numel
        )
    }  # fmt: skip
    for name, kind in (fused_adams() if bench.cuda else {}).items():
        weight = torch.nn.Parameter(torch.zeros(numel, device=bench.device))
        weight.grad = slab.grads.clone()
        betas = constants.adam_beta1, constants.adam_beta2
        optimizer = kind([weight], lr=1e-4, betas=betas, eps=constants.adam_eps, weight_decay=0.1)
        narrow = torch.zeros(numel, dtype=torch.bfloat16, device=bench.device)

        def step(own: Any = optimizer, source: Tensor = weight, target: Tensor = narrow) -> None:
            own.step()
            target.copy_(source.detach())

        arms[name] = step, 17 * numel
    bench.against_copy(f"updates, {numel / 1e6:.1f} million bfloat16 parameters", arms)


def layers(bench: Bench) -> None:
    """Forward and backward of a layer of local modules and of Transformer Engine's."""
    width, tokens = (4096, 8192) if bench.cuda else (128, 256)
    heads = width // 128
    base = ModelConfig(
        num_layers=1, hidden_size=width, num_attention_heads=heads, vocab_size=1024,
        padded_vocab_size=1024, max_position_embeddings=tokens, ffn_hidden_size=4 * width,
        kv_channels=128, num_query_groups=heads, position_embedding_type="rope", swiglu=True,
        normalization="RMSNorm", add_bias_linear=False, hidden_dropout=0.0, attention_dropout=0.0,
        params_dtype="bfloat16",
    )  # fmt: skip
    forms = {"local modules": base}
    engine = replace(base, transformer_impl="transformer_engine")
    forms["Transformer Engine, bfloat16"] = engine
    for recipe in ("tensorwise", "blockwise", "mxfp8"):
        forms[f"Transformer Engine, fp8, {recipe}"] = replace(
            engine, fp8_format="hybrid", fp8_recipe=recipe
        )
    lengths = tuple(mixture(tokens, 1))
    batch = PackedBatch(lengths, tuple(range(len(lengths))), (0,) * len(lengths))
    batch = batch.with_tail(tail) if (tail := -sum(lengths) % 128) else batch
    arms: dict[str, Arm] = {}
    for name, config in forms.items():
        try:
            check_layers(config, bench.device)
        except ValueError as error:
            print(f"  {name}: {error}", flush=True)
            continue
        held = Holdings(config, Plan.parse("0:4@0"), 0, bench.device)
        shape = (batch.num_tokens, 1, width)
        hidden = torch.randn(shape, dtype=torch.bfloat16, device=bench.device, requires_grad=True)

        def run(
            blocks: Sequence[Block] = (held.blocks[1], held.blocks[2]), x: Tensor = hidden
        ) -> None:
            out = x
            for block in blocks:
                out = block(out, batch)
            out.backward(torch.ones_like(out))

        arms[name] = run
    found = bench.seconds(arms)
    table = f"layers, forward and backward of one, width {width}, {batch.num_tokens} tokens"
    for name, seconds in found.items():
        bench.add(table, name, seconds, 0.0, found["local modules"])


def machine(device: torch.device) -> dict[str, str]:
    """What the figures belong to."""
    found = {
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": str(os.cpu_count()),
    }
    if device.type == "cuda":
        p = torch.cuda.get_device_properties(device)
        found |= {
            "gpu": p.name,
            "capability": f"{p.major}.{p.minor}",
            "memory": f"{p.total_memory / 1e9:.0f} GB",
            "cuda": str(torch.version.cuda),
        }
    return found


def main() -> None:
    """Measure, print, and write the figures where ``--out`` says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--mebibytes", type=int, default=1024, help="bytes of each copy")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--iterations", type=int, default=10, help="of a training run; 0: none")
    parser.add_argument("--out", type=Path, help="the same as JSON")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no GPU here; --device cpu rehearses without one")
    bench = Bench(
        torch.device(arguments.device),
        arguments.mebibytes * MIB,
        arguments.repeats,
        arguments.iterations,
    )
    about = machine(bench.device)
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    failed = []
    parts: list[Callable[[Bench], None]] = [
        segments, dropout, link, hand_over, attention, updates, layers,
    ]  # fmt: skip
    if arguments.iterations:
        parts.append(training)
    for part in parts:
        try:
            part(bench)
        except Exception as error:  # one part must not cost the others' figures
            failed.append(f"{part.__name__}: {type(error).__name__}: {error}")
    if arguments.out is not None:
        content = {"machine": about, "rows": [asdict(row) for row in bench.rows], "failed": failed}
        partial = arguments.out.with_suffix(".partial")
        partial.write_text(json.dumps(content, indent=1) + "\n")
        partial.replace(arguments.out)
    if failed:
        sys.exit("\n".join(["", *failed]))


if __name__ == "__main__":
    main()
