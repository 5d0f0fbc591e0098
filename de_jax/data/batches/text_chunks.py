"""Chunks of equal length of a stream of texts: which of them make up which batch, from the seed and the step alone."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
from jaxtyping import Int64

from de_jax.data.stores.corpus import TokenStore
from de_jax.types import InputError


@dataclasses.dataclass(frozen=True)
class TextChunks:
    """All texts of a store end to end, cut into chunks; every epoch has another offset and another order.

    A chunk may hold the end of one text and the beginning of the next. What fills no chunk or no batch waits for another epoch.

    Attributes:
        store: the texts.
        length: tokens of a chunk.
        batch_size: chunks of a batch.
        seed: of offsets and orders.

    Raises:
        InputError: the texts do not fill one batch.
    """

    store: TokenStore
    length: int
    batch_size: int
    seed: int

    def __post_init__(self) -> None:
        if not self.num_batches:
            raise InputError(
                f"the texts have {len(self.store.tokens):,} tokens, which do not fill a batch of {self.batch_size} chunks of "
                f"{self.length}; take more texts, or a smaller batch_size."
            )

    @property
    def num_chunks(self) -> int:
        """Of an epoch, whatever its offset is."""
        return max(len(self.store.tokens) - (self.length - 1), 0) // self.length

    @property
    def num_batches(self) -> int:
        """Of an epoch."""
        return self.num_chunks // self.batch_size

    def starts(self, step: int) -> Int64[np.ndarray, " B"]:
        """Where the chunks of a batch begin in the store's tokens."""
        epoch, number = divmod(step, self.num_batches)
        return _starts(self.seed, epoch, self.length, self.num_chunks)[number * self.batch_size : (number + 1) * self.batch_size]

    def text_rows(self, starts: Int64[np.ndarray, " r"]) -> Int64[np.ndarray, " r"]:
        """The texts that chunks begin in, as rows of the store."""
        return np.searchsorted(self.store.offsets, starts, side="right") - 1


@functools.lru_cache(maxsize=2)  # consecutive batches come from one epoch
def _starts(seed: int, epoch: int, length: int, num_chunks: int) -> np.ndarray:
    rng = np.random.default_rng((seed, epoch))
    offset = rng.integers(length)
    return offset + length * rng.permutation(num_chunks).astype(np.int64)
