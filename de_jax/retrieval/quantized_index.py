"""Search with quantized embeddings; candidates are scored again with the float32 embeddings if they are kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int, Int8

from de_jax.retrieval import quantization
from de_jax.retrieval.index import ExactIndex
from de_jax.types import InputError, Ranking

CANDIDATES = 4
"""Documents scored again for each one asked for."""


class QuantizedIndex:
    """Documents as `quantization.quantize` makes them; queries are float32.

    "int8": the query's inner product with the middles of the steps. "binary": the number of dimensions whose sign is the
    query's, less that of the others, which orders documents by Hamming distance; `CANDIDATES` times k of them are scored again by
    the query's inner product with their signs. With `embeddings`, the candidates of both are scored again by these instead. Equal
    scores stand by document id downwards, as in `ExactIndex`.

    Example:
        >>> docs = np.array([[0.9, -0.1], [0.1, 0.8], [0.5, 0.6]], np.float32)
        >>> index = QuantizedIndex(quantization.quantize(docs, "binary"), list("abc"), precision="binary", embeddings=docs, dim=2)
        >>> index.search(np.array([[1.0, 0.1]], np.float32), k=2).doc_rows.tolist()
        [[0, 2]]
    """

    def __init__(
        self,
        codes: Int8[Any, "n E"],
        ids: Sequence[str],
        *,
        precision: str,
        ranges: Float[Any, "2 D"] | None = None,
        embeddings: Float[Any, "n D"] | None = None,
        dim: int,
        devices: Sequence[Any] | None = None,
    ) -> None:
        """Nothing is copied but the bits of "binary".

        Args:
            codes: [n, D] of "int8", or [n, ceil(D / 8)] of "binary".
            ids, devices: as of `ExactIndex`.
            precision: "int8" or "binary".
            ranges: that "int8" was made with.
            embeddings: the documents themselves, float32; may be memory-mapped.
            dim: D.

        Raises:
            InputError: ranges of other dimensions, or as `ExactIndex`.
        """
        self._embeddings, self._codes, self._dim = embeddings, codes, dim
        self._is_binary = precision == "binary"
        if not self._is_binary:
            if ranges is None or np.shape(ranges) != (2, dim):
                raise InputError(f"int8 embeddings need the ranges [2, {dim}] that they were made with; give ranges.")
            starts, self._steps = quantization.steps_of(ranges)
            self._middle = starts + (128 + 0.5) * self._steps  # of the step whose number is 0
        self._index = ExactIndex(quantization.packed_bits(codes) if self._is_binary else codes, ids, devices=devices)

    def search(self, queries: Float[Any, "q D"], k: int) -> Ranking:
        """The k best documents of each query, as `ExactIndex.search`."""
        if queries.shape[1] != self._dim:
            raise InputError(
                f"queries have {queries.shape[1]} dimensions and documents {self._dim}; "
                "encode both with the same model and checkpoint."
            )
        is_again = self._is_binary or self._embeddings is not None
        num_docs = len(self._index.places)
        found = self._index.search(self._probes(queries), min(k * CANDIDATES, max(k, num_docs)) if is_again else k)
        if is_again:
            return self._scored_again(queries, found, k)
        return found._replace(scores=found.scores + (queries @ self._middle)[:, None])

    def _probes(self, queries: Float[Any, "q D"]) -> Float[np.ndarray, "q E"]:
        """The arrays that score the codes."""
        if not self._is_binary:
            return np.asarray(queries, np.float32) * self._steps
        probes = np.zeros((len(queries), 8 * self._codes.shape[1]), np.float32)
        probes[:, : self._dim] = np.where(queries > 0, 1, np.where(np.isfinite(queries), -1, np.nan))
        return probes

    def _scored_again(self, queries: Float[Any, "q D"], found: Ranking, k: int) -> Ranking:
        doc_rows = np.full((len(queries), k), -1, np.int32)
        scores = np.full((len(queries), k), -np.inf, np.float32)
        for query, candidates in enumerate(found.doc_rows):
            candidates = candidates[candidates >= 0]
            scored = np.einsum("cd,d->c", self._vectors(candidates), queries[query])  # each row alike, whatever their number
            best = np.lexsort((self._index.places[candidates], -scored))[:k]
            doc_rows[query, : len(best)], scores[query, : len(best)] = candidates[best], scored[best]
        return Ranking(doc_rows, scores)

    def _vectors(self, rows: Int[np.ndarray, " c"]) -> Float[np.ndarray, "c D"]:
        """The vectors of some documents for the second scoring."""
        if self._embeddings is not None:
            return np.asarray(self._embeddings[rows], np.float32)
        return quantization.signs(self._codes[rows], self._dim)
