"""A run from its flags to its end, on one worker of the job."""

from __future__ import annotations

import torch

from megatron_flex.arguments import dump
from megatron_flex.config.config import Config
from megatron_flex.loop.alike import of_the_files, of_the_flags
from megatron_flex.loop.assemble import Parts, assemble
from megatron_flex.loop.host_copies import forget_host_copies
from megatron_flex.loop.iteration import tensor_of
from megatron_flex.loop.measuring import with_measured
from megatron_flex.loop.memory import check_memory, memory_of_worker
from megatron_flex.loop.outputs import check_outputs
from megatron_flex.model.attention import check_attention
from megatron_flex.model.check_layers import check_layers
from megatron_flex.runtime.launch import start
from megatron_flex.training import EXPECTED, Trainer


def pretrain(config: Config) -> None:
    """Train, validate and save as the flags say. Every worker of the job calls this.

    Raises ``SystemExit`` with one message for what the user can put right, and
    ``CommunicationError`` where another worker failed first.
    """
    p = config.parallel
    world, failure, completion = start(
        p.distributed_backend,
        p.distributed_timeout_minutes,
        p.tensor_model_parallel_size,
        sequence_parallel=p.sequence_parallel,
        facts=of_the_flags(config),
    )
    last = world.process == world.processes - 1
    if world.process == 0 and config.logging.log_format == "megatron":
        print(dump(config), flush=True)
    with failure.watch():
        try:
            if completion.reached():
                forget_host_copies(config, world)
                if last:
                    print(" the run had ended when a worker died: nothing is left to do")
                return
            if last:
                check_outputs(config)
            parts = assemble(config)
            world.check_alike(of_the_files(config, parts))
            _check(config, parts, world.device)
            parts = with_measured(config, world, parts)
            trainer = Trainer(config, world, parts, completion)
            try:
                trainer.run()
            finally:
                trainer.recorder.close()
        except EXPECTED as error:
            raise SystemExit(str(error)) from error


def _check(config: Config, parts: Parts, device: torch.device) -> None:
    """Raise ``SystemExit`` if the model cannot run on this device."""
    try:
        check_layers(parts.model, device)
        check_attention(parts.model, device)
        if not config.asks_planner:  # else the planner judges batch by batch
            longest, memory = config.data.max_sample_length, memory_of_worker(device)
            check_memory(parts.model, parts.plan, parts.train, longest, memory, tensor_of(config))
    except ValueError as error:
        raise SystemExit(str(error)) from error
