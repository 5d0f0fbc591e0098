"""Losses whose negatives were mined for each row: ANCE's, DANCE's with the dual task of finding a document's query, and the
softmax of a negative cache.

Unlike the in-batch softmax, a row meets its own mined negatives only, not those of other rows.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from de_jax.losses import contrast, masks, scores
from de_jax.losses.contrast import Contrast, Items
from de_jax.losses.scores import on_any_mesh
from de_jax.settings import NonNegativeFloat, PositiveFloat
from de_jax.types import Embeddings, InputError, Metrics


@on_any_mesh
def ance(
    e: Embeddings, *, temperature: PositiveFloat | None = 1.0, in_batch: bool = False, mask_duplicates: bool = True
) -> tuple[Float[Array, ""], Metrics]:
    """Softmax of each query's document among the negatives mined for that query.

    ANCE (Xiong et al. 2021), eq. 3 with the negative log likelihood; the paper draws one negative a positive and scores by the dot
    product of embeddings that are not normalised. Ours: with N negatives they share one softmax, and a negative that is the
    row's own document is left out.

    Args:
        e: `query` and `doc` [B, D]; `neg_docs` [B, N, D].
        temperature: tau > 0, the divisor of the scores; None takes the one the model learns.
        in_batch: the documents of the other rows join the softmax, but not their mined negatives.
        mask_duplicates: leave out negatives that share the row's query or document; False compares no ids.

    Returns:
        The loss in nats, a mean over real rows, which is loss_query_to_doc too; loss_of_chance, as of `in_batch_softmax`; and the
        scalars of `scores.score_metrics`.

    Raises:
        InputError: the batch has no mined documents, or the temperature is out of its range.

    Example:
        >>> ids, queries = jnp.arange(3), jnp.eye(3)
        >>> e = Embeddings(queries, queries, ids, ids, neg_docs=jnp.full((3, 1, 3), 0.5))
        >>> loss, metrics = ance(e, temperature=1.0)
        >>> round(float(loss), 3), float(metrics["negative_score"])
        (0.474, 0.5)
    """
    scale, sets = scores.scale_of(e, temperature), _sets(e, ("neg_docs",))
    negatives = scores.contrast_of_own(sets["query"], sets["neg_docs"], scale, mask_duplicates=mask_duplicates)
    if in_batch:
        others = scores.contrasts(sets, [("query", ("doc",))], scale, mask_duplicates=mask_duplicates, block_size=None)
        negatives = scores.merge([negatives, *others])
    loss = _mean_softmax(e, sets, scale, negatives)
    metrics = _loss_metrics(e, loss, negatives.num_negatives)
    return loss, metrics | scores.score_metrics(e, scores.positive_scores(sets), negatives)


@on_any_mesh
def dance(
    e: Embeddings, *, dual_weight: NonNegativeFloat = 0.1, temperature: PositiveFloat | None = 0.01, mask_duplicates: bool = True
) -> tuple[Float[Array, ""], Metrics]:
    """`ance` plus the dual task: the softmax of each document's query among the queries mined for that document.

    DANCE (Li et al. 2021), eq. 7 + lambda * eq. 10, on L2-normalised embeddings. `ance` at temperature .01 is its first stage.

    Args:
        e: `query` and `doc` [B, D]; `neg_docs` [B, N, D]; `neg_queries` [B, M, D].
        dual_weight: lambda >= 0.
        temperature: tau > 0, the divisor of the cosine scores; None takes the one the model learns.
        mask_duplicates: as in `ance`, for queries too.

    Returns:
        The loss in nats, its parts loss_query_to_doc and loss_doc_to_query, and `ance`'s scalars.

    Raises:
        InputError: the batch lacks mined documents or mined queries, or a hyper-parameter is out of its range.

    Example:
        >>> ids, queries = jnp.arange(3), jnp.eye(3)
        >>> e = Embeddings(queries, queries, ids, ids, neg_docs=jnp.full((3, 1, 3), 0.5), neg_queries=-queries[:, None])
        >>> loss, metrics = dance(e, dual_weight=0.1, temperature=1.0)
        >>> round(float(loss), 3), round(float(metrics["loss_doc_to_query"]), 3)
        (0.487, 0.127)
    """
    sets = _sets(e, ("neg_docs", "neg_queries"))
    scale = scores.scale_of(e, temperature)
    primal, metrics = ance(e, temperature=temperature, mask_duplicates=mask_duplicates)
    own = scores.contrast_of_own(sets["doc"], sets["neg_queries"], scale, mask_duplicates=mask_duplicates)
    dual = _mean_softmax(e, sets, scale, own)
    return primal + dual_weight * dual, metrics | {"loss_doc_to_query": dual}


@on_any_mesh
def sampled_softmax(e: Embeddings, *, temperature: PositiveFloat | None = 0.05) -> tuple[Float[Array, ""], Metrics]:
    """Softmax of each query's document among all that a negative cache holds, by the few that were drawn from it.

    Lindgren et al. (2021): the value is -log p, p the document's share of the softmax, and the gradient that of
    stop_gradient(1 - p) * (negative - positive) in scaled scores. Its mean over the draws is the gradient of the value, except for
    the age of the cached embeddings. The paper draws one negative; ours weights several so that the mean stays the same.

    Args:
        e: `query` and `doc` [B, D]; `neg_docs` [B, N, D], drawn at this temperature; `sample`.
        temperature: tau > 0, the divisor of the scores; the paper scales cosines by 20. None takes the one the model learns.

    Returns:
        The loss in nats, a mean over real rows, which is loss_query_to_doc too; loss_of_chance, the mean of log(1 + a row's
        negatives in the cache); and the scalars of `scores.score_metrics` among the negatives drawn.

    Raises:
        InputError: the batch has no sample, or the temperature is out of its range.

    Example:
        >>> from de_jax.types import Sample
        >>> drawn = Sample(log_sum_exp=jnp.ones(3), weights=jnp.ones((3, 1)), num_negatives=jnp.ones(3))
        >>> ids, queries = jnp.arange(3), jnp.eye(3)
        >>> e = Embeddings(queries, queries, ids, ids, neg_docs=jnp.full((3, 1, 3), 0.5), sample=drawn)
        >>> round(float(sampled_softmax(e, temperature=1.0)[0]), 3)
        0.693
    """
    if e.sample is None:
        raise InputError("sampled_softmax needs a negative cache to draw from; set HardNegatives.negative_cache.")
    scale, sets, is_real = scores.scale_of(e, temperature), _sets(e, ("neg_docs",)), masks.is_real_row(e.query_id)
    positive = scores.positive_scores(sets)
    drawn = contrast.real_vectors(sets["neg_docs"]).reshape(*e.sample.weights.shape, -1)
    negative = jnp.einsum("BN,BND,BD->B", e.sample.weights, drawn, contrast.real_vectors(sets["query"]), **contrast.EXACT)
    losses = jax.lax.stop_gradient(scores.softmax_loss(scale * positive, e.sample.log_sum_exp))
    surrogate = -jnp.expm1(-losses) * scale * (negative - positive)
    loss = scores.mean_of_real(losses + surrogate - jax.lax.stop_gradient(surrogate), is_real)
    own = scores.contrast_of_own(sets["query"], sets["neg_docs"], scale, mask_duplicates=True)
    return loss, _loss_metrics(e, loss, e.sample.num_negatives) | scores.score_metrics(e, positive, own)


def _sets(e: Embeddings, mined: tuple[str, ...]) -> dict[str, Items]:
    sets = scores.items(e)
    if missing := [name for name in mined if name not in sets]:
        raise InputError(
            f"the loss needs mined negatives, but batches come without {missing[0]}; name a folder of negatives, or for "
            "documents set HardNegatives.negative_cache."
        )
    return sets


def _loss_metrics(e: Embeddings, loss: Float[Array, ""], num_negatives: Float[Array, " B"]) -> Metrics:
    chance = scores.mean_of_real(jnp.log1p(num_negatives), masks.is_real_row(e.query_id))
    return {"loss_query_to_doc": loss, "loss_of_chance": chance}


def _mean_softmax(e: Embeddings, sets: dict[str, Items], scale: Float[Array, ""], negatives: Contrast) -> Float[Array, ""]:
    losses = scores.softmax_loss(scale * scores.positive_scores(sets), negatives.log_sum_exp)
    return scores.mean_of_real(losses, masks.is_real_row(e.query_id))
