import numpy as np
import pytest

from de_jax.retrieval.faiss_index import FaissIndex
from de_jax.retrieval.index import ExactIndex, MaxPIndex
from de_jax.types import InputError, Ranking


def corpus(rng, num_docs, most_passages, dim=4, levels=3):
    """Embeddings of small whole numbers, so that scores are exact and many are equal; documents in no order of ids."""
    doc_rows = np.repeat(np.arange(num_docs), rng.integers(1, most_passages + 1, num_docs))
    passages = rng.integers(-levels, levels + 1, (len(doc_rows), dim)).astype(np.float32)
    doc_ids = [f"d{number}" for number in rng.permutation(num_docs)]
    return passages, doc_rows, doc_ids


def by_brute_force(passages, doc_rows, doc_ids, query, k):
    best = {}
    for doc, passage in zip(doc_rows.tolist(), passages, strict=True):
        best[doc] = max(best.get(doc, -np.inf), float(np.dot(query, passage)))
    by_id = sorted(best.items(), key=lambda item: doc_ids[item[0]], reverse=True)
    return sorted(by_id, key=lambda item: -item[1])[:k]


class Counting:
    def __init__(self, index):
        self._index, self.depths = index, []

    def search(self, queries, k):
        self.depths.append((len(queries), k))
        return self._index.search(queries, k)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("k", [1, 3, 10, 100])
def test_documents_rank_by_their_best_passage_as_in_brute_force(seed, k):
    rng = np.random.default_rng(seed)
    passages, doc_rows, doc_ids = corpus(rng, num_docs=30, most_passages=[1, 4, 25][seed % 3])
    queries = rng.integers(-3, 4, (5, 4)).astype(np.float32)
    row_ids = [doc_ids[doc] for doc in doc_rows]
    for index in (ExactIndex(passages, row_ids), FaissIndex.build(passages, row_ids)):
        found = MaxPIndex(index, doc_rows).search(queries, k)
        assert found.doc_rows.shape == (5, k)
        for query, rows, scores in zip(queries, found.doc_rows, found.scores, strict=True):
            expected = by_brute_force(passages, doc_rows, doc_ids, query, k)
            assert list(zip(rows.tolist(), scores.tolist(), strict=True))[: len(expected)] == expected
            assert rows[len(expected) :].tolist() == [-1] * (k - len(expected))


def test_one_document_with_all_the_best_passages_hides_no_other():
    # k passages would all be of the first document, and removing duplicates would leave one document of three.
    passages = np.array([[9.0], [8.0], [7.0], [6.0], [5.0], [1.0], [2.0]], np.float32)
    doc_rows = np.array([0, 0, 0, 0, 0, 1, 2])
    index = Counting(ExactIndex(passages, ["a"] * 5 + ["b", "c"]))
    found = MaxPIndex(index, doc_rows).search(np.ones((1, 1), np.float32), 3)
    assert found.doc_rows.tolist() == [[0, 2, 1]]
    assert found.scores.tolist() == [[9.0, 2.0, 1.0]]
    assert index.depths == [(1, 6), (1, 7)]


def test_only_queries_that_need_it_are_searched_deeper():
    passages = np.array([[5.0, 0.0], [4.0, 0.0], [3.0, 0.0], [2.0, 0.0], [0.0, 9.0], [1.0, 8.0]], np.float32)
    index = Counting(ExactIndex(passages, ["a", "a", "a", "a", "b", "c"]))
    found = MaxPIndex(index, np.array([0, 0, 0, 0, 1, 2])).search(np.eye(2, dtype=np.float32), 2)
    assert found.doc_rows.tolist() == [[0, 2], [1, 2]]
    assert index.depths == [(2, 4), (1, 5)]


def test_an_index_that_misses_documents_ends_with_those_it_has():
    class Blind:
        def search(self, queries, k):
            rows = np.full((len(queries), k), -1, np.int32)
            rows[:, 0] = 2
            return Ranking(rows, np.where(rows >= 0, np.float32(1), np.float32(-np.inf)))

    found = MaxPIndex(Blind(), np.array([0, 0, 1])).search(np.ones((1, 1), np.float32), 2)
    assert found.doc_rows.tolist() == [[1, -1]]


def test_bad_input_is_refused():
    index = ExactIndex(np.ones((2, 1), np.float32), ["a", "a"])
    with pytest.raises(InputError, match="k is 0"):
        MaxPIndex(index, np.array([0, 0])).search(np.ones((1, 1), np.float32), 0)
    with pytest.raises(InputError, match="document 0 has no passage"):
        MaxPIndex(index, np.array([1, 1]))
