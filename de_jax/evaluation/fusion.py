"""Fusion of rankings, their overlap, and their share of unjudged documents; none of them uses relevance."""

import itertools
import statistics
from collections.abc import Sequence

from de_jax.data.text.beir import Qrels
from de_jax.evaluation.metrics import Results
from de_jax.types import InputError

RANK_CONSTANT = 60


def fuse(rankings: Sequence[Results], *, depth: int, k: int = RANK_CONSTANT) -> Results:
    """Reciprocal-rank fusion: a document scores the sum of 1 / (k + its rank) over the rankings that hold it.

    Cormack et al. (2009). Equal scores stand by document id downwards, as trec_eval has it.

    Example:
        >>> fuse([{"q": {"a": 9.0, "b": 8.0}}, {"q": {"b": 0.5}}], depth=1)
        {'q': {'b': 0.03252247488101534}}

    `rankings` are best first, by query; their scores are not looked at. `k` dampens the first ranks, `depth` documents are kept.
    """
    fused: Results = {}
    for query_id in dict.fromkeys(itertools.chain(*rankings)):
        scores: dict[str, float] = {}
        for results in rankings:
            for rank, doc_id in enumerate(results.get(query_id, {}), start=1):
                scores[doc_id] = scores.get(doc_id, 0.0) + 1 / (k + rank)
        fused[query_id] = _best(scores, depth)
    return fused


def combine(rankings: Sequence[Results], weights: Sequence[float], *, depth: int) -> Results:
    """Weighted sums of scores, those of each ranking scaled to 0 (its last document of the query) to 1 (its first).

    The convex combination of Bruch et al. (2023, arXiv 2210.11934), who find it better than reciprocal ranks where a few judged
    queries choose the weights. A ranking without a document adds 0 to it. Equal scores stand as in `fuse`.

    Example:
        >>> combine([{"q": {"a": 9.0, "b": 8.0, "c": 5.0}}, {"q": {"b": 0.5}}], (0.5, 0.5), depth=2)
        {'q': {'b': 0.875, 'a': 0.5}}

    `weights` has one for each ranking, and `depth` documents are kept of each query.
    """
    combined: Results = {}
    for query_id in dict.fromkeys(itertools.chain(*rankings)):
        scores: dict[str, float] = {}
        for results, weight in zip(rankings, weights, strict=True):
            found = results.get(query_id, {})
            lowest, highest = min(found.values(), default=0.0), max(found.values(), default=0.0)
            for doc_id, score in found.items():
                share = (score - lowest) / (highest - lowest) if highest > lowest else 1.0
                scores[doc_id] = scores.get(doc_id, 0.0) + weight * share
        combined[query_id] = _best(scores, depth)
    return combined


def _best(scores: dict[str, float], depth: int) -> dict[str, float]:
    return dict(sorted(sorted(scores.items(), reverse=True), key=lambda item: -item[1])[:depth])


def hole(results: Results, qrels: Qrels, k: int) -> float:
    """Hole@k (Xiong et al. 2021): the share of unjudged documents among the first k, mean over the judged queries with results.

    A score can be trusted the less, the more holes the ranking has.
    """
    shares = [
        statistics.fmean(doc_id not in judged for doc_id in _top(results[query_id], k))
        for query_id, judged in qrels.items()
        if results.get(query_id)
    ]
    return _mean(shares, "no judged query has results; give a run and judgements of the same queries.")


def overlap(first: Results, second: Results, k: int) -> float:
    """Overlap@k: the share of the first k documents, or of the longer ranking if it is shorter, that two rankings have in common.

    The mean over the queries of both.
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
