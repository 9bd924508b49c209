"""The lines that a run prints: short ones, and those of Megatron-LM 0.16, field for field.

In the long ones there are additional fields between the throughput (or the elapsed time) and the
learning rate: ``tokens/s``, ``padding`` and ``ETA``, before them ``MFU`` if it is known, and after
them, where plans change, the plan, why it was chosen, and how it went (of the last iteration).
"""

from __future__ import annotations

import math
from datetime import datetime

from megatron_flex.quantities import count, duration
from megatron_flex.telemetry.interval import IntervalSummary
from megatron_flex.telemetry.record import CompletionRecord, ValidationRecord


def training_line(
    summary: IntervalSummary,
    train_iters: int,
    *,
    log_throughput: bool = False,
    now: datetime | None = None,
) -> str:
    """One line for the iterations since the last one."""
    last, rates = summary.last, summary.throughput
    fields = [f"iteration {last.iteration:8d}/{train_iters:8d}"]
    fields.append(f"consumed samples: {last.consumed_samples:12d}")
    milliseconds = summary.seconds_per_iteration * 1000.0
    fields.append(f"elapsed time per iteration (ms): {milliseconds:.1f}")
    if log_throughput:
        fields.append(f"throughput per GPU (TFLOP/s/GPU): {rates.tflops:.1f}")
        if rates.mfu_percent is not None:
            fields.append(f"MFU: {rates.mfu_percent:.1f}%")
    fields.append(f"tokens/s: {rates.tokens_per_second:.1f}")
    fields.append(f"padding: {rates.padding_percent:.1f}%")
    fields.append(f"ETA: {eta(summary, train_iters)}")
    fields += [f"{name}: {value}" for name, value in last.notes.items()]
    fields.append(f"learning rate: {last.learning_rate:.6E}")
    fields.append(f"global batch size: {last.global_batch_size:5d}")
    # Megatron leaves a mean of zero out: it has no value to report then.
    fields += [f"{name}: {value:.6E}" for name, value in summary.losses.items() if value > 0.0]
    fields.append(f"loss scale: {last.loss_scale:.1f}")
    if last.grad_norm is not None:
        fields.append(f"grad norm: {last.grad_norm:.3f}")
    if last.num_zeros is not None:
        fields.append(f"num zeros: {last.num_zeros}")
    if last.params_norm is not None:
        fields.append(f"params norm: {last.params_norm:.3f}")
    fields.append(f"number of skipped iterations: {summary.skipped:3d}")
    fields.append(f"number of nan iterations: {summary.nan:3d}")
    time = (now or datetime.now()).strftime("%Y-%m-%d %H:%M:%S.%f")
    return f" [{time}] " + " | ".join(fields) + " |"


SHORT_NOTES = ("plan", "action", "iterations over the memory budget")
"""Notes of an iteration that the short line has, too."""


def short_line(summary: IntervalSummary, train_iters: int) -> str:
    """What a person wants to see of the iterations since the last line."""
    last = summary.last
    fields = [f" iteration {last.iteration:8d}/{train_iters:8d}"]
    fields += [f"{name}: {value:.4f}" for name, value in summary.losses.items()]
    fields.append(f"{summary.seconds_per_iteration:.3g} s/iteration")
    fields.append(f"tokens/s: {count(summary.throughput.tokens_per_second)}")
    for number, what in ((summary.skipped, "skipped"), (summary.nan, "not finite")):
        if number:
            fields.append(f"{what}: {number}")
    notes = {name: last.notes[name] for name in SHORT_NOTES if name in last.notes}
    fields += [f"{name}: {value}" for name, value in notes.items()]
    fields.append(f"ETA: {eta(summary, train_iters)}")
    return " | ".join(fields)


def eta(summary: IntervalSummary, train_iters: int) -> str:
    """Time that the iterations that are left will take, as those so far did on average."""
    return duration((train_iters - summary.last.iteration) * summary.typical)


_PROMPT = 60  # characters of a prompt in the log


def completion_line(record: CompletionRecord) -> str:
    """A prompt's end and its completion, in which line breaks are written as ``\\n``."""
    prompt = record.prompt if len(record.prompt) <= _PROMPT else "…" + record.prompt[-_PROMPT:]
    more = "" if record.ended else " …"
    return f" completion at iteration {record.iteration} of {prompt!r}: {record.completion!r}{more}"


def short_validation_line(record: ValidationRecord) -> str:
    """The losses and perplexities of a validation."""
    fields = [f" validation loss at {record.where}"]
    for name, value in record.losses.items():
        fields += [f"{name}: {value:.4f}", f"{name} PPL: {perplexity(value):.4g}"]
    return " | ".join(fields)


def perplexity(loss: float) -> float:
    """``exp(loss)``, bounded as in Megatron-LM so that it stays printable; NaN of NaN."""
    return loss if math.isnan(loss) else math.exp(min(20.0, loss))


def validation_lines(record: ValidationRecord) -> tuple[str, str, str]:
    """Three lines: the losses and perplexities of a validation between two rules.

    Megatron-LM says ``validation loss at`` for the test set too; ``where`` tells them apart.
    """
    text = f" validation loss at {record.where} | "
    for name, value in record.losses.items():
        text += f"{name} value: {value:.6E} | {name} PPL: {perplexity(value):.6E} | "
    rule = "-" * (len(text) + 1)
    return rule, text, rule
