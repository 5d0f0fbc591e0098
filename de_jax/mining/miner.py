"""Hard negatives of training pairs: what ranks high by a run's embeddings, or by BM25, and is not known to be relevant."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from de_jax.data.batches import teacher_scores
from de_jax.data.batches.pair_batches import TrainingPairs
from de_jax.data.negatives import mined_pairs
from de_jax.data.stores.corpus import TokenStore
from de_jax.data.text import beir, input_policy
from de_jax.data.text.near_duplicates import Resemblances
from de_jax.files.outputs import progress_bar
from de_jax.files.reading import read_lines
from de_jax.mining.choose import SEEN_DEPTH, Filters, IsDuplicate, Mining, TeacherScore, choose, moved
from de_jax.retrieval import corpus_embeddings, encode, faiss_index
from de_jax.retrieval.bm25 import BM25Index
from de_jax.retrieval.embedding_files import KEEPS, open_embeddings
from de_jax.retrieval.index import ExactIndex, Index, MaxPIndex
from de_jax.retrieval.index_settings import IndexSettings
from de_jax.retrieval.parts import Part
from de_jax.settings import LocalPath, NonNegativeInt, PositiveFloat, PositiveInt, Seed, Share, check_fields
from de_jax.training.run.run_folder import Run
from de_jax.types import PADDING_ID, InputError, Ranking

MIN_RELEVANCE = 1
"""The grade from which a judged document is a positive."""

Score = Callable[[Index], dict[str, float]]
"""How well an index of all documents ranks, such as nDCG@10 on dev queries; by name."""


@dataclasses.dataclass(frozen=True)
class Miner(IndexSettings):
    """Settings of mining: those of ANCE (Xiong et al. 2021), except for the number of negatives kept.

    Attributes:
        num_neg_docs: most negatives per training pair.
        num_neg_queries: most negative queries per pair, for DANCE's dual task (Li et al. 2021).
        first_rank: best rank to draw from, known positives not counted.
        last_rank: worst rank to draw from.
        margin: a negative scores at most its positive's score minus this.
        max_score_ratio: a negative scores at most this share of its positive's score.
        teacher_scores: another model's scores: query id, document id, score, tab-separated; see `teacher_scores.read`.
        max_teacher_score: the highest teacher score that a negative may have.
        max_resemblance: texts that share more of their three-token sequences with the positive (Jaccard, 0 to 1) are no negatives.
        seed: with the checkpoint's step and the pair, decides the draw among the candidates; by default the run's.
    """

    num_neg_docs: PositiveInt = 20
    num_neg_queries: NonNegativeInt = 0
    first_rank: PositiveInt = 1
    last_rank: PositiveInt = 200
    margin: float | None = None
    max_score_ratio: PositiveFloat | None = None
    teacher_scores: LocalPath = ""
    max_teacher_score: float | None = None
    max_resemblance: Share | None = None
    seed: Seed | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.first_rank > self.last_rank:
            raise InputError(f"ranks {self.first_rank} to {self.last_rank} hold no candidate; give 1 <= first_rank <= last_rank.")
        if bool(self.teacher_scores) != (self.max_teacher_score is not None):
            raise InputError("teacher_scores and max_teacher_score go together; give both or none.")

    def draws(self, step: int) -> dict[str, Any]:
        """The options of `choose` that documents and queries share: the filters, and the seed and the step of the draw."""
        filters = Filters(self.first_rank, self.last_rank, self.margin, self.max_score_ratio, self.max_teacher_score)
        return {"filters": filters, "seed": self.seed or 0, "step": step}

    def check(self) -> None:
        """Raises InputError for an index or a file that mining would refuse only after everything was encoded."""
        faiss_index.index_builder(self)
        if self.faiss_device != "cpu" and not self.faiss_on_disk and self.last_rank > faiss_index.GPU_DEPTH:
            raise InputError(
                f"Miner.last_rank is {self.last_rank}, and FAISS on a GPU finds at most {faiss_index.GPU_DEPTH}; lower it, or set "
                "Miner.faiss_device to 'cpu'."
            )
        if self.teacher_scores:
            next(read_lines(teacher_scores.file_of(self.teacher_scores)), None)


class Embedded(NamedTuple):
    """The encoded texts of a search by one checkpoint."""

    step: int  # of the checkpoint
    query_rows: Int[np.ndarray, " q"]  # of the query store: every query of a training pair, equal texts once
    queries: Float[np.ndarray, "q D"]
    docs: Float[np.ndarray, "n D"]  # all documents, or all their passages
    folder: Path | None  # that holds `docs`
    seconds: dict[str, float]


def embed(
    run: Run, texts: TrainingPairs, *, keep_as: str | None, texts_per_shard: int = corpus_embeddings.TEXTS_PER_SHARD
) -> Embedded:
    """Encodes all documents and the queries that are trained on, with a bar.

    The documents' embeddings are kept in the run's folder under the name `keep_as`, see `corpus_embeddings`, so that the same call
    continues after a kill. None keeps them only in memory.
    """
    clock = _Clock()
    if keep_as:
        folder = encode_docs(run, texts, keep_as, texts_per_shard=texts_per_shard)
        docs = open_embeddings(folder)[1]
    else:
        folder, docs = None, encode.docs(run, texts.passages or texts.doc_store)
    clock.lap("encode")
    query_rows = np.unique(texts.by_text[:, 0])
    queries = encode.queries(run, texts.query_store, rows=query_rows)
    clock.lap("encode_queries")
    return Embedded(run.step, query_rows, queries, docs, folder, clock.seconds)


def encode_docs(run: Run, texts: TrainingPairs, keep_as: str, *, texts_per_shard: int, part: Part | None = None) -> Path:
    """`corpus_embeddings.cached_docs` of all documents, or of a part, which the call without one joins; with a bar."""
    store = texts.passages or texts.doc_store
    with progress_bar(total=store.num_texts, desc=KEEPS, unit=" docs", delay=0.5, leave=False) as bar:
        return corpus_embeddings.cached_docs(run, store, keep_as, part=part, texts_per_shard=texts_per_shard, progress=bar.update)


def mine(
    embedded: Embedded,
    texts: TrainingPairs,
    miner: Miner,
    *,
    previous: Int[np.ndarray, "P m"] | None = None,
    score: Score | None = None,
) -> tuple[mined_pairs.MinedPairs, dict[str, Any]]:
    """The hard negatives of every training pair.

    Negative documents are near the query, as in ANCE (Xiong et al. 2021). Negative queries are training queries near the document,
    as in DANCE (Li et al. 2021). A query's negatives exclude the documents of all its training pairs, and a document's negatives
    exclude the queries of all its training pairs. With `texts.drop_identical_ids`, they also exclude the text with the same id.
    Copies of a text under other ids are the same text.

    Returns:
        The negatives, and facts for the manifest: seconds by stage, candidates, refusals by filter, statistics.
    """
    clock = _Clock(embedded.seconds)
    positives, first = texts.by_text[:, 1], texts.first_docs
    anchors = np.searchsorted(embedded.query_rows, texts.by_text[:, 0])
    of_ids = texts.doc_store.rows_of(texts.query_store.encoded_ids[texts.pairs[:, 0]]) if texts.drop_identical_ids else None
    known = _known(anchors, positives, of_ids, first)
    build, store = faiss_index.index_builder(miner), texts.passages or texts.doc_store
    index = build(embedded.docs, store.ids, embedded.folder)  # a FAISS index is kept beside the embeddings
    index = MaxPIndex(index, texts.passages.doc_rows) if texts.passages else index
    clock.lap("index")
    depth = max(miner.last_rank + _most(known, first), SEEN_DEPTH)
    ranking = _once(index.search(embedded.queries, min(texts.doc_store.num_texts, depth)), first)
    clock.lap("search")
    positive_scores = _positive_scores(embedded, texts, anchors)
    teacher = teacher_scores.by_rows(miner.teacher_scores, texts) if miner.teacher_scores else None
    draws = miner.draws(embedded.step) | {
        "is_duplicate": _is_duplicate(texts.doc_store, miner),
        "teacher": teacher and (lambda own, docs: teacher(embedded.query_rows[own], docs)),
    }
    mined = choose(ranking, anchors, positives, positive_scores, known, num_negatives=miner.num_neg_docs, **draws)
    clock.lap("choose")
    facts = {"neg_docs": mined.facts()}
    queries = np.zeros((len(positives), 0), np.int32)
    if miner.num_neg_queries:
        dual = _mine_queries(embedded, texts, miner, anchors, positive_scores, teacher, clock)
        queries = np.append(embedded.query_rows, PADDING_ID)[dual.chosen]  # `PADDING_ID` is the last place
        facts["neg_queries"] = dual.facts()
    statistics = {} if previous is None else moved(mined.chosen, previous, ranking, anchors)
    if score:
        statistics |= {f"dev/{name}": value for name, value in score(index).items()}
    clock.lap("statistics")
    scores = np.concatenate([positive_scores[:, None], mined.scores], axis=1)
    ids = {"query_ids": texts.query_store.encoded_ids, "doc_ids": texts.doc_store.encoded_ids}
    pairs = mined_pairs.of_rows(texts.pairs, mined.chosen, queries, scores, **ids)
    of_miner = dataclasses.asdict(miner) | {"seed": miner.seed or 0}
    return pairs, {**facts, **of_miner, "statistics": statistics, "seconds": clock.seconds}


def mine_bm25(
    dataset: beir.Dataset, miner: Miner, *, drop_identical_ids: bool = True, language: str = "en"
) -> tuple[mined_pairs.MinedPairs, dict[str, Any]]:
    """The hard negatives of every training pair by BM25; for a warm-up, as a baseline, or to compare with.

    Pairs of empty texts, which the data set was read without, are left out.
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
    first_query, first = _first_rows(dataset.queries.texts), _first_rows(dataset.docs.texts)
    query_rows, anchors = np.unique(first_query[pairs[:, 0]], return_inverse=True)
    positives = first[pairs[:, 1]]
    index = BM25Index(dataset.docs.texts, dataset.docs.ids, language=language)
    clock.lap("index")
    of_ids = np.array([row_of_doc.get(dataset.queries.ids[row], -1) for row in pairs[:, 0]]) if drop_identical_ids else None
    known = _known(anchors, positives, of_ids, first)
    depth = min(len(dataset.docs.ids), miner.last_rank + _most(known, first))
    ranking = _once(index.search([dataset.queries.texts[row] for row in query_rows], depth), first)
    clock.lap("search")
    draws = miner.draws(step=0)  # BM25 has no checkpoints
    mined = choose(ranking, anchors, positives, np.zeros(len(pairs), np.float32), known, num_negatives=miner.num_neg_docs, **draws)
    clock.lap("choose")
    if (mined.chosen < 0).all():
        raise InputError("BM25 finds no negative for any query: no document that is not relevant has a word of one.")
    scores = np.pad(mined.scores, ((0, 0), (1, 0)), constant_values=np.nan)  # those of positives are not known
    ids = {"query_ids": mined_pairs.encoded(dataset.queries.ids), "doc_ids": mined_pairs.encoded(dataset.docs.ids)}
    found = mined_pairs.of_rows(pairs, mined.chosen, np.zeros((len(pairs), 0), np.int32), scores, **ids)
    facts = {name: getattr(miner, name) for name in used}
    return found, {**facts, "neg_docs": mined.facts(), "bm25_language": language, "seconds": clock.seconds}


