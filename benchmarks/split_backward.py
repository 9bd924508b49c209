"""What a split backward costs: input half and weight half over a fused backward, and its memory.

Prints for some widths the seconds of both halves of one layer (attention and MLP unit) over those
of the project's fused backward and over PyTorch's own (autograd's linear), and what is held between
the halves over what the memory model says. Repeats are interleaved; CPU seconds of one thread.

    python benchmarks/split_backward.py
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace
from unittest.mock import patch

import torch
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional

from megatron_flex.model import megatron
from megatron_flex.model.config import ModelConfig
from megatron_flex.model.layers import Kind
from megatron_flex.model.tape import Tape, recording
from megatron_flex.planner.passes import passes
from megatron_flex.profiling import Shape, Workbench
from megatron_flex.runtime.memory import MemoryMeter

MODEL = ModelConfig(
    num_layers=1, hidden_size=256, num_attention_heads=4, vocab_size=1000, padded_vocab_size=1024,
    max_position_embeddings=2048, ffn_hidden_size=1024, kv_channels=64, num_query_groups=4,
    hidden_dropout=0.1, attention_dropout=0.0,
)  # fmt: skip
KINDS = (Kind.ATTENTION, Kind.MLP)
FORMS = ("split", "fused", "autograd")


def model(hidden: int) -> ModelConfig:
    """GPT of that width, heads of 64."""
    heads = hidden // 64
    return replace(
        MODEL, hidden_size=hidden, num_attention_heads=heads, num_query_groups=heads,
        ffn_hidden_size=4 * hidden,
    )  # fmt: skip


def seconds(bench: Workbench, kind: Kind, shape: Shape, form: str) -> float:
    """CPU seconds of one backward of a unit."""
    batch, hidden = bench.batch(shape), bench._input(shape, kind)
    tape = Tape() if form == "split" else None
    linear = functional.linear if form == "autograd" else megatron.linear
    with recording(tape), patch.object(megatron, "linear", linear):
        output = bench.blocks[kind](hidden, batch)
    gradient = torch.randn_like(output)
    begin = time.process_time()
    torch.autograd.backward(output, gradient)
    if tape is not None:
        tape.run()
    return time.process_time() - begin


def held(bench: Workbench, kind: Kind, shape: Shape) -> float:
    """Bytes held between the halves over those of the memory model."""
    batch, hidden = bench.batch(shape), bench._input(shape, kind)
    assert hidden is not None
    context = bench.blocks[kind].context(batch, bench.device)
    context.token_keys, context.positions  # noqa: B018 - made once for all blocks
    meter, tape = MemoryMeter(bench.device), Tape()
    begin = meter.current
    with recording(tape):
        output = bench.blocks[kind](hidden, batch)
    edge, gradient = get_gradient_edge(output), torch.randn_like(output)
    del output
    torch.autograd.backward(edge, gradient)
    del edge, gradient
    hidden.grad = None
    found = meter.current - begin
    tape.run()
    return found / (passes(bench.config)[kind].owed * shape.tokens)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--hidden", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 512])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("hidden tokens | halves/fused | halves/autograd's | held/predicted: attention, MLP")
    for width in arguments.hidden:
        bench = Workbench(model(width), torch.device("cpu"))
        for tokens in arguments.tokens:
            shape = Shape((tokens // 2, tokens // 2))
            rows: dict[str, list[float]] = {form: [] for form in FORMS}
            for repeat in range(arguments.repeats + 1):
                for form in (FORMS, FORMS[::-1])[repeat % 2]:
                    whole = sum(seconds(bench, kind, shape, form) for kind in KINDS)
                    if repeat:
                        rows[form].append(whole)
            split = rows["split"]
            ratios = [
                statistics.median(s / o for s, o in zip(split, rows[form], strict=True))
                for form in FORMS[1:]
            ]
            memory = [held(bench, kind, shape) for kind in KINDS]
            print(
                f"{width:6d} {tokens:6d} | {ratios[0]:12.3f} | {ratios[1]:17.3f} |"
                f" {memory[0]:.4f}, {memory[1]:.4f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
