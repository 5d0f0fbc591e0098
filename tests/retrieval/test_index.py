import re

import jax
import numpy as np
import pytest

from de_jax.retrieval import index
from de_jax.retrieval.encode import aligned
from de_jax.retrieval.index import QUERY_BLOCKS, ExactIndex, _scores, _with_tile, check_documents, check_search
from de_jax.types import InputError

EYE = np.eye(3, dtype=np.float32)


def rank_by_loops(queries, docs, ids, k):
    """Rows and float64 scores of the k best documents, by score and then by id downwards."""
    rows, scores = np.full((len(queries), k), -1), np.full((len(queries), k), -np.inf)
    for i, query in enumerate(queries):
        pairs = [(float(np.dot(query.astype(np.float64), doc.astype(np.float64))), ids[j], j) for j, doc in enumerate(docs)]
        for place, (score, _, j) in enumerate(
            sorted(sorted(pairs, key=lambda pair: pair[1], reverse=True), key=lambda pair: -pair[0])[:k]
        ):
            rows[i, place], scores[i, place] = j, score
    return rows, scores


def small_integers(rng, num_rows, dim=4):
    """Vectors whose inner products are exact and often equal."""
    return rng.integers(-2, 3, (num_rows, dim)).astype(np.float32)


@pytest.mark.parametrize(("num_docs", "k"), [(1, 1), (7, 3), (7, 20), (900, 100)])
def test_search_equals_loops_with_many_ties(num_docs, k):
    rng = np.random.default_rng(num_docs)
    docs, queries = small_integers(rng, num_docs), small_integers(rng, 9)
    ids = [str(i) for i in rng.permutation(num_docs)]
    found = ExactIndex(docs, ids).search(queries, k)
    rows, scores = rank_by_loops(queries, docs, ids, k)
    np.testing.assert_array_equal(found.doc_rows, rows)
    np.testing.assert_array_equal(found.scores, scores)
    assert (found.doc_rows.dtype, found.scores.dtype) == (np.int32, np.float32)


def test_search_equals_loops_on_real_vectors():
    rng = np.random.default_rng(0)
    docs, queries = rng.standard_normal((500, 48), np.float32), rng.standard_normal((20, 48), np.float32)
    ids = [f"d{i}" for i in range(500)]
    found = ExactIndex(docs, ids).search(queries, 10)
    rows, scores = rank_by_loops(queries, docs, ids, 10)
    np.testing.assert_array_equal(found.doc_rows, rows)
    np.testing.assert_allclose(found.scores, scores, atol=1e-5)


def test_ids_are_compared_as_strings():
    docs = np.ones((3, 2), np.float32)
    found = ExactIndex(docs, ["9", "10", "1"]).search(docs[:1], 3)
    assert found.doc_rows.tolist() == [[0, 1, 2]]


def assert_same(found, expected):
    np.testing.assert_array_equal(found.doc_rows, expected.doc_rows)
    np.testing.assert_array_equal(found.scores, expected.scores)


