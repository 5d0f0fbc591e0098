"""Documents with generated queries after them, as texts for the document tower: `document + q'` (He et al. 2023, eq. 3).

    [prefix] document [separator] q'_1 [separator] q'_2 ... [suffix]

The separator is what ends a text of the tokenizer ([SEP], </s>). Room for the queries is kept before the document is cut: theirs
is the end of the text, which cutting the whole would take away first. Documents and queries come from token stores, so no text is
tokenized twice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Int32

from de_jax.data.stores.corpus import TokenStore, build_token_store, open_token_store
from de_jax.data.text.passages import PassageIds
from de_jax.data.text.tokenizing import PAD_ID, Tokenizer
from de_jax.expansion.curriculum import NONE, usable_queries
from de_jax.files import folders
from de_jax.types import PADDING_ID, InputError


class GeneratedQueries(NamedTuple):
    """The generated queries of a corpus as tokens; document d's are the store's rows [firsts[d], firsts[d + 1])."""

    store: TokenStore  # in the order of the expansion
    firsts: np.ndarray  # int64 [n + 1]
    usable: Callable[[int], np.ndarray]  # the indices of a document's queries that are not blank and not there before

    def rows_of(self, doc_rows: Int[np.ndarray, " r"], indices: Int[np.ndarray, " r"]) -> np.ndarray:
        """The store's row of each document's query with that index; `PADDING_ID` for an index of `curriculum.NONE`."""
        return np.where(indices == NONE, PADDING_ID, self.firsts[doc_rows] + indices)


def tokenized_queries(queries: Sequence[Sequence[str]], tokenizer: Tokenizer, cache_dir: str | Path) -> GeneratedQueries:
    """Tokenizes the queries of every document, once; kept in the cache.

    Args:
        queries: of each document of the corpus; see `generated_queries.queries_by_row`.
        tokenizer: the document tower's.
        cache_dir: holds the stores.
    """
    counts = [len(own) for own in queries]
    if not sum(counts):
        raise InputError("the expansion holds no query; generate some.")
    digest = hashlib.sha256(tokenizer.fingerprint.encode())
    for own in queries:
        digest.update("\n".join([str(len(own)), *own, ""]).encode())

    def build(folder: Path) -> TokenStore:
        named = ((f"{row}/{place}", query) for row, own in enumerate(queries) for place, query in enumerate(own))
        return build_token_store(named, tokenizer, folder)

    store = folders.build_once(Path(cache_dir) / f"generated-{digest.hexdigest()[:16]}", open_token_store, build)
    return GeneratedQueries(store, np.concatenate([[0], np.cumsum(counts)]), lambda row: usable_queries(queries[row], ""))


class ExpandedTexts:
    """Documents with up to S queries each, as a store that encoding and batches read.

    Attributes:
        doc_rows: int64 [m] the document of each text.
        ids: of each text the id of its document.
        num_texts: m.
        content_hash: equal for equal texts.
    """

    def __init__(
        self,
        docs: TokenStore,
        queries: TokenStore,
        doc_rows: Int[np.ndarray, " m"],
        query_rows: Int[np.ndarray, "m S"],
        *,
        max_query_length: int = 32,
    ) -> None:
        """Says which texts there are; nothing is copied.

        Args:
            docs, queries: by the same tokenizer.
            doc_rows: rows of `docs`.
            query_rows: rows of `queries`, `PADDING_ID` where a text has fewer.
            max_query_length: tokens of a query, beyond which it is cut.

        Raises:
            InputError: stores of different vocabularies, or no room for a query.
        """
        if docs.tokenizer_fingerprint != queries.tokenizer_fingerprint:
            raise InputError("documents and generated queries have different tokenizers; tokenize the queries with the documents'.")
        if max_query_length < 1:
            raise InputError(f"max_query_length is {max_query_length}; give a query at least 1 token.")
        self._docs, self._queries, self._max_query_length = docs, queries, max_query_length
        self.doc_rows, self._query_rows = np.asarray(doc_rows, np.int64), np.asarray(query_rows, np.int64)
        self.ids, self.num_texts = PassageIds(docs.ids, self.doc_rows), len(self.doc_rows)
        self.tokenizer_fingerprint = docs.tokenizer_fingerprint
        digest = hashlib.sha256(f"{docs.content_hash} {queries.content_hash} expanded {max_query_length}".encode())
        digest.update(self.doc_rows.tobytes() + self._query_rows.tobytes())
        self.content_hash = digest.hexdigest()

    def lengths(self, max_length: int) -> Int32[np.ndarray, " m"]:
        """Tokens of each text with its special tokens and separators, after cutting the document to `max_length`."""
        docs, queries, separators = self._sizes(np.arange(self.num_texts), max_length)
        return (docs + queries.sum(axis=1) + separators + self._num_specials()).astype(np.int32)

    def pad(self, rows: Int[np.ndarray, " r"], max_length: int, pad_to: int) -> Int32[np.ndarray, "r {pad_to}"]:
        """The texts of `rows`, zeros to the right; a negative row gives zeros. See `TokenStore.pad`."""
        padded = np.full((len(rows), pad_to), PAD_ID, np.int32)
        places = np.flatnonzero(rows >= 0)
        texts = np.asarray(rows, np.int64)[places]
        docs, queries, separators = self._sizes(texts, max_length)
        longest = int((docs + queries.sum(axis=1) + separators).max(initial=0)) + self._num_specials()
        if len(places) and longest > pad_to:
            raise ValueError(f"pad_to={pad_to} is shorter than a text of {longest} tokens")
        prefix, separator = self._docs.prefix_ids, self._docs.suffix_ids
        padded[places, : len(prefix)] = prefix
        column = np.full(len(places), len(prefix))
        _write(padded, places, column, self._docs, self._docs.offsets[self.doc_rows[texts]], docs)
        column = column + docs
        for query, lengths in zip(self._query_rows[texts].T, queries.T, strict=True):
            is_there = lengths > 0
            column = column + _write_same(padded, places[is_there], column[is_there], separator, is_there)
            _write(padded, places, column, self._queries, self._queries.offsets[np.maximum(query, 0)], lengths)
            column = column + lengths
        _write_same(padded, places, column, separator, np.ones(len(places), bool))
        return padded

    def _sizes(self, texts: np.ndarray, max_length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens of the document [r], of each query [r, S], and of the separators between them [r]."""
        room = max_length - self._num_specials()
        query_rows = self._query_rows[texts]
        at = np.maximum(query_rows, 0)
        queries = np.minimum(self._queries.offsets[at + 1] - self._queries.offsets[at], self._max_query_length)
        queries = np.where(query_rows >= 0, queries, 0)
        separator = len(self._docs.suffix_ids)
        # A query that does not fit with one token of the document before it is left out, as are those after it.
        fits = np.cumsum(queries + separator * (queries > 0), axis=1) < room
        queries = np.where(fits, queries, 0)
        separators = separator * np.count_nonzero(queries, axis=1)
        of_docs = self._docs.offsets[self.doc_rows[texts] + 1] - self._docs.offsets[self.doc_rows[texts]]
        return np.minimum(of_docs, room - queries.sum(axis=1) - separators), queries, separators

    def _num_specials(self) -> int:
        return len(self._docs.prefix_ids) + len(self._docs.suffix_ids)


