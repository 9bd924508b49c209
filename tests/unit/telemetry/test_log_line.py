"""The printed lines."""

from __future__ import annotations

import math
import re
from datetime import datetime

from megatron_flex.telemetry.interval import Interval, IntervalSummary
from megatron_flex.telemetry.log_line import (
    completion_line,
    perplexity,
    short_line,
    short_validation_line,
    training_line,
    validation_lines,
)
from megatron_flex.telemetry.record import IterationRecord
from tests.unit.telemetry.records import completion, record, validation

NOW = datetime(2026, 3, 4, 5, 6, 7, 89)


def summary(
    *records: IterationRecord, world_size: int = 4, peak: float | None = None
) -> IntervalSummary:
    interval = Interval(records[-1].iteration, world_size, peak)
    result = None
    for one in records:
        result = interval.add(one)
    assert result is not None
    return result


def test_the_line_has_megatrons_fields_and_two_more() -> None:
    line = training_line(summary(record(7)), 500, now=NOW)
    assert line == (
        " [2026-03-04 05:06:07.000089] iteration        7/     500 |"
        " consumed samples:          112 |"
        " elapsed time per iteration (ms): 500.0 |"
        " tokens/s: 2000.0 | padding: 0.0% | ETA: 4 min 6 s |"
        " learning rate: 1.000000E-03 |"
        " global batch size:    16 |"
        " lm loss: 4.000000E+00 |"
        " loss scale: 1.0 |"
        " grad norm: 1.250 |"
        " number of skipped iterations:   0 |"
        " number of nan iterations:   0 |"
    )


def test_without_the_additional_fields_it_is_megatrons_line() -> None:
    """The format strings of Megatron-LM's ``training_log``, applied to the same values."""
    r = record(
        3,
        losses={"lm loss": 7.5, "sop loss": 0.25},
        num_zeros=12,
        params_norm=33.0,
    )
    theirs = f" [{NOW.strftime('%Y-%m-%d %H:%M:%S.%f')}]"
    theirs += f" iteration {3:8d}/{40:8d} |"
    theirs += f" consumed samples: {48:12d} |"
    theirs += f" elapsed time per iteration (ms): {500.0:.1f} |"
    theirs += f" throughput per GPU (TFLOP/s/GPU): {1.0:.1f} |"
    theirs += f" learning rate: {1e-3:.6E} |"
    theirs += f" global batch size: {16:5d} |"
    theirs += f" lm loss: {7.5:.6E} |"
    theirs += f" sop loss: {0.25:.6E} |"
    theirs += f" loss scale: {1.0:.1f} |"
    theirs += f" grad norm: {1.25:.3f} |"
    theirs += f" num zeros: {12} |"
    theirs += f" params norm: {33.0:.3f} |"
    theirs += f" number of skipped iterations: {0:3d} |"
    theirs += f" number of nan iterations: {0:3d} |"
    ours = training_line(summary(r), 40, log_throughput=True, now=NOW)
    assert re.sub(r" (tokens/s|padding|ETA): [^|]+ \|", "", ours) == theirs


def test_the_short_line_has_what_a_person_looks_for() -> None:
    notes = {"plan": "(2,1,1)", "action": "③ more stages", "bubble": "12.4%"}
    slow = record(1, elapsed=9.0)
    one = record(2, losses={"lm loss": 3.0}, elapsed=2.0, notes=notes)
    text = short_line(summary(slow, one), 500)
    assert text == (
        " iteration        2/     500 | lm loss: 3.5000 | 5.5 s/iteration | tokens/s: 182"
        " | plan: (2,1,1) | action: ③ more stages | ETA: 16 min 36 s"
    )
    lost = short_line(summary(record(1, skipped=True, finite=False)), 1)
    assert " | skipped: 1 | not finite: 1 | ETA: 0 s" in lost


def test_the_eta_leaves_the_first_iteration_out() -> None:
    records = [record(1, elapsed=60.0), *(record(k, elapsed=1.0) for k in range(2, 12))]
    assert "ETA: 1 min 29 s" in short_line(summary(*records), 100)


def test_a_short_validation_is_one_line() -> None:
    text = short_validation_line(validation(10, losses={"lm loss": 2.0}))
    assert text == " validation loss at iteration 10 | lm loss: 2.0000 | lm loss PPL: 7.389"


def test_throughput_and_mfu_come_before_tokens() -> None:
    line = training_line(summary(record(1), peak=10e12), 1, log_throughput=True, now=NOW)
    assert (
        " | throughput per GPU (TFLOP/s/GPU): 1.0 | MFU: 10.0% | tokens/s: 2000.0 | padding: 0.0% |"
        in line
    )
    assert "MFU" not in training_line(summary(record(1)), 1, log_throughput=True, now=NOW)


def test_padding_is_a_share_of_what_was_computed() -> None:
    line = training_line(summary(record(1, padding=1000), record(2, padding=0)), 1, now=NOW)
    assert " padding: 33.3% |" in line
    assert " tokens/s: 2000.0 |" in line


def test_a_loss_of_nothing_and_a_missing_norm_are_left_out() -> None:
    line = training_line(summary(record(1, grad_norm=None, skipped=True)), 1, now=NOW)
    assert "loss:" not in line
    assert "grad norm" not in line
    assert " number of skipped iterations:   1 |" in line


def test_validation_is_framed_by_rules() -> None:
    above, line, below = validation_lines(validation(10, losses={"lm loss": 2.0}))
    assert line == (
        " validation loss at iteration 10 | lm loss value: 2.000000E+00"
        " | lm loss PPL: 7.389056E+00 | "
    )
    assert above == below == "-" * (len(line) + 1)


def test_both_losses_of_bert_are_validated() -> None:
    line = validation_lines(validation(losses={"lm loss": 1.0, "sop loss": 0.5}))[1]
    assert " | lm loss PPL: 2.718282E+00 | sop loss value: 5.000000E-01 | sop loss PPL:" in line


def test_perplexity_stays_printable() -> None:
    assert perplexity(1000.0) == perplexity(20.0)
    assert math.isnan(perplexity(math.nan))
    assert perplexity(math.inf) == perplexity(20.0)


def test_a_completion_is_one_line() -> None:
    line = completion_line(completion(7))
    assert line == " completion at iteration 7 of 'def f(': 'x):\\n  pass'"
    long = completion_line(completion(7, prompt="a" * 100, ended=False))
    assert long == f" completion at iteration 7 of '…{'a' * 60}': 'x):\\n  pass' …"
