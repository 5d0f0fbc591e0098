import itertools
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from toy_batches import pair_batches

from de_jax.data.batches.pair_batches import positives_of
from de_jax.data.batches.prefetch import prefetch
from de_jax.data.sources.training_set import qrel_pairs
from de_jax.data.stores import corpus
from de_jax.types import PADDING_ID, InputError, Packed

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "seven", "wizards", "boxed"]


def build_store(folder, tokenizer, name, num_texts, seed):
    rng = np.random.default_rng(seed)
    texts = [(f"{name}{i}", " ".join(rng.choice(WORDS, rng.integers(1, 12)))) for i in range(num_texts)]
    return corpus.build_token_store(texts, tokenizer, folder / name, progress=False)


@pytest.fixture(scope="module")
def stores(tmp_path_factory, tokenizer):
    folder = tmp_path_factory.mktemp("stores")
    return build_store(folder, tokenizer, "q", 30, 1), build_store(folder, tokenizer, "d", 40, 2)


@pytest.fixture(scope="module")
def pairs():
    rng = np.random.default_rng(3)
    random = np.stack([rng.integers(0, 30, 100), rng.integers(0, 40, 100)], axis=1).astype(np.int32)
    return np.unique(random, axis=0)


def take(iterator, count):
    return list(itertools.islice(iterator, count))


def assert_same(first, second):
    for name, ours, theirs in zip(first._fields, first, second, strict=True):
        if isinstance(ours, Packed):
            assert_same(ours, theirs)
        elif ours is not None:
            np.testing.assert_array_equal(ours, theirs, err_msg=name)


def unpacked(texts):
    """The texts of a `Packed` in the order of their slots."""
    starts = np.cumsum(texts.lengths, axis=1) - texts.lengths
    cut = lambda row, place: texts.tokens[row, starts[row, place] :][: texts.lengths[row, place]]  # noqa: E731
    return [cut(*divmod(slot, texts.lengths.shape[1])) for slot in texts.slots.reshape(-1).tolist()]


def test_a_run_goes_on_where_its_first_negatives_are_gone(stores, pairs):
    """They gave the shapes of packed batches, but are read no more."""

    class Drawn:
        def draw(self, chosen, key):
            return np.zeros((len(chosen), 1), np.int32)

    def negatives(step):
        if step == 0:
            raise InputError("generation 1 is gone.")
        return {"neg_docs": Drawn()}

    make = pair_batches(*stores, pairs, batch_size=7, seed=5, negatives=negatives)
    with pytest.raises(InputError, match="generation 1 is gone"):
        next(make(0))
    with pytest.warns(UserWarning, match=r"generation 1 is gone\. Batches are packed as step 5 needs it"):
        assert next(make(5)).neg_docs is not None
    assert next(make(6)).neg_docs is not None
    in_a_mixture = pair_batches(*stores, pairs, batch_size=7, seed=5, negatives=negatives)
    with pytest.warns(UserWarning, match="Batches are packed as step 8 needs it"):
        assert next(in_a_mixture(0, iter([8, 9]))).neg_docs is not None


IN_THE_SOAK = [pytest.param(options, marks=pytest.mark.soak) for options in ({"unique_in_batch": False}, {"batch_size": 20})]


@pytest.mark.parametrize("options", [{}, {"pack": False}, *IN_THE_SOAK])
def test_batches_from_a_later_step_equal_the_stream_across_epochs(stores, pairs, options):
    make = lambda: pair_batches(*stores, pairs, **({"batch_size": 7, "seed": 5} | options))  # noqa: E731
    stream = take(make()(0), 45)
    for start in (0, 1, 9, 13, 27, 40):
        for expected, found in zip(stream[start:], take(make()(start), 5), strict=False):
            assert_same(expected, found)
    twice = make()
    take(twice(33), 2)
    assert_same(take(twice(4), 1)[0], stream[4])


def test_an_epoch_holds_every_pair_at_most_once_and_epochs_differ(stores, pairs):
    make = pair_batches(*stores, pairs, batch_size=7, unique_in_batch=False)
    num_batches = len(pairs) // 7
    stream = take(make(0), 2 * num_batches)
    seen = [[tuple(pair) for batch in part for pair in zip(batch.query_id.tolist(), batch.doc_id.tolist(), strict=True)]
            for part in (stream[:num_batches], stream[num_batches:])]  # fmt: skip
    for epoch in seen:
        assert len(set(epoch)) == len(epoch) == num_batches * 7
        assert set(epoch) <= {tuple(pair) for pair in pairs.tolist()}
    assert seen[0] != seen[1]


def test_seeds_give_different_shuffles(stores, pairs):
    first, second = (next(pair_batches(*stores, pairs, batch_size=16, seed=seed)(0)) for seed in (0, 1))
    assert first.query_id.tolist() != second.query_id.tolist()


