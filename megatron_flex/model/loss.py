"""Cross entropy over the tokenizer's vocabulary, with one float32 buffer of logits.

On the CPU a native kernel reads the logits twice in all; elsewhere torch operations do the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_flex.model.tensor_group import TensorGroup
from megatron_flex.native import function


@dataclass(frozen=True)
class VocabularyPart:
    """What of the vocabulary a worker's logits are of, where a group divides it.

    Attributes:
        group: the workers that have the rest.
        first: the token of the first logit.
        size: tokens of the whole vocabulary.
    """

    group: TensorGroup
    first: int
    size: int


# Rows whose exponentials are held at a time where torch operations compute them.
_ROWS = 256


def log_normalizers(logits: torch.Tensor) -> torch.Tensor:
    """``[T]`` log of the sum of exponentials of contiguous float32 ``[T, vocabulary]``."""
    if logits.device.type != "cpu":
        return torch.cat([torch.logsumexp(part, dim=-1) for part in logits.split(_ROWS)])
    out = logits.new_empty(len(logits))
    function("mflex_log_normalizers")(
        logits.data_ptr(), *logits.shape, out.data_ptr(), torch.get_num_threads()
    )
    return out


def gradients_(
    logits: torch.Tensor, labels: torch.Tensor, normalizer: torch.Tensor, grad: torch.Tensor
) -> torch.Tensor:
    """Turn logits into ``grad * (softmax - one hot of the label)`` in place.

    A negative label is that of another worker's logits.
    """
    if not logits.numel():
        return logits
    if logits.device.type != "cpu":
        logits.sub_(normalizer[:, None]).exp_()
        rows = torch.arange(len(labels), device=labels.device)
        logits[rows, labels.clamp(min=0)] -= (labels >= 0).to(logits.dtype)
        return logits.mul_(grad[:, None])
    function("mflex_cross_entropy_gradients")(
        logits.data_ptr(),
        labels.contiguous().data_ptr(),
        normalizer.data_ptr(),
        grad.contiguous().data_ptr(),
        *logits.shape,
        torch.get_num_threads(),
    )
    return logits


class _CrossEntropy(torch.autograd.Function):
    """Loss of each row. The backward pass turns the saved logits into their gradient in place."""

    @staticmethod
    def forward(ctx, logits, labels, part):  # type: ignore[no-untyped-def]
        if part is None:
            normalizer = log_normalizers(logits)
            chosen = logits.gather(1, labels[:, None]).squeeze(1)
        else:
            labels, normalizer, chosen = _over_the_group(logits, labels, part)
        ctx.save_for_backward(logits, labels, normalizer)
        ctx.done = False
        return normalizer - chosen

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        logits, labels, normalizer = ctx.saved_tensors
        if ctx.done:
            raise RuntimeError("a loss has one backward: it turns the logits into their gradient")
        ctx.done = True
        # Nothing but the saved tensor holds the buffer, so that it goes as soon as the output layer
        # is done with it.
        buffer = logits.data
        gradients_(buffer, labels, normalizer, grad)
        return buffer, None, None


def _over_the_group(
    logits: torch.Tensor, labels: torch.Tensor, part: VocabularyPart
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Labels within ``logits`` (others negative); of all logits the normalizers, and the labels'.

    One exchange of two numbers a token, which are added in the order of the workers.
    """
    columns = logits.shape[1]
    if columns:
        normalizer = log_normalizers(logits)
        labels = labels - part.first
        absent = (labels < 0) | (labels >= columns)
        labels = labels.masked_fill(absent, -1)
        chosen = logits.gather(1, labels.clamp(min=0)[:, None]).squeeze(1).masked_fill(absent, 0.0)
    else:  # padding only
        normalizer = logits.new_full((len(logits),), -torch.inf)
        labels, chosen = torch.full_like(labels, -1), logits.new_zeros(len(logits))
    group = part.group
    found = group.gather(torch.stack((normalizer, chosen))).view(group.size, 2, len(logits))
    return labels, torch.logsumexp(found[:, 0], 0), found[:, 1].sum(0)


def token_cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    mask: torch.Tensor,
    part: VocabularyPart | None = None,
) -> torch.Tensor:
    """Masked loss of each token.

    Args:
        logits: ``[T, vocabulary]`` without padded rows; overwritten by the backward pass.
        labels: ``[T]`` int64; where the mask is 0 any value is allowed.
        mask: ``[T]`` weight of each target.
        part: the part of the vocabulary that ``logits`` are of; ``None``: all of it.

    Returns:
        ``[T]`` float32, exactly 0 where the mask is 0.
    """
    labels = labels.clamp(0, (logits.shape[-1] if part is None else part.size) - 1)
    losses = _CrossEntropy.apply(logits.float().contiguous(), labels, part)
    return torch.where(mask != 0, losses * mask, 0.0)
