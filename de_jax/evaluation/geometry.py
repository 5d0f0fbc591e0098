"""The geometry of embeddings, without judgements: how close pairs are, how evenly the space is used."""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from de_jax.evaluation.metrics import Results
from de_jax.types import InputError

BLOCK_ROWS = 2048
"""Rows of the n x n comparisons held at a time."""


def pair_alignment(queries: Float[np.ndarray, "n D"], docs: Float[np.ndarray, "m E"]) -> float:
    """Mean squared distance of matching pairs after L2 normalisation, 0 (equal) to 4 (opposite).

    Wang and Isola (2020), alignment with exponent 2. DAFT's alignment of two towers is in `training.hooks.alignment`.
    """
    if queries.shape != docs.shape or not len(queries):
        raise InputError(f"pairs are aligned by row, but there are queries {queries.shape} and documents {docs.shape}.")
    return float(np.mean(np.sum(np.square(_unit(queries) - _unit(docs)), axis=1)))


def uniformity(embeddings: Float[np.ndarray, "n D"]) -> float:
    """Log of the mean Gaussian potential of all pairs of different rows, in nats: 0 (collapsed) down to about -4 (even).

    Wang and Isola (2020), with t = 2, on L2-normalised rows.
    """
    unit = _unit(_several(embeddings))
    total = 0.0
    for start in range(0, len(unit), BLOCK_ROWS):
        block = unit[start : start + BLOCK_ROWS]
        total += float(np.exp(np.minimum(4 * np.einsum("id,jd->ij", block, unit, optimize=True) - 4, 0)).sum())
    num_rows = len(unit)
    return math.log((total - num_rows) / (num_rows * (num_rows - 1)))


def effective_rank(embeddings: Float[np.ndarray, "n D"]) -> float:
    """How many dimensions carry the spread of the rows, 1 to D: e to the entropy of the centred singular values' shares.

    Roy and Vetterli (2007); ours: rows are centred first, and rows that are all equal give 0.
    """
    rows = _several(embeddings).astype(np.float64)
    values = np.linalg.svd(rows - rows.mean(axis=0, keepdims=True), compute_uv=False)
    largest = float(np.abs(rows).max()) * math.sqrt(rows.size)
    values = values[values > largest * np.finfo(np.float32).eps]
    if not len(values):
        return 0.0
    shares = values / values.sum()
    return float(np.exp(-np.sum(shares * np.log(shares))))


def pair_distances(rows: Float[np.ndarray, "n D"], others: Float[np.ndarray, "m D"] | None = None) -> Float[np.ndarray, " p"]:
    """Cosine distances, 0 to 2, of all pairs of different rows, or of each row with each of the others."""
    if others is not None:
        return (1 - _unit(rows) @ _unit(others).T).reshape(-1)
    unit = _unit(_several(rows))
    return (1 - unit @ unit.T)[np.triu_indices(len(unit), k=1)]


def detaching_distances(embeddings: Float[np.ndarray, "n D"]) -> Float[np.ndarray, " n"]:
    """The mean cosine distance of each row to all the others: small in the midst of the cluster, large at its border.

    DANCE (Li et al. 2021), section 5.4.
    """
    unit = _unit(_several(embeddings))
    return 1 - (unit @ unit.sum(axis=0) - np.sum(np.square(unit), axis=1)) / (len(unit) - 1)


def recall_frequency(results: Results, ids: Sequence[str], *, depth: int = 100) -> Int[np.ndarray, " n"]:
    """In how many of the rankings each text is among the first `depth`, int64; mined negatives would be drawn as often.

    DANCE (Li et al. 2021), section 5.4.
    """
    counts = collections.Counter(text_id for found in results.values() for text_id in itertools.islice(found, depth))
    return np.array([counts[text_id] for text_id in ids], np.int64)


def _several(embeddings: Float[np.ndarray, "n D"]) -> Float[np.ndarray, "n D"]:
    if len(embeddings) < 2:
        raise InputError(f"{len(embeddings)} embeddings have no pairs to compare; give at least 2.")
    return embeddings


def _unit(rows: Float[np.ndarray, "n D"]) -> Float[np.ndarray, "n D"]:
    rows = rows.astype(np.float64)
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
