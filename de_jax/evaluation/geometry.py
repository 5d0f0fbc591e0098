"""The geometry of embeddings, without judgements: how close pairs are, how evenly the space is used."""

import math

import numpy as np
from jaxtyping import Float

from de_jax.types import InputError

BLOCK_ROWS = 2048
"""Rows of the n x n comparisons held at a time."""


def pair_alignment(queries: Float[np.ndarray, "n D"], docs: Float[np.ndarray, "m E"]) -> float:
    """Mean squared distance of matching pairs after L2 normalisation, 0 (equal) to 4 (opposite).

    Wang and Isola (2020), alignment with exponent 2. DAFT's alignment of two towers is in `training.hooks.alignment`.
    """
    if queries.shape != docs.shape or not len(queries):
        raise InputError(f"pairs are aligned by row, but there are queries {queries.shape} and documents {docs.shape}.")
    return float(np.mean(np.sum(np.square(unit_rows(queries) - unit_rows(docs)), axis=1)))


def uniformity(embeddings: Float[np.ndarray, "n D"]) -> float:
    """Log of the mean Gaussian potential of all pairs of different rows, in nats: 0 (collapsed) down to about -4 (even).

    Wang and Isola (2020), with t = 2, on L2-normalised rows.
    """
    unit = unit_rows(several(embeddings))
    total = 0.0
    for start in range(0, len(unit), BLOCK_ROWS):
        block = unit[start : start + BLOCK_ROWS]
        total += float(np.exp(np.minimum(4 * np.einsum("id,jd->ij", block, unit, optimize=True) - 4, 0)).sum())
    num_rows = len(unit)
    return math.log((total - num_rows) / (num_rows * (num_rows - 1)))


def several(embeddings: Float[np.ndarray, "n D"]) -> Float[np.ndarray, "n D"]:
    """The rows; InputError for fewer than 2."""
    if len(embeddings) < 2:
        raise InputError(f"{len(embeddings)} embeddings have no pairs to compare; give at least 2.")
    return embeddings


def unit_rows(rows: Float[np.ndarray, "n D"]) -> Float[np.ndarray, "n D"]:
    """The rows with L2 norm 1, in float64."""
    rows = rows.astype(np.float64)
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
