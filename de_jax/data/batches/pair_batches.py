"""Batches of (query, relevant document) pairs from two token stores: shuffled by seed and epoch, resumable at any step.

An epoch is planned as a whole, from (seed, epoch) alone. So every host makes the same plan and takes its own rows of it, and the
batches from step s on are the same whether or not the earlier ones were ever made.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import itertools
import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int, Int32, Int64

from de_jax.data.batches import layout
from de_jax.data.batches.teacher_scores import GuideOf, ScoresOf
from de_jax.data.sources.options import PairsOptions, Share
from de_jax.data.stores.corpus import TokenStore, first_rows
from de_jax.data.text import beir
from de_jax.data.text.passages import PassageStore
from de_jax.files import folders, outputs
from de_jax.types import PADDING_ID, Batch, InputError

# Pairs, and batches, by which the usual number of rows of packed texts is set: a batch that needs more is another shape to compile.
_SAMPLE_PAIRS, _FEWEST_BATCHES, _MOST_BATCHES = 65536, 16, 1024
# Batches a displaced pair is tried in before it waits for another epoch; keeps planning linear where one text is in most pairs.
_MAX_TRIES = 32
_MOST_LISTED = 512  # relevant documents of a query; one with more may be a label or a topic

_IDS = {"query": "query_id", "doc": "doc_id", "neg_docs": "neg_doc_ids", "neg_queries": "neg_query_ids"}
_MINED = ("neg_docs", "neg_queries")
_QUERIES = ("query", "neg_queries")
_DOCS = ("doc", "neg_docs")


class TrainingPairs(NamedTuple):
    """Training pairs and the texts of their rows, whichever source they come from."""

    name: str
    query_store: TokenStore
    doc_store: TokenStore
    pairs: np.ndarray  # int32 [P, 2] (query row, document row)
    hashes: Mapping[str, str] = MappingProxyType({})  # of "queries" and "docs" that the manifests of negatives must have
    passages: PassageStore | None = None  # of documents with several passages; the best one for a query counts
    drop_identical_ids: bool = True  # a document with the id of a query is no negative of it; see `input_policy`
    query_tokenizer: Any = None
    doc_tokenizer: Any = None
    neg_docs: np.ndarray | None = None  # int32 [P, mined] rows of negatives that come with the pairs, `PADDING_ID` for fewer
    neg_queries: np.ndarray | None = None  # the same of queries
    scores: np.ndarray | None = None  # float32 [P, 1 + mined] of a teacher: of the pair's document and its `neg_docs`; NaN without
    dev_qrels: beir.Qrels | None = None  # judgements that score checkpoints, of texts in the stores
    epoch_order: Callable[[int], np.ndarray] | None = None  # rows of an epoch by its number, see `mixing.mixed_epochs`
    own_queries: Callable[[], Sequence[str]] | None = None  # gives the text of each pair's query, as far as it is known
    is_part: bool = False  # of the corpus whose generated queries are given
    parts: Sequence[Any] = ()
    made_from: str = ""  # equal for folders of pairs with equal content
    told: Sequence[str] = ()  # the warnings of the import, given again whenever the folder is opened
    first_queries: np.ndarray | None = None  # int32 [n + 1] the first row with the text of each row, see `with_equal_texts`
    first_docs: np.ndarray | None = None  # the same of documents; None if rows tell texts apart

    @property
    def stores(self) -> tuple[TokenStore, TokenStore]:
        return self.query_store, self.doc_store

    def fingerprint(self, dev_qrels: beir.Qrels | None) -> str:
        """A hash of the texts, the pairs and the judgements of a dev set."""
        rows = hashlib.sha256(np.ascontiguousarray(self.pairs).data).hexdigest()
        judged = json.dumps(dev_qrels, sort_keys=True) if dev_qrels is not None else ""
        return folders.key_of(*(store.content_hash for store in self.stores), rows, judged)

    def with_equal_texts(self, query_length: int, doc_length: int, max_passages: int = 1) -> TrainingPairs:
        """The same pairs, which know their texts: texts that a tower cannot tell apart are one, whatever their ids are."""
        query_texts, doc_texts = self.texts(query_length, doc_length, max_passages)
        return self._replace(first_queries=first_rows(query_texts), first_docs=first_rows(doc_texts))

    def texts(self, query_length: int, doc_length: int, max_passages: int) -> tuple[tuple[TokenStore, int], tuple[TokenStore, int]]:
        """Each store with the tokens of a text that a tower sees, in all passages."""
        specials = len(self.doc_store.prefix_ids) + len(self.doc_store.suffix_ids)
        return (self.query_store, query_length), (self.doc_store, max_passages * (doc_length - specials) + specials)

    def first(self, name: str, rows: np.ndarray) -> np.ndarray:
        """The first rows with the texts of `rows`, which a batch calls "query", "doc", "neg_docs" or "neg_queries"."""
        firsts = self.first_queries if name in _QUERIES else self.first_docs
        return rows if firsts is None else firsts[rows]

    @property
    def by_text(self) -> Int32[np.ndarray, "P 2"]:
        """The pairs by the first rows of their texts."""
        return np.stack([self.first(name, self.pairs[:, side]) for side, name in enumerate(("query", "doc"))], axis=1)

    def not_relevant(self, name: str, rows: Int32[np.ndarray, "P N"]) -> Int32[np.ndarray, "P N"]:
        """The negatives of each pair by first rows; `PADDING_ID` for texts that are relevant in any pair, counted on stderr."""
        rows, pairs = self.first(name, np.asarray(rows)), self.by_text.astype(np.int64)
        query, doc = (pairs[:, :1], rows) if name == "neg_docs" else (rows.astype(np.int64), pairs[:, 1:])
        known = np.unique(pairs[:, 0] << 32 | pairs[:, 1])
        wanted = np.where(rows == PADDING_ID, PADDING_ID, query << 32 | doc)
        is_relevant = known[np.minimum(np.searchsorted(known, wanted), len(known) - 1)] == wanted
        if number := int(np.count_nonzero(is_relevant)):
            outputs.tell(f"{self.name}: hard negatives left out, as they are relevant to the same query in another row: {number}.")
        return np.where(is_relevant, PADDING_ID, rows)


class Negatives(NamedTuple):
    """Hard negatives of each pair; each epoch draws `num_drawn` of them for a row of a batch."""

    rows: np.ndarray  # int32 [P, mined] rows of a store; `PADDING_ID` where a pair has fewer
    num_drawn: int

    def draw(self, chosen: np.ndarray, key: Sequence[int]) -> np.ndarray:
        """Rows [B, num_drawn] for the pairs `chosen` [B], each mined one at most once; `PADDING_ID` if there are too few."""
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

    def of(self, query_rows: np.ndarray, first: np.ndarray) -> Int32[np.ndarray, "b most"]:
        """Those of each query, filled up with `PADDING_ID`; of more than `_MOST_LISTED` those among the documents `first` first."""
        starts, ends = self.firsts[query_rows], self.firsts[query_rows + 1]
        places = starts[:, None] + np.arange(min(int(np.diff(self.firsts).max()), _MOST_LISTED))
        found = np.where(places < ends[:, None], self.doc_rows[np.minimum(places, len(self.doc_rows) - 1)], PADDING_ID)
        for row in np.flatnonzero(ends - starts > _MOST_LISTED):
            own = self.doc_rows[starts[row] : ends[row]]
            found[row] = own[np.argsort(~np.isin(own, first), kind="stable")[:_MOST_LISTED]]
        return found


class DocTexts(NamedTuple):
    """Replacements of the documents' beginnings: their passages, or the document with a generated query."""

    store: layout.Store
    rows_of: Callable[[np.ndarray, np.ndarray, int], np.ndarray]
    """(documents [B] or [B, N], pairs [B], step) -> rows of the store [B, ...] or, for several texts each, [B, ..., C]."""


