"""Batches of a stream, against a plain list of its examples: windows, resuming at any step, shards that are passed over."""

import itertools

import numpy as np
import pytest
from toy_batches import windows

from de_jax.data.batches.window_batches import Shards, stream
from de_jax.data.text.tokenizing import Tokenizer
from de_jax.types import InputError, Packed

SIZES = (7, 0, 12, 5)


class Ending(Tokenizer):
    """A tokenizer of which only the special tokens are asked for."""

    vocab_size, prefix_ids, suffix_ids, pad_id, fingerprint = 99, (), (1,), 0, "toy"


TOKENIZERS = {"query": Ending(), "doc": Ending()}


class Source:
    """Shards of examples whose document tells shard and place; remembers what was read."""

    def __init__(self, sizes=SIZES, with_ids=False, num_docs=10**6):
        self.sizes, self.with_ids, self.num_docs, self.read_from = sizes, with_ids, num_docs, []

    def read(self, shard, skip):
        self.read_from.append((shard, skip))
        places = list(range(skip, self.sizes[shard]))
        for chunk in (places[start : start + 4] for start in range(0, len(places), 4)):
            docs = [place % self.num_docs for place in chunk]
            found = {
                "query": [np.array([3 + place], np.int32) for place in chunk],
                "doc": [np.array([2 + shard, 10 + doc] + [7] * (doc % 3), np.int32) for doc in docs],
            }
            if self.with_ids:
                found |= {"query_id": [f"q{shard}/{place}" for place in chunk], "doc_id": [f"d{doc}" for doc in docs]}
            yield found

    def shards(self, sizes=None):
        return Shards("toy", len(self.sizes), self.read, {} if sizes is None else sizes)


def batches_of(source, sizes=None, **options):
    settings = {"batch_size": 4, "window": 9, "seed": 3, "max_query_length": 4, "max_doc_length": 5, "pack": False}
    return windows(source.shards(sizes), TOKENIZERS, **(settings | options))


def take(batches, start, count):
    made = batches(start)
    found = list(itertools.islice(made, count))
    made.close()
    return found


def names(batches):
    """The (shard, place) of each document, batch by batch."""
    return [[(int(row[0]) - 2, int(row[1]) - 10) for row in batch.doc] for batch in batches]


def plain(count, seed=3):
    """The first examples of the stream as a list."""
    found = []
    for epoch in itertools.count():
        for shard in np.random.default_rng((seed, epoch)).permutation(len(SIZES)).tolist():
            found += [(shard, place) for place in range(SIZES[shard])]
        if len(found) >= count:
            return found[:count]


