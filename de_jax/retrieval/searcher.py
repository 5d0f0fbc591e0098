"""Search as a person does it: words in, documents out."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from de_jax.data.text.tokenizing import Tokenizer
from de_jax.retrieval import encode
from de_jax.retrieval.index import Index
from de_jax.training.run.run_folder import Run
from de_jax.types import InputError

SNIPPET_CHARACTERS = 300
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
LENGTH_MULTIPLE = 32


class Searcher:
    """A run, an index of a corpus by it, and the corpus.

    Args:
        run: embeds the queries.
        ids: document ids, in the rows of the index.
        index: of the documents' embeddings by the run.
        texts: documents by id.
    """

    def __init__(self, run: Run, ids: Sequence[str], index: Index, texts: Mapping[str, str]) -> None:
        self._run, self._ids, self._index, self._texts = run, ids, index, texts
        self._encode = encode.encode_fn(run, "query")

    def search(self, query: str, k: int) -> list[dict[str, Any]]:
        """The k best documents as {"rank", "score", "id", "text"}, the text cut to a snippet."""
        ranking = self._index.search(self._embedding(query), k)
        found = zip(ranking.doc_rows[0].tolist(), ranking.scores[0].tolist(), strict=True)
        hits = [(self._ids[row], score) for row, score in found if row >= 0]
        return [
            {"rank": rank, "score": round(score, 6), "id": doc_id, "text": snippet(self._texts[doc_id])}
            for rank, (doc_id, score) in enumerate(hits, start=1)
        ]

    def _embedding(self, query: str) -> np.ndarray:
        tokens, lengths = padded_tokens(
            self._run.query.tokenizer, [query], max_length=self._run.query.max_length, length_multiple=LENGTH_MULTIPLE
        )
        return np.asarray(self._encode(tokens, lengths))[:, 0]


def padded_tokens(
    tokenizer: Tokenizer, texts: Sequence[str], *, max_length: int, length_multiple: int
) -> tuple[Int[np.ndarray, "q L"], Int[np.ndarray, "q 1"]]:
    """Texts as token ids, a row each, cut to `max_length` and padded to a multiple; and how many tokens each has.

    Raises:
        InputError: the vocabulary leaves nothing of a text.
    """
    room = max_length - len(tokenizer.prefix_ids) - len(tokenizer.suffix_ids)
    rows = []
    for text, body in zip(texts, tokenizer.encode(texts), strict=True):
        if not len(body):
            raise InputError(f"the vocabulary leaves nothing of the query {text!r}; use other words.")
        rows.append([*tokenizer.prefix_ids, *body[:room].tolist(), *tokenizer.suffix_ids])
    lengths = np.array([[len(row)] for row in rows], np.int32)
    tokens = np.zeros((len(rows), -(-int(lengths.max()) // length_multiple) * length_multiple), np.int32)
    for row, ids in zip(tokens, rows, strict=True):
        row[: len(ids)] = ids
    return tokens, lengths


def printable(text: str) -> str:
    """A text without characters by which a document could move a terminal's cursor, set its title or turn text around."""
    return _CONTROL.sub("", text)


def snippet(text: str) -> str:
    """The beginning of a text, on one line and without control characters."""
    text = printable(" ".join(text.split()))
    return text if len(text) <= SNIPPET_CHARACTERS else text[: SNIPPET_CHARACTERS - 1].rstrip() + "…"
