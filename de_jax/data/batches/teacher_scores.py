"""What another model says of the texts in a batch: a teacher's scores, or a guide's embeddings.

A teacher's scores come from an array beside the pairs, or from a file of scored ids. By a guide's embeddings a loss finds false
negatives, see `losses.guided`:

<guide_dir>/
    queries/, docs/    embeddings.npy float32 [n, G] and ids.json, as encode corpus writes them
    manifest.json      the guide and the texts it embedded; written last
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jaxtyping import Float32, Float64, Int

from de_jax.data.stores.corpus import KINDS, TokenStore
from de_jax.data.text import input_policy, trec_columns
from de_jax.files import reading
from de_jax.files.folders import Kind
from de_jax.settings import Count, PositiveInt, Record, list_of
from de_jax.types import Guide, InputError

if TYPE_CHECKING:
    from de_jax.data.batches.pair_batches import TrainingPairs

TEACHER_SCORES = Kind(
    "teacher scores",
    Record({"teacher": str, "texts": str, "num_scores": Count}),
    make="run de-jax score pairs on it until it ends",
    mend="delete the folder and score the pairs again",
)
SCORES_FILE = "scores.tsv"

ScoresOf = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""(rows of the pairs [B], rows of documents [B, K], `PADDING_ID` for missing ones) -> float32 [B, K], NaN without a score."""


def of_array(
    scores: Float32[np.ndarray, "rows K"], pairs: Int[np.ndarray, "P 2"], neg_docs: Int[np.ndarray, "P mined"] | None
) -> ScoresOf:
    """Scores that come with the pairs: the first column is of a pair's document, the others of its negatives in their order."""
    num_scored = scores.shape[1] if neg_docs is None else 1 + neg_docs.shape[1]
    if scores.shape != (len(pairs), num_scored):
        raise InputError(
            f"the teacher's scores have {len(scores)} rows of {scores.shape[1]}, but there are {len(pairs)} pairs of {num_scored} "
            "documents, negatives included; write the folder of pairs again."
        )

    def find(chosen: np.ndarray, docs: np.ndarray) -> np.ndarray:
        scored = pairs[chosen, 1:] if neg_docs is None else np.concatenate([pairs[chosen, 1:], neg_docs[chosen]], axis=1)
        is_same = docs[:, :, None] == scored[:, None, :]  # [B, K, 1 + mined]
        found = np.take_along_axis(np.asarray(scores[chosen]), is_same.argmax(axis=2), axis=1)
        return np.where(is_same.any(axis=2) & (docs >= 0), found, np.nan).astype(np.float32)

    return find


def of_file(path: str | Path, texts: TrainingPairs) -> ScoresOf:
    """Scores of the texts that have the ids, whatever the negatives are; see `by_rows`."""
    score_of, pairs = by_rows(path, texts), texts.pairs

    def find(chosen: np.ndarray, docs: np.ndarray) -> np.ndarray:
        return score_of(pairs[chosen, :1], docs).astype(np.float32)

    if np.isnan(find(np.arange(len(pairs)), pairs[:, 1:])).all():
        raise InputError(f"{path} contains no score of a training pair; score this data set and split with de-jax score pairs.")
    return find


def by_rows(path: str | Path, texts: TrainingPairs) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """The scores of a file by rows of queries and of documents: float64, NaN for none, the last of several; see `read`.

    Equal texts have the same score, whichever of their ids the file names.
    """
    query_rows, doc_rows, scores = read(path, *texts.stores)

    def keys_of(queries: np.ndarray, docs: np.ndarray) -> np.ndarray:
        return texts.first("query", queries).astype(np.int64) * texts.doc_store.num_texts + texts.first("doc", docs)

    keys = keys_of(query_rows, doc_rows)
    order = np.argsort(keys, kind="stable")
    keys, scores = np.append(keys[order], -1), np.append(scores[order], np.nan)  # of no text, at the end

    def find(queries: np.ndarray, docs: np.ndarray) -> np.ndarray:
        wanted = np.where(docs >= 0, keys_of(queries, docs), -2)
        places = np.searchsorted(keys[:-1], wanted, side="right") - 1  # of a text before all: the end
        return np.where(keys[places] == wanted, scores[places], np.nan)

    return find


