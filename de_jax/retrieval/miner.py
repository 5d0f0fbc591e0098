"""Hard negatives out of rankings: which documents near a query, or queries near a document, count as its negatives.

One function serves both directions: an anchor is a query and its candidates are documents, or, for the dual task, an anchor is a
document and its candidates are queries.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from de_jax.data import beir
from de_jax.data.corpus import TokenStore
from de_jax.data.negatives import Mined
from de_jax.retrieval import encode
from de_jax.retrieval.bm25 import BM25Index
from de_jax.retrieval.embedding_files import open_embeddings
from de_jax.retrieval.faiss_index import IndexBuilder
from de_jax.retrieval.index import ExactIndex
from de_jax.training.run import Run
from de_jax.types import InputError, Ranking

MIN_RELEVANCE = 1
"""The grade from which a judged document is a positive."""

IsDuplicate = Callable[[int, int], bool]
"""Whether a candidate says nearly the same as a positive; both by row."""
TeacherScore = Callable[[int, int], float | None]
"""What another model thinks of a candidate for an anchor, both by row; None where it was not asked."""


class Pairs(NamedTuple):
    """Training pairs, and their texts as positions among the queries and documents that take part."""

    query_ids: list[str]  # of all queries with a positive
    doc_ids: list[str]  # of the corpus
    queries: Int[np.ndarray, " P"]
    docs: Int[np.ndarray, " P"]


class _Clock:
    """Seconds of the stages of a mining."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, stage: str) -> None:
        now = time.perf_counter()
        self.seconds[stage], self._last = round(now - self._last, 3), now


class Filters(NamedTuple):
    """Which candidates may be negatives, besides not being known positives.

    ANCE (Xiong et al. 2021) takes the first 200. The others guard against relevant documents that nobody judged.
    """

    first_rank: int = 1  # of the candidates left once the known positives are removed
    last_rank: int = 200
    margin: float | None = None  # a negative scores at most its positive's score minus this
    max_score_ratio: float | None = None  # a negative scores at most this share of its positive's score
    max_teacher_score: float | None = None  # of those that the teacher has scored


ALL_IN_DEPTH = Filters()


class Mining(NamedTuple):
    """The negatives of each pair, and what was left out on the way, in candidates."""

    chosen: list[Int[np.ndarray, " m"]]  # rows, in the order drawn
    num_candidates: int  # within the ranks, known positives removed
    num_known: int  # known positives met in the rankings
    num_filtered: dict[str, int]  # by filter
    mean_rank: float  # of the chosen, counted without known positives; nan without any


def choose(
    ranking: Ranking,
    pair_anchors: Int[np.ndarray, " P"],
    pair_positives: Int[np.ndarray, " P"],
    positive_scores: Float[np.ndarray, " P"],
    known: Sequence[AbstractSet[int]],
    *,
    num_negatives: int,
    seed: int,
    filters: Filters = ALL_IN_DEPTH,
    is_duplicate: IsDuplicate | None = None,
    teacher: TeacherScore | None = None,
) -> Mining:
    """Draws each pair's negatives, evenly among those that the filters leave.

    Args:
        ranking: [a, r] the candidates near each anchor; deep enough that `last_rank` are left without the positives.
        pair_anchors: the row of the ranking that each training pair asks for.
        pair_positives: the pair's own candidate.
        positive_scores: of each pair, on the ranking's scale.
        known: for each row of the ranking all its positives, of every split that must not be trained against.
        num_negatives: of each pair; fewer where the filters leave fewer.
        seed: with a pair's place, decides the draw.
        filters: see there.
        is_duplicate, teacher: what the filters of those names ask.

    Raises:
        InputError: ranks or a number of negatives out of range.
    """
    if not 1 <= filters.first_rank <= filters.last_rank:
        raise InputError(f"ranks {filters.first_rank} to {filters.last_rank} hold no candidate; give 1 <= first <= last.")
    if num_negatives < 1:
        raise InputError(f"num_negatives is {num_negatives}; mine at least 1 for each pair.")
    chosen, ranks, counts = [], [], dict.fromkeys(("margin", "max_score_ratio", "max_teacher_score", "duplicate"), 0)
    num_candidates = num_known = 0
    for pair, (anchor, positive, score) in enumerate(
        zip(pair_anchors.tolist(), pair_positives.tolist(), positive_scores, strict=True)
    ):
        rows, scores = ranking.doc_rows[anchor], ranking.scores[anchor]
        is_known = np.isin(rows, list(known[anchor]))
        num_known += int(np.count_nonzero(is_known))
        free = np.flatnonzero((rows >= 0) & ~is_known)[filters.first_rank - 1 : filters.last_rank]
        num_candidates += len(free)
        kept = np.ones(len(free), bool)
        for name, refused in _refusals(anchor, positive, float(score), rows[free], scores[free], filters, is_duplicate, teacher):
            counts[name] += int(np.count_nonzero(kept & refused))
            kept &= ~refused
        drawn = np.random.default_rng((seed, pair)).permutation(np.flatnonzero(kept))[:num_negatives]
        chosen.append(rows[free[drawn]])
        ranks.append(drawn + filters.first_rank)
    all_ranks = np.concatenate(ranks) if ranks else np.zeros(0)
    mean_rank = float(all_ranks.mean()) if len(all_ranks) else float("nan")
    return Mining(chosen, num_candidates, num_known, counts, mean_rank)