def with_one_query(
    docs: TokenStore, generated: GeneratedQueries, *, max_query_length: int = 32
) -> tuple[ExpandedTexts, np.ndarray]:
    """Every document without a query and with each of its own, for training; and the row of each document without one, int64 [n].

    The text of document d with its query of index i is the row `bare[d] + 1 + i`, and `bare[d]` where i is `curriculum.NONE`.
    """
    counts = np.diff(generated.firsts)
    bare = np.arange(len(counts)) + generated.firsts[:-1]
    doc_rows = np.repeat(np.arange(len(counts)), counts + 1)
    query_rows = np.arange(len(doc_rows)) - doc_rows - 1
    query_rows[bare] = PADDING_ID
    return ExpandedTexts(docs, generated.store, doc_rows, query_rows[:, None], max_query_length=max_query_length), bare


def corpus_expansion(docs: TokenStore, generated: GeneratedQueries, num_queries: int, **options: int) -> ExpandedTexts:
    """S views of each document, each with one of its first S queries; a document with none is there once, alone."""
    chosen = [own if len(own) else np.array([NONE]) for own in _first_usable(docs, generated, num_queries)]
    doc_rows = np.repeat(np.arange(docs.num_texts), [len(own) for own in chosen])
    query_rows = generated.rows_of(doc_rows, np.concatenate(chosen))
    return ExpandedTexts(docs, generated.store, doc_rows, query_rows[:, None], **options)


def document_expansion(docs: TokenStore, generated: GeneratedQueries, num_queries: int, **options: int) -> ExpandedTexts:
    """Each document once, with its first S queries one after another.

    A retriever trained with one query and searched with this is the paper's asymmetric expansion.
    """
    indices = np.full((docs.num_texts, num_queries), NONE)
    for row, own in enumerate(_first_usable(docs, generated, num_queries)):
        indices[row, : len(own)] = own
    doc_rows = np.repeat(np.arange(docs.num_texts), num_queries)
    query_rows = generated.rows_of(doc_rows, indices.reshape(-1)).reshape(indices.shape)
    return ExpandedTexts(docs, generated.store, np.arange(docs.num_texts), query_rows, **options)


def _first_usable(docs: TokenStore, generated: GeneratedQueries, num_queries: int) -> Iterator[np.ndarray]:
    if num_queries < 1:
        raise InputError(f"the number of queries is {num_queries}; give at least 1.")
    return (generated.usable(row)[:num_queries] for row in range(docs.num_texts))


def _write(
    padded: np.ndarray, places: np.ndarray, columns: np.ndarray, store: TokenStore, starts: np.ndarray, lengths: np.ndarray
) -> None:
    """`store.tokens[start : start + length]` into each place's row, from its column on."""
    step = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    padded[np.repeat(places, lengths), np.repeat(columns, lengths) + step] = store.tokens[np.repeat(starts, lengths) + step]


def _write_same(
    padded: np.ndarray, places: np.ndarray, columns: np.ndarray, tokens: Sequence[int], is_there: np.ndarray
) -> np.ndarray:
    """The same tokens into rows of `padded`; gives how far each row of `is_there` moved on."""
    for place, token in enumerate(tokens):
        padded[places, columns + place] = token
    return np.where(is_there, len(tokens), 0)
