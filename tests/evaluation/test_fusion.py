import pytest

from de_jax.evaluation.fusion import combine, fuse, hole, overlap
from de_jax.types import InputError


def ranked(*doc_ids):
    """Scores that fall, of a size that should not matter."""
    return {doc_id: 100.0 - rank for rank, doc_id in enumerate(doc_ids)}


def test_fusion_sums_reciprocal_ranks():
    fused = fuse([{"q": ranked("a", "b", "c")}, {"q": ranked("c", "a")}], depth=10)
    assert list(fused["q"]) == ["a", "c", "b"]
    assert fused["q"] == pytest.approx({"a": 1 / 61 + 1 / 62, "c": 1 / 63 + 1 / 61, "b": 1 / 62})


def test_combination_sums_scores_scaled_to_the_range_of_each_ranking():
    first = {"q": {"a": 30.0, "b": 25.0, "c": 10.0}, "only here": {"z": 2.0}}
    combined = combine([first, {"q": {"c": 0.9, "d": 0.8}}], (0.75, 0.25), depth=3)
    assert combined["q"] == pytest.approx({"a": 0.75, "b": 0.75 * 0.75, "c": 0.25})
    assert list(combined["q"]) == ["a", "b", "c"]
    assert combined["only here"] == {"z": 0.75}


def test_equal_fused_scores_stand_by_id_downwards():
    assert list(fuse([{"q": ranked("z", "b")}, {"q": ranked("a", "c")}], depth=3)["q"]) == ["z", "a", "c"]


def test_fusion_keeps_queries_of_either_ranking():
    assert fuse([{"q": ranked("a")}, {"r": ranked("b"), "s": {}}], depth=1, k=0) == {"q": {"a": 1.0}, "r": {"b": 1.0}, "s": {}}


def test_hole_is_the_share_of_the_top_that_nobody_judged():
    results = {"q": ranked("a", "b", "c", "d"), "r": ranked("a"), "unjudged": ranked("a"), "empty": {}}
    qrels = {"q": {"a": 1, "c": 0}, "r": {"z": 1}, "empty": {"a": 1}, "never asked": {"a": 1}}
    assert hole(results, qrels, 2) == (0.5 + 1) / 2
    assert hole(results, qrels, 3) == pytest.approx((1 / 3 + 1) / 2)


def test_overlap_is_the_share_in_common_whatever_the_order():
    first = {"q": ranked("a", "b", "c"), "r": ranked("a"), "only here": ranked("a"), "empty": {}}
    second = {"q": ranked("c", "b", "x"), "r": ranked("y"), "empty": {}}
    assert overlap(first, second, 3) == pytest.approx((2 / 3 + 0) / 2)
    assert overlap(first, second, 2) == pytest.approx((1 / 2 + 0) / 2)
    assert overlap(first, first, 2) == 1
    assert overlap(first, second, 3) == overlap(second, first, 3)


def test_bad_input_is_refused():
    with pytest.raises(InputError, match="no judged query has results"):
        hole({"q": ranked("a")}, {"r": {"a": 1}}, 10)
    with pytest.raises(InputError, match="no query in common"):
        overlap({"q": ranked("a")}, {"r": ranked("a")}, 10)
    with pytest.raises(InputError, match="k is 0"):
        hole({"q": ranked("a")}, {"q": {"a": 1}}, 0)
