"""How the texts of a batch lie in an array: one text a row, padded, or several a row, packed.

Packing saves most of the work that padding wastes: where the longest of 512 texts is three times the mean, two thirds of a padded
batch are zeros, while packed rows are nearly full.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int, Int32, Int64

from de_jax.data.text.tokenizing import Tokenizer
from de_jax.types import Array, InputError, Packed


@runtime_checkable
class Lengths(Protocol):
    """Tokens of each text: an array, or what looks them up."""

    def __getitem__(self, rows: np.ndarray, /) -> np.ndarray:
        """Those of some texts, int32, in the shape of the rows; of a negative row, any."""

    def max(self) -> Any:
        """The longest of all texts."""


@runtime_checkable
class Store(Protocol):
    """Texts as tokens: `corpus.TokenStore`, `passages.PassageStore`, `document_texts.TextsWithOneQuery`."""

    def lengths(self, max_length: int) -> Lengths:
        """Tokens of each text after truncation."""

    def pad(self, rows: np.ndarray, max_length: int, pad_to: int) -> np.ndarray:
        """Token ids of some texts, int32 [len(rows), pad_to]; zeros for a negative row."""


Layout = Callable[[np.ndarray, int], Array | Packed]
"""(the store rows of all texts of a batch [B, ...], which host) -> that host's share: tokens [B / hosts, ..., L] or `Packed`."""

_LENGTH_MULTIPLE = 8
_NUM_SIZES = 16
"""Packed batches differ in their number of rows by about one part in so many, so that few shapes are compiled."""
_LONGEST_SHARED = 512
"""Tokens of rows that all kinds of text share; a longer row would have places for hundreds of queries."""


def end_to_end(
    names: Sequence[str], encoded: Sequence[np.ndarray], tokenizer: Tokenizer
) -> tuple[Int32[np.ndarray, " total"], Int64[np.ndarray, " n"]]:
    """The tokens of texts end to end, and how many each has; the names are for messages, such as "text 3"."""
    lengths = np.array([len(ids) for ids in encoded], dtype=np.int64)
    if not tokenizer.prefix_ids and not tokenizer.suffix_ids and not lengths.all():
        raise InputError(f"nothing is left of the text {names[int(np.argmin(lengths))]} after tokenization; remove it.")
    tokens = np.concatenate(encoded).astype("<i4", copy=False)
    if not tokens.all():
        name = names[int(np.searchsorted(np.cumsum(lengths), np.argmin(tokens), side="right"))]
        raise InputError(f"the text {name} holds the padding token, which only fills rows; remove it from the text.")
    return tokens, lengths


def padded(store: Store, max_length: int, *, length_multiple: int, num_hosts: int = 1) -> Layout:
    """One text a row, as wide as the longest of the batch rounded up to a multiple of `length_multiple`, at most `max_length`."""
    lengths = store.lengths(max_length)

    def lay_out(texts: np.ndarray, host: int) -> np.ndarray:
        longest = int(lengths[texts].max(where=texts >= 0, initial=1))
        width = min(round_up(longest, length_multiple), max_length)
        share = np.split(texts, num_hosts)[host]
        return store.pad(share.reshape(-1), max_length, width).reshape(*share.shape, width)

    return lay_out


class Packing(NamedTuple):
    """The shape of packed rows."""

    row_length: int  # tokens
    max_texts: int  # of a row
    usual: int  # rows of a host's share
    step: int  # batches that need more rows have a multiple of it


class Sample(NamedTuple):
    """The texts of some batches, by which the shape of packed rows is set."""

    store: Store
    max_length: int
    rows: Sequence[np.ndarray]  # of the store, for each batch
    changes: bool = False  # later batches may hold longer texts; rows are kept for them, as another shape would be compiled


def packings(
    samples: Mapping[str, Sample], *, holds_any: bool = False, row_multiple: int = 1, num_hosts: int = 1
) -> dict[str, Packing]:
    """The shapes of rows that fit each kind of text of a batch.

    A row is as long as the longest text of all kinds, so that a tower that encodes them all is compiled once; if that takes a
    fortieth more tokens (many devices, each with a row of a few queries), or is very long, as the longest text of its own kind.

    With `holds_any`, a row has room for any text, also a longer one than those of the store. The number of rows of the global batch
    is a multiple of `row_multiple`.
    """

    def longest_of(one: Sample) -> int:
        longest = one.max_length if holds_any else int(one.store.lengths(one.max_length).max())
        return min(round_up(longest, _LENGTH_MULTIPLE), one.max_length)

    shape_of = functools.partial(_packing, row_multiple=row_multiple, num_hosts=num_hosts)
    own = {name: shape_of(one, longest_of(one)) for name, one in samples.items()}
    longest = max(shape.row_length for shape in own.values())
    alike = {name: own[name] if own[name].row_length == longest else shape_of(one, longest) for name, one in samples.items()}
    taken = [sum(shape.usual * shape.row_length for shape in shapes.values()) for shapes in (own, alike)]
    return alike if longest <= _LONGEST_SHARED and 40 * taken[1] <= 41 * taken[0] else own


