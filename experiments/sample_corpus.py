"""A smaller BEIR folder of a larger one, for experiments that encode a corpus many times; prints one JSON object.

python -m experiments.sample_corpus --dataset_dir=data/beir/medquad --num_docs=4000 --out_dir=data/medquad_4000

Keeps every document that a split beside train judges, a fixed random sample of the others, and the judgements and queries of kept
documents. Fewer documents make a search easier, so scores are comparable only within the sample. ``--rest_dir`` gets the other
documents, likewise: pairs for a model that must not have seen the sample, such as a generator of queries. ``--hold_out`` moves
training queries of the sample to a new split, ``held_out``. Their topics are those of the train split, while a data set's own test
split may have other topics.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Set
from pathlib import Path
from typing import Any

from de_jax import command
from de_jax.data.text import beir
from de_jax.types import InputError

HELD_OUT = "held_out"


def main(argv: list[str] | None = None) -> None:
    """The command."""
    args = _parse_args(argv)
    for folder in filter(None, [args.out_dir, args.rest_dir]):
        if folder.exists():
            raise InputError(f"{folder} exists already; name a new folder.")
    names = args.splits or list(beir.find_splits(args.dataset_dir))
    splits = {name: beir.read_qrels(beir.find_qrels(args.dataset_dir, name)) for name in names}
    docs = dict(beir.iter_docs(beir.find_file(args.dataset_dir, "corpus"), skip_empty=True))
    judged = {doc_id for name, qrels in splits.items() if name != "train" for own in qrels.values() for doc_id in own}
    first_others = sorted(docs, key=lambda doc_id: (doc_id not in judged, _order(doc_id)))
    kept = set(first_others[: max(args.num_docs, len(judged & docs.keys()))])
    if args.hold_out:
        if "train" not in splits or HELD_OUT in splits:
            raise InputError(f"--hold_out makes a split {HELD_OUT} of train; read a train split, and none of that name (--splits).")
        held_out = sorted(_judging(splits["train"], kept), key=_order)[: args.hold_out]
        splits[HELD_OUT] = {query_id: splits["train"].pop(query_id) for query_id in held_out}
    queries = dict(beir.iter_queries(beir.find_file(args.dataset_dir, "queries"), skip_empty=True))
    report = _write_part(args.out_dir, {doc_id: text for doc_id, text in docs.items() if doc_id in kept}, queries, splits)
    if args.rest_dir is not None:
        rest = {doc_id: text for doc_id, text in docs.items() if doc_id not in kept}
        report["rest"] = _write_part(args.rest_dir, rest, queries, splits)
    print(json.dumps(report))


def _write_part(out_dir: Path, docs: dict[str, str], queries: dict[str, str], splits: dict[str, beir.Qrels]) -> dict[str, Any]:
    """Writes a BEIR folder of ``docs`` with their judgements and queries; leaves out splits without a judgement of them."""
    left = {name: those for name, qrels in splits.items() if (those := _judging(qrels, docs.keys()))}
    asked = {query for qrels in left.values() for query in qrels}
    beir.write(
        out_dir,
        [(doc_id, "", text) for doc_id, text in docs.items()],
        [(query_id, text) for query_id, text in queries.items() if query_id in asked],
        left,
    )
    pairs = {name: sum(map(len, qrels.values())) for name, qrels in left.items()}
    return {"out_dir": str(out_dir), "num_docs": len(docs), "num_queries": len(asked), "judgements": pairs}


def _judging(qrels: beir.Qrels, docs: Set[str]) -> beir.Qrels:
    """The judgements of these documents."""
    return {query: those for query, own in qrels.items() if (those := {doc: own[doc] for doc in own if doc in docs})}


def _order(text_id: str) -> bytes:
    """Random and always the same."""
    return hashlib.sha256(text_id.encode()).digest()


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset_dir", type=Path, required=True, help="a BEIR folder")
    parser.add_argument("--num_docs", type=int, default=4000, help="at least the documents that splits beside train judge")
    parser.add_argument("--splits", nargs="+", help="of the judgements; default all")
    parser.add_argument("--hold_out", type=int, default=0, help="training queries of the sample that become the split held_out")
    parser.add_argument("--out_dir", type=Path, required=True, help="gets a BEIR folder; new")
    parser.add_argument("--rest_dir", type=Path, help="gets a BEIR folder of the documents that were not kept; new")
    return parser.parse_args(argv)


if __name__ == "__main__":
    command.run(main)