def placed(docs, offset):
    """A copy that begins so many bytes after a multiple of 64."""
    memory = aligned(1, docs.nbytes // 4 + 16).view(np.uint8)[0]
    copy = memory[offset : offset + docs.nbytes].view(docs.dtype).reshape(docs.shape)
    copy[:] = docs
    return copy


@pytest.mark.parametrize("dim", [7, 64])
def test_rankings_are_bit_equal_for_any_tile_and_batch(dim, monkeypatch):
    rng = np.random.default_rng(0)
    distinct = rng.standard_normal((1500, dim), np.float32)
    docs = distinct[rng.integers(0, 1500, 4200)]  # thousands of duplicates, in all places of a tile
    queries = rng.standard_normal((2 * QUERY_BLOCKS[-1] + 5, dim), np.float32)
    ids = [str(i) for i in rng.permutation(len(docs))]
    whole = ExactIndex(docs, ids).search(queries, 50)
    for tile_docs in (1, 2048, 3072):
        with monkeypatch.context() as patched:
            patched.setattr(index, "CPU_TILE_BYTES", tile_docs * 4 * QUERY_BLOCKS[-1])
            for devices in (jax.devices()[:1], None):
                assert_same(ExactIndex(docs, ids, devices=devices).search(queries, 50), whole)
    few = ExactIndex(docs, ids)
    for size in (1, 2, 3, 8, 9, 130):
        found = few.search(queries[-size:], 50)
        np.testing.assert_array_equal(found.doc_rows, whole.doc_rows[-size:])
        np.testing.assert_array_equal(found.scores, whole.scores[-size:])
    for row, scores in zip(whole.doc_rows, whole.scores, strict=True):
        assert [-scores[i] for i in range(50)] == sorted(-scores)
        tied = scores[1:] == scores[:-1]
        names = [ids[doc] for doc in row]
        assert all(names[i] > names[i + 1] for i in np.flatnonzero(tied))
    # A document and its copies score the same wherever they stand.
    keys = [docs[row].tobytes() for row in whole.doc_rows[0]]
    assert len({(key, float(score)) for key, score in zip(keys, whole.scores[0], strict=True)}) == len(set(keys))


@pytest.mark.parametrize("dim", [1, 24, 100, 384, 768, 1024])
def test_a_query_scores_the_same_alone_and_in_company(dim):
    rng = np.random.default_rng(dim)
    docs, queries = rng.standard_normal((2048, dim), np.float32), rng.standard_normal((QUERY_BLOCKS[-1], dim), np.float32)
    together = np.asarray(_scores(queries, docs))
    for size in QUERY_BLOCKS:
        np.testing.assert_array_equal(_scores(queries[:size], docs), together[:size])
        np.testing.assert_array_equal(_scores(queries[:size], docs[:1024]), together[:size, :1024])


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int8, np.uint8])
def test_documents_that_stay_are_ranked_as_documents_that_are_streamed(dtype):
    rng = np.random.default_rng(1)
    docs = rng.integers(-9 if np.dtype(dtype).kind != "u" else 0, 9, (40000, 8)).astype(dtype)
    queries = rng.standard_normal((11, 64 if dtype == np.uint8 else 8), np.float32)
    ids = [str(i) for i in rng.permutation(len(docs))]
    stays, streamed = (ExactIndex(placed(docs, 4), ids, kept_bytes=kept) for kept in (2**30, 0))
    assert streamed._kept is None
    assert len(stays._kept) == 1
    assert_same(streamed.search(queries, 30), stays.search(queries, 30))
    relevant = [[row, row + 100] for row in range(11)]
    np.testing.assert_array_equal(streamed.best_ranks(queries, relevant), stays.best_ranks(queries, relevant))


def test_aligned_and_memory_mapped_documents_stay_where_they_are(tmp_path):
    docs = np.random.default_rng(0).standard_normal((2048, 8), np.float32)
    np.save(tmp_path / "docs.npy", docs)
    for array in (np.load(tmp_path / "docs.npy", mmap_mode="r"), placed(docs, 0)):
        found = ExactIndex(array, [str(i) for i in range(2048)], kept_bytes=0, devices=jax.devices()[:1])
        assert [tile.unsafe_buffer_pointer() for tile, _ in found._kept] == [array.ctypes.data]
    assert ExactIndex(placed(docs, 4), [str(i) for i in range(2048)], kept_bytes=0)._kept is None


@pytest.mark.parametrize("num_docs", [5, 3000, 20000])
def test_rankings_are_bit_equal_on_one_device_and_on_several(num_docs):
    rng = np.random.default_rng(num_docs)
    distinct = np.concatenate([small_integers(rng, 300, 16), rng.standard_normal((300, 16), np.float32)])
    docs, ids = distinct[rng.integers(0, 600, num_docs)], [str(i) for i in rng.permutation(num_docs)]
    queries = np.concatenate([small_integers(rng, 9, 16), rng.standard_normal((9, 16), np.float32)])
    one = ExactIndex(docs, ids, devices=jax.devices()[:1]).search(queries, 200)
    for num_devices in (3, 8):
        found = ExactIndex(docs, ids, devices=jax.devices()[:num_devices]).search(queries, 200)
        assert_same(found, one)


