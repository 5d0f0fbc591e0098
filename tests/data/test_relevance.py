"""Relevance of generated queries, against rouge-score and by hand."""

import json

import numpy as np
import pytest

from de_jax.data.expansion.relevance import ScoreFile, rouge_l, token_overlap
from de_jax.types import InputError

WORDS = "the dying analogies of employed relational cells destroyed apologies ies skies happily in 1,200 U.S. naïve running runs"
WORDS = [*WORDS.split(), *["ran", "a", "cat's", "broadway", "fatefully", "eyes", "drying", "generalizations", "oscillators"]]


def sentences(number, rng):
    return [" ".join(rng.choice(WORDS, rng.integers(0, 12))) + rng.choice(["", "?", " -- !"]) for _ in range(number)]


def test_rouge_l_equals_rouge_score():
    from rouge_score import rouge_scorer  # with NLTK: 2 s for each worker

    rng = np.random.default_rng(0)
    scorer = rouge_scorer.RougeScorer(["rougeL"], use_stemmer=True)
    for gold in [*sentences(30, rng), "", "?!", "a a a b a"]:
        queries = [*sentences(15, rng), gold, "", "a b a", "a\nb", "A\u212a \1 b\u2028c", gold.replace(" ", "\n")]
        expected = np.array([scorer.score(gold, query)["rougeL"].fmeasure for query in queries], np.float32)
        np.testing.assert_array_equal(rouge_l(0, gold, queries), expected)


def test_token_overlap_counts_words_in_any_order():
    found = token_overlap(0, "cats and cats run", ["run and cat", "cat cats running and", "dog", "", "and and and"])
    np.testing.assert_allclose(found, [2 * (3 / 3) * (3 / 4) / (3 / 3 + 3 / 4), 1, 0, 0, 2 * (1 / 3) * (1 / 4) / (1 / 3 + 1 / 4)])
    np.testing.assert_array_equal(token_overlap(0, "?", ["a", "?"]), [0, 0])


def test_scores_of_another_model_are_found_by_pair(tmp_path):
    lines = [{"query_id": "q1", "doc_id": "d2", "scores": [0.5, -3]}, {"query_id": "q1", "doc_id": "d1", "scores": []}]
    path = tmp_path / "scores.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    measure = ScoreFile(path, [("q1", "d1"), ("q1", "d2")])
    np.testing.assert_array_equal(measure(1, "gold", ["x", "y"]), np.float32([0.5, -3]))
    assert measure(0, "gold", []).shape == (0,)
    with pytest.raises(InputError, match="has 2 scores for query q1 and document d2, which has 1 generated queries"):
        measure(1, "gold", ["x"])
    with pytest.raises(InputError, match="no scores for query q9 and document d1"):
        ScoreFile(path, [("q9", "d1")])


@pytest.mark.parametrize(
    "line", ['{"query_id": "q", "doc_id": "d", "scores": [NaN]}', '{"query_id": "q", "scores": [1]}', "[]", "{"]
)
def test_a_malformed_line_of_scores_is_named(tmp_path, line):
    (tmp_path / "scores.jsonl").write_text(line + "\n")
    with pytest.raises(InputError, match=r"scores\.jsonl, line 1"):
        ScoreFile(tmp_path / "scores.jsonl", [])
