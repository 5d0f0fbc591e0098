"""Groups of generated queries and the draws from them."""

import dataclasses
import json

import numpy as np
import pytest
from pretrained_folders import write_tokenizer as write_vocabulary

from de_jax.data.expansion.curriculum import (
    NONE,
    STRATEGIES,
    Curriculum,
    RankedQueries,
    cached_ranking,
    rank_queries,
    usable_queries,
)
from de_jax.data.expansion.generated_queries import DocQueries, ExpansionWriter
from de_jax.data.expansion.relevance import rouge_l
from de_jax.data.sources.training_set import open_stores, qrel_pairs
from de_jax.data.text import beir
from de_jax.data.text.tokenizing import load_tokenizer
from de_jax.types import InputError
from experiments.group_relevance import ranked_pairs

GENERATED = ["c d", "a b c", "zz", "a b c", " ", "a b", "b a", "a b c d"]  # for the query "a b c d": all scores, ties, the gold


def ranked_of(*counts):
    """Pairs with so many queries each, whose order is that of the expansion."""
    offsets = np.cumsum([0, *counts])
    return RankedQueries(np.concatenate([np.arange(count) for count in counts]).astype(np.int32), np.zeros(offsets[-1]), offsets)


def test_a_curriculum_goes_through_its_groups_in_the_updates_of_the_run_unless_it_says_otherwise():
    curriculum = Curriculum(num_groups=3)
    assert [curriculum.of_run(9).group_at(step) for step in range(9)] == [2, 2, 2, 1, 1, 1, 0, 0, 0]
    assert dataclasses.replace(curriculum, num_steps=3).of_run(9).group_at(2) == 0
    with pytest.raises(ValueError, match="does not know the run's updates"):
        curriculum.group_at(0)


def drawn(curriculum, ranked, pair, steps):
    return {int(curriculum.choose(ranked, np.array([pair]), step)[0]) for step in steps}


def test_queries_are_ranked_without_blanks_repetitions_and_the_gold_one_ties_in_file_order():
    ranked = rank_queries(["a b c d", "x"], [GENERATED, []].__getitem__, rouge_l)
    np.testing.assert_array_equal(ranked.offsets, [0, 5, 5])
    np.testing.assert_array_equal(ranked.order, [1, 0, 5, 6, 2])
    np.testing.assert_allclose(ranked.scores, [6 / 7, 2 / 3, 2 / 3, 1 / 3, 0])
    np.testing.assert_array_equal(usable_queries([" q", "q ", "", "gold"], "gold "), [0])


@pytest.mark.parametrize(
    "gold", ["What's the Capital of Köln-9? {x}", "what ' s the capital of koln - 9 ? x", "WHAT'S THE CAPITAL OF KÖLN9?X"]
)
def test_the_gold_query_is_known_after_a_tokenizer_and_others_stay_apart(gold):
    generated = ["What's the Capital of Köln-9? {x}", "What's the Capital of Köln-8? {x}", "北京在哪里", "上海在哪里", "???"]
    np.testing.assert_array_equal(usable_queries(generated, gold), [1, 2, 3, 4])
    np.testing.assert_array_equal(usable_queries(generated, "北京在哪里?"), [0, 1, 3, 4])
    np.testing.assert_array_equal(usable_queries(generated, "???"), [0, 1, 2, 3])
    for own, other in (("what is C++?", "what is c#?"), ("क्या रमा गया", "क्या राम गया"), ("का", "की")):
        np.testing.assert_array_equal(usable_queries([own, other], own), [1])


@pytest.mark.parametrize(("num_steps", "num_groups"), [(9, 3), (10, 3), (11, 3), (2, 3), (1, 1), (7, 4)])
def test_groups_go_from_the_least_relevant_to_the_most_in_stages_of_equal_length(num_steps, num_groups):
    forward = Curriculum("curriculum", num_steps, num_groups)
    groups = [forward.group_at(step) for step in range(num_steps)]
    assert groups == sorted(groups, reverse=True)
    assert groups[0] == num_groups - 1
    assert forward.group_at(num_steps + 5) == 0
    sizes = np.bincount(groups, minlength=num_groups)
    assert sizes.max() - sizes.min() <= 1
    backward = Curriculum("anti_curriculum", num_steps, num_groups)
    assert [backward.group_at(step) for step in range(num_steps)] == [num_groups - 1 - group for group in groups]