def _positive_scores(embedded: Embedded, texts: TrainingPairs, anchors: Int[np.ndarray, " P"]) -> Float[np.ndarray, " P"]:
    """The score of each training pair; for a document of several passages, its best passage's."""
    scores = np.empty(len(anchors), np.float32)
    first, last = texts.pairs[:, 1], texts.pairs[:, 1] + 1
    if texts.passages is not None:
        first, last = (np.searchsorted(texts.passages.doc_rows, texts.pairs[:, 1], side) for side in ("left", "right"))
    for pair, (anchor, begin, end) in enumerate(zip(anchors.tolist(), first.tolist(), last.tolist(), strict=True)):
        scores[pair] = np.max(embedded.docs[begin:end] @ embedded.queries[anchor])
    return scores


def _mine_queries(
    embedded: Embedded,
    texts: TrainingPairs,
    miner: Miner,
    anchors: Int[np.ndarray, " P"],
    positive_scores: Float[np.ndarray, " P"],
    teacher: TeacherScore | None,
    clock: _Clock,
) -> Mining:
    """The dual task: queries near each document of a training pair; `chosen` are places among the embedded queries."""
    if texts.passages is not None:
        raise InputError("mined queries are for documents of one passage; set max_passages to 1, or num_neg_queries to 0.")
    docs, doc_of_pair = np.unique(texts.by_text[:, 1], return_inverse=True)
    query_rows, of_ids = embedded.query_rows, None
    if texts.drop_identical_ids:
        same = texts.query_store.rows_of(texts.doc_store.encoded_ids[texts.pairs[:, 1]])
        same = texts.first("query", same)
        place = np.minimum(np.searchsorted(query_rows, same), len(query_rows) - 1)
        of_ids = np.where(query_rows[place] == same, place, -1)
    known = _known(doc_of_pair, anchors, of_ids)
    near = _is_duplicate(texts.query_store, miner)
    index = ExactIndex(embedded.queries, [texts.query_store.ids[row] for row in query_rows.tolist()])
    depth = min(miner.last_rank + _most(known), len(query_rows))
    ranking = index.search(np.ascontiguousarray(embedded.docs[docs]), depth)
    clock.lap("search")
    draws = miner.draws(embedded.step) | {
        "is_duplicate": near and (lambda own, others: near(query_rows[own], query_rows[others])),
        "teacher": teacher and (lambda own, queries: teacher(query_rows[queries], docs[own])),
    }
    mined = choose(ranking, doc_of_pair, anchors, positive_scores, known, num_negatives=miner.num_neg_queries, **draws)
    clock.lap("choose")
    return mined