def positives_of(pairs: Int32[np.ndarray, "P 2"], num_queries: int) -> Positives:
    """The documents of each query, from all pairs of (query row, document row)."""
    in_order = pairs[np.argsort(pairs[:, 0], kind="stable")]
    return Positives(in_order[:, 1], np.searchsorted(in_order[:, 0], np.arange(num_queries + 1)))


class PairBatches:
    """An endless, resumable stream of batches: `PairBatches(...)(start)` begins at step `start`.

    Every epoch has the same number of full batches. Pairs that fill none wait for the shuffle of another epoch.

    Attributes:
        negatives: those in force at a step by their field in a batch, "neg_docs" or "neg_queries"; always the same names.
        scores: a teacher's, of the documents and the negatives of each pair; None without.
        epoch_steps, num_left_out: batches in an epoch, and pairs that it leaves out; None if batches hold other sources too.
    """

    def __init__(
        self,
        pairs: TrainingPairs,
        options: PairsOptions,
        share: Share = Share(),
        *,
        negatives: Callable[[int], Mapping[str, Any]] = lambda step: {},
        doc_texts: DocTexts | None = None,
        scores: ScoresOf | None = None,
        guide: GuideOf | None = None,
    ) -> None:
        """Plans the first epoch, unless the batches hold pairs of other sources too."""
        self._host_rows = rows_of_host(options.batch_size, share)
        self.pairs, self.options, self.share = pairs, options, share
        self.negatives, self.scores, self._doc_texts, self._guide = negatives, scores, doc_texts, guide
        self._plan, self._positives, self.epoch_steps, self.num_left_out = None, None, None, None
        if not share.is_joined:
            by_text = pairs.by_text
            self._plan = EpochPlan(by_text, options.batch_size, options.seed or 0, options.unique_in_batch, pairs.epoch_order)
            self.epoch_steps, self.num_left_out = self._plan.num_batches, self._plan.num_left_out
            if self._plan.num_left_out >= 0.01 * len(by_text):
                share_left_out = 100 * self._plan.num_left_out / len(by_text)
                outputs.tell(
                    "pairs left out of an epoch, as a batch holds no query and no document twice: "
                    f"{self._plan.num_left_out:,} of {len(by_text):,} ({share_left_out:.0f} %). A smaller batch_size than "
                    f"{options.batch_size} leaves fewer out; in a recipe, PairsOptions.unique_in_batch=False takes all."
                )
            if options.mask_positives and np.bincount(by_text[:, 0]).max() > 1:  # else `mask_duplicates` masks the only one
                self._positives = positives_of(by_text, pairs.query_store.num_texts)
        self._layouts: dict[str, layout.Layout] = {}

    def __call__(self, start: int, steps: Iterable[int] | None = None) -> Iterator[Batch]:
        """The batches from number `start` on, each decided by its number, and its negatives by `steps`, by default the same."""
        if start < 0:
            raise ValueError(f"the first step is {start}; steps count from 0")
        if self._plan is None:
            return
        at = iter(itertools.count(start) if steps is None else steps)
        for number, step in enumerate(at, start):
            if not self._layouts:  # the first generation of negatives may not be there before the first batch is asked for
                self._layouts = self._laid_out(self._first_negatives(step))
            yield self._batch(self._plan, number, step)

    def _batch(self, plan: EpochPlan, number: int, step: int) -> Batch:
        chosen = plan.pairs_of(number)
        rows, encoded = self._rows_and_texts(plan, number, step, self.negatives(step))
        texts = {name: self._layouts[name](all_texts, self.share.host_index) for name, all_texts in encoded.items()}
        own = {name: all_rows[self._host_rows] for name, all_rows in rows.items()}
        ids = {_IDS[name]: self.pairs.first(name, own_rows) for name, own_rows in own.items()}
        docs = self.pairs.first("doc", _candidates(rows))
        return Batch(
            **texts,
            **ids,
            positive_ids=self._positives.of(ids["query_id"], docs) if self._positives else None,
            scores=self.scores(chosen[self._host_rows], _candidates(own)) if self.scores else None,
            guide=self._guide(own) if self._guide else None,
        )

    def _rows_and_texts(
        self, plan: EpochPlan, number: int, step: int, in_force: Mapping[str, Any]
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """A global batch as rows of the stores, and the rows of the texts to encode; the latter differ if there are `doc_texts`."""
        chosen, pairs = plan.pairs_of(number), self.pairs.pairs
        rows = {"query": pairs[chosen, 0], "doc": pairs[chosen, 1]}
        for kind, name in enumerate(_MINED):
            if name in in_force:
                rows[name] = in_force[name].draw(chosen, (self.options.seed or 0, *divmod(number, plan.num_batches), kind))
        texts = self._doc_texts
        if texts is None:
            return rows, rows
        return rows, rows | {name: texts.rows_of(rows[name], chosen, step) for name in _DOCS if name in rows}

    def _first_negatives(self, start: int) -> Mapping[str, Any]:
        try:
            return self.negatives(0)
        except InputError as error:
            if not start:
                raise
            here = self.negatives(start)  # raises its own error
            warnings.warn(f"{error} Batches are packed as step {start} needs it, so results may differ by rounding.", stacklevel=2)
            return here

    def _laid_out(self, first: Mapping[str, Any]) -> dict[str, layout.Layout]:
        """How the texts of each field lie in all batches, by those of the first ones."""
        assert self._plan is not None
        options, num_hosts, doc_texts = self.options, self.share.num_hosts, self._doc_texts
        queries = self.pairs.query_store, options.max_query_length
        docs = doc_texts.store if doc_texts else self.pairs.doc_store, options.max_doc_length
        numbers = range(min(max(_SAMPLE_PAIRS // options.batch_size, _FEWEST_BATCHES), _MOST_BATCHES))
        sample = [self._rows_and_texts(self._plan, number, number, first)[1] for number in numbers]
        samples = {
            name: layout.Sample(*(queries if name in _QUERIES else docs), [batch[name] for batch in sample], name in _MINED)
            for name in sample[0]
        }
        if not options.pack:
            laid_out = functools.partial(layout.padded, length_multiple=options.length_multiple, num_hosts=num_hosts)
            return {name: laid_out(one.store, one.max_length) for name, one in samples.items()}
        shapes = layout.packings(samples, row_multiple=self.share.row_multiple, num_hosts=num_hosts)
        laid_out = functools.partial(layout.packed_as, num_hosts=num_hosts)
        return {name: laid_out(shapes[name], one.store, one.max_length) for name, one in samples.items()}


def _candidates(rows: Mapping[str, np.ndarray]) -> Int32[np.ndarray, "b K"]:
    """The rows of each pair's document and of its negatives."""
    return np.concatenate([rows["doc"][:, None], *([rows["neg_docs"]] if "neg_docs" in rows else [])], axis=1)


def rows_of_host(batch_size: int, share: Share) -> slice:
    """The rows of a batch that are this host's. InputError: a batch that the hosts cannot share."""
    host, num_hosts = share.host_index, share.num_hosts
    if batch_size % num_hosts:
        raise InputError(f"batch_size {batch_size} is not divisible by the {num_hosts} hosts; take a multiple of {num_hosts}.")
    if not 0 <= host < num_hosts:
        raise ValueError(f"host_index {host} of {num_hosts} hosts")
    return slice(host * (batch_size // num_hosts), (host + 1) * (batch_size // num_hosts))


class EpochPlan:
    """Which pairs make up which batch of an epoch. Holds the last plan, as consecutive batches come from one epoch."""

    def __init__(
        self,
        pairs: np.ndarray,
        batch_size: int,
        seed: int,
        unique_in_batch: bool,
        epoch_order: Callable[[int], np.ndarray] | None = None,
    ) -> None:
        """Plans the first epoch; the arguments are those of `PairsOptions` and `TrainingPairs`."""
        self._pairs = np.stack([_by_first_place(texts) for texts in pairs.T], axis=1)
        self._batch_size = batch_size
        self._seed = seed
        self._unique = unique_in_batch
        self._order = epoch_order
        _require_enough(pairs, batch_size, unique_in_batch)
        self._most = _most_batches(self._pairs, batch_size) if unique_in_batch and epoch_order is None else None
        self._first = self._full_batches(0)
        self._latest = (0, self._first)
        self.num_batches = len(self._first)
        if not self.num_batches:
            raise InputError(
                f"no batch of {batch_size} pairs without a repeated query or document was found; "
                "take a smaller batch_size, or unique_in_batch=False."
            )

    @property
    def num_left_out(self) -> int:
        """Pairs that the first epoch leaves out because their texts repeat, in whole batches."""
        return max(0, len(self._pairs) // self._batch_size - self.num_batches) * self._batch_size if self._order is None else 0

    def epoch(self, number: int) -> Int64[np.ndarray, "S B"]:
        """Rows of `pairs`, one batch per row."""
        known, plan = self._latest
        if known == number:
            return plan
        plan = self._full_batches(number)
        # Where repeated texts leave this shuffle with fewer full batches than the first, some are seen twice.
        plan = plan[np.arange(self.num_batches) % len(plan)] if len(plan) else self._first
        self._latest = (number, plan)
        return plan

    def pairs_of(self, number: int) -> Int64[np.ndarray, " B"]:
        """The rows of `pairs` in a batch, by the number of batches before it."""
        epoch, place = divmod(number, self.num_batches)
        return self.epoch(epoch)[place]

    def _full_batches(self, epoch: int) -> np.ndarray:
        rng = np.random.default_rng((self._seed, epoch))
        order = rng.permutation(len(self._pairs)) if self._order is None else self._order(epoch)
        if self._most and any(np.bincount(texts).max() > self._most for texts in self._pairs.T):
            order = self._scheduled(epoch, order, rng)
        return full_batches(self._pairs, order, self._batch_size, self._unique)

    def _scheduled(self, epoch: int, order: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """An order whose batches hold texts that are in too many pairs once each.

        An epoch of S batches takes S pairs of such a text, the next epoch another S. The pairs of one text after another are dealt
        to the batches in turn, so no batch gets a text twice; queries are dealt, or documents, as one of them has the most pairs.
        """
        assert self._most
        kept = np.random.default_rng(self._seed).permutation(len(self._pairs))
        for texts in self._pairs.T:
            kept = _in_turn(kept, texts[kept], self._most, epoch)
        is_kept = np.zeros(len(order), bool)
        is_kept[kept] = True
        kept = order[is_kept[order]]
        dealt = self._pairs[:, np.argmax([np.bincount(texts).max() for texts in self._pairs.T])]
        kept = kept[np.argsort(rng.permutation(int(dealt.max()) + 1)[dealt[kept]], kind="stable")]
        num_batches = min(self._most, len(kept) // self._batch_size)
        batches, left = np.split(kept, [num_batches * self._batch_size])
        return np.concatenate([batches.reshape(self._batch_size, num_batches).T.reshape(-1), left])


def _by_first_place(texts: np.ndarray) -> np.ndarray:
    """The texts numbered in the order of their first places, so that a plan is the same however a store numbers them."""
    _, first, which = np.unique(texts, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[which]


def _most_batches(pairs: np.ndarray, batch_size: int) -> int:
    """The most batches that pairs can fill where each holds a text once at most."""
    most = len(pairs) // batch_size
    for texts in pairs.T:
        count = np.bincount(texts)
        while most and np.minimum(count, most).sum() < most * batch_size:
            most = min(most - 1, int(np.minimum(count, most).sum()) // batch_size)
    return most


def _in_turn(rows: np.ndarray, texts: np.ndarray, most: int, epoch: int) -> np.ndarray:
    """At most `most` rows of each text; in each epoch the next ones, until all had their turn."""
    return rows[(places_among_equals(texts) - epoch * most) % np.bincount(texts)[texts] < most]


def places_among_equals(values: Int[np.ndarray, " n"]) -> Int64[np.ndarray, " n"]:
    """How often each value was there before."""
    order = np.argsort(values, kind="stable")
    places = np.empty(len(values), np.int64)
    places[order] = np.arange(len(values)) - np.searchsorted(values[order], values[order])
    return places


def full_batches(
    pairs: Int64[np.ndarray, "P 2"], order: Int64[np.ndarray, " O"], batch_size: int, unique_in_batch: bool
) -> Int64[np.ndarray, "S B"]:
    """Rows of `pairs` in an order, one batch per row; if none may hold a text twice, as many as are found."""
    batch = np.arange(len(order)) // batch_size
    queries, docs = pairs[order].T
    displaced = _repeats(batch, queries) | _repeats(batch, docs) if unique_in_batch else np.zeros(len(order), bool)
    if displaced.any():
        batch = _rehouse(batch, queries, docs, displaced, batch_size)
        order = order[np.argsort(batch, kind="stable")[np.count_nonzero(batch < 0) :]]
    full = len(order) // batch_size
    return order[: full * batch_size].reshape(full, batch_size)


def _rehouse(batch: np.ndarray, queries: np.ndarray, docs: np.ndarray, displaced: np.ndarray, batch_size: int) -> np.ndarray:
    """The batch of each pair [P], -1 for none, once displaced pairs stand where their texts are new; all batches are full."""
    batch = np.where(displaced, -1, batch)
    size = np.bincount(batch[batch >= 0], minlength=int(batch.max()) + 1)
    members: dict[int, list[int]] = {index: [] for index in np.flatnonzero(size < batch_size).tolist()}
    for pair in np.flatnonzero((batch >= 0) & (size[batch] < batch_size)).tolist():
        members[int(batch[pair])].append(pair)
    query_of, doc_of = queries.tolist(), docs.tolist()
    held = {index: ({query_of[i] for i in pairs}, {doc_of[i] for i in pairs}) for index, pairs in members.items()}
    unfilled = collections.deque(members)
    homeless = np.flatnonzero(displaced).tolist()
    by_size: list[int] | None = None
    while unfilled:
        for pair in homeless:
            for _ in range(min(_MAX_TRIES, len(unfilled))):
                index = unfilled[0]
                held_queries, held_docs = held[index]
                if query_of[pair] not in held_queries and doc_of[pair] not in held_docs:
                    held_queries.add(query_of[pair])
                    held_docs.add(doc_of[pair])
                    members[index].append(pair)
                    batch[pair] = index
                    if len(members[index]) == batch_size:
                        unfilled.popleft()
                    break
                unfilled.rotate(-1)
        # The emptiest batch gives its pairs to the others.
        by_size = by_size or sorted(unfilled, key=lambda index: len(members[index]), reverse=True)
        while by_size and len(members[by_size[-1]]) == batch_size:
            by_size.pop()
        if by_size:
            unfilled.remove(by_size[-1])
            homeless = members.pop(by_size.pop())
            batch[homeless] = -1
    return batch


def _repeats(batch: np.ndarray, texts: np.ndarray) -> np.ndarray:
    """[P] whether the text of a pair already stands in an earlier pair of its batch."""
    _, first = np.unique(batch * (int(texts.max()) + 1) + texts, return_index=True)
    repeats = np.ones(len(texts), dtype=bool)
    repeats[first] = False
    return repeats


def _require_enough(pairs: np.ndarray, batch_size: int, unique_in_batch: bool) -> None:
    """Raises InputError where not even one batch can be filled, whatever the shuffle."""
    if batch_size > len(pairs):
        raise InputError(f"batch_size {batch_size} is more than the {len(pairs)} training pairs; take a smaller one.")
    for name, column in zip(("queries", "documents"), pairs.T, strict=True):
        distinct = len(np.unique(column)) if unique_in_batch else batch_size
        if distinct < batch_size:
            raise InputError(
                f"batch_size {batch_size} is more than the {distinct} different {name} that the vocabulary sees in the training "
                "pairs; take a smaller one, or unique_in_batch=False."
            )