def test_stages_are_the_public_codes_where_the_groups_divide_the_steps():
    num_steps, num_groups = 20, 4
    theirs = [max(num_groups - step // (num_steps // num_groups), 1) - 1 for step in range(num_steps)]
    assert [Curriculum("curriculum", num_steps, num_groups).group_at(step) for step in range(num_steps)] == theirs


@pytest.mark.parametrize("count", range(1, 12))
@pytest.mark.parametrize("num_groups", [1, 3, 4])
def test_groups_hold_every_query_and_are_never_empty(count, num_groups):
    ranked, num_steps = ranked_of(3, count), 300 * num_groups
    curriculum = Curriculum("curriculum", num_steps, num_groups)
    stages = [drawn(curriculum, ranked, 1, range(start, start + 300)) for start in range(0, num_steps, 300)]
    assert set().union(*stages) == set(range(count))
    assert all(stages)
    if count >= num_groups:
        assert sum(map(len, stages)) == count
        assert max(map(len, stages)) - min(map(len, stages)) <= 1
    for later, earlier in zip(stages[1:], stages, strict=False):
        assert max(later) <= min(earlier)


def test_each_strategy_draws_from_its_ranks():
    ranked, steps = ranked_of(7, 2), range(200)
    expected = {"random": set(range(7)), "top_1": {0}, "top_k": {0, 1, 2}, "bottom_k": {4, 5, 6}}
    for strategy, ranks in expected.items():
        assert drawn(Curriculum(strategy, 200, k=3), ranked, 0, steps) == ranks
    for strategy in ("top_k", "bottom_k", "random"):
        assert drawn(Curriculum(strategy, 200, k=3), ranked, 1, steps) == {0, 1}


def test_a_document_without_a_query_gets_none():
    for strategy in STRATEGIES[1:]:
        for ranked in (ranked_of(0, 4, 0), ranked_of(0, 0, 0)):
            found = Curriculum(strategy, 10).choose(ranked, np.array([0, 2]), 3)
            assert set(found.tolist()) == {NONE}


@pytest.mark.parametrize("strategy", STRATEGIES[1:])
def test_a_choice_depends_on_pair_step_and_seed_alone(strategy):
    ranked = ranked_of(*[9] * 40)
    curriculum = Curriculum(strategy, 50, seed=3)
    whole = np.stack([curriculum.choose(ranked, np.arange(40), step) for step in range(50)])
    rows = np.array([31, 2, 17])
    for step in (49, 0, 20):  # in any order, as after a kill
        np.testing.assert_array_equal(Curriculum(strategy, 50, seed=3).choose(ranked, rows, step), whole[step, rows])
    if strategy != "top_1":
        other = np.stack([Curriculum(strategy, 50, seed=4).choose(ranked, np.arange(40), step) for step in range(50)])
        assert (other != whole).mean() > 0.4
        assert len(np.unique(whole[:16].T, axis=0)) == 40


def test_draws_are_even():
    found = Curriculum("random", 1).choose(ranked_of(*[5] * 20000), np.arange(20000), 7)
    np.testing.assert_allclose(np.bincount(found) / 20000, 0.2, atol=0.01)


def test_a_ranking_is_made_once_and_again_where_it_is_damaged(tmp_path):
    calls = []

    def build():
        calls.append(1)
        return [rank_queries(["a b c d"], [GENERATED].__getitem__, rouge_l)]

    for _ in range(2):
        ranked = cached_ranking(tmp_path, {"measure": "rouge_l"}, build)
    assert len(calls) == 1
    assert isinstance(ranked.order, np.memmap)
    cached_ranking(tmp_path, {"measure": "token_overlap"}, build)
    (path,) = {
        path.parent for path in tmp_path.glob("ranked-*/order.npy") if "rouge_l" in (path.parent / "manifest.json").read_text()
    }
    (path / "order.npy").write_bytes(b"")
    again = cached_ranking(tmp_path, {"measure": "rouge_l"}, build)
    assert len(calls) == 3
    np.testing.assert_array_equal(again.order, [1, 0, 5, 6, 2])


def test_the_pairs_of_a_data_set_are_ranked_in_the_order_of_training(tmp_path):
    docs = [(doc_id, "", f"text of {doc_id}") for doc_id in ("d0", "d1", "d2")]
    qrels = {"q1": {"d2": 1, "d0": 0}, "q0": {"d0": 2, "d1": 1}}
    beir.write(tmp_path, docs, [("q0", "a b c d"), ("q1", "e f")], {"train": qrels})
    writer = ExpansionWriter(tmp_path / "queries", {})
    writer.append([DocQueries("d0", GENERATED), DocQueries("d2", ["x", "f e", "e f"])])
    writer.finish()
    ranked = ranked_pairs(tmp_path, "train", tmp_path / "queries")
    write_vocabulary(tmp_path, "t5")
    tokenizer = load_tokenizer(tmp_path)
    stores = open_stores(tmp_path, tokenizer, tokenizer, tmp_path / "cache")
    assert qrel_pairs(beir.read_qrels(tmp_path / "qrels" / "train.tsv"), *stores).tolist() == [[1, 2], [0, 0], [0, 1]]
    np.testing.assert_array_equal(ranked.offsets, [0, 2, 7, 7])
    np.testing.assert_array_equal(ranked.order, [1, 0, 1, 0, 5, 6, 2])
    lines = [
        {"query_id": q, "doc_id": d, "scores": list(range(n))} for q, d, n in (("q1", "d2", 3), ("q0", "d0", 8), ("q0", "d1", 0))
    ]
    (tmp_path / "scores.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    by_scores = ranked_pairs(tmp_path, "train", tmp_path / "queries", score_file=tmp_path / "scores.jsonl")
    np.testing.assert_array_equal(by_scores.order, [1, 0, 6, 5, 2, 1, 0])
    assert len(list((tmp_path / "queries").glob("ranked-*/manifest.json"))) == 2
    with pytest.raises(InputError, match="the measure is 'bleu'"):
        ranked_pairs(tmp_path, "train", tmp_path / "queries", measure="bleu")


@pytest.mark.parametrize("wrong", [{"num_groups": 0}, {"num_steps": 0}, {"k": 0}])
def test_settings_that_cannot_be_are_refused(wrong):
    with pytest.raises(InputError, match="is 0; it must be at least 1"):
        Curriculum(**wrong)
