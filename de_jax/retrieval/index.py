"""Exact search by inner product, on all devices of this process, which keep the documents that fit in their memory; and MaxP."""

import collections
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Float, Int, Num

from de_jax.settings import PositiveInt, check_value
from de_jax.types import Array, InputError, Ranking

QUERY_BLOCKS = (2, 8, 128)
"""Queries scored at a time: the smallest block that holds the rest. A CPU sums one query in another order than two."""
TILE_BYTES, CPU_TILE_BYTES = 2**27, 2**24
"""Of a tile of documents in float32 on each device, and of the scores of a block; a processor's cache is small."""
ROW_MULTIPLE = 1024
"""A tile has a multiple of these documents; an odd remainder is summed in another order on some processors."""
HOST_BYTES = 160 * 2**20
"""Of documents that an index keeps on a CPU beside the array that it is given, where it has to copy that."""
ALIGNMENT = 64
"""Bytes; XLA copies an array of a CPU that begins elsewhere."""
DOCS = "docs"
"""The mesh axis that the documents of a tile are split along."""
NO_PLACE = 2**31 - 2**24 - 1
"""The place of no document; as an integer key of `_best`, no larger one is a finite float."""


@runtime_checkable
class Index(Protocol):
    """Finds documents by embedding."""

    def search(self, queries: Float[Any, "q D"], k: int) -> Ranking:
        """The k best documents of each query."""


