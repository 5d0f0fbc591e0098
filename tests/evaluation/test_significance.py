import itertools

import numpy as np
import pytest
from scipy import stats

from de_jax.evaluation import significance
from de_jax.types import InputError


def scores(values):
    return {f"q{number}": float(value) for number, value in enumerate(values)}


def compare(system, baseline):
    return significance.compare_all({"system": scores(system)}, scores(baseline))["system"]


@pytest.fixture
def systems():
    rng = np.random.default_rng(0)
    baseline = rng.random(60)
    return baseline + rng.normal(0.05, 0.2, 60), baseline


def test_the_t_test_is_scipys_of_related_samples(systems):
    found = compare(*systems)
    assert found.p_t_test == pytest.approx(stats.ttest_rel(*systems).pvalue, abs=1e-9)
    assert found.difference == pytest.approx(systems[0].mean() - systems[1].mean(), abs=1e-9)


def test_the_permutation_test_tries_every_swap_of_a_few_queries():
    differences = np.array([0.3, -0.1, 0.2, 0.25, 0.05])
    means = [np.mean(differences * signs) for signs in itertools.product([1, -1], repeat=5)]
    expected = np.mean(np.abs(means) >= abs(differences.mean()) - 1e-12)
    assert significance.permutation_test(differences) == pytest.approx(expected, abs=1e-9)


def test_queries_without_a_difference_leave_the_permutation_test_exact():
    differences = np.zeros(300)
    differences[:10] = np.random.default_rng(0).normal(0.3, 1, 10)
    swaps = np.array(list(itertools.product((1, -1), repeat=10))) @ differences[:10]
    exact = np.mean(np.abs(swaps) >= abs(differences.sum()) - 1e-12)
    assert significance.permutation_test(differences) == pytest.approx(exact, abs=1e-12)
    assert significance.permutation_test(np.eye(20)[0]) == 1.0


def test_the_permutation_test_agrees_with_the_t_test_on_many_queries_and_repeats_itself(systems):
    differences = systems[0] - systems[1]
    found = significance.permutation_test(differences, seed=1)
    assert found == significance.permutation_test(differences, seed=1)
    assert found == pytest.approx(significance.paired_t_test(differences), abs=0.02)


def test_wins_ties_and_losses_are_counted_with_rounding_as_a_tie():
    found = compare([0.5, 0.3, 0.1 + 0.2, 0.9], [0.4, 0.3, 0.3, 1.0])
    assert (found.wins, found.ties, found.losses) == (1, 2, 1)


def test_a_system_beside_itself_differs_by_chance_only():
    found = compare([0.2, 0.4], [0.2, 0.4])
    assert found == significance.Comparison(0.0, 0, 2, 0, 1.0, 1.0, 1.0, 1.0)


def test_a_difference_that_is_the_same_everywhere_is_no_chance():
    found = compare([0.5] * 20, [0.25] * 20)
    assert found.p_t_test == 0
    assert found.p_permutation < 0.001


def test_holm_multiplies_by_the_number_of_tests_left():
    # Sorted: .01 x 4, .02 x 3, .03 x 2, .4 x 1; none below its predecessor.
    assert significance.holm([0.02, 0.4, 0.01, 0.03]) == pytest.approx([0.06, 0.4, 0.04, 0.06])
    assert significance.holm([0.9, 0.8]) == [1.0, 1.0]
    assert significance.holm([0.03]) == [0.03]
    assert significance.holm([]) == []


def test_p_values_of_several_systems_are_corrected_for_their_number(systems):
    rng = np.random.default_rng(1)
    several = {"better": scores(systems[0]), "same": scores(systems[1] + rng.normal(0, 0.1, 60)), "worse": scores(systems[1] - 0.1)}
    found = significance.compare_all(several, scores(systems[1]))
    assert [one.holm_t_test for one in found.values()] == significance.holm([one.p_t_test for one in found.values()])
    assert [one.holm_permutation for one in found.values()] == significance.holm([one.p_permutation for one in found.values()])
    alone = significance.compare_all({"better": several["better"]}, scores(systems[1]))["better"]
    assert alone.holm_t_test == alone.p_t_test == found["better"].p_t_test


