"""MaxP: a document scores as the best of its passages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from de_jax.retrieval.index import Index, empty_ranking
from de_jax.types import InputError, Ranking


def of_docs(index: Index, row_ids: Sequence[str]) -> tuple[Index, list[str]]:
    """An index whose rows may be passages, which have their document's id one after another, as one of documents; and their ids."""
    row_ids = list(row_ids)
    is_first = np.array([row == 0 or row_id != row_ids[row - 1] for row, row_id in enumerate(row_ids)])
    if is_first.all():
        return index, row_ids
    return MaxPIndex(index, np.cumsum(is_first) - 1), [row_ids[row] for row in np.flatnonzero(is_first).tolist()]


class MaxPIndex:
    """An index of passages as an index of their documents; exact where the index of passages is.

    The first passage of a document in a ranking is its best one, so the documents in the order of their first passages are
    the ranking by MaxP, as far as the passages go. Each query is searched as deep as its k documents need: at most
    (k - 1) C + 1 passages, if no document has more than C.
    """

    def __init__(self, index: Index, doc_rows: Int[np.ndarray, " p"]) -> None:
        num_passages = np.bincount(doc_rows)
        if not num_passages.all():
            raise InputError(f"document {int(np.argmin(num_passages))} has no passage; cut every document into at least one.")
        self._index, self._doc_rows = index, doc_rows
        self._num_docs, self._most_passages = len(num_passages), int(num_passages.max())

    def search(self, queries: Float[Any, "q D"], k: int) -> Ranking:
        """The k best documents of each query; fewer fill up with row -1 and score -inf."""
        found = empty_ranking(len(queries), k)
        num_wanted = min(k, self._num_docs)
        enough = min((num_wanted - 1) * self._most_passages + 1, len(self._doc_rows))
        depth, open_queries = min(2 * num_wanted, enough), np.arange(len(queries))
        while True:
            passages = self._index.search(queries[open_queries], depth)
            still_open = []
            for query, rows, scores in zip(open_queries, passages.doc_rows, passages.scores, strict=True):
                best = np.sort(np.unique(self._doc_rows[rows[rows >= 0]], return_index=True)[1])[:num_wanted]  # first passages
                found.doc_rows[query, : len(best)] = self._doc_rows[rows[best]]
                found.scores[query, : len(best)] = scores[best]
                if len(best) < num_wanted:
                    still_open.append(query)
            if not still_open or depth == enough:  # at `enough` only an approximate index can miss some
                return found
            depth, open_queries = min(2 * depth, enough), np.array(still_open)
