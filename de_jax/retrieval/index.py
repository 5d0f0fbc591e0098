"""Exact search by inner product, on all devices of this process, in memory bounded by two chunks of documents."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Float, Int, Num

from de_jax.types import Array, InputError, Ranking

QUERY_BLOCK = 128
"""Queries scored at a time. Always all of these rows, so that a query scores the same alone and in company."""
GROUP_BLOCKS = 64
"""Blocks of queries that one call to a device searches a chunk for; the blocks that fill no group are searched one a call."""
TILE_DOCS = 16384
"""Documents scored at a time, so that the scores of a block stay small beside a chunk."""
CHUNK_BYTES = 2**28
"""Of documents on each device at a time, by default; the next chunk loads while one is searched."""
ROW_MULTIPLE = 1024
"""A tile has a multiple of these documents; an odd remainder is summed in another order on some processors."""
DOCS = "docs"
"""The mesh axis that the documents of a chunk are split along."""


@runtime_checkable
class Index(Protocol):
    """Finds documents by embedding."""

    def search(self, queries: Float[Any, "q D"], k: int) -> Ranking:
        """The k best documents of each query."""


class ExactIndex:
    """All documents, scored by inner product in float32. They may be stored in fewer bytes, which a device expands, tile by tile.

    The ranking is by score, best first; equal scores stand by document id downwards, compared as strings, as trec_eval has them,
    whatever the order of the corpus, the sizes of chunks and batches and the number of devices. Documents pass through the
    devices in that order, each device takes its run of a chunk, and each selection keeps the earlier of two equals.

    Example:
        >>> index = ExactIndex(np.eye(3, dtype=np.float32), ["c", "a", "b"])
        >>> index.search(np.array([[0.0, 1.0, 1.0]], np.float32), k=2).doc_rows.tolist()
        [[2, 1]]
    """

    def __init__(
        self,
        embeddings: Num[Any, "n E"],
        ids: Sequence[str],
        *,
        chunk_bytes: int = CHUNK_BYTES,
        devices: Sequence[Any] | None = None,
    ) -> None:
        """Checks the embeddings; nothing is copied, so that they may be memory-mapped.

        Args:
            embeddings: one row a document: finite floats or int8 [n, D], or uint8 [n, D / 8], whose bits stand for 1 and -1.
            ids: the documents' ids, parallel to the rows; of rows with one id and one score the earlier comes first.
            chunk_bytes: of documents on each device at a time; at least a tile of `ROW_MULTIPLE` documents is there.
            devices: that share the work; by default all of this process.

        Raises:
            InputError: no documents, ids that do not match, a value that is not finite, `chunk_bytes` below 1.
        """
        if not len(embeddings):
            raise InputError("the corpus has no documents to search; give embeddings of at least one.")
        if len(ids) != len(embeddings):
            raise InputError(f"{len(ids)} document ids do not match {len(embeddings)} embeddings; give one id a row.")
        if chunk_bytes < 1:
            raise InputError(f"chunk_bytes is {chunk_bytes}; give at least 1.")
        check_finite(embeddings, ids)
        self._embeddings = embeddings
        self._chunk_dtype = embeddings.dtype if embeddings.dtype in (np.int8, np.uint8) else np.dtype(np.float32)
        self._dim = embeddings.shape[1] * (8 if embeddings.dtype == np.uint8 else 1)
        self._order = order_by_id(ids)
        devices = jax.local_devices() if devices is None else list(devices)
        self._mesh = jax.make_mesh((len(devices),), (DOCS,), axis_types=(AxisType.Auto,), devices=devices)
        chunk_docs = max(1, chunk_bytes // (embeddings.shape[1] * self._chunk_dtype.itemsize))
        self._num_tiles, self._tile_docs = _tiles(len(ids), chunk_docs, len(devices))

    def search(self, queries: Float[Any, "q D"], k: int) -> Ranking:
        """The k best documents of each query; a corpus of fewer than k fills up with row -1 and score -inf.

        Args:
            queries: [q, D] float32, finite; no rows give an empty ranking.
            k: depth, at least 1.

        Raises:
            InputError: another number of dimensions than the documents', a value that is not finite, `k` below 1.
        """
        num_docs, dim = len(self._order), self._dim
        if k < 1:
            raise InputError(f"k is {k}; ask for at least 1 document.")
        if queries.shape[1] != dim:
            raise InputError(
                f"queries have {queries.shape[1]} dimensions and documents {dim}; encode both with the same model and checkpoint."
            )
        check_finite(queries)
        depth = min(k, num_docs)
        doc_rows = np.full((len(queries), k), -1, np.int32)
        scores = np.full((len(queries), k), -np.inf, np.float32)
        start = 0
        for places, found in self._rank(self._groups(queries, GROUP_BLOCKS), depth):
            places, found = places.reshape(-1, depth), found.reshape(-1, depth)
            group = slice(start, start + len(places))
            num_queries = len(doc_rows[group])  # the last block ends with filler rows
            doc_rows[group, :depth] = self._order[places[:num_queries]]
            scores[group, :depth] = found[:num_queries]
            start += len(places)
        return Ranking(doc_rows, scores)

    def best_ranks(self, queries: Float[Any, "q D"], relevant: Sequence[Sequence[int]]) -> Int[np.ndarray, " q"]:
        """The rank, from 1, of each query's first relevant document among all documents; 0 for a query without a relevant document.

        Counts the documents with higher scores instead of ranking all, so that memory does not grow with the depth.

        Args:
            queries: [q, D] float32, finite.
            relevant: rows of the relevant documents of each query.
        """
        check_finite(queries)
        place_of = np.empty(len(self._order), np.int64)
        place_of[self._order] = np.arange(len(self._order))
        places = [np.sort(place_of[list(rows)]) for rows in relevant]
        scores, ranks = np.full(len(queries), -np.inf, np.float32), np.zeros(len(queries), np.int32)
        targets = np.full(len(queries), len(self._order))  # the place of the best relevant document
        for start, query, block in self._all_scores(queries):
            for row in range(len(block)):
                among = places[query + row]
                among = among[(among >= start) & (among < start + block.shape[1])]
                if len(among) and (best := block[row, among - start].max()) > scores[query + row]:
                    scores[query + row] = best
                    targets[query + row] = among[np.argmax(block[row, among - start])]
        for start, query, block in self._all_scores(queries):
            own = slice(query, query + len(block))
            is_before = np.arange(start, start + block.shape[1])[None, :] < targets[own, None]
            ranks[own] += np.sum((block > scores[own, None]) | ((block == scores[own, None]) & is_before), axis=1)
        return np.where([len(rows) > 0 for rows in places], ranks + 1, 0)

    def _all_scores(self, queries: Float[Any, "q D"]) -> Iterator[tuple[int, int, np.ndarray]]:
        """(first place by id downwards, first query, scores) of each chunk of documents with each block of queries."""
        blocks, size = self._groups(queries, 1), self._mesh.size * self._tile_docs
        for start in range(0, len(self._order), size):
            chunk = jax.device_put(self._chunk(start, size), self._on(P(DOCS)))
            for first, block in zip(range(0, len(queries), QUERY_BLOCK), blocks, strict=True):
                scores = np.asarray(_scores(block[0], _expanded(chunk)))
                yield start, first, scores[: len(queries) - first, : len(self._order) - start]

    def _rank(self, groups: list[Array], depth: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """(places by id downwards, scores) [g, QUERY_BLOCK, depth] of each group; a chunk loads while one is searched."""
        best = []
        for group in groups:
            shape = (*group.shape[:2], depth)
            nothing = np.zeros(shape, np.int32), np.full(shape, -np.inf, np.float32)
            best.append(jax.device_put(nothing, self._on(P())))
        size = self._mesh.size * self._num_tiles * self._tile_docs
        for start in range(0, len(self._order), size):
            chunk = jax.device_put(self._chunk(start, size), self._on(P(DOCS)))
            jax.block_until_ready(best)  # keeps two chunks at most on the device
            first, num_docs = np.int32(start), np.int32(len(self._order))
            best = [
                _merge(*found, queries, chunk, first, num_docs, mesh=self._mesh, tile_docs=self._tile_docs)
                for found, queries in zip(best, groups, strict=True)
            ]
        return [(np.asarray(rows), np.asarray(scores)) for rows, scores in best]

    def _groups(self, queries: Float[Any, "q D"], group_blocks: int) -> list[Array]:
        """The queries [g, QUERY_BLOCK, D] of each call: whole groups, then blocks alone, so that two programs serve any number."""
        groups, start = [], 0
        while start < len(queries):
            size = group_blocks if len(queries) - start >= group_blocks * QUERY_BLOCK else 1
            group = np.zeros((size * QUERY_BLOCK, queries.shape[1]), np.float32)
            group[: len(queries) - start] = queries[start : start + len(group)]
            groups.append(jax.device_put(group.reshape(size, QUERY_BLOCK, -1), self._on(P())))
            start += len(group)
        return groups

    def _on(self, spec: P) -> NamedSharding:
        return NamedSharding(self._mesh, spec)

    def _chunk(self, start: int, size: int) -> Num[np.ndarray, "c E"]:
        """So many documents by id downwards, zeros after the last; copied a tile at a time."""
        chunk = np.zeros((size, self._embeddings.shape[1]), self._chunk_dtype)
        for place in range(0, size, TILE_DOCS):
            rows = self._order[start + place : start + min(place + TILE_DOCS, size)]
            chunk[place : place + len(rows)] = self._embeddings[rows]
        return chunk


@functools.partial(jax.jit, static_argnames=("mesh", "tile_docs"))
def _merge(
    rows: Int[Array, "g q k"],
    scores: Float[Array, "g q k"],
    queries: Float[Array, "g q D"],
    chunk: Num[Array, "c E"],
    first: Int[Array, ""],
    num_docs: Int[Array, ""],
    *,
    mesh: Mesh,
    tile_docs: int,
) -> tuple[Int[Array, "g q k"], Float[Array, "g q k"]]:
    """The best k of the results so far and one more chunk."""
    best_of_parts = jax.shard_map(
        functools.partial(_with_part, tile_docs=tile_docs),
        mesh=mesh,
        in_specs=(P(), P(), P(), P(DOCS), P(), P()),
        out_specs=(P(None, None, DOCS), P(None, None, DOCS)),
    )
    found = best_of_parts(rows, scores, queries, chunk, first, num_docs)  # device after device, so by id downwards
    return found if mesh.size == 1 else _best(*found, k=rows.shape[-1])


def _with_part(
    rows: Int[Array, "g q k"],
    scores: Float[Array, "g q k"],
    queries: Float[Array, "g q D"],
    part: Num[Array, "p E"],
    first: Int[Array, ""],
    num_docs: Int[Array, ""],
    *,
    tile_docs: int,
) -> tuple[Int[Array, "g q k"], Float[Array, "g q k"]]:
    """Places by id downwards and scores of the best of one device's documents; the first device adds them to the results so far."""
    device = jax.lax.axis_index(DOCS)
    rows, scores = jnp.where(device == 0, rows, 0), jnp.where(device == 0, scores, -jnp.inf)
    firsts = first + device * part.shape[0] + jnp.arange(0, part.shape[0], tile_docs, dtype=jnp.int32)

    def with_tile(found: tuple[Array, Array], tile: tuple[Array, Array]) -> tuple[tuple[Array, Array], None]:
        docs, first = _expanded(tile[0]), tile[1]
        is_document = (first + jnp.arange(tile_docs, dtype=jnp.int32) < num_docs)[None, :]

        def of_block(block: tuple[Array, Array, Array]) -> tuple[Array, Array]:
            rows, scores, queries = block
            new_scores, best = jax.lax.top_k(
                jnp.where(is_document, _scores(queries, docs), -jnp.inf), min(rows.shape[1], tile_docs)
            )
            rows = jnp.concatenate([rows, first + best.astype(jnp.int32)], axis=1)
            return _best(rows, jnp.concatenate([scores, new_scores], axis=1), k=scores.shape[1])

        return jax.lax.map(of_block, (*found, queries)), None

    # Tile by tile and not block by block: XLA copies what a loop takes from a larger array, and blocks of queries are smaller.
    return jax.lax.scan(with_tile, (rows, scores), (part.reshape(-1, tile_docs, part.shape[1]), firsts))[0]


