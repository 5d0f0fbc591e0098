"""What there is to say of a generation of negatives beside itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from jaxtyping import Int, Int32

from de_jax.data.batches.pair_batches import TrainingPairs
from de_jax.data.negatives import generations
from de_jax.data.negatives.generations import rows_of_pairs
from de_jax.data.text import beir
from de_jax.types import PADDING_ID, Ranking

DEPTH = 100
"""The depth of a ranking that a searcher sees, as in ANCE's analysis (Xiong et al. 2021)."""
_PAIRS = 4096
"""Compared at a time."""


def compared(
    chosen: Int32[np.ndarray, "P N"],
    texts: TrainingPairs,
    *,
    previous: Int[np.ndarray, "P m"] | None,
    ranking: Ranking,
    anchors: Int[np.ndarray, " P"],
) -> dict[str, float]:
    """How far negatives moved since the previous generation.

    Args:
        chosen: the document rows of each training pair; `PADDING_ID` fills up.
        texts: of the pairs.
        previous: the document rows of the previous generation; None gives no statistics.
        ranking: [q, >= 100] by the model that mined the new negatives.
        anchors: [P] each pair's row of the ranking.

    Returns:
        "overlap_previous": the share of new negatives that the previous generation has too; "previous_in_top_100": the share of
        previous negatives among the first 100 documents of the current model.
    """
    if previous is None:
        return {}
    return {
        "overlap_previous": _share_found(chosen, previous),
        "previous_in_top_100": _share_found(previous, ranking.doc_rows[:, :DEPTH], anchors),
    }


def overlap_with_bm25(chosen: Int32[np.ndarray, "P N"], texts: TrainingPairs, negatives_dir: str | Path) -> dict[str, float]:
    """ "overlap_bm25": the share of negatives that BM25's newest generation has for the same pair."""
    by_bm25 = rows_of_pairs(generations.open_newest(negatives_dir), texts)["neg_docs"]
    return {"overlap_bm25": _share_found(chosen, by_bm25)}


def judged(chosen: Int32[np.ndarray, "P N"], texts: TrainingPairs, path: str | Path) -> dict[str, float]:
    """ "false_negative_rate": of the negatives that `path` (qrels) judges, the share that is relevant; and "num_judged" of them."""
    query_ids, doc_ids = texts.query_store.ids, texts.doc_store.ids
    qrels = beir.read_qrels(path)
    grades = []
    for query, docs in zip(texts.pairs[:, 0].tolist(), chosen.tolist(), strict=True):
        known = qrels.get(query_ids[query], {})
        grades += [known[doc_ids[doc]] for doc in docs if doc != PADDING_ID and doc_ids[doc] in known]
    rate = float(np.mean(np.array(grades) > 0)) if grades else 0.0
    return {"false_negative_rate": rate, "num_judged": float(len(grades))}


def _share_found(
    wanted: Int[np.ndarray, "P m"], among: Int[np.ndarray, "a k"], row_of: Int[np.ndarray, " P"] | None = None
) -> float:
    """The share of the real entries of `wanted` that stand in their row of `among`."""
    row_of = np.arange(len(wanted)) if row_of is None else row_of
    num_found = num_real = 0
    for start in range(0, len(wanted), _PAIRS):
        rows = slice(start, start + _PAIRS)
        is_real = wanted[rows] != PADDING_ID
        is_there = (wanted[rows, :, None] == among[row_of[rows]][:, None, :]).any(axis=2)
        num_found += int(np.count_nonzero(is_there & is_real))
        num_real += int(np.count_nonzero(is_real))
    return num_found / max(num_real, 1)
