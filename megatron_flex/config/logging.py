"""Flags of what is printed and recorded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_flex.config.option import option


@dataclass(frozen=True, kw_only=True)
class LoggingOptions:
    """Log line, JSONL, TensorBoard and Weights & Biases; the last worker writes them."""

    log_interval: int = option(100, at_least=1)
    """Iterations between log lines."""

    log_format: Literal["short", "megatron"] = option("short", own=True)
    """Log lines on the screen. short: loss, speed, plan and the time that is left; megatron: the
    line of Megatron-LM, and before the first its dump of all arguments."""

    log_file: str | None = option(None, own=True)
    """File to which everything that is said is appended, with all arguments and log lines in
    Megatron-LM's form."""

    log_throughput: bool = False
    """Add TFLOP/s per worker to Megatron-LM's log line, and MFU when the device's peak is known."""

    device_peak_tflops: float | None = option(None, own=True, above=0)
    """Peak TFLOP/s of one device, for MFU with --log-throughput. Not set: known for common GPUs
    with --bf16."""

    log_params_norm: bool = False
    """Add the L2 norm of all parameters."""

    log_num_zeros_in_grad: bool = False
    """Add the number of gradient entries that are zero."""

    log_progress: bool = False
    """Append tokens and floating-point operations so far to progress.txt in the --save directory
    at each checkpoint."""

    timing_log_level: Literal[0] = 0
    """0 reports the time of an iteration."""

    log_jsonl: str | None = option(None, own=True)
    """File that gets one JSON object an iteration. A resumed run replaces the iterations that it
    repeats."""

    tensorboard_dir: str | None = None
    """Directory of TensorBoard files."""

    tensorboard_log_interval: int = option(1, at_least=1)
    """Iterations between TensorBoard points."""

    tensorboard_queue_size: int = option(1000, at_least=1)
    """Events that are kept in memory before they are written."""

    log_timers_to_tensorboard: bool = False
    """Write mean iteration time, throughput and padding at each log line to TensorBoard."""

    log_loss_scale_to_tensorboard: bool = option(
        True,
        flags=("--no-log-loss-scale-to-tensorboard", "--disable-log-loss-scale-to-tensorboard"),
    )
    """Leave the loss scale out of TensorBoard."""

    log_validation_ppl_to_tensorboard: bool = False
    """Write the perplexity of validations to TensorBoard."""

    log_memory_to_tensorboard: bool = False
    """Write the memory in use to TensorBoard: the allocator's on CUDA, else the process's."""

    log_world_size_to_tensorboard: bool = False
    """Write the number of workers to TensorBoard."""

    wandb_project: str | None = None
    """Project of Weights & Biases to record to."""

    wandb_exp_name: str | None = None
    """Name of the experiment there."""

    wandb_save_dir: str | None = None
    """Local directory of its files. Not set: wandb in the --save directory."""

    wandb_entity: str | None = None
    """Owner of the project there."""