def _refusals(
    anchor: int,
    positive: int,
    positive_score: float,
    rows: np.ndarray,
    scores: np.ndarray,
    filters: Filters,
    is_duplicate: IsDuplicate | None,
    teacher: TeacherScore | None,
) -> list[tuple[str, np.ndarray]]:
    """The candidates that each filter in use refuses."""
    refusals = []
    if filters.margin is not None:
        refusals.append(("margin", scores > positive_score - filters.margin))
    if filters.max_score_ratio is not None:
        # A share of a negative score would let better candidates through than the positive itself.
        refusals.append(("max_score_ratio", scores > positive_score - (1 - filters.max_score_ratio) * abs(positive_score)))
    if filters.max_teacher_score is not None and teacher is not None:
        found = [teacher(anchor, row) for row in rows.tolist()]
        refused = [one is not None and one > filters.max_teacher_score for one in found]
        refusals.append(("max_teacher_score", np.array(refused, bool)))
    if is_duplicate is not None:
        refusals.append(("duplicate", np.array([is_duplicate(positive, row) for row in rows.tolist()], bool)))
    return refusals


def training_pairs(qrels: beir.Qrels, doc_ids: Sequence[str]) -> Pairs:
    """Every pair judged relevant.

    Raises:
        InputError: a judged document that is not in the corpus, or no pair.
    """
    judged = [(query_id, doc_id) for query_id, docs in qrels.items() for doc_id, grade in docs.items() if grade >= MIN_RELEVANCE]
    if not judged:
        raise InputError("no document is judged relevant, so there is nothing to mine for; give the qrels of a training split.")
    row_of_doc = {doc_id: row for row, doc_id in enumerate(doc_ids)}
    beir.require_known({doc_id for _, doc_id in judged}, row_of_doc, "judged documents that are not in the corpus")
    query_ids = list(dict.fromkeys(query_id for query_id, _ in judged))
    row_of_query = {query_id: row for row, query_id in enumerate(query_ids)}
    queries, docs = ([row_of_query[query_id] for query_id, _ in judged], [row_of_doc[doc_id] for _, doc_id in judged])
    return Pairs(query_ids, list(doc_ids), np.array(queries), np.array(docs))


