"""Imports hard negatives as a generation for training; prints one JSON object to stdout.

From a table with texts: triplets (query, positive, negative), n-tuples (negative_1, negative_2, ...), labelled pairs and labelled
lists, such as the outputs of sentence-transformers' mine_hard_negatives:

    de-jax import_negatives mined.parquet --dataset_dir=data/qa --negatives_dir=data/qa/negatives

From a TREC run (.trec, .run or .txt, plain or .gz) with the ids of the folder; relevant documents are skipped:

    de-jax import_negatives bm25.trec --dataset_dir=data/qa --first_rank=1 --depth=30 --negatives_dir=data/qa_negatives

A training run uses the newest generation: --gin.PairsOptions.negatives_dir=data/qa_negatives. --pairs_dir reads the pairs from a
folder written by import_pairs, for PairsOptions.negatives_dir.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from de_jax import arguments, command
from de_jax.data.negatives import generations
from de_jax.data.negatives.mined_pairs import Mined
from de_jax.data.text import input_policy
from de_jax.data.text.table_files import files_of
from de_jax.data.text.table_rows import Reading
from de_jax.evaluation import metrics
from de_jax.mining import imported
from de_jax.mining.imported import Target
from de_jax.mining.mining_run import only_miner
from de_jax.types import InputError

TREC_SUFFIXES = (".trec", ".run", ".txt")


def main(argv: list[str] | None = None) -> None:
    """The command."""
    args = _parse_args(argv)
    if args.first_rank > args.depth:
        raise InputError(f"--first_rank {args.first_rank} is beyond --depth {args.depth}; give a rank up to it.")
    target = imported.of_beir(args.dataset_dir, args.split_of_pairs) if args.dataset_dir else imported.of_pair_store(args.pairs_dir)
    lines, counts = _lines(args, target)
    facts = {**target.facts, "mined_by": ", ".join(args.tables), **counts}
    with only_miner(args.negatives_dir):
        number = generations.next_number(args.negatives_dir)
        generation = generations.write_lines(args.negatives_dir, number, lines, facts)
    report = {"generation_dir": str(generation.folder), "num_pairs": len(lines), "pairs": len(target.pairs)}
    print(json.dumps(report | {"negatives": sum(len(line.neg_doc_ids) for line in lines), **counts}))


def _lines(args: argparse.Namespace, target: Target) -> tuple[list[Mined], dict[str, Any]]:
    if not any(map(_is_run, args.tables)):
        table = arguments.table(args)
        files_of(table, f", and that of a TREC run in {', '.join(TREC_SUFFIXES)}")
        reading = Reading(table)
        lines, counts = imported.from_examples(
            reading.examples(), target, skip_unknown=args.skip_bad_rows, keep_identical_ids=args.keep_identical_ids
        )
        return lines, {**counts, "bad_rows": reading.num_bad_rows}
    if len(args.tables) > 1:
        raise InputError("a TREC run is read alone; give one file, and call again for the next.")
    ranking = metrics.read_trec_run(args.tables[0])
    ranks = {"first_rank": args.first_rank, "depth": args.depth}
    return imported.from_ranking(ranking, target, **ranks, keep_identical_ids=args.keep_identical_ids)


def _is_run(path: str) -> bool:
    return Path(path.removesuffix(".gz")).suffix in TREC_SUFFIXES


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = command.Parser(description=__doc__)
    arguments.add_table(parser)
    of = parser.add_mutually_exclusive_group(required=True)
    of.add_argument("--dataset_dir", type=Path, help="a BEIR folder or a table with the training pairs")
    of.add_argument("--pairs_dir", type=Path, help="or a folder written by import_pairs")
    parser.add_argument("--split_of_pairs", default="train", help="split of --dataset_dir (default train)")
    parser.add_argument(
        "--first_rank", type=int, default=1, help="first rank of a TREC run, without relevant documents (default 1)"
    )
    parser.add_argument("--depth", type=int, default=30, help="last rank of a TREC run (default 30)")
    input_policy.add_identical_ids(parser)
    parser.add_argument("--negatives_dir", type=Path, required=True, help="folder of generations; the next is added")
    args = parser.parse_args(argv)
    if args.pairs_dir:
        parser.refuse(args, ("split_of_pairs",), beside="--pairs_dir")
    if any(map(_is_run, args.tables)):
        parser.refuse(args, ("columns", "header", "split", "subset", "skip_bad_rows"), beside="a TREC run")
    else:
        parser.refuse(args, ("first_rank", "depth"), beside="a table, which has no ranks")
    return args


if __name__ == "__main__":
    command.run(main)
