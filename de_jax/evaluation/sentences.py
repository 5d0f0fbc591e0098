"""Sentence retrieval as MultiReQA scores it: where the first correct sentence stands among all, however far down."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from de_jax.evaluation.first_ranks import Ranks
from de_jax.evaluation.task import Policy, Task, bm25_index, encoded
from de_jax.retrieval.index import ExactIndex
from de_jax.training.run.run_folder import Run
from de_jax.types import InputError

QUERY_BLOCK = 64
"""Queries whose whole rankings are in memory at a time."""


def dense_ranks(run: Run, task: Task, policy: Policy, *, min_relevance: int = 1) -> Ranks:
    """The rank of each judged query's best correct sentence by a run's embeddings; 0 where none is, or the query is left out.

    Raises:
        InputError: settings that give a sentence several vectors, which have no ranks here.
    """
    if policy.passage_length:
        raise InputError("sentences are not cut into passages; leave --passage_length out.")
    if run.doc.max_passages > 1:
        raise InputError(f"documents of {run.run_dir} are several passages, which have no ranks here; give --max_passages=1.")
    if policy.expansion and policy.expansion.form == "views":
        raise InputError("documents as views are several vectors, which have no ranks here; give another --expand_as.")
    texts = encoded(run, task, policy)
    index, relevant = ExactIndex(texts.docs, texts.row_ids), _relevant(task, texts.query_ids, texts.doc_ids, min_relevance)
    found = dict(zip(texts.query_ids, index.best_ranks(texts.queries, relevant).tolist(), strict=True))
    return {query_id: found.get(query_id, 0) for query_id, judged in task.qrels.items() if judged}


def bm25_ranks(task: Task, policy: Policy, *, min_relevance: int = 1) -> Ranks:
    """The same by BM25; 0 too where no correct sentence has a word of the query."""
    index, queries, doc_ids = bm25_index(task, policy)
    query_ids, texts = list(queries), list(queries.values())
    relevant = _relevant(task, query_ids, doc_ids, min_relevance)
    ranks = {query_id: 0 for query_id, judged in task.qrels.items() if judged}
    for start in range(0, len(texts), QUERY_BLOCK):
        rankings = index.search(texts[start : start + QUERY_BLOCK], len(doc_ids)).doc_rows
        for query, rows in enumerate(rankings, start):
            found = np.flatnonzero(np.isin(rows, relevant[query]))
            ranks[query_ids[query]] = int(found[0]) + 1 if len(found) else 0
    return ranks


def _relevant(task: Task, query_ids: Sequence[str], doc_ids: Sequence[str], min_relevance: int) -> list[list[int]]:
    """Rows of the correct sentences of each query."""
    row_of = {doc_id: row for row, doc_id in enumerate(doc_ids)}
    return [
        [row_of[doc_id] for doc_id, grade in task.qrels[query_id].items() if grade >= min_relevance and doc_id in row_of]
        for query_id in query_ids
    ]
