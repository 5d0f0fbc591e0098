"""Corrupted texts that a language model is pretrained to mend: spans replaced by sentinels (T5), or masked tokens (BERT)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int, Int32

MASKED, RANDOM = 0.8, 0.1
"""Of the tokens that BERT predicts, the shares that are replaced by the mask and by a random token; the rest stay as they are."""


class SpanLengths(NamedTuple):
    """Tokens of a text, and of what span corruption makes of it, ends included."""

    text: int
    inputs: int
    targets: int
    num_spans: int


def span_lengths(max_length: int, *, noise_density: float, mean_span_length: float) -> SpanLengths:
    """The longest text whose corrupted inputs have at most `max_length` tokens.

    Raises:
        ValueError: `max_length` has no room for a text of two tokens.

    Example:
        >>> span_lengths(512, noise_density=0.15, mean_span_length=3.0)  # T5's own
        SpanLengths(text=568, inputs=512, targets=114, num_spans=28)
    """
    found = None
    for text in range(2, 2**31):
        num_noise, num_spans = noise_counts(text, noise_density=noise_density, mean_span_length=mean_span_length)
        inputs = text - num_noise + num_spans + 1
        if inputs > max_length:
            break
        found = SpanLengths(text, inputs, num_noise + num_spans + 1, num_spans)
    if found is None:
        raise ValueError(f"no text of two tokens fits into {max_length}")
    return found


def noise_counts(length: int, *, noise_density: float, mean_span_length: float) -> tuple[int, int]:
    """How many tokens of a text are taken out, and in how many spans; at least one of each, and one token stays."""
    # In float32 and to the even neighbour, as the code of T5 rounds.
    num_noise = int(np.round(np.float32(length) * np.float32(noise_density)))
    num_noise = min(max(num_noise, 1), length - 1)
    num_spans = int(np.round(np.float32(num_noise) / np.float32(mean_span_length)))
    return num_noise, min(max(num_spans, 1), num_noise, length - num_noise)


def span_mask(
    length: int, rng: np.random.Generator, *, noise_density: float, mean_span_length: float
) -> Bool[np.ndarray, " {length}"]:
    """Which tokens of a text are taken out: a span that stays, a span that goes, and so on in turn; the last one goes.

    The numbers of tokens and of spans are those of `noise_counts`; all masks with these numbers are equally likely.

    Args:
        length: tokens of the text, at least 2.
        rng: decides.
        noise_density: share of the tokens that are taken out, above 0 and below 1.
        mean_span_length: tokens, at least 1.
    """
    num_noise, num_spans = noise_counts(length, noise_density=noise_density, mean_span_length=mean_span_length)
    lengths = np.stack([_parts(length - num_noise, num_spans, rng), _parts(num_noise, num_spans, rng)], axis=1)
    return np.repeat(np.arange(2 * num_spans) % 2 == 1, lengths.ravel())


def span_corrupted(
    tokens: Int[np.ndarray, " t"], mask: Bool[np.ndarray, " t"], first_sentinel: int
) -> tuple[Int32[np.ndarray, " i"], Int32[np.ndarray, " o"]]:
    """Inputs and targets of span corruption (Raffel et al. 2020, section 3.1.4), without ends.

    In the inputs a sentinel stands for each span that is taken out, in the targets for each span that is left. The n-th sentinel of
    either is `first_sentinel` - n, n from 0.

    Example:
        >>> words = np.array([11, 12, 13, 14, 15, 16, 17, 18, 19, 20])  # Thank you for inviting me to your party last week
        >>> inputs, targets = span_corrupted(words, np.isin(words, [13, 14, 19]), 99)
        >>> inputs.tolist(), targets.tolist()
        ([11, 12, 99, 15, 16, 17, 18, 98, 20], [99, 13, 14, 98, 19, 97])
    """
    return _with_sentinels(tokens, mask, first_sentinel), _with_sentinels(tokens, ~mask, first_sentinel)


def num_masked(length: int, masked_share: float) -> int:
    """How many of a text's tokens BERT predicts, at least one."""
    return min(max(round(length * masked_share), 1), length)


def masked(
    tokens: Int[np.ndarray, " t"], rng: np.random.Generator, *, masked_share: float, mask_id: int, vocab_size: int
) -> tuple[Int32[np.ndarray, " t"], Int32[np.ndarray, " m"]]:
    """The text with masked tokens and their places, ascending (Devlin et al. 2019, section 3.1).

    Of the places, the share `MASKED` gets the mask, `RANDOM` a random token, which is any but padding, and the rest keeps its own.

    Args:
        tokens: of the text, special ones left out.
        rng: decides.
        masked_share: of the tokens, above 0 and up to 1; see `num_masked`.
        mask_id: the token of the mask.
        vocab_size: entries of the vocabulary.
    """
    number = num_masked(len(tokens), masked_share)
    places = np.sort(rng.permutation(len(tokens))[:number])
    fate, other = rng.random(number), rng.integers(1, vocab_size, number)
    replaced = tokens.astype(np.int32)
    replaced[places] = np.where(fate < MASKED, mask_id, np.where(fate < MASKED + RANDOM, other, tokens[places]))
    return replaced, places.astype(np.int32)


def _parts(number: int, num_parts: int, rng: np.random.Generator) -> Int[np.ndarray, " {num_parts}"]:
    """Sizes of at least 1 that add up to `number`; all ways are equally likely."""
    cuts = np.sort(rng.permutation(number - 1)[: num_parts - 1]) + 1
    return np.diff(cuts, prepend=0, append=number)


def _with_sentinels(tokens: np.ndarray, mask: np.ndarray, first_sentinel: int) -> np.ndarray:
    """A sentinel in the place of each run of masked tokens."""
    starts = mask & ~np.concatenate([[False], mask[:-1]])
    replaced = np.where(starts, first_sentinel + 1 - np.cumsum(starts), tokens)
    return replaced[starts | ~mask].astype(np.int32)
