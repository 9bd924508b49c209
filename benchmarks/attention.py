#!/usr/bin/env python3
"""Variable-length attention on the CPU: our kernel against the ways that PyTorch offers.

    python benchmarks/attention.py [--tokens 2048] [--heads 4] [--head-size 64] [--repeats 9]
    python benchmarks/attention.py --slices 256 512 1024 [--length 8192]

Forward and backward of one layer's attention over packed samples, in milliseconds (medians of
interleaved repeats), for several mixtures of lengths:

- `native`: one call for all samples (`kernels/src/attention.cpp`); with attention dropout too.
- `per sample`: PyTorch's flash kernel, one call a sample.
- `grouped`: PyTorch's flash kernel, one call for all samples of equal length.
- `block-diagonal`: samples of under 64 tokens merged into calls of at most 256 with a mask.
- `padded`: one call over the batch padded to its longest sample.

PyTorch's dropout inside attention keeps the full score matrix on the CPU; it is not compared.

With `--slices`: one sample of `--length` tokens as a whole and in slices of so many tokens, forward
in order and backward in reverse, in milliseconds of the processor and as time a FLOP by that of
the whole sample (both do the same products), for float32 and bfloat16, with and without rotary
embedding.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from megatron_flex.data.packed import PackedBatch
from megatron_flex.model import attention_cpu
from megatron_flex.model.attention_cuda import attend_per_sample
from megatron_flex.model.attention_options import AttentionOptions
from megatron_flex.model.config import ModelConfig
from megatron_flex.model.context import PackedContext, context_of
from megatron_flex.model.prefix import PrefixStore

SMALL, MERGED = 64, 256
# (weight, median tokens, sigma of the logarithm): FLANv2's lengths, four lognormals.
FLAN = ((0.381, 152, 0.532), (0.501, 280, 0.919), (0.111, 946, 0.205), (0.007, 1418, 1.255))


def mixture(tokens: int, seed: int) -> list[int]:
    """Lengths drawn from FLANv2's distribution that add up to ``tokens``."""
    generator = np.random.default_rng(seed)
    lengths: list[int] = []
    weights = np.array([w for w, _, _ in FLAN])
    while sum(lengths) < tokens:
        _, median, sigma = FLAN[generator.choice(len(FLAN), p=weights / weights.sum())]
        lengths.append(max(1, int(median * np.exp(sigma * generator.standard_normal()))))
    lengths[-1] -= sum(lengths) - tokens
    return lengths


