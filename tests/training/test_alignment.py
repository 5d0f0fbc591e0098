"""The divergence of two samples, against a tree of neighbours and against Gaussians, whose divergence is known."""

import numpy as np
import pytest
from scipy.spatial import cKDTree

from de_jax.models.bert import BertConfig
from de_jax.models.tower import TowerConfig
from de_jax.training.hooks.alignment import Alignment, StopWhenAligned, kl_divergence, threshold
from de_jax.types import InputError, TrainState


def by_tree(x, y):
    within = cKDTree(x).query(x, k=2)[0][:, 1]
    between = cKDTree(y).query(x, k=1)[0]
    return -x.shape[1] * np.mean(np.log(within / between)) + np.log(len(y) / (len(x) - 1))


@pytest.mark.parametrize(("n", "m", "dim"), [(50, 70, 3), (2500, 1100, 2), (300, 300, 16)])
def test_neighbours_are_those_of_a_tree(n, m, dim):
    rng = np.random.default_rng(n)
    x, y = rng.normal(size=(n, dim)), rng.normal(0.5, 2.0, size=(m, dim))
    assert kl_divergence(x, y) == pytest.approx(by_tree(x, y), abs=1e-9)


@pytest.mark.parametrize(("shift", "scale", "most_bias"), [(0.0, 1.0, 0.1), (0.0, 2.0, 0.1), (0.5, 1.5, 0.1), (1.0, 1.0, 0.4)])
def test_gaussians_come_out_as_the_formula_says(shift, scale, most_bias):
    """Four dimensions, 2,000 points each, against the closed form. Over ten seeds, in this order:

    bias -.003, +.050, +.028 and -.297, deviation of one estimate .048, .066, .052 and .105. Where the distributions lie apart, few
    points of the second sample fall among the first, and the estimate is too low.
    """
    dim = 4
    exact = dim * (np.log(scale) + (1 + shift**2) / (2 * scale**2) - 0.5)
    found = []
    for seed in range(5):
        rng = np.random.default_rng(seed)
        found.append(kl_divergence(rng.normal(size=(2000, dim)), rng.normal(shift, scale, size=(2000, dim))))
    assert np.mean(found) == pytest.approx(exact, abs=most_bias)
    assert 0.01 < np.std(found) < 0.15


def test_a_collapsed_tower_is_far_away_and_an_aligned_one_near():
    rng = np.random.default_rng(0)
    docs = rng.normal(size=(500, 64))
    docs /= np.linalg.norm(docs, axis=1, keepdims=True)
    collapsed = np.ones((500, 64)) / 8 + 1e-4 * rng.normal(size=(500, 64))
    aligned = docs + 0.05 * rng.normal(size=(500, 64)) / 8
    assert kl_divergence(docs, aligned) < 0 < kl_divergence(docs, collapsed)


def test_equal_rows_count_once_and_equal_points_of_both_are_no_infinity():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, 3)), rng.normal(size=(40, 3))
    assert kl_divergence(np.concatenate([x, x[:9]]), np.concatenate([y, y])) == kl_divergence(x, y)
    assert np.isfinite(kl_divergence(x, x))


