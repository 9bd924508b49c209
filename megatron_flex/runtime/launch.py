"""Starts a worker: device, process group, and an end that never hangs."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Literal, NoReturn

import torch
import torch.distributed as dist

from megatron_flex.runtime.communicator import CommunicationError
from megatron_flex.runtime.world import World, local_rank

# Exit status of a worker that only lost its peers: the worker with the cause exits with another.
EXIT_PEER_LOST = 75  # EX_TEMPFAIL


def start(backend: Literal["nccl", "gloo"] | None, timeout_minutes: float) -> World:
    """Join the job that torchrun (or a Slurm script) describes in the environment.

    Without ``WORLD_SIZE`` in the environment this is a job of one worker. ``backend`` of ``None``
    takes NCCL where there is CUDA and gloo elsewhere. Raises ``SystemExit`` with one message when
    the environment is incomplete or the workers cannot meet.
    """
    cuda = torch.cuda.is_available()
    if backend == "nccl" and not cuda:
        raise SystemExit("--distributed-backend nccl needs CUDA; this machine has none: use gloo")
    device = torch.device("cuda", local_rank()) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    timeout = timedelta(minutes=timeout_minutes)
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size > 1:
        missing = [n for n in ("RANK", "MASTER_ADDR", "MASTER_PORT") if n not in os.environ]
        if missing:
            raise SystemExit(
                f"WORLD_SIZE is {size} but {', '.join(missing)} is not set: start with torchrun"
            )
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        try:
            dist.init_process_group(backend or ("nccl" if cuda else "gloo"), timeout=timeout)
        except (RuntimeError, ValueError) as error:
            raise SystemExit(
                f"worker {os.environ['RANK']} of {size} could not meet the others at {address}"
                f" within {timeout_minutes:g} minutes: {str(error).splitlines()[0]}\nIs the port"
                " in use by another job (set --master-port), or a worker missing?"
            ) from error
    return World.create(device, timeout)


def run(main: Callable[[], None]) -> NoReturn:
    """Run a worker's ``main`` and end the process, at once if it failed.

    A failed worker leaves without waiting for the others (its peers' connections close, so they
    end too): destroying groups would wait for workers that wait for it. Status 0, 1, the
    ``SystemExit``'s own, or :data:`EXIT_PEER_LOST`.
    """
    status = 0
    try:
        main()
    except SystemExit as end:
        if isinstance(end.code, str):
            print(f"error: {end.code}", file=sys.stderr)
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except CommunicationError as error:
        print(f"error: {error}\n(the cause is in the message of the worker that failed first)",
              file=sys.stderr)  # fmt: skip
        status = EXIT_PEER_LOST
    except BaseException:
        print(f"error in worker {os.environ.get('RANK', '0')}:", file=sys.stderr)
        traceback.print_exc()
        status = 1
    if status == 0 and dist.is_initialized():
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
