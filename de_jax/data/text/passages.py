"""Long documents cut into passages when they are read; the token store stays as it is."""

import hashlib

import numpy as np
from jaxtyping import Int, Int32

from de_jax.data.stores.corpus import TextIds, TokenStore, body_room
from de_jax.data.text.tokenizing import Side
from de_jax.types import PADDING_ID, InputError


class PassageStore:
    """The documents of a token store as overlapping windows, in the order of the documents.

    Attributes:
        doc_rows: int64 [p] the document of each passage, a row of the token store; ascending.
        ids: of each passage the id of its document.
        most_passages: C, of any document.
        content_hash: equal for equal stores, lengths, strides and numbers of passages.
    """

    def __init__(self, store: TokenStore, length: int, stride: int | None = None, *, max_passages: int | None = None) -> None:
        """Finds where passages begin, `stride` tokens apart, by default `length`. A document no longer than that is one passage."""
        if max_passages is not None and max_passages < 1:
            raise InputError(f"max_passages is {max_passages}; give a document at least 1 passage.")
        room = body_room(length, store.num_specials, "a passage length")
        stride = room if stride is None else stride
        if not 1 <= stride <= room:
            raise InputError(f"a stride of {stride} does not fit passages with room for {room} tokens; give 1 to {room}.")
        starts, ends = store.offsets[:-1], store.offsets[1:]
        num_passages = 1 + -(-np.maximum(ends - starts - room, 0) // stride)  # [n]
        if max_passages is not None:
            num_passages = np.minimum(num_passages, max_passages)
        self._firsts = np.cumsum(num_passages) - num_passages  # [n] each document's first passage
        self._num_passages, self.most_passages = num_passages, int(num_passages.max())
        self.doc_rows = np.repeat(np.arange(store.num_texts), num_passages)
        place = np.arange(len(self.doc_rows)) - self._firsts[self.doc_rows]
        self._starts = starts[self.doc_rows] + place * stride
        self._ends = np.minimum(self._starts + room, ends[self.doc_rows])
        self._store = store
        self.ids = ids_of_docs(store.ids, self.doc_rows)
        self.num_texts = len(self.doc_rows)
        self.tokenizer_fingerprint = store.tokenizer_fingerprint
        described = f"{store.content_hash} passages {length} {stride}" + (f" first {max_passages}" if max_passages else "")
        self.content_hash = hashlib.sha256(described.encode()).hexdigest()

    def lengths(self, max_length: int) -> Int32[np.ndarray, " p"]:
        """Tokens of each passage with its special tokens, after truncation to `max_length`."""
        return np.minimum(self._ends - self._starts + self._store.num_specials, max_length).astype(np.int32)

    def pad(self, rows: Int[np.ndarray, " r"], max_length: int, pad_to: int) -> Int32[np.ndarray, "r {pad_to}"]:
        """The passages of `rows`, as `TokenStore.pad` gives texts."""
        starts, ends = (np.where(rows >= 0, spans[rows], PADDING_ID) for spans in (self._starts, self._ends))
        return self._store.pad_spans(starts, ends, max_length, pad_to)

    def of_docs(self, doc_rows: Int[np.ndarray, " *r"]) -> Int32[np.ndarray, " *r C"]:
        """The passages of each document, first ones first; `PADDING_ID` where it has fewer, or is `PADDING_ID` itself."""
        place = np.arange(self.most_passages)
        firsts, num_passages = self._firsts[doc_rows], np.where(doc_rows >= 0, self._num_passages[doc_rows], 0)
        return np.where(place < num_passages[..., None], firsts[..., None] + place, PADDING_ID).astype(np.int32)


def passages_of(docs: TokenStore, side: Side, length: int | None = None, stride: int | None = None) -> PassageStore | None:
    """The passages that a tower reads of documents, or whole documents cut by `length` and `stride`; None if each is one text."""
    if length is None and side.max_passages == 1:
        return None
    if side.prompt:
        raise InputError("only a document's first passage would have the prompt; leave the prompt out, or set max_passages to 1.")
    if length is None:
        return PassageStore(docs, side.max_length, max_passages=side.max_passages)
    return PassageStore(docs, length, stride)


def ids_of_docs(doc_ids: TextIds, doc_rows: Int[np.ndarray, " p"]) -> TextIds:
    """The id of each passage's document, for passages of these documents."""
    return TextIds(len(doc_rows), lambda rows: [doc_ids[row] for row in doc_rows[rows].tolist()])
