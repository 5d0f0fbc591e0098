"""Which candidates become negatives, on rankings small enough to check by hand."""

import numpy as np
import pytest

from de_jax.mining import choose as choose_
from de_jax.mining.choose import Filters, choose
from de_jax.types import PADDING_ID, Ranking

RANKING = Ranking(
    np.array([[0, 1, 2, 3, 4, 5], [5, 4, 3, -1, -1, -1]], np.int32),
    np.array([[0.9, 0.8, 0.7, 0.6, 0.5, 0.4], [0.3, 0.2, -0.1, -np.inf, -np.inf, -np.inf]], np.float32),
)
KNOWN = np.array([[0, 0], [0, 2], [1, 5]])
ANCHORS, POSITIVES, SCORES = np.array([0, 0, 1]), np.array([0, 2, 5]), np.array([0.9, 0.7, 0.3], np.float32)


def mined(**options):
    return choose(RANKING, ANCHORS, POSITIVES, SCORES, KNOWN, **({"num_negatives": 9, "seed": 0, "step": 0} | options))


def each(says):
    """A function of two numbers as one of two arrays."""
    return lambda own, others: np.array([says(*one) for one in zip(own.tolist(), others.tolist(), strict=True)])


def rows(mining):
    return [sorted(row for row in one if row != PADDING_ID) for one in mining.chosen.tolist()]


def test_no_known_positive_of_the_anchor_is_a_negative_of_any_of_its_pairs():
    found = mined()
    assert rows(found) == [[1, 3, 4, 5], [1, 3, 4, 5], [3, 4]]
    assert (found.num_candidates, found.num_known) == (10, 5)
    assert found.mean_rank == pytest.approx((2 * (1 + 2 + 3 + 4) + 1 + 2) / 10)


def test_ranks_count_without_known_positives():
    assert rows(mined(filters=Filters(first_rank=2, last_rank=3))) == [[3, 4], [3, 4], [3]]


def test_margins_are_to_the_score_of_the_pairs_own_positive():
    found = mined(filters=Filters(margin=0.15))
    assert rows(found) == [[3, 4, 5], [4, 5], [3]]
    assert found.num_filtered["margin"] == 4


def test_a_score_ratio_refuses_candidates_too_close_to_the_positive_also_below_zero():
    assert rows(mined(filters=Filters(max_score_ratio=0.8))) == [[3, 4, 5], [4, 5], [3, 4]]
    below = choose(
        RANKING, np.array([1]), np.array([5]), np.array([-0.05], np.float32), KNOWN, num_negatives=9, seed=0, step=0,
        filters=Filters(max_score_ratio=0.5),
    )  # fmt: skip
    assert rows(below) == [[3]]


def test_a_teacher_refuses_what_it_takes_for_relevant_and_says_nothing_of_what_it_has_not_seen():
    scores = {(0, 1): 0.9, (0, 3): 0.2}
    found = mined(filters=Filters(max_teacher_score=0.5), teacher=each(lambda *one: scores.get(one, np.nan)))
    assert rows(found) == [[3, 4, 5], [3, 4, 5], [3, 4]]
    assert found.num_filtered["max_teacher_score"] == 2


def test_near_duplicates_of_the_pairs_own_positive_are_refused():
    found = mined(is_duplicate=each(lambda *one: one == (2, 3)))
    assert rows(found) == [[1, 3, 4, 5], [1, 4, 5], [3, 4]]
    assert found.num_filtered["duplicate"] == 1


def test_the_draw_depends_on_the_seed_the_step_and_the_pair_alone():
    keys = ((1, 0), (1, 0), (2, 0), (1, 8))
    first, again, other_seed, other_step = (mined(num_negatives=2, seed=seed, step=step) for seed, step in keys)
    assert first.chosen.tolist() == again.chosen.tolist()
    assert first.chosen.tolist() != other_seed.chosen.tolist()
    assert first.chosen.tolist() != other_step.chosen.tolist()
    alone = choose(RANKING, ANCHORS[:1], POSITIVES[:1], SCORES[:1], KNOWN, num_negatives=2, seed=1, step=0)
    np.testing.assert_array_equal(alone.chosen[0], first.chosen[0])


def test_every_candidate_is_drawn_as_often_as_another():
    counts = np.zeros(6)
    for seed in range(400):
        counts[mined(num_negatives=1, seed=seed).chosen[0]] += 1
    assert (counts[[1, 3, 4, 5]] > 70).all()


