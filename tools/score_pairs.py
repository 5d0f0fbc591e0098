"""Scores training pairs and their hard negatives with a teacher, once; prints one JSON object.

de-jax score_pairs --dataset_dir=data/beir/scifact --negatives_dir=runs/bm25/negatives --cross_encoder=<model> \\
    --out_dir=scores/scifact
de-jax score_pairs --pairs_dir=data/questions_pairs --model=runs/large --out_dir=scores/questions

The scores are the logits of a cross-encoder that sentence-transformers opens, or the inner products of a dual encoder that this
library opens. Writes scores.tsv (query id, document id, score). Repeat the command to continue after a stop. Distillation losses
and mine_negatives --teacher_scores read the file:

de-jax train --gin_file=recipes/distil.gin --gin.PairsOptions.teacher_scores=scores/scifact ...

--engine=ray spreads the work over the machines of a Ray cluster, and --shard over jobs of any other kind.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable
from typing import Any

from de_jax import arguments, command
from de_jax.data.text import input_policy
from de_jax.files.outputs import progress_bar
from de_jax.mining import teacher
from de_jax.mining.teacher import Candidates, Score
from de_jax.model import load
from de_jax.retrieval import encode


def main(argv: list[str] | None = None) -> None:
    """The command."""
    args = _parse_args(argv)
    if arguments.by_engine(args, "de_jax.tools.score_pairs", argv):
        return
    part = arguments.part(args)
    if args.pairs_dir:
        candidates = teacher.of_pair_store(args.pairs_dir)
    else:
        candidates = teacher.of_dataset(args.dataset_dir, args.split, args.negatives_dir or "", skip_empty=args.skip_empty)
    if part and args.model:
        teacher.by_run(load(args.model).run, candidates, args.out_dir, part)
        print(json.dumps({"shard": str(part)}))
        return
    name, settings, make_score = _teacher(args, candidates)
    with progress_bar(total=len(candidates.pairs), desc="score", unit=" pairs", delay=0.5) as bar:
        teacher.write(args.out_dir, candidates, name, make_score, settings=settings, part=part, progress=bar.update)
    if part:
        print(json.dumps({"shard": str(part)}))
        return
    sizes = {"num_queries": len(candidates.queries), "num_docs": len(candidates.docs), "num_scores": len(candidates.pairs)}
    print(json.dumps({"out_dir": args.out_dir, "teacher": name, **sizes}))


def _teacher(args: argparse.Namespace, candidates: Candidates) -> tuple[str, dict[str, Any], Callable[[], Score]]:
    """The name of the teacher, the settings on which its scores depend, and a function that opens it."""
    if args.cross_encoder:
        options = {"batch_size": args.batch_size, "max_length": args.max_length}
        make = functools.partial(teacher.by_cross_encoder, args.cross_encoder, candidates, **options)
        return args.cross_encoder, {"max_length": args.max_length}, make
    run = load(args.model).run
    return encode.name_with_hashes(args.model, run), {}, functools.partial(teacher.by_run, run, candidates, args.out_dir)


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = command.Parser(description=__doc__)
    pairs = parser.add_mutually_exclusive_group(required=True)
    pairs.add_argument("--dataset_dir", help="a BEIR folder or a table")
    pairs.add_argument("--pairs_dir", help="a folder of pairs; its texts are decoded from their tokens")
    parser.add_argument("--split", default="train", help="split of --dataset_dir with the pairs (default train)")
    parser.add_argument(
        "--negatives_dir", help="for --dataset_dir: a generation, or a folder of generations: its newest complete one"
    )
    input_policy.add_flags(parser)
    by = parser.add_mutually_exclusive_group(required=True)
    by.add_argument("--cross_encoder", help="a folder or hub name for sentence-transformers")
    by.add_argument("--model", help="a run, or any model that import_model reads")
    parser.add_argument("--out_dir", required=True, help="folder of the scores; new, empty or started by this command")
    parser.add_argument("--batch_size", type=int, default=32, help="batch size of a cross-encoder, in pairs (default 32)")
    parser.add_argument("--max_length", type=int, help="tokens of a cross-encoder's input; default the model's")
    arguments.add_shard(parser)
    args = parser.parse_args(argv)
    if args.pairs_dir:
        parser.refuse(args, ("split", "negatives_dir", "skip_empty"), beside="--pairs_dir")
    if args.model:
        parser.refuse(args, ("batch_size", "max_length"), beside="--model")
    return args


if __name__ == "__main__":
    command.run(main)
