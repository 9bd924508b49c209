"""What benchmarks with two real workers share: the model, the meeting, and host memory."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_flex.runtime.world import World
from megatron_flex.twinlayer.manager import Shape, start
from megatron_flex.twinlayer.worker import Member, TwinLayers


def flags(layers: int, hidden: int, samples: int) -> list[str]:
    """The model and the batch, as for pretrain_gpt.py."""
    return (
        f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads {hidden // 64}"
        " --seq-length 512 --max-position-embeddings 512 --mock-data --vocab-size 2000"
        f" --micro-batch-tokens 512 --global-batch-size {samples} --train-iters 1000"
        " --lr 1e-4 --distributed-backend gloo --attention-dropout 0"
    ).split()


def meet(rank: int, rendezvous: str) -> World:
    """Worker ``rank`` of two, with one thread."""
    torch.set_num_threads(1)
    timeout = timedelta(minutes=5)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2, timeout=timeout
    )
    return World.create(torch.device("cpu"), timeout)


def host_memory(world: World, rendezvous: str, shape: Shape) -> TwinLayers:
    """A manager of both workers; it ends after them."""
    socket = Path(rendezvous).with_name("twin.sock")
    if world.rank == 0:
        start(socket, "benchmark", shape)
    world.barrier()
    member = Member(world.rank, "first", world.size, 1.0, world.timeout.total_seconds())
    return TwinLayers(socket, member, world.device)