def test_documents_are_split_over_the_devices_and_only_the_best_are_gathered():
    index = ExactIndex(np.zeros((16384, 8), np.float32), [str(i) for i in range(16384)])
    depth, size = 20, QUERY_BLOCKS[-1]
    ((tile, places),) = index._kept
    assert {shard.data.shape for shard in tile.addressable_shards} == {(2048, 8)}
    ((own, block),) = index._blocks(np.zeros((size, 8), np.float32))
    lowered = _with_tile.lower(*index._nothing(own, depth), _scores(block, tile), places, mesh=index._mesh)
    gathered = re.findall(r"\w+\[([\d,]+)\]\S* all-gather\(", lowered.compile().as_text())
    assert gathered
    assert max(np.prod([int(size) for size in shape.split(",")]) for shape in gathered) < size * (9 + 1) * depth
    assert "all-gather" not in _scores.lower(block, tile).compile().as_text()


def test_the_order_of_the_corpus_does_not_change_the_ranking():
    rng = np.random.default_rng(3)
    docs, queries = small_integers(rng, 200), small_integers(rng, 5)
    ids = np.array([f"d{i}" for i in range(200)])
    shuffle = rng.permutation(200)
    first = ExactIndex(docs, ids.tolist()).search(queries, 30)
    second = ExactIndex(docs[shuffle], ids[shuffle].tolist()).search(queries, 30)
    np.testing.assert_array_equal(ids[first.doc_rows], ids[shuffle][second.doc_rows])


def test_a_corpus_smaller_than_k_fills_up_with_no_document():
    found = ExactIndex(np.eye(2, dtype=np.float32), ["a", "b"]).search(np.array([[1.0, 2.0]], np.float32), 4)
    assert found.doc_rows.tolist() == [[1, 0, -1, -1]]
    assert found.scores.tolist() == [[2.0, 1.0, -np.inf, -np.inf]]


def test_negative_scores_rank_before_padding():
    found = ExactIndex(-np.ones((2, 3), np.float32), ["a", "b"]).search(np.ones((1, 3), np.float32), 2)
    assert found.doc_rows.tolist() == [[1, 0]]


def test_no_queries_give_an_empty_ranking():
    found = ExactIndex(np.eye(2, dtype=np.float32), ["a", "b"]).search(np.zeros((0, 2), np.float32), 3)
    assert found.doc_rows.shape == found.scores.shape == (0, 3)


def test_embeddings_may_be_memory_mapped(tmp_path):
    np.save(tmp_path / "docs.npy", np.eye(5, dtype=np.float32))
    docs = np.load(tmp_path / "docs.npy", mmap_mode="r")
    assert ExactIndex(docs, list("abcde")).search(np.eye(5, dtype=np.float32), 1).doc_rows[:, 0].tolist() == [0, 1, 2, 3, 4]


def test_more_queries_and_documents_compile_nothing_more(monkeypatch):
    monkeypatch.setattr(index, "CPU_TILE_BYTES", 1024 * 4 * QUERY_BLOCKS[-1])
    rng = np.random.default_rng(0)
    found = ExactIndex(rng.standard_normal((9000, 8), np.float32), [str(i) for i in range(9000)])
    for size in QUERY_BLOCKS:
        found.search(rng.standard_normal((size, 8), np.float32), 7)
    compiled = _with_tile._cache_size(), _scores._cache_size()
    found.search(rng.standard_normal((700, 8), np.float32), 7)
    found.search(rng.standard_normal((5, 8), np.float32), 7)
    assert (_with_tile._cache_size(), _scores._cache_size()) == compiled


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_values_that_are_not_finite_are_refused(bad):
    docs = np.eye(4, dtype=np.float32)
    docs[2, 1] = bad
    with pytest.raises(InputError, match="document 'c' has a value that is not finite"):
        ExactIndex(docs, list("abcd"))
    with pytest.raises(InputError, match="query 2 has a value that is not finite"):
        ExactIndex(np.eye(4, dtype=np.float32), list("abcd")).search(docs, 1)


