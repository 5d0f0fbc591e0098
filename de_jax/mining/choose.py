"""Which candidates near an anchor become its negatives.

One function serves both directions: an anchor is a query and its candidates are documents, or, for the dual task, an anchor is a
document and its candidates are queries.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from de_jax.types import PADDING_ID, Ranking

IsDuplicate = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Whether candidates say nearly the same as positives: rows [c] and rows [c] to bool [c]."""
TeacherScore = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""What another model thinks of candidates for anchors: rows [c] and rows [c] to float [c]; NaN where it was not asked."""

SEEN_DEPTH = 100
"""The depth of a ranking that a searcher sees, as in ANCE's analysis (Xiong et al. 2021)."""
_PAIRS = 1024
"""Whose candidates are looked at together."""


class Filters(NamedTuple):
    """Which candidates may be negatives, besides not being known positives.

    ANCE (Xiong et al. 2021) takes the first 200. The others guard against unjudged relevant documents.
    """

    first_rank: int = 1  # of the candidates left once the known positives are removed
    last_rank: int = 200
    margin: float | None = None  # a negative scores at most its positive's score minus this
    max_score_ratio: float | None = None  # a negative scores at most this share of its positive's score
    max_teacher_score: float | None = None  # for negatives with a teacher's score; others pass


ALL_IN_DEPTH = Filters()


class Mining(NamedTuple):
    """The negatives of each pair, and the number of refused candidates by filter."""

    chosen: np.ndarray  # int32 [P, m] rows, in the order drawn; `PADDING_ID` after fewer
    scores: np.ndarray  # float32 [P, m], of the ranking; NaN for `PADDING_ID`
    num_candidates: int  # within the ranks, known positives removed
    num_known: int  # known positives met in the rankings
    num_filtered: dict[str, int]  # by filter
    mean_rank: float  # of the chosen, counted without known positives; nan without any

    def facts(self) -> dict[str, Any]:
        """For a manifest."""
        num_chosen = int(np.count_nonzero(self.chosen != PADDING_ID))
        share = sum(self.num_filtered.values()) / max(self.num_candidates, 1)
        facts = {"num_chosen": num_chosen, "mean_rank": self.mean_rank if num_chosen else None, "share_filtered": share}
        return facts | {name: getattr(self, name) for name in ("num_candidates", "num_known", "num_filtered")}


def choose(
    ranking: Ranking,
    pair_anchors: Int[np.ndarray, " P"],
    pair_positives: Int[np.ndarray, " P"],
    positive_scores: Float[np.ndarray, " P"],
    known: Int[np.ndarray, "known 2"],
    *,
    num_negatives: int,
    seed: int,
    step: int,
    filters: Filters = ALL_IN_DEPTH,
    is_duplicate: IsDuplicate | None = None,
    teacher: TeacherScore | None = None,
) -> Mining:
    """Draws each pair's negatives, uniformly among the candidates that pass the filters.

    Args:
        ranking: [a, r] the candidates near each anchor; deep enough that `last_rank` are left without the positives.
        pair_anchors: the row of the ranking that each training pair asks for.
        positive_scores: of each pair, on the ranking's scale.
        known: (row of the ranking, candidate), each once: all positives, of every split that must not be trained against.
        seed: with the step and a pair's place, decides the draw.
        step: the checkpoint whose ranking this is. Each refresh draws other ranks, as ANCE's public code does.
    """
    is_known = _places_of_known(ranking.doc_rows, known)
    chosen = np.full((len(pair_anchors), num_negatives), PADDING_ID, np.int32)
    scores, ranks = np.full(chosen.shape, np.nan, np.float32), np.zeros(chosen.shape, np.int32)
    counts = dict.fromkeys(("margin", "max_score_ratio", "max_teacher_score", "duplicate"), 0)
    num_candidates = num_known = 0
    for start in range(0, len(pair_anchors), _PAIRS):
        pairs = slice(start, start + _PAIRS)
        anchors = pair_anchors[pairs]
        found = Ranking(ranking.doc_rows[anchors], ranking.scores[anchors])  # [c, r]
        num_known += int(np.count_nonzero(is_known[anchors]))
        is_free = (found.doc_rows >= 0) & ~is_known[anchors]
        rank = np.cumsum(is_free, axis=1, dtype=np.int32)
        kept = is_free & (rank >= filters.first_rank) & (rank <= filters.last_rank)
        num_candidates += int(np.count_nonzero(kept))
        by = _refusals(anchors, pair_positives[pairs], positive_scores[pairs], found, filters, is_duplicate, teacher)
        for name, refused_of in by:
            refused = kept & refused_of(kept)
            counts[name] += int(np.count_nonzero(refused))
            kept &= ~refused
        for row, places in enumerate(map(np.flatnonzero, kept)):
            pair = start + row
            drawn = np.random.default_rng((seed, step, pair)).permutation(places)[:num_negatives]
            chosen[pair, : len(drawn)] = found.doc_rows[row, drawn]
            scores[pair, : len(drawn)] = found.scores[row, drawn]
            ranks[pair, : len(drawn)] = rank[row, drawn]
    is_drawn = chosen != PADDING_ID
    width = int(np.count_nonzero(is_drawn, axis=1).max(initial=0))
    mean_rank = float(ranks[is_drawn].mean()) if width else float("nan")
    return Mining(chosen[:, :width], scores[:, :width], num_candidates, num_known, counts, mean_rank)


