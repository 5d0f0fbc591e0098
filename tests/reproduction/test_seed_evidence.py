"""Recorded changes over seeds and queries, beside the test that has the scores."""

import datetime
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from de_jax.evaluation import significance
from reproduction.result_files import Entry, Scores, Table
from reproduction.seed_evidence import Effect, effects_of, pooled

ROOT = Path(__file__).resolve().parents[2]


def recorded(differences, deviations, num_seeds):
    """An entry of two arms with these deviations over seeds; p is the t-test over queries."""
    mean, p = differences.mean(), significance.paired_t_test(differences.mean(axis=0))
    rows = [["arm", "score", "change"], ["new", f"{0.5 + mean} ± {deviations[0]}", f"{mean:+.9f} (p {p:.9f})"]]
    rows.append(["old", f"0.5 ± {deviations[1]}", ""])
    keys = {arm: {"score": ["sets", "squad", "arms", arm, "mean", "ndcg@10"]} for arm in ("sde_query", "sde_none")}
    line = {"design": "samtone.yaml"}
    scores = [
        Scores({"new": line}, keys["sde_query"], {"change": ["sets", "squad", "compared", 0, "systems", "sde_query"]}),
        Scores({"old": line}, keys["sde_none"]),
    ]
    day = datetime.date(2026, 11, 27)
    return Entry("", "", "", day, [], "", "", list(range(num_seeds)), tables=[Table(rows, scores=scores)])


def test_a_record_gives_an_interval_that_is_near_the_one_of_the_scores():
    """Two arms of ten seeds each: the record knows neither the pairs of seeds nor the scores of queries."""
    rng = np.random.default_rng(0)
    queries = rng.normal(0, 0.1, (1, 400))
    arms = [
        shift + queries * number + rng.normal(0, 0.01, (10, 1)) + rng.normal(0, 0.05, (10, 400))
        for number, shift in enumerate((0, 0.02))
    ]
    differences = arms[1] - arms[0]
    deviations = [arm.mean(axis=1).std(ddof=1) for arm in (arms[1], arms[0])]
    (effect,) = effects_of("made", recorded(differences, deviations, 10), ROOT)
    exact = significance.over_seeds(differences)
    assert (effect.change, effect.data) == ("sde_query - sde_none", "squad")
    low, high = effect.interval
    assert high - low == pytest.approx(exact.high - exact.low, rel=0.25)
    assert effect.p == pytest.approx(exact.p, abs=0.05)


def effect(data, difference, error):
    return Effect("", "", data, "", difference, error, 8.0, 0.01)


def test_a_visible_change_is_found_in_four_of_five_designs():
    """The judge is the noncentral t distribution, of which the sum of two quantiles is a near form."""
    found = effect("a", 0.0, 0.005)
    assert stats.nct.sf(stats.t.ppf(0.975, 8), 8, found.smallest_visible / 0.005) == pytest.approx(0.8, abs=0.02)


def test_effects_on_one_set_count_once_and_sets_that_disagree_widen_the_mean():
    alone = pooled([effect("a", 0.02, 0.005)])
    assert pooled([effect("a", 0.02, 0.005)] * 9)[:3] == pytest.approx(alone[:3])
    assert (alone.low, alone.high) == pytest.approx((0.00847, 0.03153), abs=1e-5)  # 8 degrees of freedom: 2.306 errors
    agreed, split = (
        pooled([effect(name, value, 0.005) for name, value in zip("abc", values, strict=True)])
        for values in ([0.02] * 3, [0.0, 0.02, 0.04])
    )
    assert agreed.difference == split.difference == pytest.approx(0.02)
    assert agreed.low > 0 > split.low
    assert agreed.high - agreed.low == pytest.approx(2 * 4.3027 * 0.005 / 3**0.5, rel=1e-4)  # 2 degrees of freedom
    assert split.high - split.low == pytest.approx(2 * 4.3027 * 0.02 / 3**0.5, rel=1e-4)
