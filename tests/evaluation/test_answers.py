import re
import unicodedata

import pytest

from de_jax.evaluation import answers, metrics


def has_answer(text, *strings):
    qrels = answers.judge({"q": {"d": 1.0}}, {"d": text}, {"q": list(strings)})
    return bool(qrels["q"]["d"])


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("It was May 18, 2018.", "may 18 , 2018", True),
        ("It was May 18, 2018.", "May 18 2018", False),  # the comma is a word
        ("the Atlantis", "Atlanti", False),
        ("the U.S.A. today", "u.s.a.", True),
        ("Wilhelm Conrad Röntgen won", "Ro\u0308ntgen", True),
        ("Wilhelm Conrad Röntgen won", "Rontgen", False),
        ("a\u00a0 new\nline", "a new line", True),
        ("soft\u00adhyphen", "soft hyphen", True),  # a hidden character parts two words
        ("price: $5", "$5", True),
        ("snake_case", "snake", True),
        ("", "x", False),
    ],
)
def test_an_answer_is_found_as_whole_words(text, answer, expected):
    assert has_answer(text, answer) is expected


def test_one_answer_of_several_is_enough():
    assert has_answer("the red animal", "fox", "red  ANIMAL")


def test_words_are_those_of_the_definition():
    text = "Ünïcode: ½ price, naïve—\t(5 €)\u200b日本語 a\u0301\u0302b _x_ \U0001f98a"
    expected = re.findall(r"\S+", " ".join(by_categories(text)))
    assert answers.words(text).split() == expected


def by_categories(text):
    """Runs of letters, numbers and marks, and other visible characters alone, character by character."""
    found, run = [], ""
    for character in unicodedata.normalize("NFD", text):
        kind = unicodedata.category(character)[0]
        if kind in "LNM":
            run += character
            continue
        found += [run.lower()] if run else []
        run = ""
        if kind not in "ZC":
            found.append(character.lower())
    return found + ([run.lower()] if run else [])


def test_a_question_without_results_is_not_covered():
    qrels = answers.judge({"q": {"d": 1.0}}, {"d": "fox"}, {"q": ["fox"], "r": ["fox"]})
    assert metrics.evaluate_results({"q": {"d": 1.0}}, qrels, measures=["Success@20"]) == {"success@20": 0.5}
