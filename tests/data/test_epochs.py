"""Which pairs make up which batch; what a stream of batches shows of it is in test_batches.py."""

import time

import numpy as np

from de_jax.data.batches.pair_batches import EpochPlan


def test_planning_200k_pairs_with_repeats_is_not_quadratic():
    rng = np.random.default_rng(0)
    hubs = np.stack([rng.zipf(1.3, 200_000) % 40_000, rng.integers(0, 120_000, 200_000)], axis=1)
    began = time.process_time()
    plan = EpochPlan(hubs.astype(np.int32), 256, 0, True).epoch(0)
    assert time.process_time() - began < 30  # a linear plan takes about one, a quadratic one many minutes
    for column in hubs[plan[::50]].transpose(2, 0, 1):  # [queries or documents, batch, row]
        assert all(len(np.unique(batch)) == 256 for batch in column)
