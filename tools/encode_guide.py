"""Embeds all texts of training pairs with a guide, a fixed model; prints one JSON object.

de-jax encode_guide --dataset_dir=data/beir/scifact --model=all-MiniLM-L6-v2 --out_dir=guides/scifact
de-jax encode_guide --pairs_dir=data/questions_pairs --model=runs/large --out_dir=guides/questions

Writes queries/ and docs/, in the format of encode_corpus. Repeat the command to continue after a stop. The loss `guided` uses them
to mask likely false negatives:

de-jax train --gin_file=recipes/guided.gin --gin.PairsOptions.guide_dir=guides/scifact ...
"""

from __future__ import annotations

import argparse
import json

from de_jax import command
from de_jax.data.text import input_policy
from de_jax.files.outputs import progress_bar
from de_jax.mining import guide
from de_jax.model import load
from de_jax.retrieval import encode
from de_jax.types import InputError


def main(argv: list[str] | None = None) -> None:
    """The command."""
    args = _parse_args(argv)
    if args.pairs_dir and args.skip_empty:
        raise InputError("--skip_empty goes with --dataset_dir; a folder of pairs has left empty texts out.")
    run = load(args.model).run
    name = encode.name_with_hashes(args.model, run)
    if args.pairs_dir:
        texts = guide.of_pair_store(run, args.pairs_dir)
    else:
        texts = guide.of_dataset(run, args.dataset_dir, skip_empty=args.skip_empty)
    with progress_bar(total=texts.number, desc="encode", unit=" texts", delay=0.5) as bar:
        guide.write(args.out_dir, run, name, texts, progress=bar.update)
    sizes = {f"num_{kind}": store.num_texts for kind, store in texts.stores.items()}
    print(json.dumps({"out_dir": args.out_dir, "guide": name, **sizes, "dim": run.model.doc.embedding_dim}))


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = command.Parser(description=__doc__)
    texts = parser.add_mutually_exclusive_group(required=True)
    texts.add_argument("--dataset_dir", help="a BEIR folder or a table")
    texts.add_argument("--pairs_dir", help="a folder of pairs; its texts are decoded from their tokens")
    input_policy.add_flags(parser)
    parser.add_argument("--model", required=True, help="the guide: a run, or any model that import_model reads")
    parser.add_argument("--out_dir", required=True, help="folder of the embeddings; new, empty or started by this command")
    return parser.parse_args(argv)


if __name__ == "__main__":
    command.run(main)
