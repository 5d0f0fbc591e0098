"""Batches of (query, relevant document) pairs from two token stores: shuffled by seed and epoch, resumable at any step.

An epoch is planned as a whole, from (seed, epoch) alone. So every host makes the same plan and takes its own rows of it, and the
batches from step s on are the same whether or not the earlier ones were ever made.
"""

from __future__ import annotations

import itertools
import queue
import threading
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np
from jaxtyping import Int32

from de_jax.data.batches import layout
from de_jax.data.batches.epoch_plan import EpochPlan
from de_jax.data.batches.guide import GuideOf
from de_jax.data.batches.layout import Store
from de_jax.data.batches.teacher_scores import ScoresOf
from de_jax.data.stores.corpus import TokenStore
from de_jax.data.text import beir, input_policy
from de_jax.types import PADDING_ID, Batch, InputError

T = TypeVar("T")

ITEMS_AHEAD = 2
"""What `prefetch` makes before it is asked for."""

# Batches and pairs by which the usual number of rows of packed texts is set: a batch that needs more is another shape to compile.
_SAMPLE_BATCHES, _SAMPLE_PAIRS = 16, 8192

NegativesAt = Callable[[int], Mapping[str, "Drawable"]]
"""Those in force at a step by the name of their field in a batch, "neg_docs" or "neg_queries"; always the same names."""

_IDS = {"query": "query_id", "doc": "doc_id", "neg_docs": "neg_doc_ids", "neg_queries": "neg_query_ids"}
_MINED = ("neg_docs", "neg_queries")
_DOCS = ("doc", "neg_docs")


@runtime_checkable
class BatchesOfPairs(Protocol):
    """Batches that can be some of a run's, with those of other sources between them."""

    def __call__(self, start: int, steps: Iterable[int] | None = None) -> Iterator[Batch]:
        """The batches from number `start` on; the same number always gives the same batch, except for data that the run changes.

        Args:
            start: batches of these pairs before.
            steps: the run's step of each batch, which decides the negatives that are in force; by default the batch's number.
        """


@runtime_checkable
class Drawable(Protocol):
    """Hard negatives of each pair: `Negatives`."""

    def draw(self, chosen: np.ndarray, key: Sequence[int]) -> np.ndarray:
        """Rows [B, drawn] for the pairs `chosen` [B], decided by `key`; `PADDING_ID` where there are too few."""


class Negatives(NamedTuple):
    """Hard negatives of each pair; each epoch draws `num_drawn` of them for a row of a batch."""

    rows: np.ndarray  # int32 [P, mined] rows of a store; `PADDING_ID` where a pair has fewer
    num_drawn: int

    def draw(self, chosen: np.ndarray, key: Sequence[int]) -> np.ndarray:
        """Rows [B, num_drawn] for the pairs `chosen` [B], each mined one at most once; `PADDING_ID` where there are too few."""
        mined = self.rows[chosen]  # [B, mined]
        random = np.random.default_rng(key).random(mined.shape)
        order = np.argsort(np.where(mined == PADDING_ID, 1.0, random), axis=1, kind="stable")[:, : self.num_drawn]
        drawn = np.full((len(chosen), self.num_drawn), PADDING_ID, np.int32)
        drawn[:, : order.shape[1]] = np.take_along_axis(mined, order, axis=1)
        return drawn


class Positives(NamedTuple):
    """The documents that are relevant to each query of a store."""

    doc_rows: np.ndarray  # int32 [P], those of one query after another
    firsts: np.ndarray  # int64 [queries + 1]: query q's are doc_rows[firsts[q] : firsts[q + 1]]

    def of(self, query_rows: np.ndarray) -> Int32[np.ndarray, "b most"]:
        """Those of each query, filled up with `PADDING_ID` to as many as any query has."""
        starts, ends = self.firsts[query_rows, None], self.firsts[query_rows + 1, None]
        places = starts + np.arange(int(np.diff(self.firsts).max()))
        return np.where(places < ends, self.doc_rows[np.minimum(places, len(self.doc_rows) - 1)], PADDING_ID)


class DocTexts(NamedTuple):
    """Replacements of the documents' beginnings: their passages, or the document with a generated query."""

    store: Store
    rows_of: Callable[[np.ndarray, np.ndarray, int], np.ndarray]
    """(documents [B] or [B, N], pairs [B], step) -> rows of the store [B, ...] or, for several texts each, [B, ..., C]."""


