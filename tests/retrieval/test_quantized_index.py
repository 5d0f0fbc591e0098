"""Embeddings in a byte or a bit a dimension, against sentence-transformers and FAISS, and an index of them on disk."""

import json
import re

import faiss
import numpy as np
import pytest

from de_jax.retrieval import quantization
from de_jax.retrieval.index import ExactIndex
from de_jax.retrieval.quantization import packed_bits, quantize, ranges_of, signs, steps_of
from de_jax.retrieval.vector_index import VectorIndex
from de_jax.types import InputError

library = pytest.importorskip("sentence_transformers.util.quantization")
PRECISIONS = ("float32", "int8", "binary")


def vectors(num_rows, dim=24, seed=0):
    found = np.random.default_rng(seed).standard_normal((num_rows, dim), np.float32)
    return found / np.linalg.norm(found, axis=1, keepdims=True)


def best(scores, k):
    """Rows by score, the first of equals in front."""
    return np.argsort(-scores, axis=1, kind="stable")[:, :k]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("dim", [24, 13])
def test_bytes_are_those_of_sentence_transformers(precision, dim):
    embeddings = vectors(200, dim)
    embeddings[:, 3] = 0.25  # an empty range
    embeddings[7, 5] = 0.0  # on the edge of a bit
    ours, theirs = quantize(embeddings, precision), library.quantize_embeddings(embeddings, precision)
    assert ours.dtype == theirs.dtype
    np.testing.assert_array_equal(ours, theirs)
    ranges = ranges_of(embeddings[:100])  # the others go beyond
    np.testing.assert_array_equal(
        quantize(embeddings, precision, ranges), library.quantize_embeddings(embeddings, precision, ranges=ranges)
    )


def test_int8_is_searched_by_the_middles_of_its_steps():
    docs, queries = vectors(300), vectors(9, seed=1)
    starts, steps = steps_of(ranges_of(docs))
    codes = quantize(docs, "int8")
    scores = queries.astype(np.float64) @ (starts + (codes.astype(np.float64) + 128.5) * steps).T
    assert np.abs(scores - queries @ docs.T).max() < 0.02  # half a step a dimension at most
    found = VectorIndex.build(docs, precision="int8", keep_embeddings=False).search(queries, 10, arrays=True)
    np.testing.assert_array_equal(found.doc_rows, best(scores, 10))
    np.testing.assert_allclose(found.scores, -np.sort(-scores, axis=1)[:, :10], atol=1e-5)
    by_codes = VectorIndex.build(codes, precision="int8", ranges=ranges_of(docs)).search(queries, 10, arrays=True)
    np.testing.assert_array_equal(by_codes.doc_rows, found.doc_rows)


@pytest.mark.parametrize("dim", [24, 13])
def test_binary_candidates_are_those_of_faiss_and_scored_again_by_signs(dim, monkeypatch):
    docs, queries = vectors(300, dim), vectors(9, dim, seed=1)
    codes = quantize(docs, "binary")
    hamming = faiss.IndexBinaryFlat(8 * codes.shape[1])
    hamming.add(packed_bits(codes))
    distances, _ = hamming.search(packed_bits(quantize(queries, "binary")), 300)
    index = VectorIndex.build(codes, [f"{999 - row}" for row in range(300)], precision="binary", dim=dim)
    inner = index._index._index  # of the bits alone
    found = inner.search(index._index._probes(queries), 300)
    np.testing.assert_array_equal((dim - found.scores) / 2, distances)
    monkeypatch.setattr(quantization, "CANDIDATES", 300)
    np.testing.assert_array_equal(index.search(queries, 5, arrays=True).doc_rows, best(queries @ signs(codes, dim).T, 5))