class ExactIndex:
    """All documents, scored by inner product in float32. They may be stored in fewer bytes, which a device expands, tile by tile.

    The ranking is by score, best first; equal scores stand by document id downwards, compared as strings, as trec_eval has them,
    whatever the order of the corpus, the sizes of tiles and batches and the number of devices. A document's place in the order
    by id accompanies its score through every selection.

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
        kept_bytes: int | None = None,
        devices: Sequence[Any] | None = None,
    ) -> None:
        """Checks the embeddings, and moves them to the devices if they fit; otherwise each search streams them.

        A CPU reads an array where it is if that begins at a multiple of `ALIGNMENT`, such as a memory-mapped file.

        Args:
            embeddings: one row a document: finite floats or int8 [n, D], or uint8 [n, D / 8], whose bits stand for 1 and -1; they
                must not change later.
            ids: the documents' ids, parallel to the rows; of rows with one id and one score the earlier comes first.
            kept_bytes: of copied documents that each device may keep; by default half of its free memory, `HOST_BYTES` on a CPU.

        Raises:
            InputError: no documents, ids that do not match, or a value that is not finite.
        """
        check_documents(embeddings, ids)
        check_finite(embeddings, ids)
        self._embeddings = np.asarray(embeddings) if isinstance(embeddings, jax.Array) else embeddings
        self._dtype = embeddings.dtype if embeddings.dtype in (np.int8, np.uint8) else np.dtype(np.float32)
        self._dim = embeddings.shape[1] * (8 if embeddings.dtype == np.uint8 else 1)
        self.places = ranks_by_id(ids)
        self._order = np.argsort(self.places).astype(np.int32)
        devices = jax.local_devices() if devices is None else list(devices)
        self._mesh = jax.make_mesh((len(devices),), (DOCS,), axis_types=(AxisType.Auto,), devices=devices)
        self._everywhere, self._split = (NamedSharding(self._mesh, spec) for spec in (P(), P(DOCS)))
        self._is_on_cpu = devices[0].platform == "cpu"
        self._size = _tile_size(len(ids), max(self._dim, QUERY_BLOCKS[-1]), devices)
        kept_bytes = _room(devices[0]) if kept_bytes is None else kept_bytes
        is_in_place = self._is_on_cpu and _is_aligned(self._embeddings, self._dtype)
        num_bytes = 0 if is_in_place else len(ids) * embeddings.shape[1] * self._dtype.itemsize // len(devices)
        self._kept = list(self._loaded()) if num_bytes <= kept_bytes else None

    def search(self, queries: Float[Any, "q D"], k: int) -> Ranking:
        """The k best documents of each query; a corpus of fewer than k fills up with row -1 and score -inf.

        Raises:
            InputError: another number of dimensions than the documents', a value that is not finite, `k` below 1.
        """
        check_search(queries, k, self._dim)
        depth, ranking, blocks = min(k, len(self._order)), empty_ranking(len(queries), k), self._blocks(queries)
        step = functools.partial(_with_tile, mesh=self._mesh)
        best = self._scanned(step, blocks, [self._nothing(own, depth) for own, _ in blocks])
        for (own, _), found in zip(blocks, best, strict=True):
            scores, places = (np.asarray(part)[: own.stop - own.start] for part in _in_order(*found))
            ranking.doc_rows[own, :depth], ranking.scores[own, :depth] = self._order[places], scores
        return ranking

    def best_ranks(self, queries: Float[Any, "q D"], relevant: Sequence[Sequence[int]]) -> Int[np.ndarray, " q"]:
        """The rank, from 1, of each query's first relevant document (`relevant`: rows) among all; 0 for a query without one.

        Counts the documents with higher scores instead of ranking all, so that memory does not grow with the depth.
        """
        check_finite(queries)
        blocks = self._blocks(queries)
        firsts = [(np.zeros(_block_size(own), np.int32), *self._first(own, block, relevant)) for own, block in blocks]
        ranks = np.zeros(len(queries), np.int32)
        for (own, _), (num_before, *_) in zip(blocks, self._scanned(_with_count, blocks, firsts), strict=True):
            ranks[own] = np.asarray(num_before)[: own.stop - own.start] + 1
        return np.where([len(rows) > 0 for rows in relevant], ranks, 0)

    def _first(self, own: slice, block: Array, relevant: Sequence[Sequence[int]]) -> tuple[Array, Array]:
        """The score and the place of the first relevant document of each query of a block."""
        best, docs = self._nothing(own, 1), np.array(sorted(set().union(*relevant[own])), np.int32)
        for start in range(0, len(docs), self._size):
            rows = docs[start : start + self._size]
            is_relevant = np.zeros((len(block), self._size), bool)
            for query, its in enumerate(relevant[own]):
                is_relevant[query, : len(rows)] = np.isin(rows, its)
            tile, places = self._tile(rows)
            best = _with_tile(*best, jnp.where(is_relevant, _scores(block, tile), -jnp.inf), places, mesh=self._mesh)
        return best

    def _scanned(self, step: Callable[..., Any], blocks: list[tuple[slice, Array]], states: list[Any]) -> list[Any]:
        """The state of each block of queries after a step with its scores of each tile."""
        for tile, places in self._loaded() if self._kept is None else self._kept:
            if self._kept is None:
                jax.block_until_ready(states)  # at most two tiles are on the devices
            states = [step(*state, _scores(block, tile), places) for (_, block), state in zip(blocks, states, strict=True)]
        return states

    def _blocks(self, queries: Float[Any, "q D"]) -> list[tuple[slice, Array]]:
        """Which queries a block has, and their embeddings, the last one again for each that is missing."""
        blocks, start = [], 0
        while start < len(queries):
            own = slice(start, min(start + QUERY_BLOCKS[-1], len(queries)))
            # Other devices may sum few queries in another order, so that they always get a whole block.
            size = _block_size(own) if self._is_on_cpu else QUERY_BLOCKS[-1]
            block = np.asarray(queries[np.minimum(np.arange(start, start + size), own.stop - 1)], np.float32)
            blocks.append((own, jax.device_put(block, self._everywhere)))
            start = own.stop
        return blocks

    def _nothing(self, own: slice, depth: int) -> tuple[Array, Array]:
        """The best documents of a block before the first tile."""
        shape = _block_size(own), depth
        return jax.device_put((np.full(shape, -np.inf, np.float32), np.full(shape, NO_PLACE, np.int32)), self._everywhere)

    def _loaded(self) -> Iterator[tuple[Array, Array]]:
        """All tiles, moved to the devices one by one."""
        for start in range(0, len(self._order), self._size):
            yield self._tile(slice(start, start + self._size))

    def _tile(self, rows: slice | Int[np.ndarray, " r"]) -> tuple[Array, Array]:
        """Some documents and their places by id downwards, filled up to a tile, on the devices."""
        docs, places = np.asarray(self._embeddings[rows], self._dtype), self.places[rows]
        if missing := self._size - len(docs):
            docs, places = np.pad(docs, ((0, missing), (0, 0))), np.pad(places, (0, missing), constant_values=NO_PLACE)
        return jax.device_put((docs, places), self._split)


@jax.jit
def _scores(queries: Float[Array, "q D"], docs: Num[Array, "p E"]) -> Float[Array, "q p"]:
    """The scores of a tile, a program of its own, so that all callers get the same bits."""
    bits = jnp.unpackbits(docs, axis=1) if docs.dtype == jnp.uint8 else None
    docs = docs.astype(jnp.float32) if bits is None else 2 * bits.astype(jnp.float32) - 1
    return jnp.einsum("qd,pd->qp", queries, docs, precision=jax.lax.Precision.HIGHEST)


@functools.partial(jax.jit, static_argnames="mesh")
def _with_tile(
    scores: Float[Array, "b k"],
    places: Int[Array, "b k"],
    tile_scores: Float[Array, "q p"],
    tile_places: Int[Array, " p"],
    *,
    mesh: Mesh,
) -> tuple[Float[Array, "b k"], Int[Array, "b k"]]:
    """The best k of the results so far and of one more tile, in no order; b of the q queries are asked for."""
    k = scores.shape[1]

    def with_part(scores: Array, places: Array, new_scores: Array, new_places: Array) -> tuple[Array, Array]:
        is_first = jax.lax.axis_index(DOCS) == 0  # device, which adds its documents to the results so far
        scores, places = jnp.where(is_first, scores, -jnp.inf), jnp.where(is_first, places, NO_PLACE)
        new_places = jnp.broadcast_to(new_places, new_scores.shape)
        new_scores = jnp.where(new_places == NO_PLACE, -jnp.inf, new_scores)
        return _best(jnp.concatenate([scores, new_scores], axis=1), jnp.concatenate([places, new_places], axis=1), k=k)

    in_specs, out_specs = (P(), P(), P(None, DOCS), P(DOCS)), (P(None, DOCS), P(None, DOCS))
    best_of_parts = jax.shard_map(with_part, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
    found = best_of_parts(scores, places, tile_scores[: len(scores)], tile_places)
    return found if mesh.size == 1 else _best(*jax.lax.with_sharding_constraint(found, NamedSharding(mesh, P())), k=k)


def _best(scores: Float[Array, "b j"], places: Int[Array, "b j"], *, k: int) -> tuple[Float[Array, "b k"], Int[Array, "b k"]]:
    """The k best of more, in no order; of equal scores the first places."""
    best, columns = jax.lax.top_k(scores, k)
    lowest = jnp.min(best, axis=1, keepdims=True)  # of a slice of `best` XLA would sort all
    is_cut = jnp.any(jnp.sum(scores >= lowest, axis=1) > k)  # among equal scores

    def first_of_equals() -> Int[Array, "b k"]:
        # Whole numbers as positive floats of the same order, which top_k selects many times faster on a CPU.
        keys = jax.lax.bitcast_convert_type(NO_PLACE + 2**23 - places, jnp.float32)
        return jax.lax.top_k(jnp.where(scores > lowest, jnp.inf, jnp.where(scores == lowest, keys, 0)), k)[1]

    columns = jax.lax.cond(is_cut, first_of_equals, lambda: columns)
    return jnp.take_along_axis(scores, columns, axis=1), jnp.take_along_axis(places, columns, axis=1)


@jax.jit
def _in_order(scores: Float[Array, "b k"], places: Int[Array, "b k"]) -> tuple[Float[Array, "b k"], Int[Array, "b k"]]:
    """The best first, and of equal scores the first place."""
    scores, places = jax.lax.sort((-scores, places), num_keys=2)
    return -scores, places


@jax.jit
def _with_count(
    num_before: Int[Array, " b"],
    scores: Float[Array, "b 1"],
    places: Int[Array, "b 1"],
    tile_scores: Float[Array, "q p"],
    tile_places: Int[Array, " p"],
) -> tuple[Int[Array, " b"], Float[Array, "b 1"], Int[Array, "b 1"]]:
    """Counts a tile's documents that rank before one."""
    tile_scores, tile_places = tile_scores[: len(scores)], tile_places[None]
    is_before = (tile_scores > scores) | ((tile_scores == scores) & (tile_places < places))
    return num_before + jnp.sum(is_before & (tile_places != NO_PLACE), axis=1, dtype=jnp.int32), scores, places


