"""Embeddings in a byte or a bit a dimension, as `sentence_transformers.quantize_embeddings` makes them, and search with them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int8, UInt8

from de_jax.retrieval.index import ExactIndex, check_finite, check_search, empty_ranking
from de_jax.types import Array, InputError, Ranking

PRECISIONS = ("float32", "int8", "binary")
_NUM_STEPS = 255
CANDIDATES = 4
"""Documents scored again for each one asked for."""


def quantize(embeddings: Float[Any, "n D"], precision: str, ranges: Float[Any, "2 D"] | None = None) -> Array:
    """Embeddings in a precision; the bytes are those of sentence-transformers.

    "int8": the range of each dimension is cut into 255 equal steps, and a value is the number of its step, less 128; values
    outside the range get its first or last step. "binary": whether a value is above 0, eight dimensions a byte, less 128.

    Args:
        embeddings: finite, else InputError.
        precision: out of `PRECISIONS`.
        ranges: the least and the greatest value of each dimension, for "int8"; by default those of `embeddings`, at least two.
            Compared embeddings need the same ranges.

    Returns:
        float32 [n, D], int8 [n, D], or for "binary" int8 [n, ceil(D / 8)].

    Example:
        >>> quantize(np.array([[0.0, -1.0], [100.5, 4.1], [255.0, 509.0]]), "int8").tolist()
        [[-128, -128], [-28, -126], [127, 127]]
        >>> quantize(np.array([[0.1, -0.1, 0.2]]), "binary").tolist()
        [[32]]
    """
    check_precision(precision)
    check_finite(embeddings, kind="text")
    if precision == "float32":
        return np.asarray(embeddings, np.float32)
    if precision == "binary":
        return (np.packbits(np.asarray(embeddings) > 0, axis=1) - np.uint8(128)).view(np.int8)
    starts, steps = steps_of(ranges_of(embeddings) if ranges is None else ranges)
    numbers = np.clip(np.floor((embeddings - starts) / steps), 0, _NUM_STEPS)
    return (numbers - 128).astype(np.int8)


def ranges_of(embeddings: Float[Any, "n D"]) -> Float[np.ndarray, "2 D"]:
    """The least and the greatest value of each dimension, float32, of at least two embeddings; more of them suit others better."""
    if len(embeddings) < 2:
        raise InputError(
            f"int8 needs the range of each dimension, which {len(embeddings)} embeddings do not show; give ranges, the least and "
            "the greatest values [2, D] of many."
        )
    return np.stack([np.min(embeddings, axis=0), np.max(embeddings, axis=0)]).astype(np.float32)


def steps_of(ranges: Float[Any, "2 D"]) -> tuple[Float[np.ndarray, " D"], Float[np.ndarray, " D"]]:
    """Where the first step of each dimension begins, and how wide its steps are: 1 where the range is empty."""
    starts, ends = np.asarray(ranges, np.float32)
    if not np.isfinite(ranges).all() or (ends < starts).any():
        raise InputError("ranges must be finite, the least values [D] first and the greatest [D] after them.")
    steps = (ends - starts) / _NUM_STEPS
    return starts, np.where(steps == 0, np.float32(1), steps)


def signs(codes: Int8[Any, "n E"] | UInt8[Any, "n E"], dim: int) -> Float[np.ndarray, "n D"]:
    """The embeddings that "binary" codes stand for: 1 where a value was above 0, else -1."""
    return 2 * np.unpackbits(packed_bits(codes), axis=1)[:, :dim].astype(np.float32) - 1


def packed_bits(codes: Int8[Any, "n E"] | UInt8[Any, "n E"]) -> UInt8[np.ndarray, "n E"]:
    """The bits that "binary" packs, without the 128 that it takes away."""
    codes = np.asarray(codes)
    return codes if codes.dtype == np.uint8 else codes.view(np.uint8) ^ np.uint8(128)


def check_precision(precision: str, ranges: Any = None) -> None:
    """Refuses precisions outside `PRECISIONS`, and ranges for another than "int8"."""
    if precision not in PRECISIONS:
        raise InputError(f"precision is {precision!r}; it is one of {', '.join(PRECISIONS)}.")
    if ranges is not None and precision != "int8":
        raise InputError(f"ranges are for precision='int8', but precision is {precision!r}; leave one of them out.")


class QuantizedIndex:
    """Documents as `quantize` makes them; queries are float32.

    "int8": the query's inner product with the middles of the steps. "binary": the number of dimensions whose sign is the
    query's, less that of the others, which orders documents by Hamming distance; `CANDIDATES` times k of them are scored again by
    the query's inner product with their signs. With `embeddings`, the candidates of both are scored again by these instead. Equal
    scores stand by document id downwards, as in `ExactIndex`. Nothing is copied but the bits of "binary".

    Example:
        >>> docs = np.array([[0.9, -0.1], [0.1, 0.8], [0.5, 0.6]], np.float32)
        >>> index = QuantizedIndex(quantize(docs, "binary"), list("abc"), precision="binary", embeddings=docs, dim=2)
        >>> index.search(np.array([[1.0, 0.1]], np.float32), k=2).doc_rows.tolist()
        [[0, 2]]

    `ranges` belong to "int8"; `embeddings` are float32 [n, D], which may be memory-mapped; the rest is as of
    `ExactIndex`. Raises InputError for ranges of other dimensions.
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
        self._embeddings, self._codes, self._dim = embeddings, codes, dim
        self._is_binary = precision == "binary"
        if not self._is_binary:
            if ranges is None or np.shape(ranges) != (2, dim):
                raise InputError(f"int8 embeddings need the ranges [2, {dim}] that they were made with; give ranges.")
            starts, self._steps = steps_of(ranges)
            self._middle = starts + (128 + 0.5) * self._steps  # of the step whose number is 0
        self._index = ExactIndex(packed_bits(codes) if self._is_binary else codes, ids, devices=devices)

    def search(self, queries: Float[Any, "q D"], k: int) -> Ranking:
        """The k best documents of each query, as `ExactIndex.search`."""
        check_search(queries, k, self._dim)
        if not self._is_binary and self._embeddings is None:
            found = self._index.search(self._probes(queries), k)
            return found._replace(scores=found.scores + (queries @ self._middle)[:, None])
        found = self._index.search(self._probes(queries), min(k * CANDIDATES, max(k, len(self._index.places))))
        ranking = empty_ranking(len(queries), k)
        for query, rows in enumerate(found.doc_rows):
            rows = rows[rows >= 0]
            kept = self._embeddings
            vectors = signs(self._codes[rows], self._dim) if kept is None else np.asarray(kept[rows], np.float32)
            scores = np.einsum("cd,d->c", vectors, queries[query])  # each row alike, whatever their number
            best = np.lexsort((self._index.places[rows], -scores))[:k]
            ranking.doc_rows[query, : len(best)], ranking.scores[query, : len(best)] = rows[best], scores[best]
        return ranking

    def _probes(self, queries: Float[Any, "q D"]) -> Float[np.ndarray, "q E"]:
        """The arrays that score the codes."""
        if not self._is_binary:
            return np.asarray(queries, np.float32) * self._steps
        probes = np.zeros((len(queries), 8 * self._codes.shape[1]), np.float32)
        probes[:, : self._dim] = np.where(queries > 0, 1, -1)
        return probes
