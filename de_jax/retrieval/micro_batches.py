"""The order and the shapes in which texts go through an encoder: little padding, few shapes.

Short texts are packed, several in a row; a single text has a narrow row. Longer ones have a row each and are taken longest
first: a batch is as wide as its longest text, rounded up, and its number of rows follows from that width alone, so that each width
is compiled once. Too few of them to fill a batch are packed with the short ones if they fit in such a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Int

from de_jax.data.batches import layout
from de_jax.types import Packed


class Packing(NamedTuple):
    """Texts of at most so many tokens are packed, into rows of so many tokens and at most so many texts."""

    text: int
    row: int
    texts: int
    sizes: int  # numbers of rows that a batch may have, up to a full one: few shapes, also from one call to the next
    alone: int  # the least width of a single text


SHORT = {"cpu": Packing(32, 64, 16, sizes=8, alone=16)}
"""By backend. A CPU computes scores of all pairs of tokens in a row, and compiles in seconds."""
SHORT_ACCELERATOR = Packing(256, 256, 64, sizes=1, alone=256)
"""Nearly all texts take one shape, whose program compiles for tens of seconds."""
NO_PACKING = Packing(0, 0, 1, sizes=8, alone=1)
LENGTHS_PER_DOUBLING = {"cpu": 8}
"""How many widths of longer texts there are by default between one power of two and the next, by backend."""
LENGTHS_PER_DOUBLING_ACCELERATOR = 4
TILE_ACCELERATOR = 8
"""Accelerators compute in tiles of 8 rows, so widths between two multiples of it would gain nothing."""


@runtime_checkable
class Store(layout.Store, Protocol):
    """The interface of tokenized texts for encoding, such as `de_jax.data.stores.corpus.TokenStore`."""

    def lengths(self, max_length: int) -> np.ndarray:
        """Tokens of each text after truncation, int32 [n]."""

    @property
    def ids(self) -> Sequence[str]: ...

    num_texts: int
    content_hash: str
    tokenizer_fingerprint: str


class MicroBatch(NamedTuple):
    """One call of the encoder: which texts of the request, where each lies, and the shape; the other rows are filler."""

    positions: np.ndarray
    row: np.ndarray
    place: np.ndarray
    num_rows: int
    row_length: int
    max_texts: int

    def tokens(self, store: Store, rows: np.ndarray, max_length: int) -> Packed:
        """The texts of the batch, which are the `rows` of the store, cut to `max_length`."""
        chosen = rows[self.positions]
        padded = store.pad(chosen, max_length, self.row_length)
        sizes = np.count_nonzero(padded, axis=1).astype(np.int32)
        shape = {"num_rows": self.num_rows, "row_length": self.row_length, "max_texts": self.max_texts}
        return layout.fill(padded, sizes, self.row, self.place, **shape)


def plan(
    lengths: Int[np.ndarray, " n"], *, tokens_per_batch: int, length_multiple: int | None = None, packs: bool = True
) -> Iterator[MicroBatch]:
    """Micro-batches over all texts, in one shape for each width; only the last of a width has filler rows.

    Args:
        lengths: tokens of each text.
        tokens_per_batch: bound of rows times width, except for a single longer row.
        length_multiple: see `padded_length`.
        packs: whether short texts share rows; else each text has its own.
    """
    packing = SHORT.get(jax.default_backend(), SHORT_ACCELERATOR) if packs else NO_PACKING
    order = np.argsort(-lengths, kind="stable").astype(np.int32)
    if len(order) == 1 and (width := max(packing.alone, 1 << (int(lengths[0]) - 1).bit_length())) < packing.row:
        yield MicroBatch(order, order, order, 1, width, 1)  # a query waits for no row's other tokens
        return
    long = order[: int(np.count_nonzero(lengths > packing.text))]
    start = previous = 0
    while start < len(long):
        row_length = padded_length(int(lengths[long[start]]), length_multiple)
        num_rows = _num_rows(row_length, tokens_per_batch)
        if row_length <= packing.row and len(long) - start < num_rows:
            break
        positions = long[start : start + num_rows]
        if row_length != previous:  # else a program for full batches is there
            num_rows = min(num_rows, _round_up(len(positions), max(1, num_rows // packing.sizes)))
        row, previous = np.arange(len(positions), dtype=np.int32), row_length
        yield MicroBatch(positions, row, np.zeros_like(row), num_rows, row_length, 1)
        start += num_rows
    short = order[min(start, len(long)) :]
    if len(short):
        yield from _packed(short, lengths[short], _num_rows(packing.row, tokens_per_batch), packing)


def padded_length(longest: int, length_multiple: int | None) -> int:
    """How wide a batch is made whose longest text has `longest` tokens.

    Args:
        longest: tokens.
        length_multiple: the result is a multiple of it. None takes a share of the power of two above `longest` that depends on
            the backend.
    """
    if length_multiple is None:
        backend = jax.default_backend()
        steps = LENGTHS_PER_DOUBLING.get(backend, LENGTHS_PER_DOUBLING_ACCELERATOR)
        smallest = 1 if backend == "cpu" else TILE_ACCELERATOR
        length_multiple = max(smallest, 2 ** max(0, longest - 1).bit_length() // (2 * steps))
    return _round_up(longest, length_multiple)


def _packed(texts: np.ndarray, lengths: np.ndarray, most_rows: int, packing: Packing) -> Iterator[MicroBatch]:
    """Batches of as many rows each, so that a few rows more than a batch do not cost a second full one."""
    row, place = layout.fit(lengths, packing.row, packing.texts)
    needed = int(row.max()) + 1
    num_rows = min(most_rows, _round_up(-(-needed // -(-needed // most_rows)), max(1, most_rows // packing.sizes)))
    order = np.argsort(row, kind="stable")
    ends = np.searchsorted(row[order], np.arange(num_rows, needed + num_rows, num_rows))
    for batch, members in enumerate(np.split(order, ends[:-1])):
        yield MicroBatch(texts[members], row[members] - batch * num_rows, place[members], num_rows, packing.row, packing.texts)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _num_rows(row_length: int, tokens_per_batch: int) -> int:
    num_rows = tokens_per_batch // row_length
    return num_rows // 8 * 8 if num_rows >= 8 else max(1, num_rows)
