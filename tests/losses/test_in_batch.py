"""The in-batch losses' constants, what their metrics mean, and how duplicates cost."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from compiled import compiled

from de_jax.losses import in_batch
from de_jax.types import Embeddings

in_batch_softmax, samtone, nce = (compiled(loss) for loss in (in_batch.in_batch_softmax, in_batch.samtone, in_batch.nce))


def collapsed(num_rows: int) -> Embeddings:
    """Every text has the same embedding; all ids differ."""
    vectors = jnp.asarray(np.eye(4, dtype=np.float32)[[0] * num_rows])
    ids = jnp.arange(num_rows, dtype=jnp.int32)
    return Embeddings(vectors, vectors, ids, ids)


def separated(num_rows: int) -> Embeddings:
    """Query i and document i are the unit vector i."""
    vectors = jnp.eye(num_rows, dtype=jnp.float32)
    ids = jnp.arange(num_rows, dtype=jnp.int32)
    return Embeddings(vectors, vectors, ids, ids)


def test_collapsed_embeddings_cost_log_of_the_number_of_candidates():
    e = collapsed(512)
    loss, metrics = in_batch_softmax(e)
    np.testing.assert_allclose(metrics["loss_query_to_doc"], math.log(512), rtol=1e-5)  # 6.238
    np.testing.assert_allclose(loss, 12.477, rtol=1e-4)
    np.testing.assert_allclose(in_batch_softmax(e, reduce_directions="mean")[0], math.log(512), rtol=1e-5)


def test_collapsed_embeddings_in_samtone_have_two_towers_of_candidates():
    _, metrics = samtone(collapsed(512), same_tower="query")
    np.testing.assert_allclose(metrics["loss_query_to_doc"], math.log(2 * 512 - 1), rtol=1e-5)  # 6.930
    np.testing.assert_allclose(metrics["loss_doc_to_query"], math.log(512), rtol=1e-5)
    np.testing.assert_allclose(metrics["same_tower_share"], 511 / 1023, rtol=1e-5)
    loss, _ = samtone(collapsed(512), same_tower="both")
    np.testing.assert_allclose(loss, 2 * math.log(1023), rtol=1e-5)


def test_collapsed_embeddings_in_nce_have_two_candidates():
    np.testing.assert_allclose(nce(collapsed(16))[0], math.log(2), rtol=1e-5)


def test_a_tie_is_not_accurate_and_separation_is():
    assert in_batch_softmax(collapsed(8))[1]["accuracy"] == 0.0
    loss, metrics = in_batch_softmax(separated(8), temperature=0.1)
    assert metrics["accuracy"] == 1.0
    assert metrics["positive_score"] == 1.0
    assert metrics["negative_score"] == 0.0
    np.testing.assert_allclose(loss, 2 * math.log1p(7 * math.exp(-10)), rtol=1e-5)


def test_accuracy_counts_mined_documents_among_the_candidates():
    e = separated(4)
    copies = e._replace(neg_docs=e.doc[::-1][:, None, :], neg_doc_ids=jnp.full((4, 1), 99, jnp.int32))
    assert in_batch_softmax(copies)[1]["accuracy"] == 0.0
    own = copies._replace(neg_doc_ids=e.doc_id[::-1][:, None])
    assert in_batch_softmax(own)[1]["accuracy"] == 1.0


@pytest.mark.parametrize("field", ["query_id", "doc_id"])
def test_a_duplicate_costs_at_least_log_2_where_it_is_not_masked(field):
    """Rows 0 and 1 are the same text twice; with it masked, perfectly separated rows cost nothing."""
    e = separated(8)
    vectors = e.doc.at[1].set(e.doc[0])
    e = e._replace(query=vectors, doc=vectors, **{field: getattr(e, field).at[1].set(0)})
    masked, _ = in_batch_softmax(e, directions="query_to_doc")
    unmasked, _ = in_batch_softmax(e, directions="query_to_doc", mask_duplicates=False)
    np.testing.assert_allclose(masked, 0.0, atol=1e-6)
    np.testing.assert_allclose(unmasked, 2 / 8 * math.log(2), rtol=1e-5)


def test_samtone_ignores_duplicate_docs():
    """Two queries of one document: the document's copy is no same-tower negative of itself."""
    e = separated(8)
    vectors = e.doc.at[1].set(e.doc[0])
    e = e._replace(query=vectors, doc=vectors, doc_id=e.doc_id.at[1].set(0))
    for same_tower in ("query", "doc", "both"):
        loss, metrics = samtone(e, same_tower=same_tower)
        np.testing.assert_allclose([loss, metrics["same_tower_share"]], 0.0, atol=1e-6)
    _, metrics = samtone(e, same_tower="doc", mask_duplicates=False)
    np.testing.assert_allclose(metrics["loss_doc_to_query"], 2 / 8 * math.log(3), rtol=1e-5)
    np.testing.assert_allclose(metrics["same_tower_share"], 2 / 8 * (1 / 3), rtol=1e-5)