def qrel_pairs(
    qrels: beir.Qrels, query_store: TokenStore, doc_store: TokenStore, *, min_relevance: int = 1, use: str = "train on"
) -> Int32[np.ndarray, "P 2"]:
    """The rows (query, document) of every pair judged at least `min_relevance`, in the order of the judgements; for some `use`.

    Pairs of empty texts that the stores left out are left out too, and counted on stderr.

    Raises:
        InputError: judged texts that are not in the stores (count and examples), or no such pair.
    """
    judged = [(query_id, doc_id, score) for query_id, docs in qrels.items() for doc_id, score in docs.items()]
    relevant = [(query_id, doc_id) for query_id, doc_id, score in judged if score >= min_relevance]
    no_queries, no_docs = set(query_store.skipped_ids), set(doc_store.skipped_ids)
    kept = [(query_id, doc_id) for query_id, doc_id in relevant if query_id not in no_queries and doc_id not in no_docs]
    input_policy.tell_unused(len(relevant) - len(kept))
    if not kept:
        raise InputError(f"no pair of the qrels is judged {min_relevance} or more, so there is nothing to {use}.")
    columns = []
    for name, store, text_ids in zip(("query", "document"), (query_store, doc_store), zip(*kept, strict=True), strict=True):
        rows = store.rows_of(text_ids)
        if (rows < 0).any():
            unknown = dict.fromkeys(text_ids[position] for position in np.flatnonzero(rows < 0).tolist())
            raise beir.unknown_ids(list(unknown), f"{name} ids of the qrels that are not in {store.store_dir}")
        columns.append(rows)
    return np.stack(columns, axis=1).astype(np.int32)


def positives_of(pairs: Int32[np.ndarray, "P 2"], num_queries: int) -> Positives:
    """The documents of each query, from all pairs of (query row, document row)."""
    in_order = pairs[np.argsort(pairs[:, 0], kind="stable")]
    return Positives(in_order[:, 1], np.searchsorted(in_order[:, 0], np.arange(num_queries + 1)))


