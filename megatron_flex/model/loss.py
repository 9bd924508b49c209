"""Cross entropy over the tokenizer's vocabulary, with one float32 buffer of logits."""

from __future__ import annotations

import torch

# Rows whose exponentials are held at a time in the forward pass.
_ROWS = 256


class _CrossEntropy(torch.autograd.Function):
    """Loss of each row. The backward pass turns the saved logits into their gradient in place."""

    @staticmethod
    def forward(ctx, logits, labels):  # type: ignore[no-untyped-def]
        normalizer = torch.cat([torch.logsumexp(part, dim=-1) for part in logits.split(_ROWS)])
        ctx.save_for_backward(logits, labels, normalizer)
        ctx.done = None
        return normalizer - logits.gather(1, labels[:, None]).squeeze(1)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        if ctx.done is None:
            logits, labels, normalizer = ctx.saved_tensors
            logits.sub_(normalizer[:, None]).exp_()
            logits[torch.arange(len(labels), device=labels.device), labels] -= 1.0
            logits.mul_(grad[:, None])
            # A split backward passes here twice, with the same gradient.
            ctx.done = (grad, logits)
        first, buffer = ctx.done
        if first is not grad and not torch.equal(first, grad):
            raise RuntimeError("the second backward of a loss must be given the same gradient")
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
    losses = _CrossEntropy.apply(logits.float(), labels)
    return torch.where(mask != 0, losses * mask, 0.0)
