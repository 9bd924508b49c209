"""Cross entropy: values, gradients, masks and memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_flex.model import loss
from megatron_flex.model.loss import token_cross_entropy
from tests.close import assert_close

pytestmark = pytest.mark.usefixtures("cpu_level")


@given(
    rows=st.integers(1, 9),
    columns=st.integers(2, 70),
    scale=st.sampled_from([1.0, 30.0, 1000.0]),
    seed=st.integers(0, 1000),
)
def test_losses_and_gradients_equal_torchs(
    rows: int, columns: int, scale: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(rows, columns, generator=generator)
    labels = torch.randint(columns, (rows,), generator=generator)
    mask = torch.randint(0, 3, (rows,), generator=generator).float()
    ours, theirs = (t.clone().requires_grad_() for t in (logits, logits.double()))
    losses = token_cross_entropy(ours * 1.0, labels, mask)
    expected = torch.nn.functional.cross_entropy(theirs, labels, reduction="none") * mask
    # A loss is a difference of logits and their normalizer, and may be far smaller than these.
    assert_close(losses, expected, 7e-7, least=logits.norm().item())
    losses.sum().backward()
    expected.sum().backward()
    assert ours.grad is not None
    assert theirs.grad is not None
    assert_close(ours.grad, theirs.grad, 5e-7 * scale, least=mask.norm().item())


def test_the_native_kernels_equal_the_torch_operations() -> None:
    logits, grad = 5 * torch.randn(300, 45), torch.rand(300)
    labels = torch.randint(45, (300,))
    normalizer = loss.log_normalizers(logits)
    native = loss.gradients_(logits.clone(), labels, normalizer, grad)
    assert_close(normalizer, logits.logsumexp(-1), 2e-7)
    one_hot = torch.nn.functional.one_hot(labels, 45)
    expected = grad[:, None] * (logits.softmax(-1) - one_hot)
    assert_close(native, expected, 1e-6)


def test_masked_targets_may_be_anything_and_give_exactly_zero() -> None:
    logits = torch.randn(4, 10, requires_grad=True)
    labels = torch.tensor([3, -100, 999, 1])
    losses = token_cross_entropy(logits * 1.0, labels, torch.tensor([1.0, 0.0, 0.0, 1.0]))
    assert losses[1:3].tolist() == [0.0, 0.0]
    losses.sum().backward()
    assert logits.grad is not None
    assert torch.count_nonzero(logits.grad[1:3]) == 0
    assert torch.count_nonzero(logits.grad[[0, 3]]) == 20


def test_nan_logits_give_nan_losses() -> None:
    logits = torch.zeros(2, 40)
    logits[0, 39] = torch.nan
    losses = token_cross_entropy(logits, torch.tensor([0, 0]), torch.ones(2))
    assert losses.isnan().tolist() == [True, False]


def test_the_gradient_reuses_the_memory_of_the_logits() -> None:
    hidden = torch.randn(5, 3, requires_grad=True)
    weight = torch.randn(7, 3, requires_grad=True)
    logits = hidden @ weight.t()
    address = logits.data_ptr()
    seen = []
    logits.register_hook(lambda grad: seen.append(grad.data_ptr()))
    token_cross_entropy(logits, torch.zeros(5, dtype=torch.long), torch.ones(5)).sum().backward()
    assert seen == [address]


def test_a_second_backward_is_refused_and_not_wrong() -> None:
    hidden = torch.randn(5, 3, requires_grad=True)
    total = token_cross_entropy(hidden, torch.zeros(5, dtype=torch.long), torch.ones(5)).sum()
    torch.autograd.grad(total, hidden, retain_graph=True)
    with pytest.raises(RuntimeError, match="a loss has one backward"):
        torch.autograd.grad(total, hidden)
