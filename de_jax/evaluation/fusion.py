"""Fusion of rankings, their overlap, and their share of unjudged documents; none of them uses relevance."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence

from de_jax.data.text.beir import Qrels
from de_jax.evaluation.metrics import Results
from de_jax.types import InputError

RANK_CONSTANT = 60


def fuse(rankings: Sequence[Results], *, depth: int, k: int = RANK_CONSTANT, weights: Sequence[float] | None = None) -> Results:
    """Reciprocal-rank fusion: a document scores the sum of weight / (k + its rank) over the rankings that hold it.

    Cormack et al. (2009). Equal scores stand by document id downwards, as trec_eval has it.

    Example:
        >>> fuse([{"q": {"a": 9.0, "b": 8.0}}, {"q": {"b": 0.5}}], depth=1)
        {'q': {'b': 0.03252247488101534}}

    Args:
        rankings: best first, by query; scores are not looked at.
        depth: documents kept of each query.
        k: dampens the first ranks.
        weights: of the rankings; None for equal ones, as in the paper.
    """
    fused: Results = {}
    for query_id in dict.fromkeys(itertools.chain(*rankings)):
        scores: dict[str, float] = {}
        for results, weight in zip(rankings, weights or itertools.repeat(1.0, len(rankings)), strict=True):
            for rank, doc_id in enumerate(results.get(query_id, {}), start=1):
                scores[doc_id] = scores.get(doc_id, 0.0) + weight / (k + rank)
        best = sorted(sorted(scores.items(), reverse=True), key=lambda item: -item[1])
        fused[query_id] = dict(best[:depth])
    return fused


def hole(results: Results, qrels: Qrels, k: int) -> float:
    """Hole@k: the share of unjudged documents among the first k, mean over the judged queries with results.

    Xiong et al. (2021). A score can be trusted the less, the more holes the ranking has.

    Raises:
        InputError: no judged query has results, or `k` is below 1.
    """
    shares = [
        statistics.fmean(doc_id not in judged for doc_id in _top(results[query_id], k))
        for query_id, judged in qrels.items()
        if results.get(query_id)
    ]
    return _mean(shares, "no judged query has results; give a run and judgements of the same queries.")


def overlap(first: Results, second: Results, k: int) -> float:
    """Overlap@k: the share of the first k documents that two rankings have in common, mean over the queries of both.

    Where a ranking is shorter than k, the share is that of the longer one.

    Raises:
        InputError: the two have no query in common, or `k` is below 1.
    """
    tops = [(_top(docs, k), _top(second[query_id], k)) for query_id, docs in first.items() if query_id in second]
    shares = [len({*one} & {*other}) / max(len(one), len(other)) for one, other in tops if one or other]
    return _mean(shares, "the two runs have no query in common; give runs of the same queries.")


def _top(docs: dict[str, float], k: int) -> list[str]:
    if k < 1:
        raise InputError(f"k is {k}; ask for at least 1 document.")
    return list(itertools.islice(docs, k))


def _mean(values: list[float], fault: str) -> float:
    if not values:
        raise InputError(fault)
    return statistics.fmean(values)