def _known(
    anchors: Int[np.ndarray, " P"],
    positives: Int[np.ndarray, " P"],
    of_ids: Int[np.ndarray, " P"] | None,
    first: np.ndarray | None = None,
) -> Int[np.ndarray, "known 2"]:
    """(anchor, candidate) of each pair, and each anchor with the candidate that has its own id, if any; -1 is skipped."""
    if of_ids is None:
        return np.unique(np.stack([anchors, positives], axis=1), axis=0)
    same = np.stack([anchors, of_ids if first is None else first[of_ids]], axis=1)
    return np.unique(np.concatenate([np.stack([anchors, positives], axis=1), same[same[:, 1] >= 0]]), axis=0)


def _most(known: Int[np.ndarray, "known 2"], first: np.ndarray | None = None) -> int:
    """The largest number of known candidates of an anchor, copies included."""
    copies = None if first is None else np.bincount(first[:-1])[known[:, 1]]
    return int(np.bincount(known[:, 0], copies).max())


def _first_rows(texts: Sequence[str]) -> Int[np.ndarray, " n_and_1"]:
    """As `corpus.first_rows`, of texts without tokens."""
    firsts: dict[str, int] = {}
    return np.array([*(firsts.setdefault(text, row) for row, text in enumerate(texts)), PADDING_ID])


