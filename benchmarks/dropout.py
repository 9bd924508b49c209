#!/usr/bin/env python3
"""Keyed bias-dropout-add against PyTorch's, forward and backward.

    python benchmarks/dropout.py [--tokens 2048] [--hidden 1024] [--dtype float32] [--repeats 15]
                                 [--device cpu]

`torch` is what megatron-core runs: x + bias, `torch.nn.functional.dropout`, + residual. `keyed` is
ours. Medians of interleaved repeats, on the threads that OMP_NUM_THREADS allows.
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

import torch
from torch import Tensor

from megatron_flex.model.dropout import KeyedBiasDropoutAdd, masked_scale
from megatron_flex.model.keys import token_keys


def interleaved(
    arms: dict[str, Callable[[], object]], repeats: int, device: torch.device
) -> dict[str, float]:
    """Median milliseconds of each arm; the arms take turns."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    for repeat in range(repeats + 2):
        for name, arm in arms.items():
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            start = time.perf_counter()
            arm()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if repeat > 1:  # the first rounds warm caches and threads
                times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in times.items()}


class Context:
    """The part of a micro-batch's context that dropout reads."""

    def __init__(self, keys: Tensor) -> None:
        self.token_keys = keys


def main() -> None:
    """Measure and print one line an operation."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--probability", type=float, default=0.1)
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    device, p = torch.device(arguments.device), arguments.probability
    dtype = getattr(torch, arguments.dtype)
    shape = (arguments.tokens, 1, arguments.hidden)
    x, residual = (torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
    bias = torch.randn(arguments.hidden, device=device, dtype=dtype)
    grad = torch.randn(shape, device=device, dtype=dtype)
    tokens = arguments.tokens
    keys = token_keys(
        1234, range(16), [0] * 16, [tokens // 16 + (i < tokens % 16) for i in range(16)]
    )
    keys = keys.to(device)
    ours = KeyedBiasDropoutAdd(site=2)
    ours.context = Context(keys)  # type: ignore[assignment]
    leaves = [t.clone().requires_grad_() for t in (x, bias, residual)]

    def stock(x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        return residual + torch.nn.functional.dropout(x + bias, p)

    def keyed(x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        return ours(True, False)((x, bias), residual, p)

    def both(function: Callable[..., Tensor]) -> None:
        torch.autograd.grad(function(*leaves), leaves, grad)

    arms: dict[str, Callable[[], object]] = {
        "dropout alone, torch": lambda: torch.nn.functional.dropout(x, p),
        "dropout alone, keyed": lambda: masked_scale(x, None, None, keys, 2, p),
        "bias-dropout-add, torch": lambda: stock(x, bias, residual),
        "bias-dropout-add, keyed": lambda: keyed(x, bias, residual),
        "forward and backward, torch": lambda: both(stock),
        "forward and backward, keyed": lambda: both(keyed),
    }
    medians = interleaved(arms, arguments.repeats, device)
    threads = torch.get_num_threads() if device.type == "cpu" else 1
    print(
        f"{arguments.tokens} tokens x {arguments.hidden}, {arguments.dtype}, {device}, p = {p},"
        f" {threads} thread{'s' if threads > 1 else ''}"
    )
    names = list(medians)
    for torchs, keyeds in zip(names[::2], names[1::2], strict=True):
        a, b = medians[torchs], medians[keyeds]
        print(
            f"{torchs.rsplit(',', 1)[0]:22s} torch {a:8.3f} ms   keyed {b:8.3f} ms   {b / a:5.2f}x"
        )


if __name__ == "__main__":
    main()
