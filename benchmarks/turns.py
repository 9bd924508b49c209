"""When hand-overs that begin together are there: two copy at a time, against all at once.

    python benchmarks/turns.py               under a minute

Four processes copy a slab each into shared memory at the same moment, as workers do after an
update. The manager gives turns to two, then to the others; or it has turns for all four, which is
as if there were none. Medians over interleaved rounds of the mean and of the last process's time.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from multiprocessing.sharedctypes import SynchronizedArray
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch

from megatron_flex import kernels
from megatron_flex.twinlayer.location import DIRECTORY, socket_of
from megatron_flex.twinlayer.manager import Shape, start, stop
from megatron_flex.twinlayer.turns import Turns

PROCESSES = 4
MIB = 1 << 20
SECONDS = 60.0


def copier(
    rank: int, sockets: list[Path], size: int, rounds: int, gate: Barrier, taken: Any
) -> None:
    """One process: in each round and for each manager in turn, one copy from the same moment on."""
    torch.set_num_threads(1)
    source, target = (torch.ones(size, dtype=torch.uint8) for _ in range(2))
    flags = torch.zeros(kernels.chunk_count(size, MIB), dtype=torch.int64)
    turns = [Turns(socket, SECONDS) for socket in sockets]
    for version in range(1, rounds + 1):
        for one in turns:
            gate.wait(SECONDS)
            began = time.perf_counter()
            with one.turn(rank, size):
                kernels.write_chunks(source, target, flags, version, MIB)
                taken[rank] = time.perf_counter() - began
            gate.wait(SECONDS)
            gate.wait(SECONDS)  # the times are read meanwhile


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--mebibytes", type=int, default=128, help="bytes of each slab")
    parser.add_argument("--rounds", type=int, default=25)
    arguments = parser.parse_args()
    size, rounds = arguments.mebibytes * MIB, arguments.rounds
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as directory:
        os.environ[DIRECTORY] = directory
        at_once = (2, PROCESSES)
        sockets = [socket_of(f"{n} at once") for n in at_once]
        for socket, n in zip(sockets, at_once, strict=True):
            start(socket, f"{n} at once", Shape(0, 0, 0), SECONDS, n)
        gate = context.Barrier(PROCESSES + 1)
        taken: SynchronizedArray[float] = context.Array("d", PROCESSES)
        processes = [
            context.Process(target=copier, args=(rank, sockets, size, rounds, gate, taken))
            for rank in range(PROCESSES)
        ]
        for process in processes:
            process.start()
        found: dict[int, list[list[float]]] = {n: [] for n in at_once}
        for round_ in range(rounds):
            for n in at_once:
                gate.wait(SECONDS)
                gate.wait(SECONDS)
                if round_:  # the first one warms up
                    found[n].append(taken[:])
                gate.wait(SECONDS)
        for process in processes:
            process.join(SECONDS)
        for socket in sockets:
            stop(socket)
    print(f"{PROCESSES} slabs of {arguments.mebibytes} MiB on {os.cpu_count()} cores, ms")
    print(f"{'copies at a time':20}{'mean':>8}{'first':>8}{'last':>8}")
    for n, times in found.items():
        columns = (statistics.mean, min, max)
        values = [statistics.median(of(t) for t in times) * 1e3 for of in columns]
        print(f"{n:<20}" + "".join(f"{value:8.1f}" for value in values))


if __name__ == "__main__":
    main()
