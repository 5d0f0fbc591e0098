"""Negatives that another program wrote, for pairs of ours."""

from de_jax.data.text.table_rows import Example
from de_jax.mining.imported import Target, from_examples


def test_no_document_with_the_text_of_a_positive_is_a_negative():
    texts = {"foo": ["d1", "d2"], "bar": ["d3"], "q": ["q"]}
    find = lambda text: texts.get(text, [])  # noqa: E731
    target = Target("toy", [("q", "d1")], find, find, {"q": "q"}, {"d1": "d1", "d2": "d1", "d3": "d3"}, {})
    (line,), counts = from_examples([Example("q", ["foo"], ["foo", "bar"], [], [])], target)
    assert list(line.neg_doc_ids) == ["d3"]
    assert counts == {"unknown_pairs": 0, "unknown_negatives": 0}
