"""SwiGLU against its formula."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_flex.model.swiglu import SwiGLU
from tests.close import assert_close

pytestmark = pytest.mark.usefixtures("cpu_level")


@given(
    rows=st.integers(1, 5),
    columns=st.integers(1, 40),
    scale=st.sampled_from([1.0, 100.0]),
    half=st.booleans(),
    seed=st.integers(0, 100),
)
def test_output_and_gradient_equal_the_formula(
    rows: int, columns: int, scale: float, half: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = scale * torch.randn(rows, 2 * columns, generator=generator)
    grad = torch.randn(rows, columns, generator=generator)
    if half:
        x, grad = x.bfloat16(), grad.bfloat16()
    ours, theirs = x.clone().requires_grad_(), x.double().requires_grad_()
    out = SwiGLU(None)(ours)
    gate, up = theirs.chunk(2, dim=-1)
    expected = gate * torch.sigmoid(gate) * up
    # bfloat16 is one rounding of the result: at most 2**-8.
    # Sigmoids below 1e-38 are zero.
    assert_close(out, expected, 4e-3 if half else 8e-7, least=1e-30)
    out.backward(grad)
    expected.backward(grad.double())
    assert ours.grad is not None
    assert theirs.grad is not None
    assert_close(ours.grad, theirs.grad, 4e-3 if half else 3e-6, least=1e-30)


def test_only_the_input_is_kept_for_the_backward_pass() -> None:
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    x = torch.randn(3, 1, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        SwiGLU(None)(x)
    assert [t.data_ptr() for t in kept] == [x.data_ptr()]


def test_a_type_without_a_kernel_has_the_same_formula() -> None:
    x = torch.randn(3, 10, dtype=torch.float64, requires_grad=True)
    gate, up = x.chunk(2, dim=-1)
    assert_close(SwiGLU(None)(x), gate * torch.sigmoid(gate) * up, 1e-12)
    assert torch.autograd.gradcheck(SwiGLU(None), x)