Found = Callable[[Float[np.ndarray, "b D"], int], tuple[np.ndarray, np.ndarray]]
"""(queries [b, D], depth) to an engine's scores, float32, and rows [b, depth], best first, filled up with -inf and -1."""


def ranking_of(
    found: Found, queries: Float[np.ndarray, "q D"], k: int, id_ranks: Int[np.ndarray, " n"], *, max_depth: int, result_entries: int
) -> Ranking:
    """The ranking of an engine in the order of `ExactIndex`, which no engine gives: equal scores stand by document id downwards.

    A query is asked one document deeper than k, which shows whether a tie was cut, and twice as deep while it was.

    Args:
        max_depth: the engine's limit; a deeper tie is cut as the engine cuts it.
        result_entries: results fetched at a time; bounds the memory.
    """
    most, depth = min(max_depth, len(id_ranks)), min(k, len(id_ranks))
    ranking = empty_ranking(len(queries), k)

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


def empty_ranking(num_queries: int, k: int) -> Ranking:
    """A ranking to be filled: row -1 with score -inf in every place; refuses a depth below 1."""
    check_value("k", k, PositiveInt)
    return Ranking(np.full((num_queries, k), -1, np.int32), np.full((num_queries, k), -np.inf, np.float32))


def order_by_id(ids: Sequence[str]) -> Int[np.ndarray, " n"]:
    """The rows by id downwards, in which order documents of equal scores stand."""
    return np.array(sorted(range(len(ids)), key=ids.__getitem__, reverse=True), np.int32)


