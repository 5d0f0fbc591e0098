"""Scores a trained run on the dev split of a folder of pairs, from a table or a seqio task; prints one JSON object to stdout.

de-jax export_batches --task=nq --module=my_tasks --dev_split=dev --out_dir=data/nq_pairs
de-jax evaluate_pairs --run_dir=runs/sde --pairs_dir=data/nq_pairs

The corpus is every document of the folder, unless --max_docs makes it smaller. The folder must hold the run's vocabulary. Measures
are nDCG@10, MRR@10 and Recall@100; with one passage per document also P@1 and MRR without a cut-off.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from de_jax import arguments, command
from de_jax.data.sources.pair_store import open_pair_store
from de_jax.data.sources.training_set import dev_set
from de_jax.data.text import input_policy
from de_jax.evaluation import first_ranks
from de_jax.evaluation.dev_scores import score_uncut
from de_jax.types import InputError


def main(argv: list[str] | None = None) -> None:
    """The command."""
    args = _parse_args(argv)
    store = open_pair_store(args.pairs_dir)
    if store.dev_qrels is None:
        raise InputError(f"{args.pairs_dir} has no judgements; write it with --dev_fraction or --dev_split.")
    run = arguments.model(args)
    if args.out_ranks and run.doc.max_passages > 1:
        raise InputError(f"documents of {args.run_dir} are several passages, which have no ranks here; leave --out_ranks out.")
    for tower, tokenizer in (("query", store.query_tokenizer), ("doc", store.doc_tokenizer)):
        if tokenizer.fingerprint != run.side(tower).tokenizer.fingerprint:
            raise InputError(f"{args.pairs_dir} holds another {tower} vocabulary than {args.run_dir}; write it with the run's.")
    max_queries, max_docs = args.max_queries or len(store.dev_qrels), args.max_docs or store.doc_store.num_texts
    sizes, stores = (max_queries, max_docs), (store.query_store, store.doc_store)
    dev = dev_set(store.dev_qrels, *stores, *sizes, keep_identical_ids=args.keep_identical_ids)
    report = {"tasks": [part.task for part in store.parts], "step": run.step}
    report |= {"num_queries": len(dev.query_rows), "num_docs": len(dev.doc_rows)}
    scores, ranks = score_uncut(run, dev)
    if args.out_ranks and ranks:
        first_ranks.write(args.out_ranks, ranks)
    print(json.dumps(report | scores))


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = command.Parser(description=__doc__)
    arguments.add_model(parser, "to score")
    parser.add_argument("--pairs_dir", type=Path, required=True, help="a folder written by import_pairs or export_batches")
    input_policy.add_identical_ids(parser)
    parser.add_argument("--max_queries", type=int, help="score a fixed sample of this many queries; default all")
    parser.add_argument("--out_ranks", help="keep the rank of each query's first relevant document in this JSON file")
    parser.add_argument(
        "--max_docs", type=int, help="search a fixed sample of this many documents and all relevant documents; default all"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    command.run(main)
