"""Rankings of parts, merged; encoding by parts is in test_encode.py, mining by parts in test_mine_negatives.py."""

import numpy as np
import pytest

from de_jax.retrieval import parts
from de_jax.retrieval.index import ExactIndex, order_by_id
from de_jax.retrieval.maxp import MaxPIndex
from de_jax.types import InputError, Ranking


@pytest.fixture
def corpus():
    """Embeddings of few distinct values, so that scores are tied, and ids in no order."""
    rng = np.random.default_rng(0)
    docs, queries = (rng.integers(-1, 2, (size, 3)).astype(np.float32) for size in (41, 9))
    return docs, queries, [f"d{number}" for number in rng.permutation(41)]


@pytest.mark.parametrize("depth", [1, 5, 41])
def test_merged_rankings_are_those_of_all_documents(corpus, depth):
    docs, queries, ids = corpus
    found = []
    for rows in (range(7), range(7, 8), range(8, 41)):
        part = ExactIndex(docs[rows.start : rows.stop], ids[rows.start : rows.stop]).search(queries, min(depth, len(rows)))
        found.append(part._replace(doc_rows=part.doc_rows + rows.start))
    expected = ExactIndex(docs, ids).search(queries, depth)
    merged = parts.merged(found, order_by_id(ids), depth)
    np.testing.assert_array_equal(merged.doc_rows, expected.doc_rows)
    np.testing.assert_array_equal(merged.scores, expected.scores)


def test_a_document_whose_passages_are_in_two_parts_counts_by_its_best(corpus):
    passages, queries, _ = corpus
    doc_rows = np.arange(41) // 3
    ids = [f"d{row}" for row in doc_rows]
    expected = MaxPIndex(ExactIndex(passages, ids), doc_rows).search(queries, 10)
    found = []
    for rows in (slice(0, 20), slice(20, 41)):
        first = doc_rows[rows][0]
        part = MaxPIndex(ExactIndex(passages[rows], ids[rows]), doc_rows[rows] - first).search(queries, 10)
        found.append(part._replace(doc_rows=np.where(part.doc_rows < 0, -1, part.doc_rows + first)))
    merged = parts.merged(found, order_by_id([f"d{row}" for row in range(14)]), 10)
    np.testing.assert_array_equal(merged.doc_rows, expected.doc_rows)
    np.testing.assert_array_equal(merged.scores, expected.scores)


def test_a_kept_ranking_is_read_and_a_damaged_one_named(tmp_path):
    ranking = Ranking(np.array([[2, -1]], np.int32), np.array([[0.5, -np.inf]], np.float32))
    parts.write_ranking(tmp_path / "kept", ranking)
    for kept, written in zip(parts.read_ranking(tmp_path / "kept"), ranking, strict=True):
        np.testing.assert_array_equal(kept, written)
    (tmp_path / "kept" / "scores.npy").write_bytes(b"")
    with pytest.raises(InputError, match=r"scores\.npy"):
        parts.read_ranking(tmp_path / "kept")
