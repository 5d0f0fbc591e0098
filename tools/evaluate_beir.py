"""Scores a run on BEIR data sets, with BM25 and their fusion; prints one JSON object to stdout, a table to stderr.

de-jax evaluate_beir --run_dir=runs/sde --dataset_dir=data/beir/scifact
de-jax evaluate_beir --run_dir=runs/sde --dataset_dirs data/beir/*
de-jax evaluate_beir --dataset_dirs data/beir/scifact data/beir/nfcorpus        # BM25 alone

Measures are means over the judged queries of the split. A document with the id of the query is left out, as BEIR does for ArguAna
and Quora, unless --keep_identical_ids is given. A folder of data sets, such as CQADupStack's, counts once, as their mean. Reports
and rankings stay in <run_dir>/evaluations, embeddings in <run_dir>/embeddings. Repeat the command to continue after a stop.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from de_jax import arguments, command
from de_jax.evaluation import metrics
from de_jax.evaluation.report import Report, averaged
from de_jax.evaluation.task import beir_tasks, evaluate
from de_jax.reports import tables


def main(argv: list[str] | None = None) -> None:
    """The command."""
    args = _parse_args(argv)
    policy = arguments.policy(args)
    folders = [Path(folder) for folder in args.dataset_dirs or [args.dataset_dir]]
    tasks = {folder: beir_tasks(folder, args.split) for folder in folders}  # fails here, before the model loads
    run = arguments.run(args)
    reports = [_mean_of_parts(folder, [evaluate(task, policy, run) for task in parts]) for folder, parts in tasks.items()]
    average = averaged("average", reports)
    rows = [*reports, {**average, "num_docs": None, "num_queries": None}] if args.dataset_dirs else reports
    print(tables.report_tables(rows), file=sys.stderr)
    print(json.dumps({"sets": reports, "average": average} if args.dataset_dirs else reports[0]))


def _mean_of_parts(folder: Path, reports: list[Report]) -> Report:
    return reports[0] if len(reports) == 1 else {**averaged(folder.resolve().name, reports), "parts": reports}


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = command.Parser(description=__doc__)
    datasets = parser.add_mutually_exclusive_group(required=True)
    datasets.add_argument("--dataset_dir", help="a BEIR folder or a table")
    datasets.add_argument("--dataset_dirs", nargs="+", help="several BEIR folders or tables; one row of the table each")
    parser.add_argument("--split", default="test", help="split of the judgements (default test)")
    arguments.add(parser, measures=metrics.MEASURES, beir=True)
    return arguments.parsed(parser, argv)


if __name__ == "__main__":
    command.run(main)