def test_ten_refreshes_of_twenty_in_two_hundred_show_a_pair_130_ranks_and_nearly_all_pairs_the_first_ten():
    num_pairs, depth = 60, 200
    ranking = Ranking(np.tile(np.arange(depth, dtype=np.int32), (num_pairs, 1)), np.zeros((num_pairs, depth), np.float32))
    pairs, known = np.arange(num_pairs), np.zeros((0, 2), int)
    positives, scores = np.full(num_pairs, depth), np.zeros(num_pairs, np.float32)
    steps = range(0, 10000, 1000)
    refreshes = [choose(ranking, pairs, positives, scores, known, num_negatives=20, seed=0, step=step).chosen for step in steps]
    met = [set(np.concatenate(drawn).tolist()) for drawn in zip(*refreshes, strict=True)]
    assert np.mean([len(ranks) for ranks in met]) == pytest.approx(depth * (1 - 0.9**10), abs=2)
    assert all(min(ranks) < 10 for ranks in met)
    assert np.mean(np.array(refreshes) < 10) == pytest.approx(10 / depth, abs=0.01)


def chosen_one_by_one(ranking, anchors, positives, positive_scores, known, num_negatives, filters, is_duplicate, teacher):
    """What `choose` says, candidate by candidate."""
    chosen, scores, ranks, counts = [], [], [], dict.fromkeys(("margin", "max_score_ratio", "max_teacher_score", "duplicate"), 0)
    num_candidates = num_known = 0
    for pair, (anchor, positive) in enumerate(zip(anchors.tolist(), positives.tolist(), strict=True)):
        own, rank, kept = float(positive_scores[pair]), 0, []
        for row, score in zip(ranking.doc_rows[anchor].tolist(), ranking.scores[anchor], strict=True):
            if row < 0 or [anchor, row] in known.tolist():
                num_known += row >= 0
                continue
            rank += 1
            if not filters.first_rank <= rank <= filters.last_rank:
                continue
            num_candidates += 1
            refusals = {
                "margin": score > own - filters.margin,
                "max_score_ratio": score > own - (1 - filters.max_score_ratio) * abs(own),
                "max_teacher_score": teacher.get((anchor, row), -np.inf) > filters.max_teacher_score,
                "duplicate": (positive, row) in is_duplicate,
            }
            if by := [name for name, refused in refusals.items() if refused]:
                counts[by[0]] += 1
            else:
                kept.append((row, score, rank))
        drawn = np.random.default_rng((3, 7, pair)).permutation(len(kept))[:num_negatives]
        for found, column in ((chosen, 0), (scores, 1), (ranks, 2)):
            found.append([kept[place][column] for place in drawn])
    return chosen, scores, num_candidates, num_known, counts, np.mean(np.concatenate(ranks))


@pytest.mark.parametrize("pairs_at_once", [3, 1024])
def test_arrays_choose_what_a_loop_over_candidates_chooses(monkeypatch, pairs_at_once):
    monkeypatch.setattr(choose_, "_PAIRS", pairs_at_once)
    rng = np.random.default_rng(0)
    num_anchors, num_rows, depth = 6, 30, 18
    rows = np.stack([rng.permutation(num_rows)[:depth] for _ in range(num_anchors)]).astype(np.int32)
    scores = np.sort(np.round(rng.normal(size=rows.shape), 1).astype(np.float32), axis=1)[:, ::-1]  # with ties
    rows[2, 9:], scores[2, 9:] = -1, -np.inf
    anchors, positives = rng.integers(num_anchors, size=40), rng.integers(num_rows, size=40)
    known = np.unique(np.stack([anchors, positives], axis=1), axis=0)
    positive_scores = np.round(rng.normal(1.5, 1, size=40), 1).astype(np.float32)
    teacher = {
        (anchor, row): value for (anchor, row), value in zip(rng.integers(30, size=(200, 2)).tolist(), rng.random(200), strict=True)
    }
    duplicates = set(map(tuple, rng.integers(30, size=(100, 2)).tolist()))
    filters = Filters(2, 14, margin=0.3, max_score_ratio=0.7, max_teacher_score=0.5)
    given = (Ranking(rows, scores), anchors, positives, positive_scores, known)
    found = choose(
        *given, num_negatives=4, seed=3, step=7, filters=filters, is_duplicate=each(lambda *one: one in duplicates),
        teacher=each(lambda *one: teacher.get(one, np.nan)),
    )  # fmt: skip
    chosen, of_chosen, *facts, mean_rank = chosen_one_by_one(*given, 4, filters, duplicates, teacher)
    for table, lists, filler in ((found.chosen, chosen, PADDING_ID), (found.scores, of_chosen, np.nan)):
        filled = [[*one, *[filler] * (table.shape[1] - len(one))] for one in lists]
        np.testing.assert_array_equal(table, np.array(filled, table.dtype))
    assert [*found[2:5]] == facts
    assert all(facts[2].values())
    assert len(set(map(len, chosen))) > 2
    assert found.mean_rank == pytest.approx(mean_rank)