def moved(
    chosen: Int[np.ndarray, "P N"], previous: Int[np.ndarray, "P m"], ranking: Ranking, anchors: Int[np.ndarray, " P"]
) -> dict[str, float]:
    """How far the document rows of negatives moved since the previous generation; `PADDING_ID` fills up.

    Args:
        ranking: [q, >= 100] by the model that mined `chosen`.

    Returns:
        "overlap_previous": the share of new negatives that the previous generation has too; "previous_in_top_100": the share of
        previous negatives among the first 100 documents of the current model.
    """
    return {
        "overlap_previous": _share_found(chosen, previous, np.arange(len(chosen))),
        "previous_in_top_100": _share_found(previous, ranking.doc_rows[:, :SEEN_DEPTH], anchors),
    }


def _share_found(wanted: Int[np.ndarray, "P m"], among: Int[np.ndarray, "a k"], row_of: Int[np.ndarray, " P"]) -> float:
    """The share of the real entries of `wanted` that stand in their row of `among`."""
    num_found = num_real = 0
    for start in range(0, len(wanted), _PAIRS):
        own = wanted[start : start + _PAIRS]
        is_real = own != PADDING_ID
        is_there = (own[:, :, None] == among[row_of[start : start + _PAIRS]][:, None, :]).any(axis=2)
        num_found += int(np.count_nonzero(is_there & is_real))
        num_real += int(np.count_nonzero(is_real))
    return num_found / max(num_real, 1)


def _places_of_known(rows: Int[np.ndarray, "a r"], known: Int[np.ndarray, "known 2"]) -> Bool[np.ndarray, "a r"]:
    """Which places of a ranking hold a known positive of their anchor."""
    is_known = np.zeros(rows.shape, bool)
    for start in range(0, len(known), _PAIRS):
        anchors, positives = known[start : start + _PAIRS].T
        which, place = np.nonzero(rows[anchors] == positives[:, None])
        is_known[anchors[which], place] = True
    return is_known


def _refusals(
    anchors: Int[np.ndarray, " c"],
    positives: Int[np.ndarray, " c"],
    positive_scores: Float[np.ndarray, " c"],
    found: Ranking,
    filters: Filters,
    is_duplicate: IsDuplicate | None,
    teacher: TeacherScore | None,
) -> Iterator[tuple[str, Callable[[np.ndarray], np.ndarray]]]:
    """The name of each filter in use, and a function from the mask of remaining candidates [c, r] to the mask of refused ones."""
    of_positive = positive_scores.astype(np.float64)[:, None]

    def above(limit: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
        return lambda kept: found.scores > limit.astype(np.float32)

    def each(says: Callable[[np.ndarray, np.ndarray], np.ndarray], own: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
        def refused(kept: np.ndarray) -> np.ndarray:
            rows, places = np.nonzero(kept)
            answer = np.zeros(kept.shape, bool)
            answer[rows, places] = says(own[rows], found.doc_rows[rows, places])
            return answer

        return refused

    if filters.margin is not None:
        yield "margin", above(of_positive - filters.margin)
    if (ratio := filters.max_score_ratio) is not None:
        # A share of a negative score would let better candidates through than the positive itself.
        yield "max_score_ratio", above(of_positive - (1 - ratio) * np.abs(of_positive))
    if (highest := filters.max_teacher_score) is not None and teacher is not None:
        yield "max_teacher_score", each(lambda own, rows: teacher(own, rows) > highest, anchors)
    if is_duplicate is not None:
        yield "duplicate", each(is_duplicate, positives)
