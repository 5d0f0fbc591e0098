"""Scores a run by the answers in its passages (open-domain QA); prints one JSON object to stdout, a table to stderr.

de-jax evaluate_openqa --run_dir=runs/sde --dataset_dir=data/beir/nq-open-oracle

success@20 and success@100 are the top-20 and top-100 coverage: the share of questions with an answer in the first 20 or 100
passages, compared word by word as in DPR. Answers are searched in texts, not in titles. Judgements are not used.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from de_jax import arguments, command
from de_jax.data.text import beir
from de_jax.evaluation import answers
from de_jax.evaluation.task import Task, evaluate
from de_jax.reports import tables
from de_jax.types import InputError


def main(argv: list[str] | None = None) -> None:
    """The command."""
    args = _parse_args(argv)
    policy = arguments.policy(args)
    if args.min_relevance != 1:
        raise InputError("a passage has an answer or has none; leave --min_relevance out.")
    folder = beir.folder_of(args.dataset_dir).resolve()
    strings = answers.read(args.answers or beir.find_file(folder, "answers"))
    task = Task(folder.name, beir.find_file(folder, "corpus"), beir.find_file(folder, "queries"), {}, strings)
    report = evaluate(task, policy, arguments.run(args))
    print(tables.report_tables([report]), file=sys.stderr)
    print(json.dumps(report))


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = command.Parser(description=__doc__)
    parser.add_argument("--dataset_dir", type=Path, required=True, help="corpus and queries: a BEIR folder or a table")
    parser.add_argument("--answers", help="jsonl of _id and answers; default answers.jsonl of the data set, plain or .gz")
    arguments.add(parser, measures=answers.MEASURES)
    return arguments.parsed(parser, argv)


if __name__ == "__main__":
    command.run(main)
