"""Scores a run, or a TREC run file, on any topics and judgements; prints one JSON object to stdout, a table to stderr.

de-jax evaluate_trec --run_dir=runs/sde --corpus=collection.tsv --topics=topics.dl19-passage.txt \\
    --qrels=qrels.dl19-passage.txt --measures nDCG@10 RR@10 R@1000 --min_relevance 2
de-jax evaluate_trec --run_file=bm25.trec --qrels=qrels.dl19-passage.txt --min_relevance 2

The corpus is jsonl (BEIR's), or tsv with 2 columns (id, text) or 4 (MS MARCO's documents). Topics are jsonl or tsv. Judgements are
TREC's or BEIR's. With --min_relevance 2, as for TREC DL, grade 1 is not relevant for MRR, recall and similar measures; nDCG uses
the grades unchanged. Without --run_dir and --run_file, BM25 is scored alone.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from de_jax import arguments, command
from de_jax.data.text import beir
from de_jax.evaluation import fusion, metrics
from de_jax.evaluation.task import Task, evaluate
from de_jax.reports import tables
from de_jax.types import InputError

MEASURES = ("nDCG@10", "RR@10", "R@1000")
HOLE_DEPTH = 10


def main(argv: list[str] | None = None) -> None:
    """The command."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.run_file:
        parser.refuse_others(args, "--run_file", used=("run_file", "qrels", "measures", "min_relevance"))
    arguments.check(parser, args)
    policy = arguments.policy(args)
    qrels = beir.read_qrels(args.qrels)
    if args.run_file:
        results = metrics.read_trec_run(args.run_file)
        scores = metrics.evaluate_results(results, qrels, measures=policy.measures)
        scores[f"hole@{HOLE_DEPTH}"] = fusion.hole(results, qrels, HOLE_DEPTH)
        counts = {"num_queries": len(qrels), "num_queries_found": len(qrels.keys() & results.keys())}
        print(json.dumps({"run_file": args.run_file, **counts, **scores}))
        return
    if not args.corpus or not args.topics:
        raise InputError("give --corpus and --topics to search, or --run_file with the results of a search.")
    for path in (args.corpus, args.topics):
        if not path.is_file():
            raise InputError(f"{path} does not exist.")
    task = Task(args.qrels.stem, args.corpus, args.topics, qrels)
    report = evaluate(task, policy, arguments.run(args))
    print(tables.report_tables([report]), file=sys.stderr)
    print(json.dumps(report))


def _parser() -> command.Parser:
    parser = command.Parser(description=__doc__)
    parser.add_argument("--qrels", type=Path, required=True, help="judgements with TREC's four columns or BEIR's three")
    parser.add_argument("--topics", type=Path, help="queries: jsonl, tsv or txt, plain or .gz; judged queries are used")
    parser.add_argument("--corpus", type=Path, help="documents: jsonl or tsv, plain or .gz")
    parser.add_argument("--run_file", help="score this TREC run file instead of a model")
    arguments.add(parser, measures=MEASURES)
    return parser


if __name__ == "__main__":
    command.run(main)
