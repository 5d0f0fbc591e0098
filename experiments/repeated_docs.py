"""A training split in which documents repeat as often as asked, for SamToNe's Table 3; prints one JSON object.

python -m experiments.repeated_docs --dataset_dir=data/squad --num_pairs=4000 --unique_share=0.5 --out_split=train_50

Writes qrels/<out_split>.tsv beside the others; train on it with --gin.beir_pairs.split=<out_split>. Splits of as many pairs differ
in the share of unique documents alone, num_docs / num_pairs: .17 in TriviaQA, .98 in MS MARCO (Moiseev et al. 2023). A batch holds
repeated documents only with --gin.PairsOptions.unique_in_batch=False, and they are negatives only with mask_duplicates=False, as in
recipes/paper/samtone/.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections import defaultdict
from pathlib import Path

from de_jax import command
from de_jax.data.text import beir
from de_jax.files.outputs import atomic_file
from de_jax.settings import PositiveInt, Share, numeric
from de_jax.types import InputError

Pair = tuple[str, str]
"""A query's id and a document's."""


def main(argv: list[str] | None = None) -> None:
    """The command."""
    args = _parse_args(argv)
    qrels = beir.read_qrels(beir.find_qrels(args.dataset_dir, args.split))
    pairs = [(query, doc) for query, own in qrels.items() for doc, grade in own.items() if grade > 0]
    chosen = choose(pairs, args.num_pairs, args.unique_share)
    lines = ["query-id\tcorpus-id\tscore", *(f"{query}\t{doc}\t{qrels[query][doc]}" for query, doc in chosen)]
    text, path = "\n".join(lines) + "\n", args.dataset_dir / "qrels" / f"{args.out_split}.tsv"
    if args.out_split in beir.find_splits(args.dataset_dir) and not (path.is_file() and path.read_text(encoding="utf-8") == text):
        raise InputError(f"{args.dataset_dir} has another split {args.out_split} already; name a new one.")
    with atomic_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    num_docs = len({doc for _, doc in chosen})
    print(json.dumps({"split": args.out_split, "num_pairs": len(chosen), "num_docs": num_docs}))


def choose(pairs: list[Pair], num_pairs: int, unique_share: float) -> list[Pair]:
    """Pairs of `unique_share` times `num_pairs` documents, those with the most queries, in an order that is always the same.

    Raises:
        InputError: the documents have too few queries for that.
    """
    by_doc = defaultdict(list)
    for pair in sorted(pairs, key=_order):
        by_doc[pair[1]].append(pair)
    num_docs = max(round(unique_share * num_pairs), 1)
    docs = sorted(by_doc.values(), key=len, reverse=True)[:num_docs]
    others = sorted((pair for own in docs for pair in own[1:]), key=_order)[: num_pairs - len(docs)]
    if len(docs) < num_docs or len(docs) + len(others) < num_pairs:
        raise InputError(
            f"{num_docs} documents give {len(docs) + len(others)} pairs of the {num_pairs} asked for; take fewer pairs, or a share "
            f"of unique documents nearer to the {len(by_doc) / len(pairs):.2f} of the whole split."
        )
    return sorted([own[0] for own in docs] + others, key=_order)


def _order(pair: Pair) -> bytes:
    """Random and always the same."""
    return hashlib.sha256("\t".join(pair).encode()).digest()


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset_dir", type=Path, required=True, help="a BEIR folder")
    parser.add_argument("--split", default="train", help="whose pairs are chosen from (default train)")
    parser.add_argument("--num_pairs", type=numeric(PositiveInt), required=True, help="of the new split")
    parser.add_argument("--unique_share", type=numeric(Share), required=True, help="documents over pairs, up to 1")
    parser.add_argument("--out_split", required=True, help="the new split; qrels/<out_split>.tsv must not exist")
    return parser.parse_args(argv)


if __name__ == "__main__":
    command.run(main)
