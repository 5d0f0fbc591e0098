"""A teacher's scores of the texts in a batch: from an array beside the pairs, or from a file of scored ids."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float32, Float64, Int

from de_jax.data.stores.corpus import TokenStore
from de_jax.data.text import trec_columns
from de_jax.files.folders import Kind
from de_jax.files.reading import read_lines
from de_jax.settings import Count, Record
from de_jax.types import InputError

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

    Args:
        path: a folder by `de-jax score pairs`, or a file of tab-separated lines of query id, document id and score, plain or .gz; a
            line with unknown texts is skipped.
    """
    path = file_of(path)
    query_ids, doc_ids, scores = [], [], []
    for number, raw in read_lines(path):
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
