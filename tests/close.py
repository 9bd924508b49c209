"""How near two results must be, the same measure in all tests: by the norm of a whole tensor.

Processors, and the libraries that choose kernels by processor, sum in other orders and with or
without fused products. An element may then differ by the rounding of the largest term of its sum,
whatever its own size, so elements are never compared one by one.

Tolerances are about five times the worst that was seen with the newest instruction sets and with
none: ``make test CPU=baseline``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch


def distance(actual: torch.Tensor, expected: torch.Tensor, least: float = 0.0) -> float:
    """Norm of the difference, as a part of the norm of ``expected``, which counts as ``least``."""
    assert actual.shape == expected.shape, f"{tuple(actual.shape)}, not {tuple(expected.shape)}"
    expected = expected.detach().double()
    error = torch.linalg.vector_norm(actual.detach().double() - expected).item()
    norm = max(torch.linalg.vector_norm(expected).item(), least)
    return error / norm if error else 0.0


def assert_close(
    actual: torch.Tensor | Sequence[torch.Tensor],
    expected: torch.Tensor | Sequence[torch.Tensor],
    tolerance: float,
    name: str = "",
    *,
    least: float = 0.0,
) -> None:
    """A tensor, or each of several, is within ``tolerance`` of the norm that it should have.

    ``least`` is for tensors that may be zero: a smaller norm counts as this one.
    """
    if not isinstance(expected, torch.Tensor):
        assert not isinstance(actual, torch.Tensor)
        for number, (a, e) in enumerate(zip(actual, expected, strict=True)):
            assert_close(a, e, tolerance, f"{name or 'tensor'} {number}", least=least)
        return
    assert isinstance(actual, torch.Tensor)
    far = distance(actual, expected, least)
    # So that NaN fails.
    assert far <= tolerance, f"{name or 'it'} differs by {far:.1e} of its norm, not {tolerance:.0e}"


def assert_state_close(
    actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], tolerance: float
) -> None:
    """The same names, and each tensor by :func:`assert_close`."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_close(actual[name], tensor, tolerance, name)


def assert_numbers_close(actual: Any, expected: Any, tolerance: float, name: str = "") -> None:
    """Losses, norms: each number within ``tolerance`` of its own size. ``None`` equals ``None``."""
    np.testing.assert_allclose(
        np.array(actual, float), np.array(expected, float), rtol=tolerance, err_msg=name
    )