def assert_same(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        for field, first, second in zip(one._fields, one, other, strict=True):
            parts = zip(first, second, strict=True) if isinstance(first, Packed) else [(first, second)]
            for part, expected in parts:
                np.testing.assert_array_equal(part, expected, err_msg=field)


@pytest.mark.parametrize("position", [0, 1, 7, 11, 12, 24, 60, 75])
@pytest.mark.parametrize("known", [{}, {2: 12}, dict(enumerate(SIZES))], ids=["none", "one", "all"])
def test_the_stream_begins_at_any_position_and_reads_no_shard_that_it_can_pass_over(position, known):
    source = Source()
    chunks = stream(source.shards(dict(known)), position, seed=3)
    found = []
    while len(found) < 20:
        found += [(int(doc[0]) - 2, int(doc[1]) - 10) for doc in next(chunks)["doc"]]
    assert found[:20] == plain(position + 20)[position:]
    first, skipped = source.read_from[0]
    assert skipped == 0 or first in known
    if len(known) == len(SIZES):
        assert (first, skipped) == plain(position + 1)[-1]


def test_each_window_is_its_part_of_the_stream_in_another_order():
    found = list(itertools.chain(*names(take(batches_of(Source()), 0, 12))))
    expected = plain(48)
    for start in range(0, 48, 8):  # the window of 9 holds two batches of 4
        assert sorted(found[start : start + 8]) == sorted(expected[start : start + 8])
    assert found != expected
    assert names(take(batches_of(Source(), seed=4), 0, 12)) != names(take(batches_of(Source()), 0, 12))


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("with_ids", [False, True])
def test_batches_from_any_step_equal_those_of_the_whole_stream_on_every_host(pack, with_ids):
    options = {"pack": pack, "row_multiple": 2}
    whole, sizes = take(batches_of(Source(with_ids=with_ids), **options), 0, 16), {}
    for start in range(12):
        assert_same(take(batches_of(Source(with_ids=with_ids), sizes, **options), start, 4), whole[start : start + 4])
    assert sizes == dict(enumerate(SIZES))
    shares = [take(batches_of(Source(with_ids=with_ids), host_index=host, num_hosts=2, **options), 5, 3) for host in (0, 1)]
    for both in zip(*shares, whole[5:8], strict=True):
        np.testing.assert_array_equal(np.concatenate([both[0].doc_id, both[1].doc_id]), both[2].doc_id)
        if not pack:
            np.testing.assert_array_equal(np.concatenate([both[0].doc, both[1].doc]), both[2].doc)


def test_packed_batches_have_one_shape_although_later_texts_are_longer():
    class Growing(Source):
        def read(self, shard, skip):
            for chunk in super().read(shard, skip):
                yield {**chunk, "doc": [np.append(doc, np.full(min(20, int(doc[1])), 5, np.int32)) for doc in chunk["doc"]]}

    found = take(batches_of(Growing(), pack=True, max_doc_length=24), 0, 30)
    assert {batch.doc.tokens.shape[1] for batch in found} == {24}
    assert len({batch.doc.lengths.shape for batch in found}) <= 2
    padded = take(batches_of(Growing(), max_doc_length=24), 0, 30)
    assert [int(batch.doc.lengths.sum()) for batch in found] == [np.count_nonzero(batch.doc) for batch in padded]


def test_no_text_is_twice_in_a_batch_as_far_as_the_window_allows_and_every_pair_is_in_one():
    source = Source(sizes=(40, 40), with_ids=True, num_docs=12)
    found = take(batches_of(source, window=40), 0, 20)
    is_unique = [len(set(batch.doc_id.tolist())) == 4 for batch in found]
    assert sum(is_unique) >= 18
    assert len(set(itertools.chain(*(batch.query_id.tolist() for batch in found)))) == 80
    repeated = take(batches_of(source, window=40, unique_in_batch=False), 0, 20)
    assert sum(len(set(batch.doc_id.tolist())) == 4 for batch in repeated) < 18


def test_equal_texts_without_ids_have_equal_ids():
    (batch,) = take(batches_of(Source(sizes=(4, 4, 4)), window=4), 0, 1)
    others = take(batches_of(Source(sizes=(4, 4, 4)), window=4), 0, 9)
    by_text = {}
    for one in [batch, *others]:
        for text, text_id in zip(one.query.tolist(), one.query_id.tolist(), strict=True):
            assert by_text.setdefault(tuple(text), text_id) == text_id
    assert len(set(by_text.values())) == len(by_text)


def test_a_source_without_pairs_an_empty_text_and_a_batch_that_hosts_cannot_share_are_refused():
    with pytest.raises(InputError, match="toy yields no pair"):
        take(batches_of(Source(sizes=(0, 0))), 0, 1)
    source = Source()
    source.read = lambda shard, skip: iter([{"query": [np.zeros(0, np.int32)] * 8, "doc": [np.ones(1, np.int32)] * 8}])
    with pytest.raises(InputError, match="the text 0 of a window is empty; remove it, or set skip_empty"):
        take(batches_of(source), 0, 1)
    with pytest.raises(InputError, match="batch_size 4 is not divisible by the 3 hosts"):
        batches_of(Source(), num_hosts=3)
