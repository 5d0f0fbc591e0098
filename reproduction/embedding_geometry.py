"""The geometry of embeddings that the papers' figures show, beside `de_jax.evaluation.geometry`."""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from de_jax.evaluation.geometry import several, unit_rows
from de_jax.evaluation.metrics import Results


def effective_rank(embeddings: Float[np.ndarray, "n D"]) -> float:
    """How many dimensions carry the spread of the rows, 1 to D: e to the entropy of the centred singular values' shares.

    Roy and Vetterli (2007); ours: rows are centred first, and rows that are all equal give 0.
    """
    rows = several(embeddings).astype(np.float64)
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
        return (1 - unit_rows(rows) @ unit_rows(others).T).reshape(-1)
    unit = unit_rows(several(rows))
    return (1 - unit @ unit.T)[np.triu_indices(len(unit), k=1)]


def detaching_distances(embeddings: Float[np.ndarray, "n D"]) -> Float[np.ndarray, " n"]:
    """The mean cosine distance of each row to all the others: small in the midst of the cluster, large at its border.

    DANCE (Li et al. 2021), section 5.4.
    """
    unit = unit_rows(several(embeddings))
    return 1 - (unit @ unit.sum(axis=0) - np.sum(np.square(unit), axis=1)) / (len(unit) - 1)


def recall_frequency(results: Results, ids: Sequence[str], *, depth: int = 100) -> Int[np.ndarray, " n"]:
    """In how many of the rankings each text is among the first `depth`, int64; mined negatives would be drawn as often.

    DANCE (Li et al. 2021), section 5.4.
    """
    counts = collections.Counter(text_id for found in results.values() for text_id in itertools.islice(found, depth))
    return np.array([counts[text_id] for text_id in ids], np.int64)