def test_samtone_tends_to_the_plain_softmax_where_queries_are_far_apart(make_embeddings):
    e = make_embeddings(0, unique=True, num_neg_docs=0, num_neg_queries=0)
    e = e._replace(query=jnp.eye(8, 64, dtype=jnp.float32), doc=jnp.eye(8, 64, k=1, dtype=jnp.float32) * 0.5 + 0.1)
    plain, _ = in_batch_softmax(e, temperature=0.002)
    loss, metrics = samtone(e, temperature=0.002)
    assert metrics["same_tower_share"] < 1e-5
    np.testing.assert_allclose(loss, plain, rtol=1e-5)


def test_mined_documents_leave_the_doc_to_query_softmax_alone(make_embeddings):
    e = make_embeddings(0)
    _, metrics = samtone(e, same_tower="both")
    _, without = samtone(e._replace(neg_docs=None, neg_doc_ids=None), same_tower="both")
    np.testing.assert_allclose(metrics["loss_doc_to_query"], without["loss_doc_to_query"], rtol=1e-6)
    assert metrics["loss_query_to_doc"] > without["loss_query_to_doc"]


def test_zero_mined_documents_are_none(make_embeddings):
    e = make_embeddings(0, num_neg_docs=0, num_neg_queries=0)
    empty = e._replace(neg_docs=jnp.zeros((8, 0, 3)), neg_doc_ids=jnp.zeros((8, 0), jnp.int32))
    np.testing.assert_array_equal(in_batch_softmax(empty)[0], in_batch_softmax(e)[0])


def test_nce_ignores_mined_documents_and_reports_the_hardest_score(make_embeddings):
    e = make_embeddings(1, unique=True, num_padding=0)
    loss, metrics = nce(e)
    np.testing.assert_array_equal(loss, nce(e._replace(neg_docs=None, neg_doc_ids=None))[0])
    scores = np.array(e.query @ e.doc.T)
    np.fill_diagonal(scores, -2.0)
    np.testing.assert_allclose(metrics["hardest_score"], scores.max(axis=1).mean(), rtol=1e-5)


@pytest.mark.parametrize(
    ("loss", "hyper_parameters", "sentence"),
    [
        (in_batch_softmax, {"directions": "q2d"}, "directions is 'q2d'; it must be 'both', 'query_to_doc' or 'doc_to_query'"),
        (in_batch_softmax, {"reduce_directions": "max"}, "reduce_directions is 'max'; it must be 'sum' or 'mean'"),
        (in_batch_softmax, {"label_smoothing": 1.0}, "label_smoothing is 1.0; it must be less than 1"),
        (in_batch_softmax, {"margin": -0.1}, "margin is -0.1; it must be at least 0"),
        (samtone, {"same_tower": "left"}, "same_tower is 'left'; it must be 'query', 'doc' or 'both'"),
        (samtone, {"same_tower": "doc", "directions": "query_to_doc"}, "adds to the doc_to_query softmax, but directions="),
    ],
)
def test_wrong_hyper_parameters_are_named(loss, hyper_parameters, sentence):
    with pytest.raises(ValueError, match=sentence):
        loss(collapsed(2), **hyper_parameters)
