"""A table of pairs as a source of training data: it is read once into a folder of pairs, which is kept and trained from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from de_jax.data.batches.pair_batches import TrainingPairs
from de_jax.data.sources import pair_store, table_store
from de_jax.data.sources.options import PairsOptions, Share
from de_jax.data.sources.table_store import Tables
from de_jax.data.sources.training_set import TrainingSet, opened_tokenizers
from de_jax.data.text import table_files
from de_jax.data.text.table_files import Rows, Table
from de_jax.data.text.tokenizing import Tokenizer
from de_jax.files import folders, outputs
from de_jax.settings import LocalPath, ShareBelowOne, checked
from de_jax.types import InputError

_READ_AS = "table 3"
"""Changes whenever equal tables are read as other pairs, so that a kept folder of before is not used."""


@checked
def table_pairs(
    path: LocalPath | Rows = "",
    *,
    columns: Mapping[str, str] | None = None,
    header: Sequence[str] = (),
    split: str = "train",
    subset: str = "",
    dev_path: LocalPath = "",
    dev_fraction: ShareBelowOne = 0.0,
    skip_bad_rows: bool = False,
    options: PairsOptions = PairsOptions(),
    share: Share = Share(),
) -> TrainingSet:
    """Opens a table with a column of queries and one of documents for training; it is read on first use and kept as a pair store.

    The pairs are in the order of the rows. Equal texts are one text, hard negatives and scores are kept for each row; see
    `table_rows` for what columns are called. A second start reads the files for their checksum alone.

    Args:
        path: csv, tsv, jsonl or a JSON list (plain or .gz), parquet, Arrow, a folder of `datasets.save_to_disk`, a name of the
            Hugging Face hub, several of these, or a sequence of dictionaries.
        columns: the column of "query", "doc", "neg_docs", ..., where its name is not known; see `Table.columns`.
        header: names of the columns of a csv or tsv file without a first line that names them.
        split: of a `datasets` folder or a name of the hub; `options.dev_split` is the split that scores checkpoints.
        subset: of a name of the hub that has several.
        dev_path: a table that scores checkpoints; its documents are searched among those of both.
        dev_fraction: where no other table does, the share of the queries whose pairs score checkpoints and are not trained on. A
            query is among them or not by its text, whatever the table.
        skip_bad_rows: count rows that cannot be used on stderr instead of refusing them.
        options: how the pairs become batches; `tokenizer` must be set.
        share: what this process makes of them.

    Raises:
        InputError: a table that cannot be read, a row that cannot be used (names the file, the row and the column), or batches that
            the pairs cannot fill.
    """
    for name, value in (("path", path), ("tokenizer", options.tokenizer)):
        if isinstance(value, str) and not value:
            raise InputError(f"table_pairs.{name} is not set; add {share.scope}table_pairs.{name}=<path>.")
    tokenizers = dict(zip(("query", "doc"), opened_tokenizers(options), strict=True))
    table = Table(path, tuple(header), split, subset, columns or {}, skip_bad_rows)
    tables = tables_of(table, dev_path=dev_path, dev_split=options.dev_split, dev_fraction=dev_fraction)
    made_from = fingerprint(tables, tokenizers)
    folder = _cache_dir(options.cache_dir) / f"{_stem(path)}-{made_from[:16]}"

    def build(out_dir: Path) -> TrainingPairs:
        return table_store.write_pairs(out_dir, tables, tokenizers, made_from)

    return pair_store.trained_on(folders.build_once(folder, pair_store.open_pair_store, build), options, share)


def tables_of(table: Table, *, dev_path: LocalPath = "", dev_split: str | None = None, dev_fraction: float = 0.0) -> Tables:
    """A table and its dev table; arguments as of `table_pairs`. A dev table or split comes before a fraction.

    Raises:
        InputError: a `dev_split` of a table without splits, or beside a `dev_path`.
    """
    if dev_split and dev_path:
        raise InputError(f"dev_split {dev_split!r} and the table {dev_path} would both be the dev set; leave one of them out.")
    if dev_split and not (isinstance(table.source, str) and table_files.has_splits(table.source)):
        raise InputError(
            f"{table.name} has no splits, so not {dev_split!r} either; leave dev_split out, and give a table or a share for dev."
        )
    if dev_path:
        alone: dict[str, Any] = {} if table_files.has_splits(dev_path) else {"split": "train", "subset": ""}
        return Tables(table, table._replace(source=dev_path, **alone))
    return Tables(table, table._replace(split=dev_split)) if dev_split else Tables(table, None, dev_fraction)


def fingerprint(tables: Tables, tokenizers: Mapping[str, Tokenizer]) -> str:
    """A hash of all that decides a folder of pairs: the content of the tables, how they are read, and the tokenizers."""
    contents = [table_files.fingerprint(one) for one in (tables.train, tables.dev) if one]
    prints = [tokenizer.fingerprint for tokenizer in tokenizers.values()]
    settings = [sorted(tables.train.columns.items()), tables.train.skip_bad_rows]
    described = [pair_store.PAIR_STORE.format, _READ_AS, *contents, prints, settings, tables.dev_fraction]
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()


def _stem(path: str | Rows) -> str:
    """A readable name of the folder; its hash makes it unique."""
    name = Path(path).name.split(".")[0] if isinstance(path, str) else ""
    return "".join(character for character in name if character.isalnum() or character in "-_") or "table"


def _cache_dir(cache_dir: str) -> Path:
    return Path(cache_dir) if cache_dir else outputs.cache_dir() / "pair_stores"