@pytest.mark.parametrize("batch_size", [2, 7, 16, 24])
def test_no_text_occurs_twice_in_a_batch(stores, pairs, batch_size):
    for batch in take(pair_batches(*stores, pairs, batch_size=batch_size)(0), 40):
        assert len(set(batch.query_id.tolist())) == len(set(batch.doc_id.tolist())) == batch_size
        assert all([query, doc] in pairs.tolist() for query, doc in zip(batch.query_id, batch.doc_id, strict=True))


@pytest.mark.parametrize("num_hosts", [1, 2])
def test_a_batch_names_all_documents_of_its_queries(stores, pairs, num_hosts):
    most = np.bincount(pairs[:, 0]).max()
    for host in range(num_hosts):
        options = {"batch_size": 6, "host_index": host, "num_hosts": num_hosts}
        for batch in take(pair_batches(*stores, pairs, **options)(0), 9):
            assert batch.positive_ids.shape == (6 // num_hosts, most)
            for query, found in zip(batch.query_id.tolist(), batch.positive_ids.tolist(), strict=True):
                expected = sorted(pairs[pairs[:, 0] == query, 1].tolist())
                assert sorted(found) == [PADDING_ID] * (most - len(expected)) + expected


def test_a_batch_names_no_documents_if_each_query_has_one(stores):
    assert next(pair_batches(*stores, np.array([[0, 0], [1, 1], [2, 1]], np.int32), batch_size=2)(0)).positive_ids is None


def test_of_a_query_with_very_many_documents_a_batch_names_its_own():
    pairs = np.array([(0, doc) for doc in range(1500)] + [(1, 7)], np.int32)
    found = positives_of(pairs, 2).of(np.array([1, 0]), np.array([1400, 3, 9]))
    assert found.shape == (2, 512)
    assert found[0].tolist() == [7] + [PADDING_ID] * 511
    assert {1400, 3, 9} < set(found[1].tolist()) < set(range(1500))


def test_displaced_pairs_find_another_batch(stores, pairs):
    num_batches = len(pairs) // 4
    stream = take(pair_batches(*stores, pairs, batch_size=4)(0), num_batches)
    used = {(query, doc) for batch in stream for query, doc in zip(batch.query_id.tolist(), batch.doc_id.tolist(), strict=True)}
    assert len(used) == num_batches * 4


def test_repeats_are_allowed_on_request(stores):
    pairs = np.array([[0, 0], [0, 1], [0, 2], [0, 3]], dtype=np.int32)
    batch = next(pair_batches(*stores, pairs, batch_size=4, unique_in_batch=False)(0))
    assert sorted(batch.doc_id.tolist()) == [0, 1, 2, 3]
    assert batch.query_id.tolist() == [0] * 4


def test_a_padded_batch_is_as_wide_as_its_longest_text_rounded_up(stores, pairs):
    query_store, doc_store = stores
    options = {"batch_size": 6, "max_query_length": 20, "max_doc_length": 64, "length_multiple": 8, "pack": False}
    make = pair_batches(*stores, pairs, **options)
    widths = set()
    for batch in take(make(0), 30):
        for tokens, longest, limit in [
            (batch.query, query_store.lengths(20)[batch.query_id].max(), 20),
            (batch.doc, doc_store.lengths(64)[batch.doc_id].max(), 64),
        ]:
            assert tokens.shape[1] == min(-(-longest // 8) * 8, limit)
            assert np.count_nonzero(tokens, axis=1).max() == longest
        np.testing.assert_array_equal(batch.doc, doc_store.pad(batch.doc_id, 64, batch.doc.shape[1]))
        widths.add(batch.doc.shape[1])
    assert len(widths) > 1


def test_a_packed_batch_has_the_texts_of_the_padded_one(stores, pairs):
    options = {"batch_size": 12, "max_query_length": 20, "max_doc_length": 30}
    packed, padded = (pair_batches(*stores, pairs, **options, pack=pack)(0) for pack in (True, False))
    for ours, theirs in zip(take(packed, 10), take(padded, 10), strict=True):
        assert ours.query_id.tolist() == theirs.query_id.tolist()
        for texts, tokens in ((ours.query, theirs.query), (ours.doc, theirs.doc)):
            assert [text.tolist() for text in unpacked(texts)] == [row[row != 0].tolist() for row in tokens]


@pytest.mark.parametrize("num_hosts", [2, 3])
def test_hosts_share_the_rows_of_one_global_batch(stores, pairs, num_hosts):
    options = {"batch_size": 12, "length_multiple": 4, "pack": False}
    whole = take(pair_batches(*stores, pairs, **options)(0), 20)
    hosts = [
        take(pair_batches(*stores, pairs, **options, host_index=index, num_hosts=num_hosts)(0), 20) for index in range(num_hosts)
    ]
    for step, batch in enumerate(whole):
        parts = [host[step] for host in hosts]
        for name in ("query", "doc", "query_id", "doc_id"):
            np.testing.assert_array_equal(np.concatenate([getattr(part, name) for part in parts]), getattr(batch, name))


@pytest.mark.parametrize("num_hosts", [2, 3])
def test_hosts_pack_their_own_rows_into_equal_shapes(stores, pairs, num_hosts):
    options = {"batch_size": 12, "num_hosts": num_hosts, "row_multiple": 2 * num_hosts}
    whole = take(pair_batches(*stores, pairs, batch_size=12)(0), 20)
    hosts = [take(pair_batches(*stores, pairs, **options, host_index=index)(0), 20) for index in range(num_hosts)]
    for step, batch in enumerate(whole):
        parts = [host[step] for host in hosts]
        for name in ("query", "doc"):
            texts = [text.tolist() for part in parts for text in unpacked(getattr(part, name))]
            assert texts == [text.tolist() for text in unpacked(getattr(batch, name))]
            (shape,) = {getattr(part, name).tokens.shape for part in parts}
            assert shape[0] % 2 == 0


def test_batches_the_data_cannot_fill_are_refused(stores, pairs):
    with pytest.raises(InputError, match=f"batch_size 1000 is more than the {len(pairs)} training pairs"):
        pair_batches(*stores, pairs, batch_size=1000)
    with pytest.raises(InputError, match="more than the 3 different documents"):
        pair_batches(*stores, np.array([[i, i % 3] for i in range(12)], np.int32), batch_size=4)
    star = np.array([[0, i] for i in range(9)] + [[i, 0] for i in range(1, 9)], np.int32)
    with pytest.raises(InputError, match="no batch of 4 pairs without a repeated query or document was found"):
        pair_batches(*stores, star, batch_size=4)


def test_batches_the_hosts_cannot_share_are_refused(stores, pairs):
    with pytest.raises(InputError, match="batch_size 7 is not divisible by the 2 hosts"):
        pair_batches(*stores, pairs, batch_size=7, num_hosts=2)
    with pytest.raises(InputError, match="batch_size is 0"):
        pair_batches(*stores, pairs, batch_size=0)


def test_pairs_of_qrels_are_rows_in_the_order_of_the_judgements(stores):
    qrels = {"q5": {"d3": 1, "d2": 0, "d9": 2}, "q0": {"d3": 1}}
    assert qrel_pairs(qrels, *stores).tolist() == [[5, 3], [5, 9], [0, 3]]
    assert qrel_pairs(qrels, *stores, min_relevance=2).tolist() == [[5, 9]]
    with pytest.raises(InputError, match="no pair of the qrels is judged 3 or more"):
        qrel_pairs(qrels, *stores, min_relevance=3)


def test_judged_ids_without_text_are_counted_with_examples(stores):
    qrels = {"q5": {f"x{number}": 1 for number in range(5)}, "q6": {"x0": 1}}
    with pytest.raises(InputError, match=r"document ids of the qrels that are not in .*: 5 \(x0, x1, x2, \.\.\.\)"):
        qrel_pairs(qrels, *stores)
    with pytest.raises(InputError, match=r"query ids of the qrels that are not in .*: 1 \(q99\)"):
        qrel_pairs({"q99": {"d1": 1, "d2": 1}}, *stores)


def prefetch_threads():
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


def test_prefetch_yields_everything_in_order():
    assert list(prefetch(iter(range(100)))) == list(range(100))
    assert not prefetch_threads()


def test_threads_that_are_left_open_end_with_python_one_within_the_other():
    code = """
import atexit, threading, time
atexit.register(lambda: print([one.name for one in threading.enumerate()]))  # after all others
from de_jax.data.batches.prefetch import prefetch
slow = (time.sleep(0.02) or number for number in range(10**6))
left_open = prefetch(number for number in prefetch(slow, ahead=1))
print(next(left_open))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "0\n['MainThread']\n"), done.stderr


def test_prefetch_works_ahead_by_no_more_than_its_size():
    made = []
    ahead = prefetch(made.append(item) or item for item in range(100))
    assert next(ahead) == 0
    deadline = time.monotonic() + 10
    while len(made) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    assert len(made) == 4  # one taken, two waiting, one in hand
    ahead.close()
    assert not prefetch_threads()


def test_prefetch_passes_exceptions_on_in_their_place():
    def failing():
        yield 1
        raise InputError("broken data")

    ahead = prefetch(failing())
    assert next(ahead) == 1
    with pytest.raises(InputError, match="broken data"):
        next(ahead)
    assert not prefetch_threads()


def test_prefetched_batches_equal_plain_ones(stores, pairs):
    make = pair_batches(*stores, pairs, batch_size=7)
    ahead = prefetch(make(3))
    for expected, found in zip(take(make(3), 20), take(ahead, 20), strict=True):
        assert_same(expected, found)
    ahead.close()
