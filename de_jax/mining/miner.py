"""Hard negatives of training pairs: what ranks high by a run's embeddings, or by BM25, and is not known to be relevant."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from de_jax.data.batches import teacher_scores
from de_jax.data.text import beir, input_policy
from de_jax.files.reading import read_lines
from de_jax.mining import generations, mining_statistics
from de_jax.mining.choose import Filters, Mining, choose, near_duplicates_in, read_teacher
from de_jax.mining.generations import Mined
from de_jax.mining.negatives import TrainingTexts
from de_jax.retrieval import encode, faiss_index
from de_jax.retrieval.bm25 import BM25Index
from de_jax.retrieval.embedding_files import open_embeddings
from de_jax.retrieval.index import ExactIndex, Index
from de_jax.retrieval.maxp import MaxPIndex
from de_jax.settings import NonNegativeInt, PositiveFloat, PositiveInt, Seed, Share, check_fields
from de_jax.training.run.run_folder import Run
from de_jax.types import InputError

MIN_RELEVANCE = 1
"""The grade from which a judged document is a positive."""

Score = Callable[[Index], dict[str, float]]
"""How well an index of all documents ranks, such as nDCG@10 on dev queries; by name."""


@dataclasses.dataclass(frozen=True)
class Miner:
    """Settings of mining: those of ANCE (Xiong et al. 2021), except for the number of negatives kept.

    `num_neg_docs`, `num_neg_queries`: of each training pair, at most. Queries are for DANCE's dual task (Li et al. 2021).
    `first_rank`, `last_rank`: candidates by rank, known positives not counted.
    `margin`, `max_score_ratio`: a negative scores at most its positive's score minus this, or at most this share of it.
    `teacher_scores`, `max_teacher_score`: a file of scores by another model (`choose.read_teacher`), and the highest that a
    negative may have.
    `max_resemblance`: texts that share more of their three-token sequences with the positive (Jaccard, 0 to 1) are no negatives.
    `index`: "exact" or a FAISS factory string, with `nprobe`, `ef_search` and `faiss_device` as in `faiss_index.SearchOptions`.
    `seed`: with the checkpoint's step and the pair, decides the draw among the candidates.
    `bm25_negatives_dir`: generations by BM25 that new ones are compared with.
    `judgements`: qrels beside the training split's, by which negatives that are judged relevant are counted, and kept.
    """

    num_neg_docs: PositiveInt = 20
    num_neg_queries: NonNegativeInt = 0
    first_rank: PositiveInt = 1
    last_rank: PositiveInt = 200
    margin: float | None = None
    max_score_ratio: PositiveFloat | None = None
    teacher_scores: str = ""
    max_teacher_score: float | None = None
    max_resemblance: Share | None = None
    index: str = "exact"
    nprobe: PositiveInt | None = None
    ef_search: PositiveInt | None = None
    faiss_device: faiss_index.Device = "cpu"
    seed: Seed = 0
    bm25_negatives_dir: str = ""
    judgements: str = ""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.first_rank > self.last_rank:
            raise InputError(f"ranks {self.first_rank} to {self.last_rank} hold no candidate; give 1 <= first_rank <= last_rank.")
        if bool(self.teacher_scores) != (self.max_teacher_score is not None):
            raise InputError("teacher_scores and max_teacher_score go together; give both or none.")

    @property
    def filters(self) -> Filters:
        """Ranks and scores that may be drawn from."""
        return Filters(self.first_rank, self.last_rank, self.margin, self.max_score_ratio, self.max_teacher_score)

    def check(self) -> None:
        """Raises InputError for an index or a file that mining would refuse only after everything was encoded."""
        self.index_builder()
        if self.bm25_negatives_dir:
            generations.open_newest(self.bm25_negatives_dir)
        if self.judgements:
            beir.read_qrels(self.judgements)
        if self.teacher_scores:
            next(read_lines(teacher_scores.file_of(self.teacher_scores)), None)

    def index_builder(self) -> faiss_index.IndexBuilder:
        """Makes the index of documents; raises InputError for one that cannot be."""
        options = faiss_index.SearchOptions(self.nprobe, self.ef_search, self.faiss_device)
        return faiss_index.index_builder(self.index, options)


class Embedded(NamedTuple):
    """The encoded texts of a search by one checkpoint."""

    step: int  # of the checkpoint
    query_rows: Int[np.ndarray, " q"]  # of the query store: every query of a training pair
    queries: Float[np.ndarray, "q D"]
    docs: Float[np.ndarray, "n D"]  # all documents, or all their passages
    folder: Path | None  # that holds `docs`
    seconds: dict[str, float]


def embed(run: Run, texts: TrainingTexts, *, keep_as: str | None, progress: encode.Progress | None = None) -> Embedded:
    """Encodes all documents and the queries that are trained on.

    Args:
        run: its towers and parameters.
        texts: of the training pairs.
        keep_as: the name that the documents' embeddings are kept under in the run's folder (`encode.cached_docs`), where a process
            that was killed finds what it had; None keeps them in memory alone.
        progress: told of documents encoded.
    """
    clock = _Clock()
    store = texts.passages or texts.doc_store
    folder = encode.cached_docs(run, store, keep_as, progress=progress) if keep_as else None
    docs = open_embeddings(folder)[1] if folder else encode.docs(run, store, progress=progress)
    clock.lap("encode")
    query_rows = np.unique(texts.pairs[:, 0])
    queries = encode.queries(run, texts.query_store, rows=query_rows)
    clock.lap("encode_queries")
    return Embedded(run.step, query_rows, queries, docs, folder, clock.seconds)


def mine(
    embedded: Embedded,
    texts: TrainingTexts,
    miner: Miner,
    *,
    previous: Int[np.ndarray, "P m"] | None = None,
    score: Score | None = None,
) -> tuple[list[Mined], dict[str, Any]]:
    """The hard negatives of every training pair.

    Documents are near a query as in ANCE (Xiong et al. 2021), training queries near a document as in DANCE (Li et al. 2021). All
    documents of a query's training pairs are left out for each of them, as are all queries of a document's; so is, with
    `texts.drop_identical_ids`, the text with the same id.

    Args:
        embedded: see `embed`.
        texts: of the training pairs.
        miner: the settings of mining.
        previous: the document rows of the generation before, for the statistics.
        score: scores the index of documents, for the statistics.

    Returns:
        The negatives, and what a manifest says of them: seconds by stage, candidates, what each filter took, statistics.

    Raises:
        InputError: mined queries for documents of several passages, or a generation or file to compare with that does not fit.
    """
    clock = _Clock(embedded.seconds)
    anchors = np.searchsorted(embedded.query_rows, texts.pairs[:, 0])  # [P] places among the queries
    positives = texts.pairs[:, 1]
    index = _index_of_docs(embedded, texts, miner)
    clock.lap("index")
    known = _known(anchors, positives, len(embedded.query_rows))
    if texts.drop_identical_ids:
        _add_identical(known, [texts.query_store.ids[row] for row in embedded.query_rows.tolist()], texts.doc_store.rows_of)
    depth = max(miner.last_rank + max(map(len, known)), mining_statistics.DEPTH)
    ranking = index.search(embedded.queries, min(texts.doc_store.num_texts, depth))
    clock.lap("search")
    positive_scores = _positive_scores(embedded, texts, anchors)
    teacher = read_teacher(miner.teacher_scores, texts) if miner.teacher_scores else {}
    query_rows = embedded.query_rows.tolist()
    mined = choose(
        ranking,
        anchors,
        positives,
        positive_scores,
        known,
        num_negatives=miner.num_neg_docs,
        seed=miner.seed,
        step=embedded.step,
        filters=miner.filters,
        is_duplicate=near_duplicates_in(texts.doc_store, miner.max_resemblance),
        teacher=lambda anchor, doc: teacher.get((query_rows[anchor], doc)),
    )
    clock.lap("choose")
    facts = {"neg_docs": mined.facts()}
    queries = [np.zeros(0, np.int32)] * len(positives)
    if miner.num_neg_queries:
        dual = _mine_queries(embedded, texts, miner, anchors, positive_scores, teacher, clock)
        queries = [embedded.query_rows[chosen] for chosen in dual.chosen]
        facts["neg_queries"] = dual.facts()
    statistics = mining_statistics.compared(mined.chosen, texts, previous=previous, ranking=ranking, anchors=anchors)
    statistics |= mining_statistics.judged(mined.chosen, texts, miner.judgements) if miner.judgements else {}
    if miner.bm25_negatives_dir:
        statistics |= mining_statistics.overlap_with_bm25(mined.chosen, texts, miner.bm25_negatives_dir)
    if score:
        statistics |= {f"dev/{name}": value for name, value in score(index).items()}
    clock.lap("statistics")
    lines = lines_of(texts.pairs, mined.chosen, queries, texts.query_store.ids, texts.doc_store.ids)
    return lines, {**facts, **dataclasses.asdict(miner), "statistics": statistics, "seconds": clock.seconds}


def mine_bm25(
    dataset: beir.Dataset, miner: Miner, *, drop_identical_ids: bool = True, k1: float = 0.9, b: float = 0.4
) -> tuple[list[Mined], dict[str, Any]]:
    """The hard negatives of every training pair by BM25; for a warm-up, as a baseline, or to compare with.

    Pairs of empty texts, which the data set was read without, are left out.

    Raises:
        InputError: settings that need embeddings.
    """
    used = ("num_neg_docs", "first_rank", "last_rank", "seed")
    others = [field for field in dataclasses.fields(miner) if field.name not in used]
    if wrong := [field.name for field in others if getattr(miner, field.name) != field.default]:
        raise InputError(f"BM25 does not support {', '.join(wrong)}; leave them out, or mine with a run.")
    clock = _Clock()
    judged = [(query, doc) for query, docs in dataset.qrels.items() for doc, grade in docs.items() if grade >= MIN_RELEVANCE]
    row_of_query, row_of_doc = ({text_id: row for row, text_id in enumerate(side.ids)} for side in (dataset.queries, dataset.docs))
    pairs = np.array(
        [(row_of_query[query], row_of_doc[doc]) for query, doc in judged if query in row_of_query and doc in row_of_doc]
    )
    if not len(pairs):
        raise InputError("no document is judged relevant, so there is nothing to mine for; give the qrels of a training split.")
    input_policy.tell_unused(len(judged) - len(pairs))
    query_rows, anchors = np.unique(pairs[:, 0], return_inverse=True)
    index = BM25Index(dataset.docs.texts, dataset.docs.ids, k1=k1, b=b)
    clock.lap("index")
    known = _known(anchors, pairs[:, 1], len(query_rows))
    if drop_identical_ids:
        _add_identical(
            known, [dataset.queries.ids[row] for row in query_rows], lambda ids: [row_of_doc.get(one, -1) for one in ids]
        )
    depth = min(len(dataset.docs.ids), miner.last_rank + max(map(len, known)))
    ranking = index.search([dataset.queries.texts[row] for row in query_rows], depth)
    clock.lap("search")
    mined = choose(
        ranking,
        anchors,
        pairs[:, 1],
        np.zeros(len(pairs), np.float32),
        known,
        num_negatives=miner.num_neg_docs,
        seed=miner.seed,
        step=0,  # BM25 has no checkpoints
        filters=miner.filters,
    )
    clock.lap("choose")
    lines = lines_of(pairs, mined.chosen, [np.zeros(0, np.int32)] * len(pairs), dataset.queries.ids, dataset.docs.ids)
    facts = {name: getattr(miner, name) for name in used}
    return lines, {**facts, "neg_docs": mined.facts(), "k1": k1, "b": b, "seconds": clock.seconds}


def lines_of(
    pairs: Int[np.ndarray, "P 2"],
    docs: Sequence[np.ndarray],
    queries: Sequence[np.ndarray],
    query_ids: Sequence[str],
    doc_ids: Sequence[str],
) -> list[Mined]:
    """A generation's negatives of each pair; all are rows of the ids, one array a pair."""
    return [
        Mined(query_ids[query], doc_ids[doc], [doc_ids[row] for row in found], [query_ids[row] for row in asked])
        for (query, doc), found, asked in zip(
            pairs.tolist(), map(np.ndarray.tolist, docs), map(np.ndarray.tolist, queries), strict=True
        )
    ]


