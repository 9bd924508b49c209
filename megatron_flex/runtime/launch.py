"""Starts a worker: device, process groups, and who speaks when something fails."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Literal, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from megatron_flex.runtime.agreement import Facts, check_alike
from megatron_flex.runtime.attempt import AGREED, agree, attempt, several_torchruns
from megatron_flex.runtime.completion import Completion
from megatron_flex.runtime.failure import FirstFailure, lost
from megatron_flex.runtime.host_allocator import keep_freed_memory
from megatron_flex.runtime.world import World, control_group, local_rank, workers_per_gpu

STORE_TIMEOUT = timedelta(seconds=5)
"""Longest wait for an answer of the job's key-value store when the job fails."""


def start(
    backend: Literal["nccl", "gloo"] | None,
    timeout_minutes: float,
    sharing: int = 1,
    *,
    sequence_parallel: bool = False,
    facts: Facts | None = None,
) -> tuple[World, FirstFailure, Completion]:
    """Join the job that torchrun (or a Slurm script) describes in the environment.

    Without ``WORLD_SIZE`` in the environment this is a job of one worker. ``backend`` of ``None``
    takes NCCL where there is CUDA and gloo elsewhere. ``sharing`` neighbouring workers are one
    device, and divide tokens too if ``sequence_parallel``. All must start from the same ``facts``.
    Raises ``SystemExit`` with one message when the environment is incomplete, or the workers cannot
    meet, or do not start alike.
    """
    cuda = torch.cuda.is_available()
    if backend == "nccl" and not cuda:
        raise SystemExit(
            "--distributed-backend nccl (the default, as in Megatron-LM) needs CUDA, which this"
            " machine does not have: give --distributed-backend gloo"
        )
    device = torch.device("cpu")
    if cuda:
        if backend != "gloo" and workers_per_gpu() > 1:
            raise SystemExit(
                f"--distributed-backend nccl (the default, as in Megatron-LM) needs a GPU for each"
                f" worker, but {workers_per_gpu()} would share one: start fewer, or give"
                " --distributed-backend gloo"
            )
        device = torch.device("cuda", local_rank() % torch.cuda.device_count())
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(_threads(os.environ))
        keep_freed_memory()
    timeout = timedelta(minutes=timeout_minutes)
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    failure, completion = FirstFailure(None, rank), Completion(None)
    if size > 1:
        store = _join(rank, size, backend or ("nccl" if cuda else "gloo"), timeout)
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        # torchrun keeps its store over restarts; keys of an earlier attempt must not be met.
        own = dist.PrefixStore(attempt(), store)
        failure = FirstFailure(own, rank, hosts=rank == 0 and not agent)
        completion = Completion(store if agent else None)
    with failure.watch():
        # What is made next depends on how many workers share layers.
        try:
            control = control_group(timeout)
            check_alike(control, facts or {}, _apart(rank, size, sharing))
        except RuntimeError as error:
            raise lost(rank, "what all workers start from", error) from error
        world = World.create(
            device, timeout, sharing, sequence_parallel=sequence_parallel, control=control
        )
        return world, failure, completion


def _threads(environment: Mapping[str, str]) -> int:
    """Threads that a worker computes with: OpenMP's outermost; one where none are named."""
    first = environment.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) > 0 else 1


def _apart(rank: int, size: int, sharing: int) -> str:
    """Why servers are not alike, or workers that share layers would not be neighbours on one
    server; empty if all is well."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", str(sharing)))
    if "LOCAL_WORLD_SIZE" in os.environ and size % local:
        return (
            f"{size} workers do not fill servers of {local}, as many as worker {rank}'s has: start"
            " as many on each server (torchrun --nproc-per-node)"
        )
    if local % sharing:
        return (
            f"{local} workers on a server are no multiple of --tensor-model-parallel-size"
            f" {sharing}: workers that share layers must be on one server; change one of them"
        )
    number = int(os.environ.get("LOCAL_RANK", str(rank)))
    if number % sharing != rank % sharing:
        return (
            f"worker {rank} is number {number} on its server: with --tensor-model-parallel-size"
            f" {sharing} neighbouring workers must be on one server; number the workers server by"
            " server (srun --distribution=block)"
        )
    return ""


def _join(rank: int, size: int, backend: str, timeout: timedelta) -> dist.Store:
    """Meet the other workers; a client of the job's store for what concerns the job's end."""
    missing = [n for n in ("RANK", "MASTER_ADDR", "MASTER_PORT") if n not in os.environ]
    if missing:
        raise SystemExit(
            f"WORLD_SIZE is {size} but {', '.join(missing)} is not set: start with torchrun"
        )
    try:
        store, _, _ = next(rendezvous("env://", timeout=timeout))
        if several_torchruns():
            os.environ[AGREED] = str(agree(store, rank, size, timeout))
        prefixed = dist.PrefixStore(attempt(), store)
        dist.init_process_group(
            backend, store=prefixed, rank=rank, world_size=size, timeout=timeout
        )
        own: dist.Store = store.clone()
        own.set_timeout(STORE_TIMEOUT)
        return own
    except (RuntimeError, ValueError) as error:
        _could_not_meet(rank, size, timeout, error)


def _could_not_meet(rank: int, size: int, timeout: timedelta, error: Exception) -> NoReturn:
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    if "EADDRINUSE" in str(error):
        raise SystemExit(
            f"worker {rank}: another program uses port {os.environ['MASTER_PORT']} of this machine,"
            f" where the workers were to meet ({address}): give another --master-port to torchrun"
            " (MASTER_PORT in the environment), or start with torchrun --standalone"
        ) from error
    raise SystemExit(
        f"worker {rank} of {size} could not meet the others at {address} within"
        f" {timeout.total_seconds() / 60:g} minutes (--distributed-timeout-minutes):"
        f" {str(error).splitlines()[0]}. Is a worker missing, or the address wrong"
        " (MASTER_ADDR, MASTER_PORT)?"
    ) from error