def test_bad_sizes_are_refused():
    eye = np.eye(3, dtype=np.float32)
    with pytest.raises(InputError, match="no documents"):
        ExactIndex(np.zeros((0, 3), np.float32), [])
    with pytest.raises(InputError, match="2 document ids do not match 3 embeddings"):
        ExactIndex(eye, ["a", "b"])
    with pytest.raises(InputError, match="k is 0"):
        ExactIndex(eye, list("abc")).search(eye, 0)
    with pytest.raises(InputError, match="queries have 2 dimensions and documents 3"):
        ExactIndex(eye, list("abc")).search(np.zeros((1, 2), np.float32), 1)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"queries": EYE[0]}, r"queries have the shape \(3,\); give them as rows, one query as \[1, 3\]"),
        ({"queries": EYE.tolist()}, r"queries is \[\[1.0, .*, not an array of numbers"),
        ({"queries": None}, "queries is None, not an array"),
        ({"queries": EYE.astype(str)}, "not an array of numbers"),
        ({"queries": EYE.astype(complex)}, "not an array of numbers"),
        ({"k": True}, "k is True; it must be a whole number"),
        ({"k": 2.0}, "k is 2.0; it must be a whole number, written 2"),
        ({"embeddings": EYE[0]}, r"embeddings have the shape \(3,\)"),
        ({"embeddings": EYE[None]}, r"embeddings have the shape \(1, 3, 3\)"),
        ({"embeddings": EYE.tolist()}, "embeddings is .*, not an array of numbers"),
        ({"ids": list("aba")}, "the document id 'a' is given to several rows"),
        ({"ids": ["1", 1, "2"]}, "the document id 1 is no text"),
        ({"ids": (name for name in "abc")}, "ids is <generator .*; give a list of str"),
    ],
)
def test_what_no_index_can_take_is_refused_in_a_sentence(change, sentence):
    def check(embeddings=EYE, ids=("a", "b", "c"), queries=EYE, k=2):
        check_documents(embeddings, ids)
        check_search(queries, k, 3)

    check(k=np.int64(2))
    with pytest.raises(InputError, match=sentence):
        check(**change)


def test_device_arrays_can_be_searched():
    found = ExactIndex(jax.numpy.eye(3), list("abc")).search(jax.numpy.eye(3), 1)
    assert found.doc_rows[:, 0].tolist() == [0, 1, 2]


@pytest.mark.parametrize("num_devices", [1, 8])
def test_the_best_rank_is_that_of_the_whole_ranking(num_devices, monkeypatch):
    monkeypatch.setattr(index, "CPU_TILE_BYTES", 1)
    rng = np.random.default_rng(0)
    embeddings = rng.integers(-2, 3, (1100, 4)).astype(np.float32)  # whole numbers: many equal scores
    ids = [f"d{number}" for number in rng.permutation(1100)]
    queries = rng.integers(-2, 3, (150, 4)).astype(np.float32)
    relevant = [rng.choice(1100, size=size, replace=False).tolist() for size in rng.integers(0, 4, 150)]
    found = ExactIndex(embeddings, ids, devices=jax.devices()[:num_devices])
    ranking = found.search(queries, 1100).doc_rows
    expected = [
        min([1 + rows.tolist().index(row) for row in wanted], default=0) for rows, wanted in zip(ranking, relevant, strict=True)
    ]
    assert found.best_ranks(queries, relevant).tolist() == expected