def _best(rows: Int[Array, "*b j"], scores: Float[Array, "*b j"], *, k: int) -> tuple[Int[Array, "*b k"], Float[Array, "*b k"]]:
    """The best k; on equal scores the earlier one stays first, as top_k promises."""
    scores, best = jax.lax.top_k(scores, k)
    return jnp.take_along_axis(rows, best, axis=-1), scores


@jax.jit
def _expanded(docs: Num[Array, "p E"]) -> Float[Array, "p D"]:
    """Documents as floats; bits stand for 1 and -1."""
    if docs.dtype != jnp.uint8:
        return docs.astype(jnp.float32)
    return 2 * jnp.unpackbits(docs, axis=1).astype(jnp.float32) - 1


@jax.jit
def _scores(queries: Float[Array, "q D"], docs: Float[Array, "p D"]) -> Float[Array, "q p"]:
    return jnp.einsum("qd,pd->qp", queries, docs, precision=jax.lax.Precision.HIGHEST)


Found = Callable[[Float[np.ndarray, "b D"], int], tuple[np.ndarray, np.ndarray]]
"""(queries [b, D], depth) to an engine's scores, float32, and rows [b, depth], best first, filled up with -inf and -1."""


def ranking_of(
    found: Found,
    queries: Float[np.ndarray, "q D"],
    k: int,
    id_ranks: Int[np.ndarray, " n"],
    *,
    max_depth: int,
    result_entries: int,
) -> Ranking:
    """The ranking of an engine in the order of `ExactIndex`, which no engine gives: equal scores stand by document id downwards.

    A query is asked one document deeper than k, which shows whether a tie was cut, and twice as deep while it was.

    Args:
        found: asks the engine.
        queries: no rows give an empty ranking.
        k: depth of the ranking.
        id_ranks: see `ranks_by_id`.
        max_depth: the engine's limit; a deeper tie is cut as the engine cuts it.
        result_entries: results fetched at a time; bounds the memory.
    """
    most, depth = min(max_depth, len(id_ranks)), min(k, len(id_ranks))
    ranking = Ranking(np.full((len(queries), k), -1, np.int32), np.full((len(queries), k), -np.inf, np.float32))

    def rank(among: np.ndarray, deeper: int) -> None:
        size = max(1, result_entries // deeper)
        for start in range(0, len(among), size):
            block = among[start : start + size]
            scores, rows = found(queries[block], deeper)
            order = np.lexsort((id_ranks[rows], -scores))[:, :depth]
            ranking.doc_rows[block, :depth] = np.take_along_axis(rows, order, axis=1)
            ranking.scores[block, :depth] = np.take_along_axis(scores, order, axis=1)
            lowest = scores.min(axis=1)
            tied = block[(lowest == ranking.scores[block, depth - 1]) & (lowest > -np.inf)]
            if len(tied) and deeper < most:
                rank(tied, min(2 * deeper, most))

    rank(np.arange(len(queries)), min(depth + 1, most))
    return ranking


def order_by_id(ids: Sequence[str]) -> Int[np.ndarray, " n"]:
    """The rows by id downwards, in which order documents of equal scores stand."""
    return np.array(sorted(range(len(ids)), key=ids.__getitem__, reverse=True), np.int32)


def ranks_by_id(ids: Sequence[str]) -> Int[np.ndarray, " n"]:
    """The place of each row in `order_by_id`."""
    ranks = np.empty(len(ids), np.int32)
    ranks[order_by_id(ids)] = np.arange(len(ids), dtype=np.int32)
    return ranks


def array_of(kind: str, values: Any) -> np.ndarray:
    """Embeddings as an array; refuses lists of unequal lengths."""
    try:
        return np.asarray(values)
    except ValueError:
        raise InputError(f"{kind} are no array, as their rows have unequal lengths; give float32 [n, D].") from None


def check_finite(embeddings: Num[Any, "r D"], ids: Sequence[str] | None = None, *, kind: str = "query") -> None:
    """Refuses NaN and infinite values; the embedding is named by its id as a document, or by its kind and row."""
    for start in range(0, len(embeddings), 65536):
        finite = np.isfinite(embeddings[start : start + 65536]).all(axis=1)
        if not finite.all():
            row = start + int(np.argmin(finite))
            name = f"document {ids[row]!r}" if ids is not None else f"{kind} {row}"
            raise InputError(f"the embedding of {name} has a value that is not finite; the model diverged or its file is damaged.")


def _tiles(num_docs: int, chunk_docs: int, num_devices: int) -> tuple[int, int]:
    """Tiles of a device's part of a chunk, and documents of a tile: chunks of equal size, so that few rows are filler."""
    num_chunks = -(-num_docs // (num_devices * chunk_docs))
    part_docs = -(-num_docs // (num_devices * num_chunks))
    num_tiles = -(-part_docs // TILE_DOCS)
    return num_tiles, _round_up(-(-part_docs // num_tiles), ROW_MULTIPLE)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
