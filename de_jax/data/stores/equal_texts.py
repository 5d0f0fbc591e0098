"""Texts that a tower cannot tell apart: their tokens are equal, after the prompt and the cut, whatever their ids are."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int, Int32, UInt64

from de_jax.data.batches.layout import Store
from de_jax.types import PADDING_ID

_TEXTS = 4096
"""Hashed at a time."""


def text_hashes(store: Store, max_length: int, rows: np.ndarray | None = None) -> UInt64[np.ndarray, " n"]:
    """64 bits that tell the tokens of each text, cut to `max_length`, from others: a sum of tokens times random odd numbers.

    Two texts of fewer than 2^17 different tokens have equal hashes with a probability below 2^-46.

    Args:
        store: the texts.
        max_length: tokens, special ones included.
        rows: which texts; all by default.
    """
    lengths = store.lengths(max_length)
    rows = np.arange(len(lengths)) if rows is None else rows  # type: ignore[arg-type]
    factors = np.random.default_rng(0).integers(0, 2**63, int(lengths.max()), dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    hashes = np.empty(len(rows), np.uint64)
    for start in range(0, len(rows), _TEXTS):
        chunk = rows[start : start + _TEXTS]
        width = int(lengths[chunk].max())
        hashes[start : start + _TEXTS] = store.pad(chunk, max_length, width).astype(np.uint64) @ factors[:width]
    return hashes


def first_places(hashes: UInt64[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
    """Where the hash of each place stands first."""
    _, firsts, which = np.unique(hashes, return_index=True, return_inverse=True)
    return firsts[which]


def first_rows(store: Store, max_length: int) -> Int32[np.ndarray, " n_and_1"]:
    """The first row that has the tokens of each row; at the end `PADDING_ID`, the place of `PADDING_ID` itself."""
    return np.append(first_places(text_hashes(store, max_length)), PADDING_ID).astype(np.int32)
