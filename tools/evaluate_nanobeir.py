"""Scores a run on NanoBEIR: 13 BEIR sets of 50 queries each, in minutes; prints one JSON object, and a table to stderr.

de-jax evaluate_nanobeir --run_dir=runs/sde --dataset_dir=data/nanobeir
de-jax evaluate_nanobeir --run_dir=runs/sde --hub_name=sentence-transformers/NanoBEIR-en
de-jax evaluate_nanobeir --run_dir=runs/sde --hub_name=zeta-alpha-ai/NanoNQ

A folder holds the sets as parquet files from the hub, or in the BEIR layout. Every set counts once in the average. A document with
the id of the query is ranked like any other, as in sentence-transformers' NanoBEIREvaluator.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from de_jax import arguments, command
from de_jax.data.text import nanobeir
from de_jax.evaluation.report import averaged
from de_jax.evaluation.task import Task, beir_tasks, evaluate
from de_jax.files import outputs
from de_jax.interop import hub
from de_jax.reports import tables
from de_jax.types import InputError

MEASURES = ("nDCG@10", "RR@10", "R@10", "AP@100")


def main(argv: list[str] | None = None) -> None:
    """The command."""
    args = _parse_args(argv)
    policy = arguments.policy(args)
    tasks = _tasks(args)  # fails here, before the model loads
    run = arguments.run(args)
    reports = [evaluate(task, policy, run) for task in tasks]
    average = averaged("average", reports)
    print(tables.report_tables([*reports, {**average, "num_docs": None, "num_queries": None}]), file=sys.stderr)
    missing = [name for name in nanobeir.SETS if name not in {task.name for task in tasks}]
    if missing:
        print(f"The average is not NanoBEIR's: {', '.join(missing)} not scored.", file=sys.stderr)
    print(json.dumps({"sets": reports, "average": average, "missing": missing}))


def _tasks(args: argparse.Namespace) -> list[Task]:
    """A task for each set, of its own name."""
    root, name = args.dataset_dir, None
    if args.hub_name:
        root, name = hub.fetched_dataset(args.hub_name, ["*.parquet"]), args.hub_name.rpartition("/")[2]
    found = nanobeir.beir_folders(root, outputs.cache_dir() / "nanobeir", name=name)
    if unknown := sorted(set(args.sets or ()) - set(found)):
        raise InputError(f"--sets has {unknown[0]}, which is not among the sets there: {', '.join(found)}.")
    chosen = {name: folder for name, folder in found.items() if not args.sets or name in args.sets}
    return [task._replace(name=name) for name, folder in chosen.items() for task in beir_tasks(folder, nanobeir.SPLIT)]


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = command.Parser(description=__doc__)
    datasets = parser.add_mutually_exclusive_group(required=True)
    datasets.add_argument("--dataset_dir", type=Path, help="a folder of sets")
    datasets.add_argument("--hub_name", help="a data set to fetch from the Hugging Face hub")
    parser.add_argument("--sets", nargs="+", help="names of sets, such as NanoNQ; default all in the folder")
    arguments.add(parser, measures=MEASURES)
    return arguments.parsed(parser, argv)


if __name__ == "__main__":
    command.run(main)