@pytest.mark.parametrize("precision", PRECISIONS[1:])
def test_kept_embeddings_score_again_what_the_codes_find(precision, monkeypatch):
    docs, queries = vectors(300), vectors(9, seed=1)
    ids = [f"d{row}" for row in range(300)]
    index = VectorIndex.build(docs, ids, precision=precision)
    found, exact = index.search(queries, 10, arrays=True), ExactIndex(docs, ids).search(queries, 10)
    scores = np.take_along_axis(queries @ docs.T, found.doc_rows, axis=1)
    np.testing.assert_allclose(found.scores, scores, atol=1e-6)
    share = np.mean([len({*ours} & {*theirs}) for ours, theirs in zip(found.doc_rows, exact.doc_rows, strict=True)]) / 10
    assert share > {"int8": 0.99, "binary": 0.6}[precision]
    monkeypatch.setattr(quantization, "CANDIDATES", 30)  # all
    np.testing.assert_array_equal(index.search(queries, 10, arrays=True).doc_rows, exact.doc_rows)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_equal_documents_stand_by_id_downwards_and_few_documents_are_all(precision):
    docs = np.repeat(vectors(2), 3, axis=0)
    index = VectorIndex.build(docs, ["b", "a", "c", "e", "d", "f"], precision=precision)
    assert repr(index) == f"VectorIndex(6 documents, dim={docs.shape[1]}, precision={precision!r})"
    found = index.search(docs[0], k=8, arrays=True)
    assert found.doc_rows.tolist() == [[2, 0, 1, 5, 3, 4]]
    assert [hit.id for hit in index.search(docs[0], k=8)] == ["c", "b", "a", "f", "e", "d"]
    assert index.search(docs[:0], k=3, arrays=True).doc_rows.shape == (0, 3)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_passages_rank_their_documents(precision):
    docs, queries = vectors(60), vectors(4, seed=1)
    doc_rows = np.sort(np.concatenate([np.arange(20), np.random.default_rng(0).integers(0, 20, 40)]))
    index = VectorIndex.build(docs, precision=precision, doc_rows=doc_rows)
    scores = queries @ docs.T
    expected = np.stack([[row[doc_rows == doc].max() for doc in range(20)] for row in scores])
    found = index.search(queries, 20, arrays=True)
    np.testing.assert_array_equal(found.doc_rows, best(expected, 20))
    assert len(index.ids) == 20


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("keep", [True, False])
def test_saved_index_finds_the_same(precision, keep, tmp_path):
    docs, queries = vectors(40, 13), vectors(4, 13, seed=1)
    ids = [f"d {row}" for row in range(20)]
    doc_rows = np.arange(40) // 2
    index = VectorIndex.build(docs, ids, precision=precision, keep_embeddings=keep, doc_rows=doc_rows)
    index.save(tmp_path / "index")
    index.save(tmp_path / "index")  # replaces itself
    again = VectorIndex.load(tmp_path / "index")
    assert (again.ids, again.precision, again.dim) == (ids, precision, 13)
    for ours, theirs in zip(again.search(queries, 7, arrays=True), index.search(queries, 7, arrays=True), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    has_both = keep and precision != "float32"
    assert (tmp_path / "index" / "embeddings.npy").exists() == has_both


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", ["<f8", "<f2", ">f4", ">f8", list])
def test_other_floats_are_indexed_and_saved_as_float32(kind, precision, tmp_path):
    given = vectors(40).tolist() if kind is list else vectors(40).astype(kind)
    index = VectorIndex.build(given, precision=precision)
    index.save(tmp_path / "index")
    expected = VectorIndex.build(np.asarray(given, np.float32), precision=precision).search(vectors(4, seed=1), 7, arrays=True)
    for one in (index, VectorIndex.load(tmp_path / "index")):
        for found, wanted in zip(one.search(vectors(4, seed=1), 7, arrays=True), expected, strict=True):
            np.testing.assert_array_equal(found, wanted)


def test_index_whose_parts_do_not_fit_together_is_refused_with_its_folder(tmp_path):
    VectorIndex.build(vectors(40), precision="int8").save(tmp_path / "index")
    (tmp_path / "index" / "checksums.json").unlink()
    manifest = tmp_path / "index" / "manifest.json"
    said = json.loads(manifest.read_text())
    changes = {
        "manifest.json: arrays are ['ranges'], not some of": {"arrays": ["ranges"]},
        "index is damaged (int8 embeddings need the ranges [2, 24]": {"arrays": ["vectors"]},
        "embeddings.npy holds float32 of shape (40, 24), not float32 of shape (39, 24)": {"num_vectors": 39},
    }
    for sentence, change in changes.items():
        manifest.write_text(json.dumps(said | change))
        with pytest.raises(InputError, match=re.escape(sentence)):
            VectorIndex.load(tmp_path / "index")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"precision": "int4"}, "precision is 'int4'; it is one of float32, int8, binary"),
        ({"embeddings": np.zeros((0, 4), np.float32)}, r"shape \(0, 4\); give \[n, D\] of at least one document"),
        ({"embeddings": np.zeros(4, np.float32)}, r"shape \(4,\)"),
        ({"embeddings": np.zeros((3, 4), np.int32)}, "embeddings are int32; give float32"),
        ({"embeddings": np.full((3, 4), 1e300)}, "the embedding of document '0' has a value that is not finite"),
        ({"embeddings": np.zeros((3, 4), np.int8)}, "are int8 already; say how they were made"),
        ({"embeddings": np.zeros((3, 4), np.int8), "precision": "int8"}, r"need the ranges \[2, 4\]"),
        ({"embeddings": np.zeros((3, 4), np.int8), "precision": "binary", "dim": 40}, "have 4 columns, but 40 dimensions take 5"),
        ({"dim": 5}, "have 4 columns, but 5 dimensions take 5"),
        ({"embeddings": np.ones((1, 4), np.float32), "precision": "int8"}, "which 1 embeddings do not show; give ranges"),
        ({"precision": "int8", "ranges": np.array([[1.0] * 4, [0.0] * 4])}, "the least values .* first"),
        ({"embeddings": np.array([[1.0], [np.nan]])}, "the embedding of document '1' has a value that is not finite"),
        ({"embeddings": np.array([[1.0], [np.inf]]), "precision": "binary"}, "the embedding of text 1 has a value"),
        ({"ids": ["a"]}, "1 ids do not match 3 documents"),
        ({"ids": ["a", "b", 0]}, "the document id 0 is no text"),
        ({"ids": ["a", "b", "a"]}, "the document id 'a' is given to several rows"),
        ({"ids": "abc"}, "ids is 'abc'; give a list of str"),
        ({"ids": 3}, "ids is 3; give a list of str"),
        ({"embeddings": [[1.0, 0.0], [1.0]]}, "embeddings are no array, as their rows have unequal lengths"),
        ({"doc_rows": [0, 2, 2]}, "from 0 upwards and none left out"),
    ],
)
@pytest.mark.usefixtures("as_users_have_it")
def test_what_cannot_be_searched_is_refused(options, sentence):
    with pytest.raises(InputError, match=sentence):
        VectorIndex.build(options.pop("embeddings", vectors(3, 4)), options.pop("ids", None), **options)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("queries", "k", "sentence"),
    [
        (vectors(2, 5), 1, "queries have 5 dimensions and documents 4"),
        (np.zeros((2, 4), np.int8), 1, "queries are int8"),
        (np.array([[1.0, np.nan, 0.0, 0.0]]), 1, "the embedding of query 0 has a value that is not finite"),
        ([[1.0], [1.0, 0.0]], 1, "queries are no array, as their rows have unequal lengths"),
        (vectors(2, 4), 0, "k is 0; it must be at least 1"),
        (vectors(2, 4), "3", "k is '3'; it must be a whole number"),
        (vectors(2, 4), None, "k is None; it must be a whole number"),
        (vectors(2, 4), 2.5, "k is 2.5; it must be a whole number"),
        (vectors(2, 4), True, "k is True; it must be a whole number"),
        (vectors(2, 4), np.True_, "k is True; it must be a whole number"),
        (vectors(2, 4), 10**12, "k is 1000000000000; it must be at most 1048576"),
    ],
)
@pytest.mark.usefixtures("as_users_have_it")
def test_queries_that_do_not_fit_are_refused(precision, queries, k, sentence):
    with pytest.raises(InputError, match=sentence):
        VectorIndex.build(vectors(5, 4), precision=precision).search(queries, k)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.usefixtures("as_users_have_it")
def test_depths_of_numpy_are_depths_and_fewer_documents_are_all(precision):
    index = VectorIndex.build(vectors(5, 4), precision=precision)
    found, deeper = index.search(vectors(2, 4), 3, arrays=True), index.search(vectors(2, 4), np.int64(7), arrays=True)
    np.testing.assert_array_equal(deeper.doc_rows[:, :3], found.doc_rows)
    assert deeper.doc_rows.shape == deeper.scores.shape == (2, 5)
