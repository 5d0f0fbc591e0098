"""Scores a run on MS MARCO's passages or documents; prints one JSON object to stdout, a table to stderr.

de-jax evaluate_msmarco --run_dir=runs/sde --dataset_dir=data/msmarco --split=dev.small
de-jax evaluate_msmarco --run_dir=runs/sde --dataset_dir=data/msmarco --kind=documents --split=dev \\
    --passage_length=512                                                       # MaxP; without it, the first tokens: FirstP

Passages: MRR@10, Recall@50 and Recall@1000. Documents: MRR@100 and nDCG@10. Every mean is over all judged queries (6,980 for
passages' dev.small). BM25 holds all texts in memory; --no_bm25 skips it.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from de_jax import arguments, command
from de_jax.data.text import beir, msmarco
from de_jax.evaluation.task import Task, evaluate
from de_jax.reports import tables

MEASURES = {"passages": ["RR@10", "R@50", "R@1000"], "documents": ["RR@100", "nDCG@10"]}


def main(argv: list[str] | None = None) -> None:
    """The command."""
    args = _parse_args(argv)
    args.measures = args.measures or MEASURES[args.kind]
    policy = arguments.policy(args)
    files = msmarco.find_files(args.dataset_dir, args.kind)
    queries, qrels = (msmarco.of_split(paths, args.split) for paths in (files.queries, files.qrels))
    task = Task(f"msmarco-{args.kind}", files.docs, queries, beir.read_qrels(qrels), split=args.split)
    report = evaluate(task, policy, arguments.run(args))
    print(tables.report_tables([report]), file=sys.stderr)
    print(json.dumps(report))


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = command.Parser(description=__doc__)
    parser.add_argument("--dataset_dir", type=Path, required=True, help="MS MARCO's files as distributed")
    parser.add_argument("--kind", default="passages", choices=msmarco.KINDS, help="passages or documents (default passages)")
    parser.add_argument("--split", default="dev.small", help="split of queries and judgements (default dev.small)")
    arguments.add(parser)
    return arguments.parsed(parser, argv)


if __name__ == "__main__":
    command.run(main)
