"""The rank of each query's first relevant document, however far down: P@1, and MRR without a cut-off."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from de_jax.data.text.beir import Qrels

Ranks = dict[str, int]
"""By query id, from 1; 0 if nothing relevant was found."""
NAMES = ("p@1", "mrr")


def by_query(ranks: Mapping[str, int]) -> dict[str, dict[str, float]]:
    """ "p@1" and "mrr" of each query, for tests over queries.

    Example:
        >>> by_query({"q1": 1, "q2": 4, "q3": 0})["mrr"]
        {'q1': 1.0, 'q2': 0.25, 'q3': 0.0}
    """
    first = {query_id: float(rank == 1) for query_id, rank in ranks.items()}
    return dict(zip(NAMES, (first, {query_id: 1 / rank if rank else 0.0 for query_id, rank in ranks.items()}), strict=True))


def means(ranks: Mapping[str, int]) -> dict[str, float]:
    """The means over the queries, at least one."""
    return {name: math.fsum(values.values()) / len(values) for name, values in by_query(ranks).items()}


def relevant_rows(qrels: Qrels, query_ids: Sequence[str], doc_ids: Sequence[str], min_relevance: int = 1) -> list[list[int]]:
    """Rows of the relevant documents of each query, as far as they are among the documents."""
    row_of = {doc_id: row for row, doc_id in enumerate(doc_ids)}
    return [
        [row_of[doc_id] for doc_id, grade in qrels[query_id].items() if grade >= min_relevance and doc_id in row_of]
        for query_id in query_ids
    ]
