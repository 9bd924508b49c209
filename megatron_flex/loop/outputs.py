"""Whether a run can write what its flags ask for, found out before anything is allocated."""

from __future__ import annotations

from pathlib import Path

from megatron_flex.config.config import Config
from megatron_flex.loop import recording
from megatron_flex.telemetry import jsonl, log_file, tensorboard, trace, wandb


def check_outputs(config: Config) -> None:
    """Try each file; nothing that is there is changed.

    Raises ``TelemetryError`` naming flag and path, and what to change.
    """
    g, f = config.logging, config.flexpipe
    for path, check in (
        (g.log_file, log_file.check),
        (g.log_jsonl, jsonl.check),
        (g.tensorboard_dir, tensorboard.check),
        (g.wandb_save_dir if g.wandb_project else None, wandb.check),
        (f.flexpipe_record, recording.check),
        (f.flexpipe_trace, trace.check),
    ):
        if path is not None:
            check(Path(path))