def ranks_by_id(ids: Sequence[str]) -> Int[np.ndarray, " n"]:
    """The place of each row in `order_by_id`."""
    return np.argsort(order_by_id(ids)).astype(np.int32)


def array_of(kind: str, values: Any) -> np.ndarray:
    """Embeddings as an array; refuses lists of unequal lengths."""
    try:
        return np.asarray(values)
    except ValueError:
        raise InputError(f"{kind} are no array, as their rows have unequal lengths; give float32 [n, D].") from None


def check_documents(embeddings: Any, ids: Any) -> None:
    """Refuses a corpus without documents, or with ids that do not match or repeat; passages of a document follow one another."""
    _check_rows("embeddings", embeddings, "one document as [1, D]")
    if not len(embeddings):
        raise InputError("the corpus has no documents to search; give embeddings of at least one.")
    if not hasattr(ids, "__len__"):
        raise InputError(f"ids is {ids!r:.60}; give a list of str, one a document.")
    if len(ids) != len(embeddings):
        raise InputError(f"{len(ids)} document ids do not match {len(embeddings)} embeddings; give one id a row.")
    check_distinct([one for one, _ in itertools.groupby(ids)])


def check_distinct(ids: Sequence[Any]) -> None:
    """Refuses document ids that are no text, or not one for each document."""
    if wrong := next((repr(one) for one in ids if not isinstance(one, str)), ""):
        raise InputError(f"the document id {wrong} is no text; give ids as str.")
    if len(set(ids)) < len(ids):
        repeated = collections.Counter(ids).most_common(1)[0][0]
        raise InputError(f"the document id {repeated!r} is given to several rows; give each document an id of its own.")


def check_search(queries: Any, k: Any, dim: int) -> None:
    """Refuses a depth below 1, and queries of other dimensions than the documents' or with values that are not finite."""
    check_value("k", k, PositiveInt)
    _check_rows("queries", queries, f"one query as [1, {dim}]")
    if queries.shape[1] != dim:
        raise InputError(
            f"queries have {queries.shape[1]} dimensions and documents {dim}; encode both with the same model and checkpoint."
        )
    check_finite(queries)


def _check_rows(name: str, values: Any, one: str) -> None:
    """Refuses anything but an array of numbers with two axes; `one` is the form of a single row."""
    kind = getattr(getattr(values, "dtype", None), "kind", "f")  # PyTorch's types have none
    if not hasattr(values, "shape") or kind in "OSUMmc":
        raise InputError(f"{name} is {values!r:.60}, not an array of numbers; give float32 [n, D].")
    if len(values.shape) != 2:
        raise InputError(f"{name} have the shape {tuple(values.shape)}; give them as rows, {one}.")


