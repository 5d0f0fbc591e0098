"""How far apart two towers' embeddings lie as distributions: DAFT's measure of when a query tower is aligned (Leonhardt et al.)."""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Float

from de_jax.types import InputError

DELTA, DELTA_DIM = 250.0, 512
"""DAFT's threshold for the divergence, and the dimensions of the embeddings that it was chosen with."""
_ROWS = 1024
"""Compared at a time."""


def threshold(dim: int) -> float:
    """DAFT's threshold for embeddings of another size: the divergence is `dim` times a mean of logarithms."""
    return DELTA * dim / DELTA_DIM


def kl_divergence(x: Float[np.ndarray, "n D"], y: Float[np.ndarray, "m D"], *, floor: float = 1e-6) -> float:
    """The divergence KL(P || Q) of the distributions that two samples were drawn from, by nearest neighbours; in nats.

    DAFT, eq. 9, the estimator of Perez-Cruz (2008) with one neighbour:

        -(D / n) sum_i log(r(x_i) / s(x_i)) + log(m / (n - 1))

    r(x_i) is the distance from x_i to the nearest other point of `x`, s(x_i) that to the nearest of `y`. Equal rows of a sample
    count once, and distances below `floor` as `floor`, since a logarithm of 0 would decide everything. The estimate of a small
    divergence may be negative.

    Args:
        x: of P, in DAFT the document tower's embeddings of the validation queries.
        y: of Q, in DAFT the query tower's embeddings of the same queries.
        floor: > 0.

    Raises:
        InputError: fewer than two different rows in `x`, no row in `y`, or values that are not finite.
    """
    if not np.isfinite(x).all() or not np.isfinite(y).all():
        raise InputError("embeddings to compare hold values that are not finite; the run has diverged.")
    x, y = (np.unique(np.asarray(rows, np.float64), axis=0) for rows in (x, y))
    if len(x) < 2 or not len(y):
        raise InputError(f"{len(x)} and {len(y)} different embeddings cannot be compared; give at least 2 and 1.")
    within = np.maximum(_nearest(x, x, skip_self=True), floor)
    between = np.maximum(_nearest(x, y), floor)
    return float(x.shape[1] * np.mean(np.log(between / within)) + math.log(len(y) / (len(x) - 1)))


def _nearest(x: Float[np.ndarray, "n D"], y: Float[np.ndarray, "m D"], *, skip_self: bool = False) -> Float[np.ndarray, " n"]:
    """The distance from each row of `x` to the nearest of `y`; with `skip_self`, which are the same rows, to the nearest other."""
    norms, found = np.einsum("mD,mD->m", y, y), np.empty(len(x))
    for start in range(0, len(x), _ROWS):
        rows = slice(start, start + _ROWS)
        products = norms[None, :] - 2 * x[rows] @ y.T  # of the squared distance what depends on y
        if skip_self:
            products[np.arange(len(products)), np.arange(len(x))[rows]] = np.inf
        # Computed once more from the difference, which loses nothing where the two are close.
        found[rows] = np.linalg.norm(x[rows] - y[np.argmin(products, axis=1)], axis=1)
    return found