def pair_batches(
    query_store: Store,
    doc_store: Store,
    pairs: Int32[np.ndarray, "P 2"],
    *,
    batch_size: int,
    max_query_length: int = 64,
    max_doc_length: int = 256,
    seed: int = 0,
    unique_in_batch: bool = True,
    pack: bool = True,
    length_multiple: int = 32,
    row_multiple: int = 1,
    negatives: NegativesAt | None = None,
    doc_texts: DocTexts | None = None,
    positives: Positives | None = None,
    scores: ScoresOf | None = None,
    guide: GuideOf | None = None,
    epoch_order: Callable[[int], np.ndarray] | None = None,
    host_index: int = 0,
    num_hosts: int = 1,
) -> BatchesOfPairs:
    """An endless, resumable stream of batches: `pair_batches(...)(start)` begins at step `start`.

    Every epoch has the same number of full batches. Pairs that fill none wait for the shuffle of another epoch.

    Args:
        query_store, doc_store: the texts of the rows of `pairs`.
        pairs: (query row, document row); see `qrel_pairs`.
        batch_size: rows of the global batch B.
        max_query_length, max_doc_length: tokens, special ones included; longer texts are cut.
        seed: with the epoch's number, decides the shuffle.
        unique_in_batch: no query and no document occurs twice in a batch, where it would be a false negative.
        pack: lay several texts in a row, so that little work goes into padding (`layout.packed`).
        length_multiple: without `pack`, a batch is as wide as its longest text, rounded up to a multiple of this (and at most
            the maximum length), so that shapes are few.
        row_multiple: the rows of packed texts of the global batch are a multiple of it.
        negatives: hard negatives of each pair.
        doc_texts: of the documents of `doc_store`, instead of their beginnings.
        positives: what batches say in `positive_ids`.
        scores: a teacher's, of the documents and the negatives of each pair.
        guide: a guide's embeddings of all texts.
        epoch_order: the rows of `pairs` that make up an epoch, by its number, in shuffled order (`mixing.mixed_epochs`); by
            default every pair once.
        host_index, num_hosts: this host gets rows [host_index * B / num_hosts, ...) of every batch.

    Raises:
        InputError: a batch that the pairs cannot fill or that the hosts cannot share.
    """
    require_shares(batch_size, host_index, num_hosts)
    plan = EpochPlan(pairs, batch_size, seed, unique_in_batch, epoch_order)
    host_size = batch_size // num_hosts
    host_rows = slice(host_index * host_size, (host_index + 1) * host_size)
    sides: dict[str, tuple[Store, int]]
    sides = {"query": (query_store, max_query_length), "doc": (doc_texts.store if doc_texts else doc_store, max_doc_length)}
    sides |= {"neg_queries": sides["query"], "neg_docs": sides["doc"]}

    def chosen_at(number: int) -> np.ndarray:
        epoch, step = divmod(number, plan.num_batches)
        return plan.epoch(epoch)[step]

    def rows_and_texts(
        number: int, at: int, in_force: Mapping[str, Drawable]
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """A global batch as rows of the stores, and the rows of the texts to encode; the latter differ if there are `doc_texts`."""
        epoch, step = divmod(number, plan.num_batches)
        chosen = chosen_at(number)
        rows = {"query": pairs[chosen, 0], "doc": pairs[chosen, 1]}
        for kind, name in enumerate(_MINED):
            if name in in_force:
                rows[name] = in_force[name].draw(chosen, (seed, epoch, step, kind))
        if doc_texts is None:
            return rows, rows
        return rows, rows | {name: doc_texts.rows_of(rows[name], chosen, at) for name in _DOCS if name in rows}

    found: dict[str, layout.Layout] = {}

    def layouts(start: int) -> dict[str, layout.Layout]:
        if not found:  # the first generation of negatives may not be there before the first batch is asked for
            found.update(laid_out(first_negatives(start)))
        return found

    def first_negatives(start: int) -> Mapping[str, Drawable]:
        if negatives is None:
            return {}
        try:
            return negatives(0)
        except InputError as error:
            if not start:
                raise
            here = negatives(start)  # raises its own error
            warnings.warn(f"{error} Batches are packed as step {start} needs it, so results may differ by rounding.", stacklevel=2)
            return here

    def laid_out(first: Mapping[str, Drawable]) -> dict[str, layout.Layout]:
        sample = [rows_and_texts(number, number, first)[1] for number in range(max(_SAMPLE_BATCHES, _SAMPLE_PAIRS // batch_size))]

        def layout_of(name: str) -> layout.Layout:
            if not pack:
                return layout.padded(*sides[name], length_multiple=length_multiple, num_hosts=num_hosts)
            rows = [batch[name] for batch in sample]
            changes = name in _MINED  # with every generation
            return layout.packed(*sides[name], sample=rows, changes=changes, row_multiple=row_multiple, num_hosts=num_hosts)

        return {name: layout_of(name) for name in sample[0]}

    def batches(start: int, steps: Iterable[int] | None = None) -> Iterator[Batch]:
        if start < 0:
            raise ValueError(f"the first step is {start}; steps count from 0")
        at = iter(itertools.count(start) if steps is None else steps)
        for number, step in enumerate(at, start):
            lay_out = layouts(step)
            rows, encoded = rows_and_texts(number, step, negatives(step) if negatives else {})
            texts = {name: lay_out[name](all_texts, host_index) for name, all_texts in encoded.items()}
            own = {name: all_rows[host_rows] for name, all_rows in rows.items()}
            ids = {_IDS[name]: own_rows for name, own_rows in own.items()}
            yield Batch(
                **texts,
                **ids,
                positive_ids=positives.of(ids["query_id"]) if positives else None,
                scores=scores(chosen_at(number)[host_rows], _candidates(ids)) if scores else None,
                guide=guide(own) if guide else None,
            )

    return batches


def prefetch(iterator: Iterator[T], *, ahead: int = ITEMS_AHEAD) -> Generator[T]:
    """Yields what `iterator` yields, made up to `ahead` in advance by a background thread.

    An exception of `iterator` is raised here, in its place. Closing the generator ends the thread.
    """
    ready: queue.Queue[tuple[str, object]] = queue.Queue(maxsize=ahead)
    stopped = threading.Event()

    def put(kind: str, value: object) -> None:
        while not stopped.is_set():
            try:
                return ready.put((kind, value), timeout=0.1)
            except queue.Full:
                continue

    def produce() -> None:
        try:
            for item in iterator:
                put("item", item)
                if stopped.is_set():
                    return
            put("end", None)
        except BaseException as error:
            put("error", error)

    thread = threading.Thread(target=produce, name="prefetch", daemon=True)
    thread.start()
    try:
        while True:
            kind, value = ready.get()
            if kind == "end":
                return
            if kind == "error":
                raise value  # type: ignore[misc]
            yield value  # type: ignore[misc]
    finally:
        stopped.set()
        thread.join()


def _candidates(ids: Mapping[str, np.ndarray]) -> Int32[np.ndarray, "b K"]:
    """The rows of each pair's document and of its negatives."""
    return np.concatenate([ids["doc_id"][:, None], *([ids["neg_doc_ids"]] if "neg_doc_ids" in ids else [])], axis=1)


def require_shares(batch_size: int, host_index: int, num_hosts: int) -> None:
    """Raises InputError for a batch that the hosts cannot share."""
    if batch_size < 1 or batch_size % num_hosts:
        raise InputError(f"batch_size {batch_size} is not divisible by the {num_hosts} hosts; take a multiple of {num_hosts}.")
    if not 0 <= host_index < num_hosts:
        raise ValueError(f"host_index {host_index} of {num_hosts} hosts")