def check_finite(embeddings: Num[Any, "r D"], ids: Sequence[str] | None = None, *, kind: str = "query") -> None:
    """Refuses NaN and infinite values; the embedding is named by its id as a document, or by its kind and row."""
    for start in range(0, len(embeddings), 65536):
        finite = np.isfinite(embeddings[start : start + 65536]).all(axis=1)
        if not finite.all():
            row = start + int(np.argmin(finite))
            name = f"document {ids[row]!r}" if ids is not None else f"{kind} {row}"
            raise InputError(f"the embedding of {name} has a value that is not finite; the model diverged or its file is damaged.")


def _tile_size(num_docs: int, num_columns: int, devices: Sequence[Any]) -> int:
    """Documents of a tile on all devices: tiles of equal size, so that few rows are filler."""
    tile_bytes = CPU_TILE_BYTES if devices[0].platform == "cpu" else TILE_BYTES
    multiple = ROW_MULTIPLE * len(devices)
    num_tiles = -(-num_docs // (multiple * max(1, tile_bytes // (4 * num_columns * ROW_MULTIPLE))))
    return -(-num_docs // (num_tiles * multiple)) * multiple


def _block_size(own: slice) -> int:
    """The smallest block for so many queries."""
    return next(size for size in QUERY_BLOCKS if own.stop - own.start <= size)


def _room(device: Any) -> int:
    """Bytes of documents that a device may keep."""
    stats = device.memory_stats() or {}
    return (stats["bytes_limit"] - stats["bytes_in_use"]) // 2 if "bytes_limit" in stats else HOST_BYTES


def _is_aligned(embeddings: Any, dtype: np.dtype) -> bool:
    """Whether XLA can read an array of a CPU where it is."""
    is_array = isinstance(embeddings, np.ndarray) and embeddings.dtype == dtype and embeddings.flags.c_contiguous
    return is_array and embeddings.ctypes.data % ALIGNMENT == 0


def of_docs(index: Index, row_ids: Sequence[str]) -> tuple[Index, list[str]]:
    """An index whose rows may be passages, which have their document's id one after another, as one of documents; and their ids."""
    row_ids = list(row_ids)
    is_first = np.array([row == 0 or row_id != row_ids[row - 1] for row, row_id in enumerate(row_ids)])
    if is_first.all():
        return index, row_ids
    return MaxPIndex(index, np.cumsum(is_first) - 1), [row_ids[row] for row in np.flatnonzero(is_first).tolist()]


class MaxPIndex:
    """An index of passages as one of documents, which score as their best passages; exact where that of passages is.

    The first passage of a document in a ranking is its best one, so the documents in the order of their first passages are
    the ranking by MaxP, as far as the passages go. Each query is searched as deep as its k documents need: at most
    (k - 1) C + 1 passages, if no document has more than C.
    """

    def __init__(self, index: Index, doc_rows: Int[np.ndarray, " p"]) -> None:
        num_passages = np.bincount(doc_rows)
        if not num_passages.all():
            raise InputError(f"document {int(np.argmin(num_passages))} has no passage; cut every document into at least one.")
        self._index, self._doc_rows = index, doc_rows
        self._num_docs, self._most_passages = len(num_passages), int(num_passages.max())

    def search(self, queries: Float[Any, "q D"], k: int) -> Ranking:
        """The k best documents of each query; fewer fill up with row -1 and score -inf."""
        found = empty_ranking(len(queries), k)
        num_wanted = min(k, self._num_docs)
        enough = min((num_wanted - 1) * self._most_passages + 1, len(self._doc_rows))
        depth, open_queries = min(2 * num_wanted, enough), np.arange(len(queries))
        while True:
            passages = self._index.search(queries[open_queries], depth)
            still_open = []
            for query, rows, scores in zip(open_queries, passages.doc_rows, passages.scores, strict=True):
                best = np.sort(np.unique(self._doc_rows[rows[rows >= 0]], return_index=True)[1])[:num_wanted]  # first passages
                found.doc_rows[query, : len(best)] = self._doc_rows[rows[best]]
                found.scores[query, : len(best)] = scores[best]
                if len(best) < num_wanted:
                    still_open.append(query)
            if not still_open or depth == enough:  # at `enough` only an approximate index can miss some
                return found
            depth, open_queries = min(2 * depth, enough), np.array(still_open)
