"""What is special about losses over a row's own mined negatives."""

import jax
import jax.numpy as jnp
import naive
import numpy as np
import pytest
from compiled import compiled

from de_jax.losses import mined
from de_jax.losses.in_batch import in_batch_softmax
from de_jax.types import InputError, Sample

ance, dance, sampled_softmax = (compiled(loss) for loss in (mined.ance, mined.dance, mined.sampled_softmax))


def test_a_row_does_not_meet_the_negatives_of_another(make_embeddings):
    e = make_embeddings(0, unique=True, num_padding=0)._replace(neg_doc_ids=None)
    alone = [ance(jax.tree.map(lambda x, row=row: np.asarray(x)[row : row + 1], e))[0] for row in range(8)]
    np.testing.assert_allclose(ance(e)[0], np.mean(alone), rtol=1e-6)


def test_ance_with_one_negative_is_the_logistic_loss_of_the_score_difference(make_embeddings):
    e = make_embeddings(1, unique=True, num_padding=0, num_neg_docs=1)._replace(neg_doc_ids=None)
    query, doc, neg_docs = (np.asarray(vectors) for vectors in (e.query, e.doc, e.neg_docs))
    difference = np.einsum("BD,BD->B", query, neg_docs[:, 0] - doc)
    np.testing.assert_allclose(ance(e)[0], np.mean(np.log1p(np.exp(difference))), rtol=1e-5)


def test_a_batch_of_one_row_with_in_batch_documents_is_the_plain_softmax(make_embeddings):
    e = make_embeddings(2, num_padding=7)
    expected, _ = compiled(in_batch_softmax)(e, temperature=0.1, directions="query_to_doc")
    np.testing.assert_allclose(ance(e, temperature=0.1, in_batch=True)[0], expected, rtol=1e-5)


def test_dance_without_its_dual_task_is_ance(make_embeddings):
    e = make_embeddings(3)
    np.testing.assert_allclose(dance(e, dual_weight=0.0)[0], ance(e, temperature=0.01)[0], rtol=1e-6)


@pytest.mark.parametrize("mask_duplicates", [True, False])
def test_rows_whose_negatives_are_all_fillers_cost_nothing(mask_duplicates, make_embeddings):
    e = make_embeddings(4)
    e = e._replace(neg_doc_ids=jnp.full_like(e.neg_doc_ids, -1), neg_query_ids=jnp.full_like(e.neg_query_ids, -1))
    value, metrics = dance(e, mask_duplicates=mask_duplicates)
    np.testing.assert_allclose(value, 0.0, atol=1e-7)
    assert all(np.isfinite(metric) for metric in metrics.values())
    assert naive.dance(e, mask_duplicates=mask_duplicates) == 0


def test_missing_negatives_and_bad_weights_are_refused(make_embeddings):
    e = make_embeddings(5)
    with pytest.raises(InputError, match="batches come without neg_docs; name a folder of negatives"):
        ance(e._replace(neg_docs=None, neg_doc_ids=None))
    with pytest.raises(InputError, match="batches come without neg_queries"):
        dance(e._replace(neg_queries=None, neg_query_ids=None))
    with pytest.raises(InputError, match=r"dual_weight is -1\.0; it must be at least 0"):
        dance(e, dual_weight=-1.0)


def with_sample(e, seed=0):
    rng = np.random.default_rng(seed)
    weights = rng.random(e.neg_docs.shape[:2]).astype(np.float32) * np.asarray(e.neg_doc_ids != -1)
    return e._replace(
        sample=Sample(
            jnp.asarray(rng.normal(size=len(e.query_id)), jnp.float32), jnp.asarray(weights), jnp.full(len(e.query_id), 9.0)
        )
    )


def test_sampled_softmax_and_its_gradient_equal_loops(make_embeddings):
    e = with_sample(make_embeddings(6))
    vectors = {name: getattr(e, name) for name in ("query", "doc", "neg_docs")}
    of_vectors = lambda vectors: sampled_softmax(e._replace(**vectors), temperature=0.2)[0]  # noqa: E731
    value, gradient = jax.jit(jax.value_and_grad(of_vectors))(vectors)
    query, doc, neg_docs = (np.asarray(vectors[name], np.float64) for name in vectors)
    losses, expected = [], {name: np.zeros(vector.shape) for name, vector in vectors.items()}
    rows = [row for row in range(len(query)) if e.query_id[row] != -1]
    for row in rows:
        logit, total = query[row] @ doc[row] / 0.2, np.exp(float(e.sample.log_sum_exp[row]))
        share = np.exp(logit) / (np.exp(logit) + total)
        losses.append(-np.log(share))
        pull = (1 - share) / 0.2 / len(rows)
        expected["doc"][row] -= pull * query[row]
        expected["query"][row] -= pull * doc[row]
        for n in range(neg_docs.shape[1]):
            weight = float(e.sample.weights[row, n])
            expected["query"][row] += pull * weight * neg_docs[row, n]
            expected["neg_docs"][row, n] += pull * weight * query[row]
    np.testing.assert_allclose(value, np.mean(losses), rtol=1e-5)
    for name, computed in gradient.items():
        np.testing.assert_allclose(computed, expected[name], rtol=1e-5, atol=1e-6, err_msg=name)


def test_sampled_softmax_of_an_empty_cache_costs_nothing(make_embeddings):
    e = with_sample(make_embeddings(7))
    e = e._replace(neg_doc_ids=jnp.full_like(e.neg_doc_ids, -1))
    e = e._replace(
        sample=Sample(jnp.full_like(e.sample.log_sum_exp, -1e30), jnp.zeros_like(e.sample.weights), jnp.zeros(len(e.query_id)))
    )
    value, gradient = jax.value_and_grad(lambda doc: sampled_softmax(e._replace(doc=doc))[0])(e.doc)
    assert value == 0
    assert not gradient.any()


def test_sampled_softmax_learns_its_temperature_and_wants_a_sample(make_embeddings):
    e = with_sample(make_embeddings(8))
    learned = e._replace(scale=jnp.float32(20.0))
    value, metrics = sampled_softmax(learned, temperature=None)
    np.testing.assert_allclose(value, sampled_softmax(e, temperature=0.05)[0], rtol=1e-6)
    assert {"accuracy", "positive_score", "negative_score", "temperature"} <= set(metrics)
    with pytest.raises(InputError, match=r"set HardNegatives\.negative_cache\."):
        sampled_softmax(e._replace(sample=None))
