"""The relevance of a curriculum's groups, counted by hand."""

import numpy as np

from de_jax.data.expansion.curriculum import RankedQueries
from experiments.group_relevance import described


def test_groups_are_those_of_training_and_come_from_the_least_relevant():
    scores = np.array([0.9, 0.8, 0.5, 0.4, 0.1, 0.3, 0.3, 0.3, 1.0], np.float32)
    ranked = RankedQueries(np.zeros(9, np.int32), scores, np.array([0, 5, 8, 9]))
    report = described(ranked, 3)
    assert report["num_pairs"] == 3
    assert report["num_queries"] == {"mean": 3.0, "least": 1}
    assert report["rouge_l"] == [round((0.25 + 0.3) / 2, 4), round((0.65 + 0.3) / 2, 4), round((0.9 + 0.3) / 2, 4)]
    assert report["share_without_difference"] == 0.5
