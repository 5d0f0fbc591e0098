"""The hard negatives of a generation as rows of the token stores, beside the training pairs that they were mined for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from de_jax.data.stores.corpus import TokenStore
from de_jax.data.text.passages import PassageStore
from de_jax.mining import generations
from de_jax.mining.generations import Generation
from de_jax.types import PADDING_ID, InputError


class TrainingTexts(NamedTuple):
    """The training pairs, and the texts that their negatives are found among."""

    name: str  # of the data set
    query_store: TokenStore
    doc_store: TokenStore
    pairs: np.ndarray  # int32 [P, 2] (query row, document row)
    hashes: Mapping[str, str]  # what manifests must say of "queries" and "docs"; empty for no such check
    passages: PassageStore | None = None  # where a document is several, of which the best one for a query counts
    drop_identical_ids: bool = True  # a document with the id of a query is no negative of it; see `input_policy`


def rows_of_pairs(generation: Generation, texts: TrainingTexts) -> dict[str, np.ndarray]:
    """The negatives of each training pair as rows of the stores, filled up with `PADDING_ID`.

    Args:
        generation: mined for these pairs, or for more.
        texts: the pairs, and the texts of the rows.

    Returns:
        "neg_docs" int32 [P, longest list] and "neg_queries" int32 [P, longest list].

    Raises:
        InputError: mined over other texts, ids that are not in the stores, or none of the pairs.
    """
    for name, expected in texts.hashes.items():
        if generation.manifest.get(name) != expected:
            raise InputError(f"{generation.folder} was mined from other {name} than the training data has; mine again.")
    stores = {"neg_docs": texts.doc_store, "neg_queries": texts.query_store}
    mined = list(generations.read_mined(generation))
    own = [texts.query_store.rows_of([line.query_id for line in mined]), texts.doc_store.rows_of([line.doc_id for line in mined])]
    places: dict[tuple[int, ...], list[int]] = {}  # a table may hold a pair in several rows
    for row, pair in enumerate(map(tuple, np.asarray(texts.pairs).tolist())):
        places.setdefault(pair, []).append(row)
    chosen = [
        (row, line)
        for pair, line in zip(zip(*(rows.tolist() for rows in own), strict=True), mined, strict=True)
        for row in places.get(pair, ())
    ]
    if not chosen:
        raise InputError(f"{generation.folder} was mined for none of the training pairs; mine for this data set and split.")
    return {
        name: _table(generation, [(row, getattr(line, field)) for row, line in chosen], len(texts.pairs), stores[name])
        for name, field in (("neg_docs", "neg_doc_ids"), ("neg_queries", "neg_query_ids"))
    }


def _table(generation: Generation, lists: list[tuple[int, list[str]]], num_pairs: int, store: TokenStore) -> np.ndarray:
    """The rows of lists of ids, [num_pairs, longest list]; a list of the same pair that comes later counts."""
    ids = [text_id for _, one in lists for text_id in one]
    rows = store.rows_of(ids)
    if (rows < 0).any():
        raise InputError(f"{generation.folder}: the negative {ids[int(np.argmin(rows))]!r} is in none of the texts; mine again.")
    table = np.full((num_pairs, max(len(one) for _, one in lists)), PADDING_ID, np.int32)
    ends = np.cumsum([len(one) for _, one in lists])
    for (pair, one), found in zip(lists, np.split(rows, ends[:-1]), strict=True):
        table[pair] = PADDING_ID
        table[pair, : len(one)] = found
    return table
