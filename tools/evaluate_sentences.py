"""Scores a run on retrieval of answer sentences, as in MultiReQA; prints one JSON object to stdout, a table to stderr.

de-jax evaluate_sentences --run_dir=runs/sde --dataset_dir=data/beir/xquad-en-sentence

Measures are P@1, and MRR without a cut-off over all sentences of the corpus, by the best correct sentence. Stored rankings are cut
at --depth. MRR looks deeper and is given for the run and for BM25.
"""

from __future__ import annotations

import argparse
import json
import sys

from de_jax import arguments, command
from de_jax.evaluation import first_ranks, sentences
from de_jax.evaluation.task import beir_task, evaluate
from de_jax.reports import tables

MEASURES = ("P@1",)


def main(argv: list[str] | None = None) -> None:
    """The command."""
    args = _parse_args(argv)
    policy = arguments.policy(args)
    task = beir_task(args.dataset_dir, args.split)
    run = arguments.run(args)
    ranks = {"dense": sentences.dense_ranks(run, task, policy, min_relevance=args.min_relevance)} if run else {}
    report = evaluate(task, policy, run)
    if "bm25" in report:
        ranks["bm25"] = sentences.bm25_ranks(task, policy, min_relevance=args.min_relevance)
    for system, found in ranks.items():
        report[system]["mrr"] = first_ranks.means(found)["mrr"]
    if args.out_ranks:
        first_ranks.write(args.out_ranks, ranks["dense" if run else "bm25"])
    print(tables.report_tables([report]), file=sys.stderr)
    print(json.dumps(report))


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = command.Parser(description=__doc__)
    parser.add_argument("--dataset_dir", required=True, help="a BEIR folder with sentences as documents")
    parser.add_argument("--split", default="test", help="split of the judgements (default test)")
    parser.add_argument("--out_ranks", help="keep the rank of each query's first correct sentence in this JSON file")
    arguments.add(parser, measures=MEASURES)
    return arguments.parsed(parser, argv)


if __name__ == "__main__":
    command.run(main)
