"""Fitting a profile's lines to measured points: relative, robust, never negative."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from megatron_flex.cluster.profile import Line, ProfileError

Array = np.ndarray[Any, np.dtype[np.float64]]

_ROUNDS = 20
_HUBER = 1.345  # residuals beyond this many standard deviations count linearly


@dataclass(frozen=True)
class Point:
    """One measured micro-batch: its tokens and token pairs, and what was measured."""

    tokens: float
    squares: float
    value: float


@dataclass(frozen=True)
class FitError:
    """Relative errors of a line on points: median and 90th percentile of their absolute value."""

    median: float
    p90: float


def fit_line(points: Sequence[Point], name: str = "line", *, pairs: bool = True) -> Line:
    """The line ``fixed + per_token * tokens + per_pair * squares`` nearest to the points.

    Least relative error (a short micro-batch matters as much as a long one), reweighted so that a
    few disturbed points do not pull it (Huber), with coefficients that are not negative.

    Args:
        name: of the quantity, for errors.
        pairs: whether token pairs may matter at all.

    Raises:
        ProfileError: points that are negative, not finite, or too few to tell the terms apart.
    """
    values = np.array([p.value for p in points])
    if len(points) == 0 or not np.isfinite(values).all() or (values < 0).any():
        raise ProfileError(f"{name}: measured values must be finite and not negative: {values}")
    if not (values > 0).any():
        return Line()
    columns = [np.ones(len(points)), np.array([p.tokens for p in points])]
    if pairs:
        columns.append(np.array([p.squares for p in points]))
    basis = np.stack(columns, axis=1)
    if np.linalg.matrix_rank(basis / basis.max(axis=0)) < basis.shape[1]:
        raise ProfileError(
            f"{name}: {len(points)} points cannot tell fixed cost, tokens and token pairs apart;"
            " measure more token counts, and each with samples of different lengths"
        )
    floor = 1e-3 * float(values.max())  # what is nearly free needs no relative precision
    scale = 1.0 / np.maximum(values, floor)
    rows, target = basis * scale[:, None], values * scale
    weights = np.ones(len(points))
    found = np.zeros(basis.shape[1])
    for _ in range(_ROUNDS):
        root = np.sqrt(weights)
        found = _nonnegative(rows * root[:, None], target * root)
        residual = np.abs(rows @ found - target)
        spread = 1.4826 * float(np.median(residual)) + 1e-12
        fresh = np.minimum(1.0, _HUBER * spread / np.maximum(residual, 1e-300))
        if np.allclose(fresh, weights, rtol=1e-6):
            break
        weights = fresh
    coefficients = [*found.tolist(), 0.0][:3]
    return Line(*coefficients)


def _nonnegative(rows: Array, target: Array) -> Array:
    """Least squares with no negative coefficient: the best of all choices of terms (at most 7)."""
    count = rows.shape[1]
    best, best_error = np.zeros(count), math.inf
    scale = np.maximum(np.abs(rows).max(axis=0), 1e-300)
    for number in range(1, count + 1):
        for chosen in combinations(range(count), number):
            part = list(chosen)
            solved, *_ = np.linalg.lstsq(rows[:, part] / scale[part], target, rcond=None)
            solved = solved / scale[part]
            if (solved < 0).any():
                continue
            error = float(((rows[:, part] @ solved - target) ** 2).sum())
            if error < best_error:
                best_error = error
                best = np.zeros(count)
                best[part] = solved
    return best


def errors(line: Line, points: Sequence[Point]) -> FitError:
    """How well a line predicts points."""
    if not points:
        raise ProfileError("no points to compare with")
    size = [abs(line(p.tokens, p.squares) / p.value - 1.0) for p in points]
    return FitError(float(np.median(size)), float(np.percentile(size, 90)))
