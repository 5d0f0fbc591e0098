"""Mines hard negatives for the training pairs of a BEIR folder, by a run or by BM25; prints one JSON object.

python -m tools.mine_negatives --dataset_dir=data/beir/scifact --bm25 --negatives_dir=runs/bm25/negatives
python -m tools.mine_negatives --dataset_dir=data/beir/scifact --run_dir=runs/warm_up --num_neg_queries=20

Each call adds a generation to --negatives_dir. A training run takes the newest one there when it begins, and with
train.follow_every_steps also those that come later:

de-jax train --gin_file=recipes/fine_tune.gin --gin.train.loss=@ance --gin.beir_pairs.negatives_dir=runs/bm25/negatives ...
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from tqdm import tqdm

from de_jax import command
from de_jax.data import beir, negatives
from de_jax.data.training_set import open_stores, text_hashes
from de_jax.retrieval import faiss_index, miner
from de_jax.training.run import load_run
from de_jax.types import InputError


def main(argv: list[str] | None = None) -> None:
    """The command."""
    args = _parse_args(argv)
    if not args.negatives_dir and args.bm25:
        raise InputError("--negatives_dir is missing; name the folder that generations go to.")
    negatives_dir = Path(args.negatives_dir or Path(args.run_dir) / "negatives")
    filters = miner.Filters(args.first_rank, args.last_rank, args.margin, args.max_score_ratio)
    options: dict[str, Any] = {"num_neg_docs": args.num_neg_docs, "filters": filters, "seed": args.seed}
    if args.bm25 and args.num_neg_queries:
        raise InputError("--num_neg_queries are mined by embeddings; give a --run_dir in the place of --bm25.")
    build_index = faiss_index.index_builder(args.index, faiss_index.SearchOptions(args.nprobe, args.ef_search, args.faiss_device))
    if args.bm25:
        mined, facts = miner.mine_bm25(beir.read(args.dataset_dir, args.split), **options)
    else:
        qrels = beir.read_qrels(beir.find_qrels(args.dataset_dir, args.split))
        run = load_run(args.run_dir, args.step)
        stores = open_stores(args.dataset_dir, run.query_tokenizer, run.doc_tokenizer)
        name = Path(args.dataset_dir).resolve().name
        with tqdm(total=stores[1].num_texts, desc="encode", unit=" docs", delay=0.5) as bar:
            mined, facts = miner.mine(
                run, qrels, *stores, build_index, name=name, num_neg_queries=args.num_neg_queries, progress=bar.update, **options
            )
    facts |= {"mined_by": "bm25" if args.bm25 else str(args.run_dir), "split": args.split, "seed": args.seed, **filters._asdict()}
    number = max(negatives.numbers(negatives_dir), default=0) + 1
    generation = negatives.write_generation(negatives_dir, number, mined, {**text_hashes(args.dataset_dir), **facts})
    print(json.dumps({"generation_dir": str(generation.folder), "num_pairs": len(mined), **facts}))


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset_dir", required=True, help="a BEIR folder")
    parser.add_argument("--split", default="train", help="whose pairs get negatives (default train)")
    by = parser.add_mutually_exclusive_group(required=True)
    by.add_argument("--run_dir", help="the run that ranks")
    by.add_argument("--bm25", action="store_true", help="BM25 ranks")
    parser.add_argument("--step", help="checkpoint of the run: a step, or best; default the newest")
    parser.add_argument("--negatives_dir", help="folder of generations; default <run_dir>/negatives")
    parser.add_argument("--num_neg_docs", type=int, default=20, help="of each pair, at most (default 20)")
    parser.add_argument("--num_neg_queries", type=int, default=0, help="for DANCE's dual task, at most (default 0)")
    parser.add_argument("--first_rank", type=int, default=1, help="best rank to draw from, positives not counted (default 1)")
    parser.add_argument("--last_rank", type=int, default=200, help="worst rank to draw from (default 200)")
    parser.add_argument("--margin", type=float, help="negatives score at most the positive's score minus this")
    parser.add_argument("--max_score_ratio", type=float, help="negatives score at most this share of the positive's score")
    parser.add_argument("--index", default="exact", help="exact (default), or a FAISS factory string")
    parser.add_argument("--nprobe", type=int, help="inverted lists to visit, of an IVF index")
    parser.add_argument("--ef_search", type=int, help="candidates to keep, of an HNSW index")
    parser.add_argument("--faiss_device", default="cpu", choices=faiss_index.DEVICES, help="where FAISS searches (default cpu)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    return parser.parse_args(argv)


if __name__ == "__main__":
    command.run(main)
