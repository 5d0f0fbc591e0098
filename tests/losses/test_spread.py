"""The spread of a batch's embeddings, against eigenvalues and loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import compiled

from de_jax.losses import spread
from de_jax.losses.in_batch import in_batch_softmax
from de_jax.losses.spread import with_spread
from de_jax.types import PADDING_ID

spread_metrics = compiled(spread.spread_metrics)


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


@pytest.mark.parametrize("num_rows", [4, 9])
def test_a_collapsed_pair_has_the_loss_of_chance(make_embeddings, num_rows):
    e = make_embeddings(num_rows=num_rows, num_padding=0, unique=True, num_neg_docs=0, num_neg_queries=0)
    collapsed = e._replace(query=jnp.broadcast_to(e.query[:1], e.query.shape), doc=jnp.broadcast_to(e.doc[:1], e.doc.shape))
    _, metrics = compiled(in_batch_softmax)(collapsed, temperature=0.05)
    np.testing.assert_allclose(metrics["loss_of_chance"], np.log(num_rows), rtol=1e-6)
    np.testing.assert_allclose(metrics["loss_query_to_doc"], metrics["loss_of_chance"], rtol=1e-5)