def _index_of_docs(embedded: Embedded, texts: TrainingTexts, miner: Miner) -> Index:
    build = miner.index_builder()
    if texts.passages is None:
        return build(embedded.docs, texts.doc_store.ids, embedded.folder)
    return MaxPIndex(build(embedded.docs, texts.passages.ids, embedded.folder), texts.passages.doc_rows)


def _positive_scores(embedded: Embedded, texts: TrainingTexts, anchors: Int[np.ndarray, " P"]) -> Float[np.ndarray, " P"]:
    """Of each training pair; of several passages the best one's."""
    scores = np.empty(len(anchors), np.float32)
    first, last = texts.pairs[:, 1], texts.pairs[:, 1] + 1
    if texts.passages is not None:
        first, last = (np.searchsorted(texts.passages.doc_rows, texts.pairs[:, 1], side) for side in ("left", "right"))
    for pair, (anchor, begin, end) in enumerate(zip(anchors.tolist(), first.tolist(), last.tolist(), strict=True)):
        scores[pair] = np.max(embedded.docs[begin:end] @ embedded.queries[anchor])
    return scores


def _mine_queries(
    embedded: Embedded,
    texts: TrainingTexts,
    miner: Miner,
    anchors: Int[np.ndarray, " P"],
    positive_scores: Float[np.ndarray, " P"],
    teacher: dict[tuple[int, int], float],
    clock: _Clock,
) -> Mining:
    """The dual task: queries near each document that has one; `chosen` are places among the embedded queries."""
    if texts.passages is not None:
        raise InputError("mined queries are for documents of one passage; set max_passages to 1, or num_neg_queries to 0.")
    docs, doc_of_pair = np.unique(texts.pairs[:, 1], return_inverse=True)
    known = _known(doc_of_pair, anchors, len(docs))
    if texts.drop_identical_ids:
        place = {texts.query_store.ids[row]: place for place, row in enumerate(embedded.query_rows.tolist())}
        _add_identical(known, [texts.doc_store.ids[row] for row in docs.tolist()], lambda ids: [place.get(one, -1) for one in ids])
    query_rows, doc_rows = embedded.query_rows.tolist(), docs.tolist()
    near = near_duplicates_in(texts.query_store, miner.max_resemblance)
    index = ExactIndex(embedded.queries, [texts.query_store.ids[row] for row in query_rows])
    depth = min(miner.last_rank + max(map(len, known)), len(query_rows))
    ranking = index.search(np.ascontiguousarray(embedded.docs[docs]), depth)
    clock.lap("search")
    mined = choose(
        ranking,
        doc_of_pair,
        anchors,
        positive_scores,
        known,
        num_negatives=miner.num_neg_queries,
        seed=miner.seed,
        step=embedded.step,
        filters=miner.filters,
        is_duplicate=near and (lambda own, other: near(query_rows[own], query_rows[other])),
        teacher=lambda doc, query: teacher.get((query_rows[query], doc_rows[doc])),
    )
    clock.lap("choose")
    return mined


def _known(anchors: Int[np.ndarray, " P"], positives: Int[np.ndarray, " P"], num_anchors: int) -> list[set[int]]:
    """The positives of each anchor."""
    known: list[set[int]] = [set() for _ in range(num_anchors)]
    for anchor, positive in zip(anchors.tolist(), positives.tolist(), strict=True):
        known[anchor].add(positive)
    return known


def _add_identical(known: list[set[int]], anchor_ids: Sequence[str], rows_of: Callable[[Sequence[str]], Iterable[int]]) -> None:
    """Adds to what each anchor must not draw the candidate that has the anchor's id, where there is one."""
    for own, row in zip(known, rows_of(anchor_ids), strict=True):
        if row >= 0:
            own.add(int(row))


class _Clock:
    """Seconds of the stages of a mining, after those `before`; a stage that comes twice counts both."""

    def __init__(self, before: dict[str, float] | None = None) -> None:
        self.seconds = dict(before or {})
        self._last = time.perf_counter()

    def lap(self, stage: str) -> None:
        now = time.perf_counter()
        self.seconds[stage], self._last = round(self.seconds.get(stage, 0.0) + now - self._last, 3), now
