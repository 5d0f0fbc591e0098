"""Span corruption as T5's own code has it, and BERT's masks, against loops and published examples."""

import collections

import naive
import numpy as np
import pytest

from reproduction import corruption

TENS = np.arange(10, 20)
T5 = {"noise_density": 0.15, "mean_span_length": 3.0}


def bits(text):
    return np.array([character == "1" for character in text])


@pytest.mark.parametrize(
    ("mask", "inputs", "targets"),
    [  # of the tests of t5.data.preprocessors (999, 998, ... there) and of airio, for T5's vocabulary with its 100 extra ids
        ("0001101001", [10, 11, 12, 32099, 15, 32098, 17, 18, 32097], [32099, 13, 14, 32098, 16, 32097, 19]),
        ("1100001110", [32099, 12, 13, 14, 15, 32098, 19], [10, 11, 32099, 16, 17, 18, 32098]),
        ("0000000000", list(range(10, 20)), [32099]),
    ],
)
def test_spans_are_replaced_as_t5_does_it(mask, inputs, targets):
    found = corruption.span_corrupted(TENS, bits(mask), 32099)
    assert [part.tolist() for part in found] == [inputs, targets]


def test_spans_are_replaced_as_a_loop_does_it():
    rng = np.random.default_rng(0)
    for length in (2, 3, 17, 60):
        tokens, mask = rng.integers(2, 90, length), rng.random(length) < 0.3
        found = corruption.span_corrupted(tokens, mask, 99)
        assert [part.tolist() for part in found] == [*naive.span_corrupted(tokens.tolist(), mask.tolist(), 99)]


@pytest.mark.parametrize(
    ("max_length", "noise_density", "mean_span_length", "text", "targets"),
    [(512, 0.15, 3.0, 568, 114), (64, 0.2, 2.0, 70, 22), (64, 0.2, 1.0, 63, 27)],  # as t5 gives them
)
def test_a_text_is_as_long_as_its_inputs_allow(max_length, noise_density, mean_span_length, text, targets):
    found = corruption.span_lengths(max_length, noise_density=noise_density, mean_span_length=mean_span_length)
    assert (found.text, found.inputs, found.targets) == (text, max_length, targets)


def test_masks_have_the_numbers_of_t5_and_every_one_is_as_likely():
    rng, found = np.random.default_rng(1), collections.Counter()
    for _ in range(3000):
        mask = corruption.span_mask(8, rng, noise_density=0.4, mean_span_length=1.5)
        found["".join("01"[int(value)] for value in mask)] += 1
    # 3 tokens of 8 in 2 spans, the last token among them: 2 ways to cut the noise, 4 to cut the rest.
    expected = {"0" * a + "1" * n + "0" * (5 - a) + "1" * (3 - n) for a in range(1, 5) for n in (1, 2)}
    assert found.keys() == expected
    assert all(abs(count - 375) < 5 * 375**0.5 for count in found.values())


def test_lengths_of_a_row_are_those_that_were_told():
    rng = np.random.default_rng(2)
    for max_length in (4, 16, 128, 190, 512):
        lengths = corruption.span_lengths(max_length, **T5)
        mask = corruption.span_mask(lengths.text, rng, **T5)
        inputs, targets = corruption.span_corrupted(np.arange(lengths.text), mask, 10**6)
        assert (len(inputs) + 1, len(targets) + 1) == (lengths.inputs, lengths.targets)
        assert lengths.inputs <= max_length


def test_masked_tokens_are_a_share_of_the_row_and_most_of_them_hidden():
    rng, fates, num_tokens = np.random.default_rng(3), collections.Counter(), 40
    tokens = rng.integers(5, 1000, num_tokens)
    for _ in range(2000):
        replaced, places = corruption.masked(tokens, rng, masked_share=0.15, mask_id=4, vocab_size=1000)
        assert len(places) == len(set(places.tolist())) == 6
        others = np.setdiff1d(np.arange(num_tokens), places)
        np.testing.assert_array_equal(replaced[others], tokens[others])
        assert replaced.all()  # padding would hide the place from the encoder
        kinds = np.where(replaced[places] == 4, "mask", np.where(replaced[places] == tokens[places], "same", "other"))
        fates.update(kinds.tolist())
    shares = {kind: count / 12000 for kind, count in fates.items()}
    assert {kind: round(share, 1) for kind, share in shares.items()} == {"mask": 0.8, "same": 0.1, "other": 0.1}
