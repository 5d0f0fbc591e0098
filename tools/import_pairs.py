"""Makes training data from a table with a column of queries and a column of documents; prints one JSON object to stdout.

As tokens, for Recipe.data = @stored_pairs, with the vocabulary of a model or a file:

    de-jax import_pairs qa.csv --model=sentence-transformers/all-MiniLM-L6-v2 --dev_fraction=0.1 --out_dir=data/qa_pairs

As a BEIR folder for --dataset_dir of every other command, to train, search and score:

    de-jax import_pairs qa.csv --format=beir --dev_fraction=0.1 --out_dir=data/qa

Tables are csv, tsv, jsonl or a JSON list (plain or .gz), parquet, Arrow, a folder of datasets.save_to_disk or a name on the Hugging
Face hub. docs/data.md lists the known column names. For other names:

    de-jax import_pairs posts.parquet --columns query=title doc=body neg_docs=other,another --format=beir --out_dir=data/posts
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from de_jax import arguments, command
from de_jax.data.batches.pair_batches import TrainingPairs
from de_jax.data.sources import pair_store, table_store, table_texts
from de_jax.data.sources.pair_store import Tables
from de_jax.data.text import beir
from de_jax.data.text.table_files import files_of
from de_jax.data.text.table_rows import Reading
from de_jax.data.text.tokenizing import Tokenizer, load_tokenizer
from de_jax.files import folders
from de_jax.interop.fine_tuning import pretrained_tokenizer
from de_jax.settings import ShareBelowOne, numeric
from de_jax.types import InputError

FORMATS = ("pairs", "beir")


def main(argv: list[str] | None = None) -> None:
    """The command; prints the folder's counts."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.format == "beir":
        parser.refuse_others(args, "--format=beir", used=vars(args).keys() - {"model", "tokenizer", "doc_tokenizer"})
    for flag in ("dev_table", "dev_split"):
        if getattr(args, flag):
            parser.refuse(args, ["dev_fraction"], beside=f"--{flag}")
    table = arguments.table(args)
    files_of(table)  # refused before a model is fetched
    tables = pair_store.tables_of(table, dev_path=args.dev_table, dev_split=args.dev_split, dev_fraction=args.dev_fraction)
    read: list[Reading] = []
    report = _write_beir(args, tables, read) if args.format == "beir" else _write_pairs(args, tables, read)
    print(json.dumps(report | _rows_read(read)))


def _write_beir(args: argparse.Namespace, tables: Tables, read: list[Reading]) -> dict[str, Any]:
    folders.require_replaceable(args.out_dir, beir.BEIR_KIND)
    return {"dataset_dir": str(args.out_dir), **table_texts.write_beir(args.out_dir, tables, read)}


def _write_pairs(args: argparse.Namespace, tables: Tables, read: list[Reading]) -> dict[str, Any]:
    """Writes a folder of pairs, unless the same was written before."""
    tokenizers = _tokenizers(args)
    made_from = pair_store.fingerprint_of(tables, tokenizers)
    store = _open(args.out_dir, made_from) or table_store.write_pairs(args.out_dir, tables, tokenizers, made_from, read)
    return {
        "pairs_dir": str(args.out_dir),
        "queries": store.query_store.num_texts,
        "docs": store.doc_store.num_texts,
        "train_pairs": len(store.pairs),
        "dev_pairs": sum(map(len, (store.dev_qrels or {}).values())),
        "neg_docs": 0 if store.neg_docs is None else store.neg_docs.shape[1],
        "has_scores": store.scores is not None,
    }


def _open(out_dir: Path, made_from: str) -> TrainingPairs | None:
    """The output of an earlier call of the same command, or None."""
    if not out_dir.is_dir() or not any(out_dir.iterdir()):
        return None
    if not (out_dir / "manifest.json").is_file() or (store := pair_store.open_pair_store(out_dir)).made_from != made_from:
        raise InputError(
            f"{out_dir} holds data of another table, or of another version of it; choose another folder, or remove it."
        )
    return store


def _tokenizers(args: argparse.Namespace) -> dict[str, Tokenizer]:
    if bool(args.model) == bool(args.tokenizer):
        raise InputError("give the vocabulary: --model=<run, folder or hub name>, or --tokenizer=<file>; or write --format=beir.")
    if args.model:
        return {side: pretrained_tokenizer(source=args.model, tower=side)() for side in ("query", "doc")}
    return {"query": load_tokenizer(args.tokenizer), "doc": load_tokenizer(args.doc_tokenizer or args.tokenizer)}


def _rows_read(read: list[Reading]) -> dict[str, Any]:
    """Counts of the rows; empty if nothing was read."""
    rows, bad_rows = (sum(getattr(one, name) for one in read) for name in ("num_rows", "num_bad_rows"))
    return {"rows": rows, "bad_rows": bad_rows, "columns": read[0].columns} if rows else {}


def _parser() -> command.Parser:
    parser = command.Parser(description=__doc__)
    arguments.add_table(parser)
    parser.add_argument("--dev_table", default="", help="a table of dev pairs, to score checkpoints")
    parser.add_argument("--dev_split", help="split of dev pairs of a datasets folder or of the hub")
    parser.add_argument(
        "--dev_fraction", type=numeric(ShareBelowOne), default=0.0, help="or the share of the queries for the dev split (default 0)"
    )
    parser.add_argument(
        "--format", choices=FORMATS, default="pairs", help="pairs: tokens for training; beir: texts for every command"
    )
    parser.add_argument("--model", help="model with the vocabulary and prompts: a run, a folder or a name on the hub")
    parser.add_argument("--tokenizer", help="or spiece.model, tokenizer.json, or a folder with either")
    parser.add_argument("--doc_tokenizer", help="another vocabulary for documents")
    parser.add_argument("--out_dir", type=Path, required=True, help="the folder to write")
    return parser


if __name__ == "__main__":
    command.run(main)
