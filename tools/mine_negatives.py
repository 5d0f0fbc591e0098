"""Mines hard negatives for the training pairs of a BEIR folder, with a run or BM25; prints one JSON object.

de-jax mine_negatives --dataset_dir=data/beir/scifact --bm25 --negatives_dir=runs/bm25/negatives
de-jax mine_negatives --dataset_dir=data/beir/scifact --run_dir=runs/warm_up --num_neg_queries=20

Each call adds a generation to --negatives_dir. A training run starts with the newest generation; with
HardNegatives.follow_every_steps it also uses later generations:

de-jax train --gin_file=recipes/fine_tune.gin --gin.Recipe.loss=@ance --gin.PairsOptions.negatives_dir=runs/bm25/negatives ...

--engine=ray spreads the work over the machines of a Ray cluster, and --shard over jobs of any other kind.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from de_jax import arguments, command
from de_jax.data.batches.pair_batches import TrainingPairs
from de_jax.data.negatives import generations
from de_jax.data.negatives.generations import Generation
from de_jax.data.negatives.mined_pairs import MinedPairs
from de_jax.data.sources.training_set import open_stores, qrel_pairs, text_hashes
from de_jax.data.text import beir, input_policy
from de_jax.files.outputs import progress_bar
from de_jax.mining.miner import Miner, embed, mine, mine_bm25
from de_jax.mining.mining_run import by_run, only_miner
from de_jax.retrieval import encode, maxp
from de_jax.retrieval.parts import Part
from de_jax.settings import NonNegativeInt, PositiveFloat, PositiveInt, Seed, Share, numeric
from de_jax.training.run.run_folder import RUN
from de_jax.types import InputError


def main(argv: list[str] | None = None) -> None:
    """The command."""
    args = _parse_args(argv)
    is_run = not args.bm25 and RUN.is_in(Path(args.run_dir))
    if not args.negatives_dir and not is_run:
        raise InputError("--negatives_dir is missing; name the folder that generations go to.")
    negatives_dir = Path(args.negatives_dir or Path(args.run_dir) / "negatives")
    given = {field.name: getattr(args, field.name) for field in dataclasses.fields(Miner)}
    miner = Miner(**{name: value for name, value in given.items() if value is not None})
    miner.check()
    if args.bm25 and (args.shard or args.distributed or args.engine):
        raise InputError("BM25 mines in one job; leave --engine, --shard and --distributed out.")
    part = arguments.shard(args)
    if arguments.by_engine(args, "de_jax.tools.mine_negatives", argv):
        return
    if negatives_dir.is_dir() and part is None:
        with only_miner(negatives_dir):  # refused here, before anything is encoded
            pass

    def write(mined: MinedPairs, facts: dict[str, Any]) -> Generation:
        mined_by = by_run(args.run_dir, negatives_dir) if is_run else {"mined_by": "bm25" if args.bm25 else args.run_dir}
        facts |= {**mined_by, "split": args.split}
        with only_miner(negatives_dir):
            number = generations.next_number(negatives_dir)
            generation = generations.write_generation(negatives_dir, number, mined, {**text_hashes(args.dataset_dir), **facts})
        print(json.dumps({"generation_dir": str(generation.folder), "num_pairs": len(mined.pairs), **facts}))
        return generation

    if args.bm25:
        write(*_mined_by_bm25(args, miner))
    else:
        _mine_by_run(args, miner, part, write)


def _mined_by_bm25(args: argparse.Namespace, miner: Miner) -> tuple[MinedPairs, dict[str, Any]]:
    dataset = beir.read(args.dataset_dir, args.split, skip_empty=args.skip_empty)
    return mine_bm25(dataset, miner, drop_identical_ids=not args.keep_identical_ids)


def _mine_by_run(
    args: argparse.Namespace, miner: Miner, part: Part | None, write: Callable[[MinedPairs, dict[str, Any]], Generation]
) -> None:
    qrels = beir.read_qrels(beir.find_qrels(args.dataset_dir, args.split))
    run = arguments.model(args)
    stores = open_stores(args.dataset_dir, run.query.tokenizer, run.doc.tokenizer, skip_empty=args.skip_empty)
    name, passages = beir.folder_of(args.dataset_dir).resolve().name, maxp.passages_of(run, stores[1])
    texts = TrainingPairs(name, *stores, qrel_pairs(qrels, *stores), {}, passages, not args.keep_identical_ids)
    texts = texts.with_equal_texts(run.query, run.doc)

    with progress_bar(total=(passages or stores[1]).num_texts, desc="encode", unit=" docs", delay=0.5) as bar:
        options: dict[str, Any] = {"keep_as": texts.name, "texts_per_shard": args.texts_per_shard, "progress": bar.update}
        if part:
            encode.cached_docs(run, passages or stores[1], name=options.pop("keep_as"), part=part, **options)
            print(json.dumps({"shard": str(part)}))
            return
        embedded = embed(run, texts, **options)
    mined, facts = mine(embedded, texts, miner)
    write(mined, facts | {"checkpoint_step": run.step, "dtype": run.model.dtype})


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = command.Parser(description=__doc__)
    parser.add_argument("--dataset_dir", required=True, help="a BEIR folder or a table")
    parser.add_argument("--split", default="train", help="split of the pairs (default train)")
    input_policy.add_flags(parser, identical_ids=True)
    by = parser.add_mutually_exclusive_group(required=True)
    by.add_argument("--run_dir", help="the model that ranks: a run, a folder with a model, or a hub name")
    by.add_argument("--bm25", action="store_true", help="BM25 ranks")
    parser.add_argument("--step", help="checkpoint of the run: a step, or best; default the newest")
    arguments.add_dtype(parser)
    parser.add_argument("--negatives_dir", help="folder of generations; default <run_dir>/negatives")
    parser.add_argument("--num_neg_docs", type=int, help="most negatives per pair (default 20)")
    parser.add_argument(
        "--num_neg_queries", type=numeric(NonNegativeInt), help="most negative queries per pair, for DANCE's dual task (default 0)"
    )
    parser.add_argument("--first_rank", type=int, help="best rank to draw from, without positives (default 1)")
    parser.add_argument("--last_rank", type=int, help="worst rank to draw from (default 200)")
    parser.add_argument("--seed", type=numeric(Seed), help="seed of the draw (default 0)")
    guards = parser.add_argument_group("filters against unjudged relevant documents")
    guards.add_argument("--margin", type=float, help="negatives score at most the positive's score minus this")
    guards.add_argument(
        "--max_score_ratio", type=numeric(PositiveFloat), help="negatives score at most this share of the positive's score"
    )
    guards.add_argument("--teacher_scores", help="another model's scores: query id, document id, score, tab-separated")
    guards.add_argument("--max_teacher_score", type=float, help="highest teacher score of a negative")
    guards.add_argument(
        "--max_resemblance", type=numeric(Share), help="highest share of three-token sequences in common with the positive (0 to 1)"
    )
    search = parser.add_argument_group("search")
    search.add_argument("--index", help="exact (default), or a FAISS factory string")
    arguments.add_faiss(search)
    arguments.add_shard(parser)
    parser.add_argument(
        "--texts_per_shard",
        type=numeric(PositiveInt),
        default=encode.TEXTS_PER_SHARD,
        help="texts encoded at a time (default 32768)",
    )
    statistics = parser.add_argument_group("statistics")
    statistics.add_argument("--bm25_negatives_dir", help="BM25's generations, to report the share of common negatives")
    statistics.add_argument("--judgements", help="more complete qrels, to report the share of relevant negatives")
    args = parser.parse_args(argv)
    if args.bm25:
        parser.refuse(args, ("step", "texts_per_shard"), beside="--bm25")
    return args


if __name__ == "__main__":
    command.run(main)
