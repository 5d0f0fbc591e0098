"""Checks that BEIR folders as tables give the same pairs and the same training, bit for bit; prints one JSON line a set.

python -m experiments.table_formats --dataset_dir data/medquad data/tldr-pages data/arxiv --tokenizer data/t5/spiece.model

The training pairs of each set are written in every format, by csv, json and pyarrow, and read by `table_pairs`; a tiny T5 then
trains on the folder and on each table. `different_batches` and `different_parameters` count the batches and parameters that differ
in any bit. A table has one text for a text with several ids; `repeated_texts` counts the further ids.
"""

from __future__ import annotations

import argparse
import csv
import functools
import gzip
import itertools
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from de_jax.data.sources.options import PairsOptions
from de_jax.data.sources.pair_store import table_pairs
from de_jax.data.sources.training_set import beir_pairs
from de_jax.data.text import beir
from de_jax.losses.in_batch import in_batch_softmax
from de_jax.models.dual_encoder import DualEncoder
from de_jax.models.t5 import T5Config
from de_jax.models.tower import TowerConfig
from de_jax.training.optim.optimizer import adafactor, linear, make_optimizer
from de_jax.training.step.train_step import init_state, make_train_step
from de_jax.types import Batches

Rows = list[dict[str, str]]


def main(argv: list[str] | None = None) -> None:
    """The command."""
    args = _parse_args(argv)
    for dataset_dir in args.dataset_dir:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(_compare(dataset_dir, Path(folder), args)), flush=True)


def _compare(dataset_dir: Path, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    options = PairsOptions(
        tokenizer=str(args.tokenizer), batch_size=args.batch_size, max_doc_length=128, cache_dir=str(folder / "cache")
    )
    rows = _rows(dataset_dir)
    original = beir_pairs(str(dataset_dir), options=options, skip_empty=True)
    train = _trainer(options.max_doc_length)
    expected = train(original.batches, args.num_steps)
    formats = {}
    for name in args.formats:
        path = folder / f"{dataset_dir.name}.{name}"
        WRITERS[name](path, rows)
        table = table_pairs(str(path), options=options)
        both = zip(original.batches(0), table.batches(0), strict=True)
        different = sum(not _same_texts(one, other) for one, other in itertools.islice(both, args.num_batches))
        parameters = jax.tree.map(lambda a, b: int((a != b).sum()), expected, train(table.batches, args.num_steps))
        formats[name] = {"different_batches": different, "different_parameters": sum(jax.tree.leaves(parameters))}
        path.unlink()
    texts = [len({row[name] for row in rows}) for name in ("query", "title_and_text")]
    ids = [len(np.unique(column)) for column in original.texts.pairs.T] if original.texts else []
    repeated = sum(ids) - sum(texts)
    return {"dataset": dataset_dir.name, "pairs": len(rows), "repeated_texts": repeated, "batches": args.num_batches,
            "steps": args.num_steps, **formats}  # fmt: skip


def _rows(dataset_dir: Path) -> Rows:
    """The training pairs in the order of the judgements, with titles in a column of their own."""
    path = beir.find_file(dataset_dir, "corpus")
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else open(path, encoding="utf-8") as file:
        docs = {record["_id"]: record for record in map(json.loads, file)}
    queries = dict(beir.iter_queries(beir.find_file(dataset_dir, "queries"), skip_empty=True))
    qrels = beir.read_qrels(beir.find_qrels(dataset_dir, "train"))
    pairs = [(query, docs[doc]) for query, judged in qrels.items() for doc, grade in judged.items() if grade > 0]
    rows = [
        {"query": queries[query], "title": doc.get("title") or "", "answer": doc["text"],
         "title_and_text": f"{doc.get('title') or ''} {doc['text']}".strip()}
        for query, doc in pairs if query in queries
    ]  # fmt: skip
    return [row for row in rows if row["title_and_text"]]


def _same_texts(one: Any, other: Any) -> bool:
    """Whether two batches hold the same tokens in the same places, and agree on which rows have the same text."""
    tokens = jax.tree.map(np.array_equal, (one.query, one.doc), (other.query, other.doc))
    ids = (
        np.array_equal(a[:, None] == a, b[:, None] == b) for a, b in ((one.query_id, other.query_id), (one.doc_id, other.doc_id))
    )
    return all(jax.tree.leaves(tokens)) and all(ids)


def _trainer(max_doc_length: int) -> Callable[[Batches, int], Any]:
    """A function that trains a tiny T5 on a stream of batches and gives its parameters."""
    encoder = T5Config(vocab_size=32128, model_dim=32, num_layers=1, num_heads=2, head_dim=16, mlp_dim=64, dtype="float32")
    tower = TowerConfig(encoder, projection_dim=32)
    model = DualEncoder(query=tower, doc=tower)
    tx = functools.partial(make_optimizer, adafactor, linear(peak=0.02, num_steps=1000))
    first = init_state(model, tx, jax.random.key(0))
    step = jax.jit(make_train_step(model, functools.partial(in_batch_softmax, temperature=0.05), tx(first.params)))

    def train(batches: Batches, num_steps: int) -> Any:
        state = first
        for batch in itertools.islice(batches(0), num_steps):
            state, _ = step(state, batch)
        return state.params

    return train


def _write_csv(path: Path, rows: Rows, **dialect: Any) -> None:
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ["query", "title", "answer"], extrasaction="ignore", **dialect)
        writer.writeheader()
        writer.writerows(rows)


def _plain(rows: Rows) -> Iterator[dict[str, str]]:
    return ({name: row[name] for name in ("query", "title", "answer")} for row in rows)


def _write_jsonl(path: Path, rows: Rows) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in _plain(rows)), encoding="utf-8")


def _write_json(path: Path, rows: Rows) -> None:
    path.write_text(json.dumps(list(_plain(rows)), ensure_ascii=False), encoding="utf-8")


def _write_arrow(path: Path, rows: Rows) -> None:
    import pyarrow
    from pyarrow import feather, parquet

    table = pyarrow.Table.from_pylist(list(_plain(rows)))
    if path.suffix == ".parquet":
        parquet.write_table(table, path)
    elif path.suffix == ".feather":
        feather.write_feather(table, path)
    else:
        with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)


WRITERS: dict[str, Callable[[Path, Rows], None]] = {
    "csv": _write_csv,
    "tsv": functools.partial(_write_csv, delimiter="\t"),
    "jsonl": _write_jsonl,
    "json": _write_json,
    "parquet": _write_arrow,
    "feather": _write_arrow,
    "arrow": _write_arrow,
}


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset_dir", type=Path, nargs="+", required=True, help="BEIR folders with a split train")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--formats", nargs="+", choices=list(WRITERS), default=list(WRITERS), help="default all")
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--num_batches", type=int, default=500, help="that are compared")
    parser.add_argument("--num_steps", type=int, default=20, help="of training")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
