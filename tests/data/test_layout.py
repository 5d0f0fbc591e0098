"""Packing: every text whole, in one row, little padding, few shapes."""

import numpy as np
import pytest

from de_jax.data.batches import layout
from de_jax.data.stores import corpus
from de_jax.types import PADDING_ID


@pytest.fixture(scope="module")
def store(tmp_path_factory, tokenizer):
    rng = np.random.default_rng(0)
    texts = [(f"d{i}", " ".join(rng.choice(["fox", "dog", "lazy"], size))) for i, size in enumerate(rng.geometric(0.15, 400))]
    return corpus.build_token_store(texts, tokenizer, tmp_path_factory.mktemp("stores") / "d", progress=False)


def packed_by(store, max_length, *, sample, **options):
    shape = layout.packings({"doc": layout.Sample(store, max_length, sample)}, **options)["doc"]
    return layout.packed_as(shape, store, max_length)


@pytest.mark.parametrize(("row_length", "max_texts"), [(64, 100), (64, 5), (40, 2), (40, 1)])
def test_every_text_gets_room_of_its_own(row_length, max_texts):
    lengths = np.random.default_rng(1).integers(1, 41, 300)
    row, place = layout.fit(lengths, row_length, max_texts)
    assert len({*zip(row.tolist(), place.tolist(), strict=True)}) == len(lengths)
    assert np.bincount(row, weights=lengths).max() <= row_length
    assert np.bincount(row).max() == place.max() + 1 <= max_texts
    assert np.bincount(row).min() > 0


def test_rows_are_nearly_full():
    drawn = np.rint(67.3 * np.exp(0.4 * np.random.default_rng(2).standard_normal(512)))
    lengths = np.clip(drawn, 8, 256).astype(np.int64)
    row, _ = layout.fit(lengths, 256, 100)
    assert 256 * (row.max() + 1) < 1.03 * lengths.sum()


def test_a_text_of_a_full_row_stands_alone():
    row, place = layout.fit(np.array([8, 3, 8, 8]), 8, 4)
    assert len(set(row.tolist())) == 4
    assert place.tolist() == [0] * 4


def test_tokens_lie_where_lengths_and_slots_say():
    tokens = np.array([[1, 2, 3], [4, 0, 0], [5, 6, 0]])
    row, place = np.array([0, 1, 1]), np.array([0, 1, 0])
    packed = layout.fill(tokens, np.array([3, 1, 2]), row, place, num_rows=3, row_length=4, max_texts=2)
    assert packed.tokens.tolist() == [[1, 2, 3, 0], [5, 6, 4, 0], [0, 0, 0, 0]]
    assert packed.lengths.tolist() == [[3, 0], [2, 1], [0, 0]]
    assert packed.slots.tolist() == [0, 3, 2]


def test_batches_have_few_shapes(store):
    rng = np.random.default_rng(3)
    chosen = [rng.choice(400, 128, replace=False) for _ in range(60)]
    lay_out = packed_by(store, 48, sample=chosen[:16], row_multiple=4)
    shapes = {lay_out(texts, 0).tokens.shape for texts in chosen}
    assert len(shapes) <= 2
    assert all(num_rows % 4 == 0 and length == 48 for num_rows, length in shapes)


class Lengths:
    """Texts of some lengths, which a layout asks for."""

    def __init__(self, lengths):
        self._lengths = lengths

    def lengths(self, max_length):
        return np.minimum(self._lengths, max_length)

    def pad(self, rows, max_length, pad_to):
        return np.ones((len(rows), pad_to), np.int32)


def test_small_batches_have_few_shapes_too():
    """Each further one is compiled, which takes longer than hundreds of updates on an accelerator."""
    rng = np.random.default_rng(0)
    texts = Lengths(rng.geometric(1 / 12, 20_000).clip(3, 64).astype(np.int32))
    batches = [rng.permutation(20_000)[:64] for _ in range(1024)]
    lay_out = packed_by(texts, 64, sample=batches)
    assert len({lay_out(batch, 0).tokens.shape for batch in batches}) == 1
    later = {lay_out(rng.permutation(20_000)[:64], 0).tokens.shape for _ in range(1024)}
    assert len(later) <= 2


def test_rows_are_no_longer_than_the_longest_text_needs(store):
    longest = int(store.lengths(10**6).max())
    texts = np.arange(100)
    packed = packed_by(store, 10**6, sample=[texts])(texts, 0)
    assert packed.tokens.shape[1] == -(-longest // 8) * 8


@pytest.mark.parametrize(
    ("longest", "row_multiple", "expected"),
    [(64, 1, (64, 64)), (64, 16, (16, 64)), (512, 1, (512, 512)), (520, 1, (16, 520))],
    ids=["alike", "many devices", "long", "too long"],
)
def test_rows_of_all_kinds_are_alike_where_that_costs_little(longest, row_multiple, expected):
    """With 16 devices, 8 rows of 64 tokens for the queries would become 16; with one, 32 of 16 become 8."""
    kinds = {"query": Lengths(np.full(32, 16)), "doc": Lengths(np.full(32, longest))}
    samples = {name: layout.Sample(texts, longest, [np.arange(32)]) for name, texts in kinds.items()}
    shapes = layout.packings(samples, row_multiple=row_multiple)
    assert (shapes["query"].row_length, shapes["doc"].row_length) == expected
    for name, shape in shapes.items():
        laid_out = layout.packed_as(shape, kinds[name], longest)(np.arange(32), 0)
        assert laid_out.lengths.sum() == kinds[name].lengths(longest).sum()


def test_absent_texts_take_no_room(store):
    texts = np.full((20, 4), PADDING_ID)
    texts[:, 0] = np.arange(20)
    packed, alone = (packed_by(store, 32, sample=[rows])(rows, 0) for rows in (texts, texts[:, :1]))
    np.testing.assert_array_equal(packed.tokens, alone.tokens)
    np.testing.assert_array_equal(packed.slots, np.concatenate([alone.slots, np.full((20, 3), -1)], axis=1))
    nothing = packed_by(store, 32, sample=[texts])(np.full((2, 3), PADDING_ID), 0)
    assert (nothing.slots.tolist(), nothing.lengths.any()) == ([[-1] * 3] * 2, False)


def test_filler_texts_are_empty_and_negatives_keep_their_shape(store):
    texts = np.array([[1, 2], [3, PADDING_ID]])
    packed = packed_by(store, 32, sample=[texts])(texts, 0)
    assert packed.slots.shape == (2, 2)
    lengths = np.where(packed.slots < 0, 0, packed.lengths.reshape(-1)[packed.slots])
    np.testing.assert_array_equal(lengths, [[*store.lengths(32)[1:3]], [store.lengths(32)[3], 0]])
    padded = layout.padded(store, 32, length_multiple=8)(texts, 0)
    np.testing.assert_array_equal(np.count_nonzero(padded, axis=-1), lengths)