def test_a_projection_wider_than_the_encoder_changes_no_divergence():
    """The density of points falls with the power of the dimension that they fill, not of the space around them."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(200, 6)), rng.normal(0.3, 1.5, size=(200, 6))
    encoder = BertConfig(model_dim=6, num_heads=1)
    widened = np.linalg.qr(rng.normal(size=(24, 6)))[0].T  # orthogonal rows, as `projection_init="orthogonal"`
    wide, narrow, none = (TowerConfig(encoder, projection_dim=dim) for dim in (24, 4, None))
    assert kl_divergence(x @ widened, y @ widened, dim=wide.embedding_rank) == pytest.approx(kl_divergence(x, y), abs=1e-9)
    assert kl_divergence(x @ widened, y @ widened) > 2 * kl_divergence(x, y)
    assert (narrow.embedding_rank, none.embedding_rank) == (4, 6)


def test_the_threshold_grows_with_the_dimensions():
    assert threshold(512) == 250
    assert threshold(384) == 187.5


@pytest.mark.parametrize(
    ("x", "y", "sentence"),
    [
        (np.ones((5, 2)), np.ones((5, 2)), "1 and 1 different embeddings cannot be compared"),
        (np.eye(2), np.array([[np.nan, 0.0]]), "not finite"),
    ],
)
def test_what_cannot_be_compared_is_refused(x, y, sentence):
    with pytest.raises(InputError, match=sentence):
        kl_divergence(x, y)


def stops(alignment, values, *, begun=None, dim=512):
    """After which measurement a run with these values ends, and why."""
    remaining, lines = iter(values), []
    hook = StopWhenAligned(
        alignment, lambda params: next(remaining), dim=dim, begun=begun, sinks=[lambda step, scalars: lines.append((step, scalars))]
    )
    for number in range(1, len(values) + 1):
        assert hook(2 * number - 1, TrainState(0, {}, {}, 0), {}) is None
        if stop := hook(2 * number, TrainState(0, {}, {}, 0), {}):
            return number, stop.reason, hook.progress(), lines
    return None, None, hook.progress(), lines


def test_a_stage_ends_below_the_threshold_or_when_patience_is_over():
    aligned = Alignment(every_steps=2, patience=2)
    number, reason, _, lines = stops(aligned, [400, 300, 240, 100])
    assert (number, reason) == (3, "aligned: kl_divergence 240 is below 250 at step 6")
    assert lines[0] == (2, {"alignment/kl_divergence": 400, "alignment/threshold": 250.0})
    assert stops(aligned, [240], dim=384)[0] is None
    number, reason, *_ = stops(aligned, [400, 300, 310, 305, 1])
    assert (number, reason) == (4, "kl_divergence has not become better in 2 measurements, up to step 8")
    assert stops(Alignment(every_steps=2, patience=None, delta=-9.0), [5, 6, 7, 8, -8])[0] is None


def begun_at(value, alignment):
    """The progress of a run whose towers begin so far apart."""
    hook = StopWhenAligned(alignment, lambda params: value, dim=512)
    hook.measure(0, {})
    return hook.progress()


def test_where_towers_begin_below_the_usual_threshold_it_ends_nothing():
    aligned = Alignment(every_steps=2, patience=2)
    with pytest.warns(match="begin at a divergence of 157, below the usual threshold of 250, .* Alignment.delta gives another"):
        begun = begun_at(157.0, aligned)
    number, _, progress, lines = stops(aligned, [160, 150], begun=begun)
    assert number is None
    assert lines[0] == (2, {"alignment/kl_divergence": 160})
    assert stops(aligned, [140, 145, 141, 1], begun=progress)[:2] == (
        3, "kl_divergence has not become better in 2 measurements, up to step 6"
    )  # fmt: skip
    asked_for = Alignment(every_steps=2, delta=250.0)
    assert stops(asked_for, [160], begun=begun_at(157.0, asked_for))[0] == 1
    assert stops(aligned, [249], begun=begun_at(400.0, aligned))[0] == 1


def test_a_score_has_patience_but_no_threshold():
    number, reason, *_ = stops(Alignment("ndcg@10", every_steps=2, patience=2), [0.1, 0.3, 0.2, 0.3, 0.9])
    assert (number, reason) == (4, "ndcg@10 has not become better in 2 measurements, up to step 8")
    with pytest.raises(InputError, match="leave delta out"):
        Alignment("ndcg@10", delta=0.5)


def test_patience_goes_on_counting_where_a_run_was_stopped():
    aligned = Alignment(every_steps=2, patience=2)
    *_, progress, _ = stops(aligned, [400, 300, 310])
    assert stops(aligned, [305, 1], begun=progress)[0] == 1
    assert stops(aligned, [299, 298], begun=progress)[0] is None