def _once(ranking: Ranking, first: np.ndarray | None) -> Ranking:
    """A ranking by first rows, each text at its best rank; other places of its copies hold -1."""
    if first is None:
        return ranking
    rows = first[ranking.doc_rows].astype(np.int32)
    has_copy = np.flatnonzero((rows != ranking.doc_rows).any(axis=1))
    own = rows[has_copy]
    order = np.argsort(own, axis=1, kind="stable")
    in_order = np.take_along_axis(own, order, axis=1)
    in_order[:, 1:][in_order[:, 1:] == in_order[:, :-1]] = -1
    np.put_along_axis(own, order, in_order, axis=1)
    rows[has_copy] = own
    return Ranking(rows, ranking.scores)


def _is_duplicate(store: TokenStore, miner: Miner) -> IsDuplicate | None:
    """Whether two texts of a store share too many of their three-token sequences."""
    if miner.max_resemblance is None:
        return None
    return Resemblances(store.tokens, store.offsets, max_resemblance=miner.max_resemblance).exceed


class _Clock:
    """Seconds of the stages of a mining, after those `before`; a stage that comes twice counts both."""

    def __init__(self, before: dict[str, float] | None = None) -> None:
        self.seconds = dict(before or {})
        self._last = time.perf_counter()

    def lap(self, stage: str) -> None:
        now = time.perf_counter()
        self.seconds[stage], self._last = round(self.seconds.get(stage, 0.0) + now - self._last, 3), now
