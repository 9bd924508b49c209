"""Cross entropy over the tokenizer's vocabulary, with one float32 buffer of logits.

On the CPU a native kernel reads the logits twice in all; elsewhere torch operations do the same.
"""

from __future__ import annotations

import torch

from megatron_flex.native import function

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
    """Turn logits into ``grad * (softmax - one hot of the label)`` in place."""
    if logits.device.type != "cpu":
        logits.sub_(normalizer[:, None]).exp_()
        logits[torch.arange(len(labels), device=labels.device), labels] -= 1.0
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
    def forward(ctx, logits, labels):  # type: ignore[no-untyped-def]
        normalizer = log_normalizers(logits)
        ctx.save_for_backward(logits, labels, normalizer)
        ctx.done = False
        return normalizer - logits.gather(1, labels[:, None]).squeeze(1)

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
        return buffer, None


def token_cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Masked loss of each token.

    Args:
        logits: ``[T, vocabulary]`` without padded rows; overwritten by the backward pass.
        labels: ``[T]`` int64; where the mask is 0 any value is allowed.
        mask: ``[T]`` weight of each target.

    Returns:
        ``[T]`` float32, exactly 0 where the mask is 0.
    """
    labels = labels.clamp(0, logits.shape[-1] - 1)
    losses = _CrossEntropy.apply(logits.float().contiguous(), labels)
    return torch.where(mask != 0, losses * mask, 0.0)
