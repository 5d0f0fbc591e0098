"""Writes a folder of pairs (`pair_store`) from streams of tokenized examples, whoever makes them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from de_jax.data.batches.pair_batches import TrainingPairs
from de_jax.data.sources import pair_store
from de_jax.data.stores.corpus import TokenStore, open_token_store
from de_jax.data.stores.store_writer import StoreWriter, writing
from de_jax.data.text import beir, input_policy
from de_jax.data.text.tokenizing import Tokenizer
from de_jax.types import PADDING_ID, InputError

Columns = dict[str, Any]
"""Some examples, by feature: `query` and `doc` are lists of int32 arrays, without special tokens and not truncated; `query_id` and
`doc_id` lists of strings; `neg_doc_ids` and `neg_query_ids` lists of lists of strings; `relevance` an array of numbers."""

SIDES = {"query": "queries", "doc": "docs"}
MINED = {"neg_docs": ("neg_doc_ids", "doc"), "neg_queries": ("neg_query_ids", "query")}


class TextSource(NamedTuple):
    """Texts of one side, each of them once."""

    name: str
    chunks: Callable[[], Iterator[Columns]]


class PairSource(NamedTuple):
    """Pairs of ids, with their texts in the same examples where a side has no source of its own."""

    name: str
    rate: float
    chunks: Callable[[], Iterator[Columns]]
    texts: Mapping[str, TextSource | None]  # by side


def write(
    out_dir: Path,
    sources: Sequence[PairSource],
    dev_sources: Sequence[PairSource],
    tokenizers: Mapping[str, Tokenizer],
    made_from: str,
    *,
    skip_empty: bool = False,
) -> TrainingPairs:
    """Reads every source once and writes the folder, which appears when complete; memory is bounded by the ids of the pairs."""
    readings, dev_readings = ([_Reading(source) for source in some] for some in (sources, dev_sources))
    with pair_store.PAIR_STORE.writing(out_dir) as folder:
        _write_texts(folder, [*readings, *dev_readings], tokenizers, skip_empty)
        stores = {side: open_token_store(folder / name) for side, name in SIDES.items()}
        for reading in readings:
            reading.leave_out(stores)
        parts = [pair_store.Part(reading.source.name, reading.source.rate, reading.num_pairs) for reading in readings]
        arrays = {"pairs": np.concatenate([reading.pairs(stores) for reading in readings])}
        for name in MINED:
            if (mined := side_by_side([reading.mined(name, stores) for reading in readings])).shape[1]:
                arrays[name] = mined
        dev_qrels: beir.Qrels = {}
        for reading in dev_readings:
            reading.check(stores)
            reading.judge(dev_qrels)
        pair_store.save(folder, parts=parts, arrays=arrays, dev_qrels=dev_qrels or None, made_from=made_from)
    return pair_store.open_pair_store(out_dir)


class _Reading:
    """One pass over a source of pairs: texts go to the stores, ids are held until the stores are whole."""

    def __init__(self, source: PairSource) -> None:
        self.source = source
        self.prefixes = dict.fromkeys(SIDES, "")  # of this source's ids, in stores that hold the texts of several
        self.num_pairs = 0
        self._ids: dict[str, list[str]] = {side: [] for side in SIDES}
        self._mined: dict[str, list[list[str]]] = {name: [] for name in MINED}
        self._relevance: list[float] = []

    def texts_name(self, side: str) -> str:
        texts = self.source.texts[side]
        return texts.name if texts else self.source.name

    def read(self, writers: Mapping[str, _TextWriter]) -> None:
        for chunk in self.source.chunks():
            count = len(chunk["query_id"])
            self.num_pairs += count
            for side, ids in self._ids.items():
                named = [self.prefixes[side] + text_id for text_id in chunk[f"{side}_id"]]
                ids += named
                if self.source.texts[side] is None:
                    writers[side].append_new(named, chunk[side])
            for name, (feature, side) in MINED.items():
                rows = chunk.get(feature, [[]] * count)
                self._mined[name] += [[self.prefixes[side] + text_id for text_id in row] for row in rows]
            self._relevance += chunk["relevance"].tolist() if "relevance" in chunk else [1] * count
        if not self.num_pairs:
            raise InputError(f"{self.source.name} yields no pair.")

    def leave_out(self, stores: Mapping[str, TokenStore]) -> None:
        """Drops pairs of relevance 0 or below, and texts that the stores left out with their pairs; counted on stderr."""
        empty = {side: set(store.skipped_ids) for side, store in stores.items()}
        both = zip(self._ids["query"], self._ids["doc"], strict=True)
        has_texts = [query not in empty["query"] and doc not in empty["doc"] for query, doc in both]
        kept = [row for row, grade in enumerate(self._relevance) if grade > 0 and has_texts[row]]
        if not kept:
            raise InputError(f"{self.source.name} yields only pairs with an empty text, or of relevance 0 or below.")
        input_policy.tell_graded(self.source.name, sum(not grade > 0 for grade in self._relevance))
        input_policy.tell_unused(sum(grade > 0 for grade in self._relevance) - len(kept))
        self.num_pairs, self._relevance = len(kept), [self._relevance[row] for row in kept]
        self._ids = {side: [ids[row] for row in kept] for side, ids in self._ids.items()}
        for name, rows in self._mined.items():
            left_out = empty[MINED[name][1]]
            self._mined[name] = [[text_id for text_id in rows[row] if text_id not in left_out] for row in kept]

    def check(self, stores: Mapping[str, TokenStore]) -> None:
        """Refuses ids without a text; a judgement of an empty one stays, and counts as not found."""
        for side, store in stores.items():
            empty = set(store.skipped_ids)
            self._rows(store, [text_id for text_id in self._ids[side] if text_id not in empty], f"{side}_id")

    def pairs(self, stores: Mapping[str, TokenStore]) -> np.ndarray:
        """(query row, document row), int32 [P, 2]."""
        return np.stack([self._rows(stores[side], self._ids[side], f"{side}_id") for side in SIDES], axis=1)

    def mined(self, name: str, stores: Mapping[str, TokenStore]) -> np.ndarray:
        """Rows of the hard negatives, int32 [P, the longest list]."""
        feature, side = MINED[name]
        lengths = np.array([len(row) for row in self._mined[name]])
        is_id = np.arange(lengths.max())[None, :] < lengths[:, None]
        mined = np.full(is_id.shape, PADDING_ID, np.int32)
        mined[is_id] = self._rows(stores[side], [text_id for row in self._mined[name] for text_id in row], feature)
        return mined

    def judge(self, qrels: beir.Qrels) -> None:
        """Adds the judgements; the greatest of a pair counts."""
        if fraction := next((grade for grade in self._relevance if grade % 1), None):
            wrong = f"the task '{self.source.name}' has the relevance {fraction:g} in its dev split"
            raise InputError(f"{wrong}, where scores need integers; round the feature 'relevance'.")
        for query_id, doc_id, relevance in zip(self._ids["query"], self._ids["doc"], self._relevance, strict=True):
            judged = qrels.setdefault(query_id, {})
            judged[doc_id] = max(int(relevance), judged.get(doc_id, int(relevance)))

    def _rows(self, store: TokenStore, text_ids: Sequence[str], feature: str) -> np.ndarray:
        rows = store.rows_of(text_ids)
        if (rows < 0).any():
            unknown = dict.fromkeys(text_ids[row] for row in np.flatnonzero(rows < 0).tolist())
            raise beir.unknown_ids(list(unknown), f"{self.source.name}: values of {feature} that have no text")
        return rows.astype(np.int32)


class _TextWriter:
    """Appends texts to one store."""

    def __init__(self, writer: StoreWriter, tokenizer: Tokenizer, skip_empty: bool) -> None:
        self._writer, self._vocab_size, self._skip_empty = writer, tokenizer.vocab_size, skip_empty
        self._seen: dict[str, bytes] = {}  # a digest of each text that came with a pair, by id

    def append(self, text_ids: Sequence[str], tokens: Sequence[np.ndarray]) -> None:
        """Texts that are missing from the store."""
        for text_id, text in zip(text_ids, tokens, strict=True):
            if text.size and int(text.max()) >= self._vocab_size:
                raise InputError(
                    f"the text {text_id} holds the token {int(text.max())}, and the vocabulary has {self._vocab_size} pieces, "
                    "extra ids aside; remove symbols such as <extra_id_0> from the text."
                )
        empty = [text_id for text_id, text in zip(text_ids, tokens, strict=True) if not text.size]
        if empty and not self._skip_empty:
            raise InputError(f"the text of {empty[0]} is empty; remove it, or set skip_empty.")
        self._writer.skip(empty)
        kept = [(text_id, text) for text_id, text in zip(text_ids, tokens, strict=True) if text.size]
        if kept:
            self._writer.append([text_id for text_id, _ in kept], [text for _, text in kept])

    def append_new(self, text_ids: Sequence[str], tokens: Sequence[np.ndarray]) -> None:
        """Texts in the order of the pairs; some are repetitions."""
        new = []
        for row, (text_id, text) in enumerate(zip(text_ids, tokens, strict=True)):
            digest = hashlib.blake2b(text.tobytes(), digest_size=8).digest()
            known = self._seen.setdefault(text_id, digest)
            if known != digest:
                raise InputError(f"the id '{text_id}' names two different texts; give each text its own id.")
            if known is digest:
                new.append(row)
        self.append([text_ids[row] for row in new], [tokens[row] for row in new])


def _write_texts(folder: Path, readings: Sequence[_Reading], tokenizers: Mapping[str, Tokenizer], skip_empty: bool) -> None:
    """Writes both token stores and the tokenizers; afterwards the readings hold the ids of their pairs."""
    for side, name in SIDES.items():
        for directory in (folder / name, folder / f"{side}_tokenizer"):
            directory.mkdir()
        tokenizers[side].save(folder / f"{side}_tokenizer")
        names = {reading.texts_name(side) for reading in readings}
        for reading in readings:
            # Two sources may use one id for different texts.
            reading.prefixes[side] = f"{reading.texts_name(side)}/" if len(names) > 1 else ""
    with writing(folder / "queries", tokenizers["query"]) as queries, writing(folder / "docs", tokenizers["doc"]) as docs:
        stores = {"query": queries, "doc": docs}
        writers = {side: _TextWriter(writer, tokenizers[side], skip_empty) for side, writer in stores.items()}
        for side, writer in writers.items():
            separate = {texts.name: (reading, texts) for reading in readings if (texts := reading.source.texts[side])}
            for reading, texts in separate.values():
                for chunk in texts.chunks():
                    writer.append([reading.prefixes[side] + text_id for text_id in chunk[f"{side}_id"]], chunk[side])
        for reading in readings:
            reading.read(writers)


def side_by_side(arrays: Sequence[np.ndarray], filler: int | float = PADDING_ID) -> np.ndarray:
    """The rows of all, one after another, filled up to the widest."""
    width = max(array.shape[1] for array in arrays)
    return np.concatenate([np.pad(array, ((0, 0), (0, width - array.shape[1])), constant_values=filler) for array in arrays])
