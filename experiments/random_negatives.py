"""Random documents as hard negatives of a BEIR folder's training pairs, for an arm that has one negative a pair like the others.

python -m experiments.random_negatives --dataset_dir=data/beir/scifact --negatives_dir=runs/random_negatives --num_neg_docs=20

Prints one JSON object. Drawn from the whole corpus, each query's relevant documents left out.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from de_jax import command
from de_jax.data.negatives import generations
from de_jax.data.negatives.mined_pairs import Mined
from de_jax.data.sources.training_set import text_hashes
from de_jax.data.text import beir
from de_jax.mining.mining_run import only_miner
from de_jax.settings import PositiveInt, Seed, numeric


def main(argv: list[str] | None = None) -> None:
    """The command."""
    args = _parse_args(argv)
    qrels = beir.read_qrels(beir.find_qrels(args.dataset_dir, args.split))
    doc_ids = [doc_id for doc_id, _ in beir.iter_docs(beir.find_file(args.dataset_dir, "corpus"), skip_empty=True)]
    rng = np.random.default_rng(args.seed)
    lines = []
    for query_id, judged in qrels.items():
        relevant = {query_id, *(doc_id for doc_id, grade in judged.items() if grade > 0)}
        for doc_id in sorted(relevant - {query_id}):
            drawn = dict.fromkeys(doc_ids[row] for row in rng.integers(len(doc_ids), size=args.num_neg_docs))
            lines.append(Mined(query_id, doc_id, [one for one in drawn if one not in relevant], []))
    facts = {**text_hashes(args.dataset_dir), "mined_by": "random", "split": args.split, "seed": args.seed}
    with only_miner(args.negatives_dir):
        number = generations.next_number(args.negatives_dir)
        generation = generations.write_lines(args.negatives_dir, number, lines, facts)
    print(json.dumps({"generation_dir": str(generation.folder), "num_pairs": len(lines)}))


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset_dir", type=Path, required=True, help="a BEIR folder")
    parser.add_argument("--split", default="train", help="whose pairs get negatives (default train)")
    parser.add_argument("--num_neg_docs", type=numeric(PositiveInt), default=20, help="of a pair, at most (default 20)")
    parser.add_argument("--negatives_dir", type=Path, required=True, help="folder of generations; gets the next one")
    parser.add_argument("--seed", type=numeric(Seed), default=0)
    return parser.parse_args(argv)


if __name__ == "__main__":
    command.run(main)
