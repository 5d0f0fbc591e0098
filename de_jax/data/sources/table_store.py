"""Writes the rows of a table as a folder of pairs (`pair_store`).

Equal texts are one text. Its id is the first 20 hex digits of the SHA-256 of its UTF-8 bytes, so it depends on no file and on no
order of rows. Texts are streamed: memory holds the ids and the numbers of rows alone.
"""

from __future__ import annotations

import hashlib
import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from de_jax.data.batches.pair_batches import TrainingPairs
from de_jax.data.negatives.mined_pairs import rectangle
from de_jax.data.sources import pair_store
from de_jax.data.sources.pair_store import Part, Tables
from de_jax.data.sources.pair_writer import SIDES, side_by_side
from de_jax.data.sources.training_set import hash_of
from de_jax.data.stores.store_writer import StoreWriter, of_file, writing
from de_jax.data.text import beir
from de_jax.data.text.table_rows import Example, Reading
from de_jax.data.text.tokenizing import Tokenizer
from de_jax.files import outputs
from de_jax.types import PADDING_ID, InputError

_DIGEST_BYTES = 10
_CHUNK_EXAMPLES = 4096


def text_id(text: str) -> str:
    """The id of a text.

    >>> text_id("why?")
    'f5b2b98bf44b60881a86'
    """
    return digest(text).hex()


def write_pairs(
    out_dir: Path, tables: Tables, tokenizers: Mapping[str, Tokenizer], made_from: str, read: list[Reading] | None = None
) -> TrainingPairs:
    """Reads the tables once, and writes a folder of pairs in the order of their rows; `read` gets each table's counts of rows."""
    with pair_store.PAIR_STORE.writing(out_dir) as folder:
        for side, name in SIDES.items():
            (folder / name).mkdir()
            (folder / f"{side}_tokenizer").mkdir()
            tokenizers[side].save(folder / f"{side}_tokenizer")
        with writing(folder / "queries", tokenizers["query"]) as queries, writing(folder / "docs", tokenizers["doc"]) as docs:
            writers = {"query": queries, "doc": docs}
            texts = {side: _Texts(writer, tokenizers[side], tables.train.name) for side, writer in writers.items()}
            with outputs.collecting(is_quiet=True) as told:  # the folder's reader warns again
                arrays, dev_qrels = _pairs(tables, [] if read is None else read, texts)
        parts = [Part(out_dir.name, 1.0, len(arrays["pairs"]))]
        pair_store.save(folder, parts=parts, arrays=arrays, dev_qrels=dev_qrels or None, made_from=made_from, told=told)
    return pair_store.open_pair_store(out_dir)


def _pairs(tables: Tables, read: list[Reading], texts: Mapping[str, _Texts]) -> tuple[dict[str, np.ndarray], beir.Qrels]:
    """The arrays of a folder of pairs, and the judgements that score checkpoints; texts are written meanwhile."""
    pairs, mined, scores = [np.zeros((0, 2), np.int32)], [np.zeros((0, 0), np.int32)], [np.zeros((0, 1), np.float32)]
    dev_qrels: beir.Qrels = {}
    dev_rows: dict[str, int] = {}
    for chunk in chunks(tables, read):
        queries = texts["query"].add([one.query for one, _ in chunk])
        docs = iter(texts["doc"].add([text for one, _ in chunk for text in (*one.docs, *one.neg_docs)]).tolist())
        rows: list[tuple[int, int]] = []
        negatives: list[list[int]] = []
        scored: list[list[float]] = []
        for query, (one, split) in zip(queries.tolist(), chunk, strict=True):
            own, others = (list(itertools.islice(docs, len(some))) for some in (one.docs, one.neg_docs))
            if split == "dev" and one.docs:
                dev_qrels.setdefault(text_id(one.query), {}).update({text_id(doc): 1 for doc in one.docs})
                dev_rows[text_id(one.query)] = query
            if split == "dev" and tables.dev:
                continue
            for doc, score in zip(own, one.doc_scores, strict=True):
                rows.append((query, doc))
                negatives.append(others)
                scored.append([score, *one.neg_scores])
        pairs.append(np.array(rows, np.int32).reshape(-1, 2))
        mined.append(rectangle(negatives, PADDING_ID, np.int32))
        scores.append(rectangle(scored, np.nan, np.float32))
    held_out = [] if tables.dev else sorted(dev_qrels, key=hash_of)[: tables.dev_most]
    whole = np.concatenate(pairs)
    is_trained = ~np.isin(whole[:, 0], [dev_rows[one] for one in held_out])
    arrays, negative_rows = {"pairs": whole[is_trained]}, side_by_side(mined, PADDING_ID)[is_trained]
    if width := int((negative_rows >= 0).any(axis=0).sum()):
        arrays["neg_docs"] = negative_rows = negative_rows[:, :width]
    if not np.isnan(found := side_by_side(scores, np.nan)[is_trained, : 1 + width]).all():
        arrays["scores"] = found
        if width and not np.isfinite(found[:, :1] + found[:, 1:]).any():
            warnings.warn(
                f"{tables.train.name} scores no document together with a negative of its row, so kl_distillation and "
                "margin_mse have nothing to compare in it.",
                stacklevel=2,
            )
    return arrays, dev_qrels if tables.dev else {one: dev_qrels[one] for one in held_out}