def mine(
    run: Run,
    qrels: beir.Qrels,
    query_store: TokenStore,
    doc_store: TokenStore,
    build_index: IndexBuilder,
    *,
    name: str,
    num_neg_docs: int,
    num_neg_queries: int = 0,
    filters: Filters = ALL_IN_DEPTH,
    seed: int = 0,
    progress: encode.Progress | None = None,
) -> tuple[list[Mined], dict[str, Any]]:
    """The hard negatives of every training pair by a run's embeddings.

    Documents are near a query as in ANCE (Xiong et al. 2021), training queries near a document as in DANCE (Li et al. 2021), whose
    own queries are all left out.

    Args:
        run: its newest or any checkpoint.
        qrels: of the training split; also what is a known positive.
        query_store, doc_store: the texts with the run's tokenizers.
        build_index: of the documents; see `faiss_index.index_builder`. Queries are searched exactly.
        name: of the data set, for the folder of embeddings.
        num_neg_docs, num_neg_queries: of each pair, at most.
        filters: for both kinds.
        seed: of the draw.
        progress: told of documents encoded.

    Returns:
        The negatives, and what there is to say of them: seconds by stage, candidates, and what each filter took.
    """
    clock = _Clock()
    folder = encode.cached_docs(run, doc_store, name, progress=progress)
    doc_ids, docs, _ = open_embeddings(folder)
    pairs = training_pairs(qrels, doc_ids)
    queries = encode.queries(run, query_store, rows=query_store.rows_of(pairs.query_ids))
    clock.lap("encode")
    index = build_index(docs, doc_ids, folder)
    clock.lap("index")
    known_docs, known_queries = _known(pairs)
    ranking = index.search(queries, min(len(doc_ids), filters.last_rank + max(map(len, known_docs))))
    clock.lap("search")
    scores = np.einsum("PD,PD->P", queries[pairs.queries], docs[pairs.docs])
    options: dict[str, Any] = {"filters": filters, "seed": seed}
    mined = choose(ranking, pairs.queries, pairs.docs, scores, known_docs, num_negatives=num_neg_docs, **options)
    facts = {"neg_docs": _facts(mined)}
    mined_queries = [np.zeros(0, np.int32)] * len(pairs.docs)
    if num_neg_queries:
        anchors, anchor_of = np.unique(pairs.docs, return_inverse=True)
        near = _queries_near(docs[anchors], queries, pairs.query_ids, filters.last_rank + max(map(len, known_queries.values())))
        known = [known_queries[doc] for doc in anchors.tolist()]
        dual = choose(near, anchor_of, pairs.queries, scores, known, num_negatives=num_neg_queries, **options)
        mined_queries, facts["neg_queries"] = dual.chosen, _facts(dual)
    clock.lap("choose")
    lines = [_line(pairs, pair, mined.chosen[pair], mined_queries[pair]) for pair in range(len(pairs.docs))]
    return lines, {**facts, "checkpoint_step": run.step, "seconds": clock.seconds}


def mine_bm25(
    dataset: beir.Dataset, *, num_neg_docs: int, filters: Filters = ALL_IN_DEPTH, seed: int = 0, k1: float = 0.9, b: float = 0.4
) -> tuple[list[Mined], dict[str, Any]]:
    """The hard negatives of every training pair by BM25; for a warm-up, or as a baseline.

    Raises:
        InputError: filters that need the positive's score, which BM25 gives only to what it finds.
    """
    if filters.margin is not None or filters.max_score_ratio is not None:
        raise InputError("BM25 has no score for a positive that it does not find; leave margin and max_score_ratio out.")
    clock = _Clock()
    pairs = training_pairs(dataset.qrels, dataset.docs.ids)
    index = BM25Index(dataset.docs.texts, dataset.docs.ids, k1=k1, b=b)
    clock.lap("index")
    texts = dict(zip(dataset.queries.ids, dataset.queries.texts, strict=True))
    known, _ = _known(pairs)
    ranking = index.search([texts[query_id] for query_id in pairs.query_ids], filters.last_rank + max(map(len, known)))
    clock.lap("search")
    scores = np.zeros(len(pairs.docs), np.float32)
    mined = choose(ranking, pairs.queries, pairs.docs, scores, known, num_negatives=num_neg_docs, filters=filters, seed=seed)
    clock.lap("choose")
    nothing = np.zeros(0, np.int32)
    lines = [_line(pairs, pair, chosen, nothing) for pair, chosen in enumerate(mined.chosen)]
    return lines, {"neg_docs": _facts(mined), "k1": k1, "b": b, "seconds": clock.seconds}


def _queries_near(docs: np.ndarray, queries: np.ndarray, query_ids: Sequence[str], depth: int) -> Ranking:
    return ExactIndex(queries, query_ids).search(np.ascontiguousarray(docs), min(depth, len(query_ids)))


def _known(pairs: Pairs) -> tuple[list[set[int]], dict[int, set[int]]]:
    """The positives of each query, and the queries of each document that has some."""
    docs: list[set[int]] = [set() for _ in pairs.query_ids]
    queries: dict[int, set[int]] = {}
    for query, doc in zip(pairs.queries.tolist(), pairs.docs.tolist(), strict=True):
        docs[query].add(doc)
        queries.setdefault(doc, set()).add(query)
    return docs, queries


def _line(pairs: Pairs, pair: int, docs: np.ndarray, queries: np.ndarray) -> Mined:
    return Mined(
        pairs.query_ids[pairs.queries[pair]],
        pairs.doc_ids[pairs.docs[pair]],
        [pairs.doc_ids[doc] for doc in docs.tolist()],
        [pairs.query_ids[query] for query in queries.tolist()],
    )


def _facts(mining: Mining) -> dict[str, Any]:
    num_chosen = sum(map(len, mining.chosen))
    facts = {"num_chosen": num_chosen, "mean_rank": mining.mean_rank if num_chosen else None}
    return facts | {name: getattr(mining, name) for name in ("num_candidates", "num_known", "num_filtered")}
