"""What the training loop tells the recorder: one frozen value for each event."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

LENGTH_PERCENTILES = (0, 10, 25, 50, 75, 90, 100)
"""Of a batch's sample lengths; recorded as ``length-quantiles``."""
LENGTHS_LISTED = 256
"""Samples of the largest batch whose lengths are recorded one by one, as ``lengths``."""


@dataclass(frozen=True)
class RunRecord:
    """What stays the same for a run, told at its start.

    Attributes:
        iteration: iterations that were trained before; 0 unless it resumes.
        workers: how many there are.
        train_iters: the iteration that it trains up to.
        parameters: of the model.
        budget: bytes that a worker may use; ``None``: no budget was given.
        setup: what the planner needs to make programs again
            (:meth:`megatron_flex.planner.messages.Setup.to_json`).
        kind: ``training`` or ``simulation``.
        time: seconds since the epoch.
    """

    iteration: int
    workers: int
    train_iters: int
    parameters: int
    budget: float | None
    setup: Mapping[str, Any]
    kind: str = "training"
    time: float | None = None


@dataclass(frozen=True)
class IterationRecord:
    """One training iteration, over all workers.

    Attributes:
        iteration: its number; the first of a run is 1.
        consumed_samples: samples of all iterations so far, this one included.
        elapsed: seconds from the end of the iteration before to the end of this one.
        learning_rate: of this iteration's update.
        global_batch_size: samples.
        losses: mean of each loss over its tokens, ``lm loss`` first.
        grad_norm: before clipping; ``None`` if it was not computed.
        skipped: no update was made (gradients not finite, or no loss token in the batch).
        finite: false if the gradient norm was NaN or infinite.
        tokens: input tokens of the samples.
        padding: positions that were computed beside them.
        flops: floating-point operations of the model, forward and backward, for ``tokens``.
        loss_scale: what the loss was multiplied by; 1 without fp16.
        num_zeros: gradient entries that are zero (``--log-num-zeros-in-grad``).
        params_norm: L2 norm of all parameters (``--log-params-norm``).
        memory: bytes or counts by name (``--log-memory-to-tensorboard``).
        plan: text form of the layout.
        extra: further numbers for JSONL and TensorBoard, by name.
        lists: figures of every sample or worker for JSONL, by name.
        notes: further fields of the log line, by name; JSONL gets ``action``.
        reason: where the layout is another than before, why, in words.
        time: seconds since the epoch at its end.
    """

    iteration: int
    consumed_samples: int
    elapsed: float
    learning_rate: float
    global_batch_size: int
    losses: Mapping[str, float]
    grad_norm: float | None
    skipped: bool
    tokens: int
    flops: float
    finite: bool = True
    padding: int = 0
    loss_scale: float = 1.0
    num_zeros: int | None = None
    params_norm: float | None = None
    memory: Mapping[str, float] = field(default_factory=dict)
    plan: str = ""
    extra: Mapping[str, float] = field(default_factory=dict)
    lists: Mapping[str, Sequence[float]] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)
    reason: str = ""
    time: float | None = None


@dataclass(frozen=True)
class CompletionRecord:
    """A prompt that was completed at a validation.

    Attributes:
        iteration: iterations trained so far.
        consumed_samples: training samples so far.
        prompt: as the model read it.
        completion: what it added, without its end.
        tokens: how many it made.
        ended: it came to an end by itself.
    """

    iteration: int
    consumed_samples: int
    prompt: str
    completion: str
    tokens: int
    ended: bool


@dataclass(frozen=True)
class ValidationRecord:
    """One validation or test.

    Attributes:
        where: as in Megatron's line, such as ``iteration 100`` or ``iteration 500 on test set``;
            ``validation loss at`` comes before it.
        iteration: iterations trained so far.
        consumed_samples: training samples so far.
        losses: mean of each loss over its tokens.
        samples: samples that were evaluated.
        tokens: their tokens.
        test: the test set, not the validation set.
    """

    where: str
    iteration: int
    consumed_samples: int
    losses: Mapping[str, float]
    samples: int
    tokens: int
    test: bool = False
