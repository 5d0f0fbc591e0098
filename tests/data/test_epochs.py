"""Which pairs make up which batch; what a stream of batches shows of it is in test_batches.py."""

import time

import numpy as np
import pytest

from de_jax.data.batches.pair_batches import EpochPlan


def test_planning_200k_pairs_with_repeats_is_not_quadratic():
    rng = np.random.default_rng(0)
    hubs = np.stack([rng.zipf(1.3, 200_000) % 40_000, rng.integers(0, 120_000, 200_000)], axis=1)
    began = time.process_time()
    plan = EpochPlan(hubs.astype(np.int32), 256, 0, True).epoch(0)
    assert time.process_time() - began < 30  # a linear plan takes about one, a quadratic one many minutes
    for column in hubs[plan[::50]].transpose(2, 0, 1):  # [queries or documents, batch, row]
        assert all(len(np.unique(batch)) == 256 for batch in column)


def faq(num_pairs, num_docs, num_queries=None):
    """Pairs whose documents are as frequent as 1 / rank."""
    rng = np.random.default_rng(0)
    weights = 1 / np.arange(1, num_docs + 1)
    docs = rng.choice(num_docs, num_pairs, p=weights / weights.sum())
    queries = np.arange(num_pairs) if num_queries is None else rng.integers(0, num_queries, num_pairs)
    return np.unique(np.stack([queries, docs], 1), axis=0)


@pytest.mark.parametrize(
    ("pairs", "batch_size", "least", "least_of_ten"),
    [
        (faq(3000, 100), 64, 1.0, 0.83),
        (faq(20_000, 2000), 64, 1.0, 0.99),
        (faq(20_000, 2000)[:, ::-1], 256, 1.0, 0.82),  # queries with many documents
        (np.stack([np.arange(3000), np.arange(3000) % 64], 1), 64, 1.0, 1.0),
        (faq(20_000, 5000, 500), 256, 0.95, 0.99),  # both repeat
    ],
)
def test_frequent_texts_fill_as_many_batches_as_there_can_be_and_their_pairs_take_turns(pairs, batch_size, least, least_of_ten):
    plan = EpochPlan(pairs, batch_size, 0, True)
    counts = [np.bincount(texts) for texts in pairs.T]
    best = next(
        most for most in range(len(pairs) // batch_size, 0, -1)
        if all(np.minimum(count, most).sum() >= most * batch_size for count in counts)
    )  # fmt: skip
    seen = np.zeros(len(pairs), bool)
    for epoch in range(10):
        batches = plan.epoch(epoch)
        assert len(batches) >= least * best
        assert all(len(np.unique(pairs[batch, side])) == batch_size for batch in batches for side in (0, 1))
        seen[batches] = True
    assert seen.mean() >= least_of_ten
    assert not np.array_equal(plan.epoch(0), plan.epoch(1))
