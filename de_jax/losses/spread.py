"""The spread of a batch's embeddings, which shows whether a tower collapses."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from de_jax.losses import masks
from de_jax.types import Embeddings, LossFn, Metrics


def with_spread(loss: LossFn) -> LossFn:
    """The same loss, with `spread_metrics` beside its own."""

    def loss_and_spread(e: Embeddings) -> tuple[Array, Metrics]:
        value, metrics = loss(e)
        return value, metrics | spread_metrics(jax.lax.stop_gradient(e))

    return loss_and_spread


def spread_metrics(e: Embeddings) -> Metrics:
    """The spread of the batch's queries and of its documents, as directions: each embedding is brought to length 1.

    Args:
        e: `query` and `doc` [B, D].

    Returns:
        For "query" and "doc": <tower>_mean_cosine over all pairs of different rows, 1 for a tower that gives one vector for all;
        <tower>_variance, the sum over dimensions, at most 1; <tower>_effective_rank, the participation ratio, which is the square
        of the sum of the covariance's eigenvalues over the sum of their squares: the number of dimensions that carry the spread
        where they carry it evenly; <tower>_dead_dimensions, the share of dimensions with less than .001 of the mean variance.
    """
    is_real = masks.is_real_row(e.query_id)
    found = {name: _spread(vectors, is_real) for name, vectors in (("query", e.query), ("doc", e.doc))}
    return {f"{tower}_{name}": value for tower, values in found.items() for name, value in values.items()}


def _spread(vectors: Float[Array, "B D"], is_real: Bool[Array, " B"]) -> Metrics:
    weight = is_real.astype(jnp.float32)[:, None]
    number = jnp.maximum(weight.sum(), 2.0)
    unit = weight * vectors * jax.lax.rsqrt(jnp.maximum(jnp.sum(jnp.square(vectors), axis=1, keepdims=True), 1e-12))
    mean = unit.sum(axis=0) / number
    centred = weight * (unit - mean[None, :])
    covariance = jnp.einsum("BD,BE->DE", centred, centred, precision="highest") / number  # its trace loses nothing by centring
    by_dim = jnp.diagonal(covariance)
    variance = by_dim.sum()
    squared_sum = jnp.square(unit.sum(axis=0)).sum()
    return {
        "mean_cosine": (squared_sum - jnp.square(unit).sum()) / (number * (number - 1.0)),
        "variance": variance,
        "effective_rank": jnp.square(variance) / jnp.maximum(jnp.square(covariance).sum(), 1e-30),
        "dead_dimensions": jnp.mean(by_dim < 1e-3 * variance / by_dim.shape[0]),
    }
