"""Long documents cut into passages when they are read; the token store stays as it is."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Int, Int32

from de_jax.data.corpus import TokenStore
from de_jax.types import InputError


class PassageStore:
    """The documents of a token store as overlapping windows, all of them, in the order of the documents.

    Attributes:
        doc_rows: int64 [p] the document of each passage, a row of the token store; ascending.
        ids: of each passage the id of its document.
        num_texts: p.
        content_hash: equal for equal stores, lengths and strides.
    """

    def __init__(self, store: TokenStore, length: int, stride: int | None = None) -> None:
        """Finds where passages begin; a document no longer than `length` is one passage.

        Args:
            store: the documents.
            length: tokens of a passage, special ones included.
            stride: tokens from the beginning of one to that of the next; by default passages do not overlap.

        Raises:
            InputError: no room beside the special tokens, or a stride that would leave tokens out.
        """
        room = length - len(store.prefix_ids) - len(store.suffix_ids)
        if room < 1:
            raise InputError(f"passages of {length} tokens have no room beside the {length - room} special tokens; give more.")
        stride = room if stride is None else stride
        if not 1 <= stride <= room:
            raise InputError(f"a stride of {stride} does not fit passages with room for {room} tokens; give 1 to {room}.")
        starts, ends = store.offsets[:-1], store.offsets[1:]
        num_passages = 1 + -(-np.maximum(ends - starts - room, 0) // stride)  # [n]
        self.doc_rows = np.repeat(np.arange(store.num_texts), num_passages)
        place = np.arange(len(self.doc_rows)) - (np.cumsum(num_passages) - num_passages)[self.doc_rows]
        self._starts = starts[self.doc_rows] + place * stride
        self._ends = np.minimum(self._starts + room, ends[self.doc_rows])
        self._store = store
        self.ids = PassageIds(store.ids, self.doc_rows)
        self.num_texts = len(self.doc_rows)
        self.tokenizer_fingerprint = store.tokenizer_fingerprint
        self.content_hash = hashlib.sha256(f"{store.content_hash} passages {length} {stride}".encode()).hexdigest()

    def lengths(self, max_length: int) -> Int32[np.ndarray, " p"]:
        """Tokens of each passage with its special tokens, after truncation to `max_length`."""
        specials = len(self._store.prefix_ids) + len(self._store.suffix_ids)
        return np.minimum(self._ends - self._starts + specials, max_length).astype(np.int32)

    def pad(self, rows: Int[np.ndarray, " r"], max_length: int, pad_to: int) -> Int32[np.ndarray, "r {pad_to}"]:
        """The passages of `rows`, as `TokenStore.pad` gives texts."""
        return self._store.pad_spans(self._starts[rows], self._ends[rows], max_length, pad_to)


class PassageIds(Sequence[str]):
    """The id of each passage's document."""

    def __init__(self, doc_ids: Sequence[str], doc_rows: Int[np.ndarray, " p"]) -> None:
        self._doc_ids, self._doc_rows = doc_ids, doc_rows

    def __len__(self) -> int:
        return len(self._doc_rows)

    def __getitem__(self, row):  # type: ignore[no-untyped-def]
        if isinstance(row, slice):
            return [self._doc_ids[int(doc)] for doc in self._doc_rows[row]]
        return self._doc_ids[int(self._doc_rows[row])]

    def __iter__(self) -> Iterator[str]:
        for doc_id, count in zip(self._doc_ids, np.bincount(self._doc_rows, minlength=len(self._doc_ids)), strict=True):
            yield from (doc_id for _ in range(count))