def _packing(sample: Sample, row_length: int, *, row_multiple: int, num_hosts: int) -> Packing:
    lengths = sample.store.lengths(sample.max_length)
    real = np.concatenate([texts[texts >= 0] for texts in sample.rows])
    mean = float(lengths[real].mean()) if len(real) else row_length
    max_texts = math.ceil(2 * row_length / mean)  # twice what fits on average: the shortest texts meet in the last rows
    host_multiple = -(-row_multiple // num_hosts)
    needed = max(_num_rows(_fitted(lengths, texts, row_length, max_texts, num_hosts)) for texts in sample.rows)
    step = host_multiple * math.ceil(needed / (_NUM_SIZES * host_multiple))
    return Packing(row_length, max_texts, round_up(needed, step) + step * sample.changes, step)


def packed_as(shape: Packing, store: Store, max_length: int, *, num_hosts: int = 1) -> Layout:
    """Several texts of a store a row, in rows of a shape that all of them fit."""
    row_length, max_texts, usual, step = shape
    lengths = store.lengths(max_length)

    def lay_out(texts: np.ndarray, host: int) -> Packed:
        placed = _fitted(lengths, texts, row_length, max_texts, num_hosts)
        num_rows = max(usual, round_up(_num_rows(placed), step))
        share = np.split(texts, num_hosts)[host]
        is_text = share >= 0
        sizes = lengths[share[is_text]]
        tokens = store.pad(share[is_text], max_length, int(sizes.max(initial=0)))
        packed = fill(tokens, sizes, *placed[host], num_rows=num_rows, row_length=row_length, max_texts=max_texts)
        slots = np.full(share.shape, -1, np.int32)
        slots[is_text] = packed.slots
        return packed._replace(slots=slots)

    return lay_out


def _fitted(
    lengths: Lengths, texts: np.ndarray, row_length: int, max_texts: int, num_hosts: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Row and place of each text, by host."""
    return [fit(lengths[share[share >= 0]], row_length, max_texts) for share in np.split(texts, num_hosts)]


def _num_rows(placed: list[tuple[np.ndarray, np.ndarray]]) -> int:
    """The rows that the fullest host needs."""
    return max(int(row.max(initial=0)) + 1 for row, _ in placed)


def fit(lengths: Int[np.ndarray, " n"], row_length: int, max_texts: int) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " n"]]:
    """Which row each text goes to, and its place there: longest first, each to the fullest row that has room (best fit)."""
    row, place = np.zeros(len(lengths), np.int32), np.zeros(len(lengths), np.int32)
    open_rows: list[list[int]] = [[] for _ in range(row_length + 1)]  # by free tokens
    nonempty = 0  # bit f is set where open_rows[f] has a row
    num_texts: list[int] = []
    sizes = lengths.tolist()
    for text in np.argsort(-lengths, kind="stable").tolist():
        size = sizes[text]
        roomy = nonempty >> size
        if roomy:
            free = size + (roomy & -roomy).bit_length() - 1
            chosen = open_rows[free].pop()
            if not open_rows[free]:
                nonempty ^= 1 << free
        else:
            free, chosen = row_length, len(num_texts)
            num_texts.append(0)
        row[text], place[text] = chosen, num_texts[chosen]
        num_texts[chosen] += 1
        if num_texts[chosen] < max_texts:
            open_rows[free - size].append(chosen)
            nonempty |= 1 << (free - size)
    return row, place


def fill(
    tokens: Int[np.ndarray, "n l"],
    sizes: Int[np.ndarray, " n"],
    row: Int[np.ndarray, " n"],
    place: Int[np.ndarray, " n"],
    *,
    num_rows: int,
    row_length: int,
    max_texts: int,
) -> Packed:
    """Padded texts of `sizes` tokens, moved to the rows and places that `fit` gave them."""
    lengths = np.zeros((num_rows, max_texts), np.int32)
    lengths[row, place] = sizes
    starts = (np.cumsum(lengths, axis=1) - lengths)[row, place] + row * row_length  # among the tokens of all rows
    steps = np.arange(tokens.shape[1])
    is_token = steps[None, :] < sizes[:, None]
    flat = np.zeros(num_rows * row_length, np.int32)
    flat[(starts[:, None] + steps[None, :])[is_token]] = tokens[is_token]
    return Packed(flat.reshape(num_rows, row_length), lengths, (row * max_texts + place).astype(np.int32))


def round_up(value: int, multiple: int) -> int:
    """The least multiple that is not below a value."""
    return -(-value // multiple) * multiple
