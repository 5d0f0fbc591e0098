"""Losses that push the texts of one tower apart: PAIR, beside its softmax over documents, and the global orthogonal regulariser.

And the spread of a batch's embeddings, which shows whether a tower collapses.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from de_jax.losses import masks, scores
from de_jax.losses.contrast import EXACT
from de_jax.losses.in_batch import Reduction, in_batch_softmax
from de_jax.losses.scores import on_any_mesh
from de_jax.settings import NonNegativeFloat, PositiveFloat, PositiveInt, Share
from de_jax.types import PADDING_ID, Embeddings, LossFn, Metrics

CANDIDATES = {"samtone_eq3": ("doc",), "pair_paper": ("doc", "neg_docs"), "pair_code": ("query", "neg_docs")}
"""What each form contrasts a document with."""


@on_any_mesh
def pair(
    e: Embeddings,
    *,
    form: Literal["samtone_eq3", "pair_paper", "pair_code"] = "samtone_eq3",
    alpha: Share = 0.1,
    temperature: PositiveFloat | None = 0.01,
    reduce_directions: Reduction = "sum",
    mask_duplicates: bool = True,
    block_size: PositiveInt | None = None,
) -> tuple[Float[Array, ""], Metrics]:
    """(1 - alpha) * query-centric loss + alpha * document-centric loss, in one of the three forms that go by this name.

    With s the score, q and d a pair, d' the other documents of the batch, n all mined documents of the batch:

    `samtone_eq3`, as the SamToNe paper (Moiseev et al. 2023) prints it in eq. 3. Query-centric: `in_batch_softmax` in both
        directions. Document-centric: log sum_{d'} exp(s(d, d') / tau) - s(q, d) / tau. The positive is missing from that
        sum, so the loss is not bounded below: at tau .01, with 511 orthogonal documents and s(q, d) = 1, it is
        log 511 - 100 = -93.8. Document terms stay within the batch, as `samtone`'s do.
    `pair_paper`, the PAIR paper (Ren et al. 2021). Query-centric: the softmax of d among d, d' and n for the query only.
        Document-centric: -log of exp(s(q, d)) over exp(s(q, d)) + the sum of exp(s(d, d')) and exp(s(d, n)).
    `pair_code`, the authors' public code. Query-centric as in the paper. Document-centric: the softmax of q among all queries of
        the batch and, as the only documents, n.

    The PAIR paper and code take the dot product with no temperature: set temperature=1.0 over embeddings that are not
    normalised. Ours: rows that share a query or a document are not negatives. Mined queries join the doc-to-query softmax
    of `samtone_eq3` only.

    Args:
        e: `query` and `doc` [B, D]; `neg_docs` [B, N, D] if there are any.
        form: "samtone_eq3", "pair_paper" or "pair_code".
        alpha: the document-centric weight, in [0, 1].
        temperature: tau > 0, the divisor of the scores; None takes the one the model learns.
        reduce_directions: "sum" or "mean" of the two directions that only `samtone_eq3` has.
        mask_duplicates: see above; False matches the papers.
        block_size: how many candidates are scored at a time, for batches whose scores do not fit in memory; None: all at once.

    Returns:
        The loss in nats, and `in_batch_softmax`'s scalars with loss_doc_centric. The query-centric loss is the (reduced) sum of
        loss_query_to_doc and, for `samtone_eq3`, loss_doc_to_query.

    Raises:
        InputError: a hyper-parameter is out of its range.

    Example:
        >>> ids = jnp.arange(3)
        >>> e = Embeddings(query=jnp.eye(3), doc=jnp.eye(3), query_id=ids, doc_id=ids)
        >>> loss, metrics = pair(e, form="samtone_eq3", alpha=0.1, temperature=1.0)
        >>> round(float(loss), 3), round(float(metrics["loss_doc_centric"]), 3)
        (0.962, -0.307)
    """
    query_centric, metrics = in_batch_softmax(
        e,
        temperature=temperature,
        directions="both" if form == "samtone_eq3" else "query_to_doc",
        reduce_directions=reduce_directions,
        mask_duplicates=mask_duplicates,
        block_size=block_size,
    )
    scale = scores.scale_of(e, temperature)
    sets = scores.items(e)
    (negatives,) = scores.contrasts(
        sets, [("doc", CANDIDATES[form])], scale, mask_duplicates=mask_duplicates, block_size=block_size
    )
    logit = scale * scores.positive_scores(sets)
    if form == "samtone_eq3":
        losses = jnp.where(negatives.num_negatives > 0, negatives.log_sum_exp - logit, 0.0)
    else:
        losses = scores.softmax_loss(logit, negatives.log_sum_exp)
    doc_centric = scores.mean_of_real(losses, masks.is_real_row(e.query_id))
    return (1.0 - alpha) * query_centric + alpha * doc_centric, metrics | {"loss_doc_centric": doc_centric}


@on_any_mesh
def global_orthogonal(
    e: Embeddings,
    *,
    mean_weight: NonNegativeFloat = 1.0,
    second_moment_weight: NonNegativeFloat = 1.0,
    reduce_sides: Reduction = "mean",
) -> tuple[Float[Array, ""], Metrics]:
    """A regulariser that brings the scores within each tower to those of random directions; `combined` adds it to a loss.

    Global orthogonal regulariser (Zhang et al. 2017, arXiv 1708.06320), eq. 5: M1^2 + max(0, M2 - 1 / D), with M1 the mean and M2
    the mean square of the scores of different texts. EmbeddingGemma (2025) has mean_weight 0 and the sum of both sides. Ours: a
    text of several rows counts once, and mined negatives take no part. It needs memory for D^2 numbers, whatever the batch.

    Args:
        e: `query` and `doc` [B, D], L2-normalised.
        mean_weight, second_moment_weight: >= 0, of the two terms.
        reduce_sides: "sum" or "mean" of the queries' and the documents' value.

    Returns:
        The value, and before their weights the terms, query_mean_term, query_second_moment_term, and the same of "doc".

    Raises:
        InputError: a hyper-parameter is out of its range.

    Example:
        >>> ids = jnp.arange(3)
        >>> e = Embeddings(query=jnp.ones((3, 4)) / 2, doc=jnp.eye(3, 4), query_id=ids, doc_id=ids)
        >>> loss, metrics = global_orthogonal(e, reduce_sides="sum")
        >>> float(loss), float(metrics["query_second_moment_term"])
        (1.75, 0.75)
    """
    metrics: Metrics = {}
    for name, text_ids in (("query", e.query_id), ("doc", e.doc_id)):
        mean, square = _moments(getattr(e, name), (_is_first(text_ids) | (text_ids == PADDING_ID)) & masks.is_real_row(e.query_id))
        metrics[f"{name}_mean_term"] = jnp.square(mean)
        metrics[f"{name}_second_moment_term"] = jax.nn.relu(square - 1.0 / getattr(e, name).shape[1])
    total = mean_weight * (metrics["query_mean_term"] + metrics["doc_mean_term"])
    total += second_moment_weight * (metrics["query_second_moment_term"] + metrics["doc_second_moment_term"])
    return total if reduce_sides == "sum" else total / 2.0, metrics


def _moments(vectors: Float[Array, "B D"], is_counted: Bool[Array, " B"]) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The mean and the mean square of the scores of different counted rows."""
    counted = jnp.where(is_counted[:, None], vectors, jnp.zeros_like(vectors)).astype(jnp.float32)
    own = jnp.square(counted).sum(axis=1)  # of each row with itself
    number = jnp.sum(is_counted, dtype=jnp.float32)
    num_pairs = jnp.maximum(number * (number - 1.0), 1.0)
    products = jnp.einsum("BD,BE->DE", counted, counted, **EXACT)
    mean = (jnp.square(counted.sum(axis=0)).sum() - own.sum()) / num_pairs
    return mean, (jnp.square(products).sum() - jnp.square(own).sum()) / num_pairs


def _is_first(text_ids: Int[Array, " B"]) -> Bool[Array, " B"]:
    """True at the first row of each text."""
    order = jnp.argsort(text_ids)
    is_new = jnp.diff(text_ids[order], prepend=text_ids[order][:1] - 1) != 0
    return jnp.zeros_like(is_new).at[order].set(is_new)


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
