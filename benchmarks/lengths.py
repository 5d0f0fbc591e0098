"""Texts as long as MS MARCO's, made of random token ids, so that a benchmark needs no download.

The lengths are drawn from log-normal distributions, right-skewed as the real ones are, cut to a range and seeded:

    queries    median 8.05, sigma .40, 3 to 64 tokens     mean 8.7
    passages   median 67.3, sigma .40, 8 to 256 tokens    mean 73

In 512 of them the longest query has about 26 tokens and the longest passage about 220, so that a batch padded to its longest
texts computes some three times the useful work.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MEDIAN = {"query": 8.05, "doc": 67.3}
SIGMA = 0.40
RANGE = {"query": (3, 64), "doc": (8, 256)}
EOS_ID = 1
FIRST_ID = 3
"""0 to 2 are padding, end of text and unknown."""


class RandomTexts:
    """Texts of given lengths as `de_jax.retrieval.encode` asks for a token store.

    Args:
        lengths: tokens of each text, the final `</s>` included.
        vocab_size: token ids are drawn evenly below it.
        seed: of the token ids.
    """

    def __init__(self, lengths: np.ndarray, *, vocab_size: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.texts = [np.append(rng.integers(FIRST_ID, vocab_size, n - 1), EOS_ID).astype(np.int32) for n in lengths.tolist()]
        self.ids: Sequence[str] = [str(row) for row in range(len(lengths))]
        self.num_texts = len(lengths)
        self.content_hash = self.tokenizer_fingerprint = "random"
        self._lengths = lengths.astype(np.int32)

    def lengths(self, max_length: int) -> np.ndarray:
        """Tokens of each text, int32 [n]; none is cut."""
        if max_length < int(self._lengths.max()):
            raise ValueError(f"max_length={max_length} would cut a text of {self._lengths.max()} tokens")
        return self._lengths

    def pad(self, rows: np.ndarray, max_length: int, pad_to: int) -> np.ndarray:
        """Token ids of some texts, zeros to the right, int32 [len(rows), pad_to]."""
        padded = np.zeros((len(rows), pad_to), np.int32)
        for place, row in enumerate(rows.tolist()):
            padded[place, : len(self.texts[row])] = self.texts[row]
        return padded


def msmarco_like(kind: str, num_texts: int, seed: int) -> np.ndarray:
    """Lengths in tokens, int32 [num_texts], of "query" or "doc" texts."""
    rng = np.random.default_rng((seed, len(kind)))
    drawn = np.rint(MEDIAN[kind] * np.exp(SIGMA * rng.standard_normal(num_texts)))
    return np.clip(drawn, *RANGE[kind]).astype(np.int32)


def round_up(length: int, multiple: int) -> int:
    """The smallest multiple that is not below `length`."""
    return -(-length // multiple) * multiple