def test_seeds_are_averaged_query_by_query():
    seeds = [scores([0.0, 1.0]), scores([0.5, 1.0]), scores([1.0, 0.7])]
    assert significance.mean_over_seeds(seeds) == pytest.approx({"q0": 0.5, "q1": 0.9})
    spread = significance.spread_over_seeds(seeds)
    assert spread == pytest.approx((0.7, np.std([0.5, 0.75, 0.85], ddof=1), 3))
    assert significance.spread_over_seeds(seeds[:1]) == (0.5, 0.0, 1)


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(InputError, match=r"1 queries are scored for one system only \(q2, ...\)"):
        compare([1, 2, 3], [1, 2])
    with pytest.raises(InputError, match="1 query is too few"):
        compare([1], [2])
    with pytest.raises(InputError, match="the seeds were scored on different queries"):
        significance.mean_over_seeds([scores([1]), scores([1, 2])])
    with pytest.raises(InputError, match="no seed to average"):
        significance.mean_over_seeds([])
    with pytest.raises(InputError, match="0 resamples"):
        significance.permutation_test(np.array([0.1, 0.2]), num_resamples=0)


@pytest.mark.parametrize("values", [[0.0, 1.0], [0.3, 0.5, 0.9, 0.2, 0.2], [1.0, 1.0, 1.0], [1.0, 1.0, 0.7], [-1.0, 3.0, 2.0]])
def test_a_confidence_interval_is_that_of_students_t(values):
    low, high = significance.confidence_interval(values)
    expected = stats.ttest_1samp(values, 0.0).confidence_interval(0.95) if len(set(values)) > 1 else (1.0, 1.0)
    of_shares = max(values) <= 1
    np.testing.assert_allclose([low, high], np.clip(expected, 0, 1) if of_shares else expected, rtol=1e-12)
    assert significance.half_width(values) == pytest.approx((expected[1] - expected[0]) / 2)


def test_intervals_hold_the_mean_of_their_population_as_often_as_they_say():
    rng = np.random.default_rng(0)
    held = []
    for _ in range(400):  # three sets of 50 queries each; the average of the sets' means is 0.4 in the population
        sets = [rng.beta(a, 2.0, 50).tolist() for a in (1.0, 2.0, 0.5)]
        truth = np.mean([a / (a + 2.0) for a in (1.0, 2.0, 0.5)])
        means = [float(np.mean(values)) for values in sets]
        parts = ([of(values) for values in sets] for of in (significance.confidence_interval, significance.half_width))
        low, high = significance.interval_of_average(means, *parts)
        held.append(low <= truth <= high)
    assert 0.92 < np.mean(held) < 0.98


def test_one_query_has_no_interval():
    with pytest.raises(InputError, match="1 query is too few"):
        significance.confidence_interval([0.5])


@pytest.mark.parametrize(
    ("shape", "of_seeds", "of_queries"),
    [((5, 200), 0.004, 0.1), ((5, 200), 0.0, 0.1), ((3, 300), 0.01, 0.02), ((5, 100), 0.01, 0.0)],
)
def test_over_seeds_one_in_twenty_is_a_false_alarm_whatever_seeds_add(shape, of_seeds, of_queries):
    rng = np.random.default_rng(0)
    num_trials, alarms = 1500, 0
    for _ in range(num_trials):
        parts = rng.normal(0, of_seeds, (shape[0], 1)), rng.normal(0, of_queries, (1, shape[1])), rng.normal(0, 0.05, shape)
        alarms += significance.over_seeds(sum(parts)).p < 0.05
    assert 0.02 < alarms / num_trials < 0.08


def test_a_test_over_queries_alone_takes_seeds_for_a_difference():
    """Three seeds that differ more than queries do, as some recorded runs: most trials without a difference are significant."""
    rng = np.random.default_rng(0)
    trials = [rng.normal(0, 0.01, (3, 1)) + rng.normal(0, 0.02, (1, 1000)) + rng.normal(0, 0.05, (3, 1000)) for _ in range(300)]
    assert np.mean([significance.paired_t_test(one.mean(axis=0)) < 0.05 for one in trials]) > 0.6
    assert np.mean([significance.over_seeds(one).p < 0.05 for one in trials]) < 0.1


def test_over_seeds_a_difference_of_every_seed_and_query_is_found_and_one_of_two_seeds_is_not():
    rng = np.random.default_rng(0)
    noise = rng.normal(0, 0.05, (5, 300))
    low, high, p = significance.over_seeds(0.02 + noise)
    assert low < 0.02 < high
    assert p < 0.001
    seeds = np.array([0.1, 0.1, 0.0, -0.04, -0.06])[:, None]
    assert significance.paired_t_test((seeds + noise).mean(axis=0)) < 0.001
    assert significance.over_seeds(seeds + noise).p > 0.3


def test_over_seeds_equal_systems_do_not_differ_and_one_seed_is_refused():
    assert significance.over_seeds(np.zeros((2, 3))) == (0.0, 0.0, 1.0)
    with pytest.raises(InputError, match="1 seeds and 3 queries"):
        significance.over_seeds(np.zeros((1, 3)))
