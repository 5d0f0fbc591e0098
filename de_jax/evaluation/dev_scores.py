"""How well a run does on held-out queries, as it is asked while it is trained."""

from collections.abc import Sequence

from de_jax.data.sources.training_set import DevSet, QueriesForBoth
from de_jax.data.text.passages import PassageStore, passages_of
from de_jax.evaluation import metrics
from de_jax.evaluation.metrics import FirstRanks, Results
from de_jax.retrieval import encode
from de_jax.retrieval.index import ExactIndex, Index, of_docs
from de_jax.training.hooks.alignment import kl_divergence
from de_jax.training.run.run_folder import Run

DEPTH = 101
"""One more than Recall@100 needs, since a document with the query's id is left out."""


def rank_dev(run: Run, dev: DevSet) -> Results:
    """The ranking of the dev set's documents by a run's parameters, `DEPTH` deep."""
    return rank(run, dev, *of_docs(*exact_index(run, dev)))


def score_uncut(run: Run, dev: DevSet) -> tuple[dict[str, float], FirstRanks | None]:
    """nDCG@10, MRR@10, Recall@100, P@1 and MRR without a cut-off ("mrr"), as SamToNe scores MS MARCO and MultiReQA; and the ranks.

    The ranks are those of each judged query's first relevant document. Documents of several passages have none of these.
    """
    exact, row_ids = exact_index(run, dev)
    index, doc_ids = of_docs(exact, row_ids)
    scores = score_index(run, dev, index, doc_ids)
    if index is not exact:
        return scores, None
    ranks = _first_ranks(run, dev, exact, row_ids)
    return scores | metrics.means(metrics.of_first_ranks(ranks)), ranks


def score_index(run: Run, dev: DevSet, index: Index, doc_ids: Sequence[str]) -> dict[str, float]:
    """nDCG@10, MRR@10 and Recall@100 by an index of documents, whatever they are."""
    return metrics.evaluate_results(rank(run, dev, index, doc_ids), dev.qrels)


def rank(run: Run, dev: DevSet, index: Index, doc_ids: Sequence[str]) -> Results:
    """The ranking of an index's documents, `DEPTH` deep."""
    ranking = index.search(encode.queries(run, dev.query_store, rows=dev.query_rows), min(DEPTH, len(doc_ids)))
    query_ids = [dev.query_store.ids[int(row)] for row in dev.query_rows]
    return metrics.results_of(ranking, query_ids, doc_ids, drop_identical_ids=dev.drop_identical_ids)


def exact_index(run: Run, dev: DevSet) -> tuple[ExactIndex, list[str]]:
    """The dev set's documents, or their passages, and the document that each row is of."""
    store, rows = passages_of(dev.doc_store, run.doc) or dev.doc_store, dev.doc_rows
    if isinstance(store, PassageStore):
        passages = store.of_docs(rows)
        rows = passages[passages >= 0]
    row_ids = [store.ids[int(row)] for row in rows]
    return ExactIndex(encode.docs(run, store, rows=rows), row_ids), row_ids


def _first_ranks(run: Run, dev: DevSet, index: ExactIndex, doc_ids: Sequence[str]) -> FirstRanks:
    """The rank of each judged query's best relevant document among all."""
    row_of = {doc_id: row for row, doc_id in enumerate(doc_ids)}
    query_ids = [dev.query_store.ids[int(row)] for row in dev.query_rows]
    own = [row_of.get(query_id, -1) if dev.drop_identical_ids else -1 for query_id in query_ids]
    found = zip(metrics.relevant_rows(dev.qrels, query_ids, doc_ids), own, strict=True)
    relevant = [[row for row in rows if row != same] for rows, same in found]
    queries = encode.queries(run, dev.query_store, rows=dev.query_rows)
    ranks = index.best_ranks(queries, relevant)
    if any(same >= 0 for same in own):  # documents below a dropped one move up by one rank
        of_own = index.best_ranks(queries, [[same] if same >= 0 else [] for same in own])
        ranks = ranks - ((of_own > 0) & (of_own < ranks))
    judged = {query_id: 0 for query_id, docs in dev.qrels.items() if docs}
    return judged | dict(zip(query_ids, ranks.tolist(), strict=True))


def divergence(run: Run, queries: QueriesForBoth) -> float:
    """How far the query tower's embeddings of some queries lie from the document tower's embeddings of the same (DAFT, eq. 9)."""
    by_doc_tower = encode.docs(run, queries.for_doc_tower, rows=queries.rows, max_length=run.query.max_length)
    by_query_tower = encode.queries(run, queries.for_query_tower, rows=queries.rows)
    return kl_divergence(by_doc_tower, by_query_tower, dim=run.model.doc.embedding_rank)
