"""Which candidates near an anchor become its negatives.

One function serves both directions: an anchor is a query and its candidates are documents, or, for the dual task, an anchor is a
document and its candidates are queries.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from de_jax.data.batches import teacher_scores
from de_jax.data.stores.corpus import TokenStore
from de_jax.data.text import near_duplicates
from de_jax.mining.negatives import TrainingTexts
from de_jax.types import InputError, Ranking

IsDuplicate = Callable[[int, int], bool]
"""Whether a candidate says nearly the same as a positive; both by row."""
TeacherScore = Callable[[int, int], float | None]
"""What another model thinks of a candidate for an anchor, both by row; None where it was not asked."""


class Filters(NamedTuple):
    """Which candidates may be negatives, besides not being known positives.

    ANCE (Xiong et al. 2021) takes the first 200. The others guard against unjudged relevant documents.
    """

    first_rank: int = 1  # of the candidates left once the known positives are removed
    last_rank: int = 200
    margin: float | None = None  # a negative scores at most its positive's score minus this
    max_score_ratio: float | None = None  # a negative scores at most this share of its positive's score
    max_teacher_score: float | None = None  # of those that the teacher has scored


ALL_IN_DEPTH = Filters()


class Mining(NamedTuple):
    """The negatives of each pair, and the number of refused candidates by filter."""

    chosen: list[Int[np.ndarray, " m"]]  # rows, in the order drawn
    num_candidates: int  # within the ranks, known positives removed
    num_known: int  # known positives met in the rankings
    num_filtered: dict[str, int]  # by filter
    mean_rank: float  # of the chosen, counted without known positives; nan without any

    def facts(self) -> dict[str, Any]:
        """For a manifest."""
        num_chosen = sum(map(len, self.chosen))
        share = sum(self.num_filtered.values()) / max(self.num_candidates, 1)
        facts = {"num_chosen": num_chosen, "mean_rank": self.mean_rank if num_chosen else None, "share_filtered": share}
        return facts | {name: getattr(self, name) for name in ("num_candidates", "num_known", "num_filtered")}


def choose(
    ranking: Ranking,
    pair_anchors: Int[np.ndarray, " P"],
    pair_positives: Int[np.ndarray, " P"],
    positive_scores: Float[np.ndarray, " P"],
    known: Sequence[AbstractSet[int]],
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
        pair_positives: the pair's own candidate.
        positive_scores: of each pair, on the ranking's scale.
        known: for each row of the ranking all its positives, of every split that must not be trained against.
        num_negatives: of each pair; fewer where the filters leave fewer.
        seed: with the step and a pair's place, decides the draw.
        step: the checkpoint whose ranking this is. Each refresh draws other ranks, as ANCE's public code does.
        filters: see there.
        is_duplicate, teacher: the tests of the filters of these names.

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
        drawn = np.random.default_rng((seed, step, pair)).permutation(np.flatnonzero(kept))[:num_negatives]
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


def read_teacher(path: str | Path, texts: TrainingTexts) -> dict[tuple[int, int], float]:
    """Scores by another model by (query row, document row); `path` and errors are those of `teacher_scores.read`."""
    queries, docs, scores = teacher_scores.read(path, texts.query_store, texts.doc_store)
    return {(query, doc): score for query, doc, score in zip(queries.tolist(), docs.tolist(), scores.tolist(), strict=True)}


def near_duplicates_in(store: TokenStore, max_resemblance: float | None) -> IsDuplicate | None:
    """Whether two texts of a store share more than this of their three-token sequences; None for None."""
    if max_resemblance is None:
        return None

    @functools.lru_cache(maxsize=1 << 16)
    def shingles(row: int) -> frozenset[int]:
        return near_duplicates.shingles_of(store.tokens[store.offsets[row] : store.offsets[row + 1]])

    return lambda positive, row: near_duplicates.resemblance(shingles(positive), shingles(row)) > max_resemblance
