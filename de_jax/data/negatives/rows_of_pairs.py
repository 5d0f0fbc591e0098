"""The hard negatives of a generation as rows of the token stores, beside the training pairs that they were mined for."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int, Int32

from de_jax.data.batches.pair_batches import TrainingPairs
from de_jax.data.negatives import generations
from de_jax.data.negatives.generations import Generation
from de_jax.types import PADDING_ID, InputError


def rows_of_pairs(generation: Generation, texts: TrainingPairs) -> dict[str, np.ndarray]:
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
    mined = generations.read(generation)
    query_rows, doc_rows = texts.query_store.rows_of(mined.query_ids), texts.doc_store.rows_of(mined.doc_ids)
    own = np.stack([query_rows[mined.pairs[:, 0]], doc_rows[mined.pairs[:, 1]]], axis=1)
    places = _places(own, np.asarray(texts.pairs))
    if (places < 0).all():
        raise InputError(f"{generation.folder} was mined for none of the training pairs; mine for this data set and split.")
    return {
        "neg_docs": _table(generation, mined.neg_docs, places, mined.doc_ids, doc_rows),
        "neg_queries": _table(generation, mined.neg_queries, places, mined.query_ids, query_rows),
    }


def _places(own: Int[np.ndarray, "G 2"], pairs: Int32[np.ndarray, "P 2"]) -> Int[np.ndarray, " P"]:
    """Where the generation has each training pair; -1 where it does not, the last place of several."""
    there, wanted = (rows[:, 0].astype(np.int64) << 32 | rows[:, 1] for rows in (own, pairs))
    there[(own < 0).any(axis=1)] = -1
    order = np.argsort(there, kind="stable")
    places = order[np.searchsorted(there[order], wanted, side="right") - 1]
    return np.where(there[places] == wanted, places, -1)


def _table(
    generation: Generation,
    mined: Int32[np.ndarray, "G N"],
    places: Int[np.ndarray, " P"],
    ids: np.ndarray,
    rows_of_ids: Int[np.ndarray, " n"],
) -> Int32[np.ndarray, "P longest"]:
    """The lists at some places of a generation in the rows of a store; in memory."""
    taken = mined[places]
    taken[places < 0] = PADDING_ID
    rows = np.append(rows_of_ids, PADDING_ID).astype(np.int32)[taken]  # `PADDING_ID` is the last place
    unknown = (rows < 0) & (taken != PADDING_ID)
    if unknown.any():
        text_id = ids[taken[unknown][0]].decode()
        raise InputError(f"{generation.folder}: the negative {text_id!r} is in none of the texts; mine again.")
    return rows[:, (rows != PADDING_ID).any(axis=0)]
