"""The spread of a batch's embeddings, against eigenvalues and loops."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import compiled

from de_jax.losses import pair_loss
from de_jax.losses.distillation import relevance_weighted
from de_jax.losses.in_batch import in_batch_softmax, nce, samtone
from de_jax.losses.mined import ance, sampled_softmax
from de_jax.losses.pair_loss import with_spread
from de_jax.training.step import negative_cache
from de_jax.training.step.negative_cache import NegativeCache
from de_jax.types import PADDING_ID

spread_metrics = compiled(pair_loss.spread_metrics)


def by_eigenvalues(vectors):
    unit = np.asarray(vectors, np.float64)
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    cosines = [a @ b for i, a in enumerate(unit) for j, b in enumerate(unit) if i != j]
    covariance = np.cov(unit.T, bias=True)
    values = np.linalg.eigvalsh(covariance)
    return {
        "mean_cosine": np.mean(cosines),
        "variance": values.sum(),
        "effective_rank": values.sum() ** 2 / (values**2).sum(),
        "dead_dimensions": np.mean(np.diag(covariance) < 1e-3 * values.sum() / len(values)),
    }


def test_spread_is_that_of_the_real_rows_alone(make_embeddings):
    e = make_embeddings(num_padding=2)
    real = np.asarray(e.query_id) != PADDING_ID
    found = spread_metrics(e)
    for tower, vectors in (("query", e.query), ("doc", e.doc)):
        for name, value in by_eigenvalues(np.asarray(vectors)[real]).items():
            np.testing.assert_allclose(found[f"{tower}_{name}"], value, rtol=1e-4, atol=1e-6)


def test_length_is_no_spread_and_a_collapse_is_seen(make_embeddings):
    e = make_embeddings(num_rows=64, dim=5, num_padding=0, unique=True, num_neg_docs=0, num_neg_queries=0)
    stretched = spread_metrics(e._replace(query=e.query * jnp.arange(1, 65, dtype=jnp.float32)[:, None]))
    np.testing.assert_allclose(stretched["query_variance"], spread_metrics(e)["query_variance"], rtol=1e-5)
    one_vector = spread_metrics(e._replace(query=e.query[:1] + 1e-4 * e.query))
    assert one_vector["query_variance"] < 1e-6
    assert one_vector["query_mean_cosine"] > 0.999
    line = spread_metrics(e._replace(query=e.query.at[:, 2:].set(0.0)))
    assert line["query_effective_rank"] < 2.01
    assert line["query_variance"] > 0.5
    np.testing.assert_allclose(line["query_dead_dimensions"], 0.6)


def test_a_loss_is_the_same_with_spread_beside_it_and_so_is_its_gradient(make_embeddings):
    e = make_embeddings()
    plain = lambda e: in_batch_softmax(e, temperature=0.1)  # noqa: E731
    by_query = lambda loss: jax.value_and_grad(lambda query: loss(e._replace(query=query)), has_aux=True)  # noqa: E731
    ((value, metrics), gradient), ((again, more), same) = (jax.jit(by_query(loss))(e.query) for loss in (plain, with_spread(plain)))
    assert value == again
    assert metrics.keys() < more.keys()
    np.testing.assert_array_equal(gradient, same)


def of_cache(e, *, temperature):
    """`sampled_softmax` by draws from a cache of nine documents, all like the queries; one is a document of the batch."""
    ids = jnp.arange(20, 29, dtype=jnp.int32)
    cache = NegativeCache(capacity=9, num_negatives=3).empty(4, e.query.shape[1])
    cache = cache._replace(query_id=ids, doc_id=ids.at[0].set(e.doc_id[0]), embedding=jnp.broadcast_to(e.query[:1], (9, 3)))
    drawn = negative_cache.sample(cache, e, jnp.float32(1 / temperature), 3, jax.random.key(0))
    neg_docs = jnp.broadcast_to(e.query[:1, None], (len(e.query), 3, 3))
    return sampled_softmax(e._replace(neg_docs=neg_docs, neg_doc_ids=drawn.doc_ids, sample=drawn.sample), temperature=temperature)


ALIKE = {
    "in_batch_softmax": (in_batch_softmax, {}),
    "margin": (in_batch_softmax, {"margin": 0.1, "label_smoothing": 0.1}),
    "doc_to_query": (in_batch_softmax, {"directions": "doc_to_query"}),
    "samtone": (samtone, {"same_tower": "query"}),
    "nce": (nce, {}),
    "weights": (relevance_weighted, {}),
    "ance": (ance, {"in_batch": True}),
    "sampled_softmax": (of_cache, {}),
}


@pytest.mark.parametrize("name", ALIKE)
def test_a_collapsed_pair_has_the_loss_of_chance(name, make_embeddings):
    loss, options = ALIKE[name]
    e = make_embeddings(num_neg_docs=2 if name == "ance" else 0, num_neg_queries=0)  # with duplicates and padding
    one = lambda vectors: vectors if vectors is None else jnp.broadcast_to(e.query[0], vectors.shape)  # noqa: E731
    e = e._replace(query=one(e.query), doc=one(e.doc), neg_docs=one(e.neg_docs))
    _, metrics = jax.jit(functools.partial(loss, temperature=0.05, **options))(e)
    found = next(metrics[name] for name in ("loss_query_to_doc", "loss_doc_to_query") if name in metrics)
    assert found > 0.5
    np.testing.assert_allclose(metrics["loss_of_chance"], found, rtol=1e-5)


def test_the_loss_of_chance_of_a_softmax_counts_its_negatives(make_embeddings):
    e = make_embeddings(num_rows=9, num_padding=0, unique=True, num_neg_docs=0, num_neg_queries=0)
    _, metrics = compiled(in_batch_softmax)(e, temperature=0.05)
    np.testing.assert_allclose(metrics["loss_of_chance"], np.log(9), rtol=1e-6)