def equal(tokens: int, length: int) -> list[int]:
    """Samples of one length; the last takes what is left."""
    lengths = [length] * (tokens // length)
    return lengths + ([tokens % length] if tokens % length else [])


class Forms:
    """The compared ways; each maps (query, key, value), ``[T, heads, d]``, to ``[T, heads, d]``."""

    def __init__(self, context: PackedContext, depth: int) -> None:
        self.context = context
        self.options = AttentionOptions(0, True, depth**-0.5, 0.0, False)
        self.dropping = AttentionOptions(0, True, depth**-0.5, 0.1, False)
        rows = [
            torch.arange(a, b) for a, b in zip(context.offsets, context.offsets[1:], strict=False)
        ]
        by_length: dict[int, list[Tensor]] = {}
        for r in rows:
            by_length.setdefault(len(r), []).append(r)
        self.groups = [torch.stack(group) for group in by_length.values()]
        self.merged: list[tuple[Tensor, Tensor | None]] = []
        waiting: list[Tensor] = []
        for r in sorted(rows, key=len):
            if waiting and (len(r) >= SMALL or sum(map(len, waiting)) + len(r) > MERGED):
                self._merge(waiting)
                waiting = []
            if len(r) >= SMALL:
                self.merged.append((r, None))
            else:
                waiting.append(r)
        if waiting:
            self._merge(waiting)
        longest = max(context.lengths)
        place = torch.full((len(rows), longest), -1)
        for i, r in enumerate(rows):
            place[i, : len(r)] = r
        self.place, self.filled = place.clamp(min=0), place >= 0

    def _merge(self, rows: list[Tensor]) -> None:
        owner = torch.cat([torch.full((len(r),), i) for i, r in enumerate(rows)])
        same = (owner[:, None] == owner).tril()
        mask = torch.zeros(same.shape).masked_fill(~same, -torch.inf)
        self.merged.append((torch.cat(rows), mask))

    def native(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Ours."""
        return attention_cpu.attend(q, k, v, self.context, self.options)

    def native_dropout(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Ours with attention dropout 0.1."""
        return attention_cpu.attend(q, k, v, self.context, self.dropping)

    def per_sample(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """One call a sample."""
        return attend_per_sample(q, k, v, self.context, self.options)

    def grouped(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """One call for each length."""
        out = torch.empty_like(q)
        for rows in self.groups:
            a, b, c = (t[rows].transpose(1, 2) for t in (q, k, v))
            out = out.index_put((rows,), sdpa(a, b, c, is_causal=True).transpose(1, 2))
        return out

    def block_diagonal(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Small samples share a call."""
        out = torch.empty_like(q)
        for rows, mask in self.merged:
            a, b, c = (t[rows].transpose(0, 1)[None] for t in (q, k, v))
            result = sdpa(a, b, c, attn_mask=mask, is_causal=mask is None)
            out = out.index_put((rows,), result[0].transpose(0, 1))
        return out

    def padded(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """One call over all samples, padded. Later keys are hidden by causality."""
        a, b, c = (t[self.place].transpose(1, 2) for t in (q, k, v))
        return sdpa(a, b, c, is_causal=True).transpose(1, 2)[self.filled]


def run_slices(
    length: int, tokens: int, mixed: Tensor, grad: Tensor, rotary: bool
) -> tuple[float, float]:
    """Processor seconds of forward and of backward of one sample in slices of ``tokens``."""
    heads, depth = grad.shape[1:]
    options = AttentionOptions(0, True, depth**-0.5, 0.0, rotary)
    config, store = model(heads, depth), PrefixStore(training=True)
    waiting = []
    forward = backward = 0.0
    for start in range(0, length, tokens):
        stop = min(length, start + tokens)
        batch = PackedBatch((stop - start,), (0,), (start,), totals=(length,), prefixes=store)
        context = context_of(batch, config, torch.device("cpu"))
        context.rotary  # noqa: B018 - made once for all layers
        leaf = mixed[start:stop].clone().requires_grad_()
        q, k, v = (t.unflatten(1, (heads, depth)) for t in leaf.chunk(3, dim=1))
        begin = time.process_time()
        out = attention_cpu.attend(q, k, v, context, options)
        forward += time.process_time() - begin
        waiting.append((out, leaf, slice(start, stop)))
    while waiting:
        out, leaf, rows = waiting.pop()
        begin = time.process_time()
        torch.autograd.grad(out, leaf, grad[rows])
        backward += time.process_time() - begin
    return forward, backward


def slices(arguments: argparse.Namespace) -> None:
    """Print the table of slices."""
    length, heads, depth = arguments.length, arguments.heads, arguments.head_size
    print(
        f"one sample of {length} tokens, {heads} heads of {depth},"
        f" {torch.get_num_threads()} threads; medians of {arguments.repeats}"
    )
    print(
        f"{'':24s}{'slice':>8s}{'forward ms':>12s}{'backward ms':>12s}{'by whole':>18s}{'sum':>8s}"
    )
    for dtype in (torch.float32, torch.bfloat16):
        for rotary in (False, True):
            mixed = torch.randn(length, 3 * heads * depth).to(dtype)
            grad = torch.randn(length, heads, depth).to(dtype)
            sizes = [length, *arguments.slices]
            times: dict[int, list[tuple[float, float]]] = {size: [] for size in sizes}
            for repeat in range(arguments.repeats + 1):
                for size in sizes:
                    found = run_slices(length, size, mixed, grad, rotary)
                    if repeat:
                        times[size].append(found)
            # Ratios within a repeat: the machine's speed changes from one to the next.
            for size in sizes:
                ratios = [
                    (a / c, b / d, (a + b) / (c + d))
                    for (a, b), (c, d) in zip(times[size], times[length], strict=True)
                ]
                ahead, back = (1e3 * statistics.median(t) for t in zip(*times[size], strict=True))
                by = [statistics.median(r) for r in zip(*ratios, strict=True)]
                label = f"{str(dtype).removeprefix('torch.')}{', rotary' if rotary else ''}"
                print(
                    f"{label:24s}{size:8d}{ahead:12.1f}{back:12.1f}"
                    f"{by[0]:9.3f}{by[1]:9.3f}{by[2]:8.3f}"
                )


def model(heads: int, depth: int) -> ModelConfig:
    """As much of a model as attention needs."""
    return ModelConfig(
        num_layers=1, hidden_size=heads * depth, num_attention_heads=heads, vocab_size=2,
        padded_vocab_size=2, max_position_embeddings=1, ffn_hidden_size=1, kv_channels=depth,
        num_query_groups=heads,
    )  # fmt: skip


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--slices", type=int, nargs="+", default=[], metavar="TOKENS")
    parser.add_argument("--length", type=int, default=8192, help="of the sample that is sliced")
    arguments = parser.parse_args()
    if arguments.slices:
        slices(arguments)
        return
    tokens, heads, depth = arguments.tokens, arguments.heads, arguments.head_size
    config = model(heads, depth)
    mixtures = {
        "FLANv2 mixture": mixture(tokens, seed=0),
        "all of 20 tokens": equal(tokens, 20),
        "all of 64 tokens": equal(tokens, 64),
        "all of 256 tokens": equal(tokens, 256),
        "one sample": [tokens],
    }
    print(f"{tokens} tokens, {heads} heads of {depth}, {torch.get_num_threads()} threads, ms")
    names = ("native", "native_dropout", "per_sample", "grouped", "block_diagonal", "padded")
    print(f"{'lengths':20s}" + "".join(f"{n.replace('_', ' '):>16s}" for n in names))
    for label, lengths in mixtures.items():
        batch = PackedBatch(tuple(lengths), tuple(range(len(lengths))), (0,) * len(lengths))
        forms = Forms(context_of(batch, config, torch.device("cpu")), depth)
        mixed = torch.randn(tokens, 3 * heads * depth, requires_grad=True)
        grad = torch.randn(tokens, heads, depth)

        def run(
            form: Callable[[Tensor, Tensor, Tensor], Tensor], mixed: Tensor, grad: Tensor
        ) -> Tensor:
            q, k, v = (t.unflatten(1, (heads, depth)) for t in mixed.chunk(3, dim=1))
            out = form(q, k, v)
            torch.autograd.grad(out, mixed, grad)
            return out.detach()

        results = {}
        times: dict[str, list[float]] = {name: [] for name in names}
        for repeat in range(arguments.repeats + 1):
            for name in names:
                start = time.perf_counter()
                results[name] = run(getattr(forms, name), mixed, grad)
                if repeat:
                    times[name].append(1e3 * (time.perf_counter() - start))
        for name in names:
            if name != "native_dropout":
                torch.testing.assert_close(results[name], results["native"], rtol=1e-4, atol=1e-4)
        medians = "".join(f"{statistics.median(times[n]):16.2f}" for n in names)
        print(f"{label:20s}{medians}")


if __name__ == "__main__":
    main()
