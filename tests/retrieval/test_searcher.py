"""Queries as tokens: as a store pads them, and refused where a length holds nothing of them."""

import numpy as np
import pytest

from de_jax.data.stores.corpus import tokenized
from de_jax.retrieval.searcher import padded_tokens
from de_jax.types import InputError

TEXTS = ["red fox den", "a", "grey wolf sea grey wolf sea"]


def test_queries_are_padded_as_stores_pad_them(tokenizer):
    for max_length in (2, 4, 50):
        tokens, lengths = padded_tokens(tokenizer, TEXTS, max_length=max_length, length_multiple=8)
        store = tokenized(TEXTS, tokenizer)
        np.testing.assert_array_equal(tokens, store.pad(np.arange(3), max_length, tokens.shape[1]))
        np.testing.assert_array_equal(lengths[:, 0], np.count_nonzero(tokens, axis=1))


def test_a_query_that_is_cut_is_told(tokenizer, recwarn):
    padded_tokens(tokenizer, TEXTS, max_length=50, length_multiple=8)
    assert not recwarn.list
    with pytest.warns(UserWarning, match="67 % of the texts have more than max_length = 4 tokens and are cut"):
        padded_tokens(tokenizer, TEXTS, max_length=4, length_multiple=8)


def test_a_length_without_room_for_a_query_is_refused(tokenizer):
    with pytest.raises(InputError, match="a maximum length of 1 leaves no room beside the 1 special tokens"):
        padded_tokens(tokenizer, TEXTS, max_length=1, length_multiple=8)