def read(
    path: str | Path, query_store: TokenStore, doc_store: TokenStore
) -> tuple[Int[np.ndarray, " s"], Int[np.ndarray, " s"], Float64[np.ndarray, " s"]]:
    """The rows of queries, the rows of documents and the scores in a file by another model, such as a cross-encoder.

    `path` is a folder by `de-jax score pairs`, or a file of tab-separated lines of query id, document id and score, plain or .gz; a
    line with unknown texts is skipped.
    """
    path = file_of(path)
    query_ids, doc_ids, scores = [], [], []
    for number, raw in reading.read_lines(path):
        columns = raw.split("\t")
        if len(columns) != 3:
            raise InputError(f"{path}, line {number}: expected a query id, a document id and a score, tab-separated.")
        try:
            scores.append(trec_columns.parse_score(columns[2].strip()))
        except ValueError as error:
            raise InputError(f"{path}, line {number}: {error}.") from None
        query_ids.append(columns[0])
        doc_ids.append(columns[1])
    queries, docs = query_store.rows_of(query_ids), doc_store.rows_of(doc_ids)
    is_known = (queries >= 0) & (docs >= 0)
    return queries[is_known], docs[is_known], np.asarray(scores, np.float64)[is_known]


def file_of(path: str | Path) -> Path:
    """The file itself, or that of a complete folder; raises InputError for another folder."""
    path = Path(path)
    if not path.is_dir():
        return path
    TEACHER_SCORES.open(path)
    return path / SCORES_FILE


GUIDE = Kind(
    "guide",
    Record({"guide": str, "dim": PositiveInt, "texts": Record(dict.fromkeys(KINDS, str))}),
    make="run de-jax encode guide on it until it ends",
    mend="delete the folder and encode again",
)
_KIND_OF = {"query": "queries", "doc": "docs", "neg_docs": "docs", "neg_queries": "queries"}

GuideOf = Callable[[Mapping[str, np.ndarray]], Guide]
"""Rows of texts [B] or [B, N] by the names of `Batch`, `PADDING_ID` for a missing text, to a guide's embeddings of them."""


class _Embeddings(NamedTuple):
    """Of the texts of one store."""

    vectors: np.ndarray  # float32 [n, G], memory-mapped
    places: np.ndarray  # int64: where each text of the store stands among them

    def of(self, rows: Int[np.ndarray, " *t"]) -> Float32[np.ndarray, "*t G"]:
        """Scaled to length 1; zeros for a negative row."""
        found = np.asarray(self.vectors[self.places[np.maximum(rows, 0)]])
        lengths = np.linalg.norm(found, axis=-1, keepdims=True)
        return np.where(rows[..., None] < 0, np.float32(0.0), found / np.maximum(lengths, np.float32(1e-12)))


def open_guide(guide_dir: str | Path, query_store: TokenStore, doc_store: TokenStore, hashes: Mapping[str, str]) -> GuideOf:
    """The embeddings of a guide for the texts of two stores."""
    folder = Path(guide_dir)
    manifest = GUIDE.open(folder)
    sides = {}
    for kind, store in zip(KINDS, (doc_store, query_store), strict=True):
        if manifest["texts"][kind] not in (hashes.get(kind), store.content_hash):
            raise InputError(
                f"{folder} was made of other {kind} than the training pairs; run de-jax encode guide on their data set, or on "
                "their folder of pairs."
            )
        sides[kind] = _opened(folder / kind, kind, store, manifest["dim"])

    def find(rows: Mapping[str, np.ndarray]) -> Guide:
        return Guide(**{name: sides[_KIND_OF[name]].of(own) for name, own in rows.items()})

    return find


def _opened(folder: Path, kind: str, store: TokenStore, dim: int) -> _Embeddings:
    ids = reading.read_json(folder / "ids.json", list_of(str), mend=GUIDE.mend, max_bytes=None)
    vectors = reading.read_array(folder / "embeddings.npy", "<f4", (len(ids), dim), rebuild=GUIDE.mend)
    rows = store.rows_of(ids)
    places = np.full(store.num_texts, -1)
    places[rows[rows >= 0]] = np.flatnonzero(rows >= 0)
    if (places < 0).any():
        missing = [store.ids[row] for row in np.flatnonzero(places < 0).tolist()]
        raise InputError(f"{folder} lacks {len(missing)} {kind} ({input_policy.examples(missing)}); {GUIDE.mend}.")
    return _Embeddings(vectors, places)