def chunks(tables: Tables, read: list[Reading], *, as_texts: bool = False) -> Iterator[list[tuple[Example, str]]]:
    """The examples of both tables with their split, "train" or "dev", many at a time; see `write_pairs` and `Reading`."""
    num_pairs: dict[str, int] = {}

    def examples() -> Iterator[tuple[Example, str]]:
        read[:] = [Reading(table, as_texts=as_texts) for table in (tables.train, tables.dev) if table]
        for one in read[0].examples():
            is_dev = int.from_bytes(digest(one.query)[:6]) < tables.dev_fraction * 2**48
            yield one, "dev" if is_dev else "train"
        for one in itertools.chain.from_iterable(dev.examples() for dev in read[1:]):
            yield one._replace(row=one.row + read[0].num_rows), "dev"

    stream = iter(outputs.progress_bar(examples(), desc=f"read {tables.train.name}", unit=" rows", delay=1))
    while chunk := list(itertools.islice(stream, _CHUNK_EXAMPLES)):
        for one, split in chunk:
            num_pairs[split] = num_pairs.get(split, 0) + len(one.docs)
        yield chunk
    table = tables.train.name
    if not num_pairs.get("train"):
        taken = ", as all score checkpoints; lower dev_fraction" if tables.dev_fraction and num_pairs.get("dev") else ""
        raise InputError(f"{table} holds no pair to train on{taken}.")
    if num_pairs.get("dev") == 0 and tables.dev:
        raise InputError(f"{tables.dev.name} has no relevant document to score checkpoints; give another dev table.")
    if num_pairs.get("dev") == 0:
        raise InputError(f"{table} has no relevant document for the queries drawn to score checkpoints; raise dev_fraction.")


class _Texts:
    """The texts of one side; each is written at its first occurrence."""

    def __init__(self, writer: StoreWriter, tokenizer: Tokenizer, table: str) -> None:
        self._writer, self._tokenizer, self._table, self._rows = writer, tokenizer, table, _RowsByDigest()

    def add(self, texts: Sequence[str]) -> np.ndarray:
        """The row of each text, int32."""
        if not texts:
            return np.zeros(0, np.int32)
        digests = [digest(text) for text in texts]
        rows, new = self._rows.find_or_add(np.array(digests, f"S{_DIGEST_BYTES}"))
        if new:
            tokens = self._tokenizer.encode([texts[place] for place in new])
            with of_file(self._table):  # the store has no file
                self._writer.append([digests[place].hex() for place in new], tokens)
        return rows


class _RowsByDigest:
    """Which row each digest has: sorted runs, each at least twice as long as the next, in a sixth of the memory of a dictionary."""

    def __init__(self) -> None:
        self.num_rows = 0
        self._runs: list[tuple[np.ndarray, np.ndarray]] = []

    def find_or_add(self, keys: np.ndarray) -> tuple[np.ndarray, list[int]]:
        """The int32 row of each digest, and the places of the new digests in the order of their rows."""
        rows = np.full(len(keys), PADDING_ID, np.int32)
        for known, known_rows in self._runs:
            places = np.minimum(np.searchsorted(known, keys), len(known) - 1)
            rows = np.where(known[places] == keys, known_rows[places], rows)
        new = np.flatnonzero(rows == PADDING_ID)
        distinct, firsts, which = np.unique(keys[new], return_index=True, return_inverse=True)
        new_rows = np.empty(len(distinct), np.int32)
        new_rows[np.argsort(firsts)] = np.arange(self.num_rows, self.num_rows + len(distinct))
        rows[new] = new_rows[which]
        self.num_rows += len(distinct)
        self._add_run(distinct, new_rows)
        return rows, new[np.sort(firsts)].tolist()

    def _add_run(self, keys: np.ndarray, rows: np.ndarray) -> None:
        while self._runs and len(self._runs[-1][0]) < 2 * len(keys):
            longer, its_rows = self._runs.pop()
            keys, rows = np.concatenate([longer, keys]), np.concatenate([its_rows, rows])
            order = np.argsort(keys, kind="stable")  # merges two sorted runs
            keys, rows = keys[order], rows[order]
        if len(keys):
            self._runs.append((keys, rows))


def digest(text: str) -> bytes:
    """Identifies a text."""
    return hashlib.sha256(text.encode()).digest()[:_DIGEST_BYTES]
