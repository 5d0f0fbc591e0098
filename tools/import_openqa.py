"""Makes a BEIR folder of DPR's files for open-domain questions; prints one JSON object to stdout.

de-jax import_openqa --passages=psgs_w100.tsv.gz --train=biencoder-nq-train.json.gz --dev=biencoder-nq-dev.json.gz \\
    --test=nq-test.qa.csv --out_dir=data/dpr/nq

Passages keep their ids. The first positive passage of each question is its judgement in qrels/train.tsv and qrels/dev.tsv. Test
questions are judged by their answers, in answers.jsonl, which de-jax evaluate_openqa reads. Several files of questions are one
split. Passages are streamed: 21 million make 5 GB of corpus.jsonl.gz.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from de_jax import command
from de_jax.data.text import beir, dpr
from de_jax.files import folders
from de_jax.settings import PositiveInt, numeric


def main(argv: list[str] | None = None) -> None:
    """The command; prints the folder's counts."""
    args = _parser().parse_args(argv)
    folders.require_replaceable(args.out_dir, beir.BEIR_KIND)
    questions = {"train": args.train} | ({"dev": args.dev} if args.dev else {})
    counts = dpr.write_beir(
        args.out_dir, passages=args.passages, questions=questions, answers=args.test, max_positives=args.max_positives
    )
    print(json.dumps({"dataset_dir": str(args.out_dir), **counts}))


def _parser() -> argparse.ArgumentParser:
    parser = command.Parser(description=__doc__)
    parser.add_argument("--passages", required=True, help="tsv with the columns id, text and title")
    parser.add_argument("--train", nargs="+", required=True, help="json of training questions with their passages")
    parser.add_argument("--dev", nargs="+", default=[], help="the same, of the questions that choose a checkpoint")
    parser.add_argument("--test", nargs="+", default=[], help="tsv of questions and lists of answers")
    parser.add_argument(
        "--max_positives", type=numeric(PositiveInt), default=1, help="positive passages of a question, from its first (default 1)"
    )
    parser.add_argument("--out_dir", type=Path, required=True, help="the folder to write")
    return parser


if __name__ == "__main__":
    command.run(main)
