"""Scores a run on retrieval of answer sentences, as in MultiReQA; prints one JSON object to stdout, a table to stderr.

de-jax evaluate_sentences --run_dir=runs/sde --dataset_dir=data/beir/xquad-en-sentence

Measures are P@1, and MRR without a cut-off over all sentences of the corpus, by the best correct sentence. Stored rankings are cut
at --depth. MRR looks deeper and is given for the run and for BM25.
"""

from __future__ import annotations

import argparse
import json
import sys

import numpy as np

from de_jax import arguments, command
from de_jax.evaluation import first_ranks
from de_jax.evaluation.task import Policy, Task, beir_task, bm25_index, encoded, evaluate
from de_jax.reports import tables
from de_jax.retrieval.index import ExactIndex
from de_jax.training.run.run_folder import Run
from de_jax.types import InputError

MEASURES = ("P@1",)
QUERY_BLOCK = 64
"""Queries whose whole rankings are in memory at a time."""


def main(argv: list[str] | None = None) -> None:
    """The command."""
    args = _parse_args(argv)
    policy = arguments.policy(args)
    task = beir_task(args.dataset_dir, args.split)
    run = arguments.run(args)
    ranks = {"dense": _dense_ranks(run, task, policy, args.min_relevance)} if run else {}
    report = evaluate(task, policy, run)
    if "bm25" in report:
        ranks["bm25"] = _bm25_ranks(task, policy, args.min_relevance)
    for system, found in ranks.items():
        report[system]["mrr"] = first_ranks.means(found)["mrr"]
    if args.out_ranks:
        first_ranks.write(args.out_ranks, ranks["dense" if run else "bm25"])
    print(tables.report_tables([report]), file=sys.stderr)
    print(json.dumps(report))


def _dense_ranks(run: Run, task: Task, policy: Policy, min_relevance: int) -> first_ranks.Ranks:
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
    relevant = first_ranks.relevant_rows(task.qrels, texts.query_ids, texts.row_ids, min_relevance)
    ranks = ExactIndex(texts.docs, texts.row_ids).best_ranks(texts.queries, relevant)
    found = dict(zip(texts.query_ids, ranks.tolist(), strict=True))
    return {query_id: found.get(query_id, 0) for query_id, judged in task.qrels.items() if judged}


def _bm25_ranks(task: Task, policy: Policy, min_relevance: int) -> first_ranks.Ranks:
    """The same by BM25; 0 too where no correct sentence has a word of the query."""
    index, queries, doc_ids = bm25_index(task, policy)
    query_ids, texts = list(queries), list(queries.values())
    relevant = first_ranks.relevant_rows(task.qrels, query_ids, doc_ids, min_relevance)
    ranks = {query_id: 0 for query_id, judged in task.qrels.items() if judged}
    for start in range(0, len(texts), QUERY_BLOCK):
        rankings = index.search(texts[start : start + QUERY_BLOCK], len(doc_ids)).doc_rows
        for query, rows in enumerate(rankings, start):
            found = np.flatnonzero(np.isin(rows, relevant[query]))
            ranks[query_ids[query]] = int(found[0]) + 1 if len(found) else 0
    return ranks


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = command.Parser(description=__doc__)
    parser.add_argument("--dataset_dir", required=True, help="a BEIR folder or a table with sentences as documents")
    parser.add_argument("--split", default="test", help="split of the judgements (default test)")
    parser.add_argument("--out_ranks", help="keep the rank of each query's first correct sentence in this JSON file")
    arguments.add(parser, measures=MEASURES)
    return arguments.parsed(parser, argv)


if __name__ == "__main__":
    command.run(main)
