"""Losses that learn from a teacher: its scores of a row's document and of the negatives mined for that row, as `scores` [B, 1 + N].

A score is any finite number that is higher for the better document. NaN marks a missing score, which does not contribute.
`de-jax score pairs` writes such scores.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from de_jax.losses import masks, scores
from de_jax.losses.contrast import EXACT, EXCLUDED, real_vectors
from de_jax.losses.in_batch import Directions, Reduction, sum_of_softmaxes
from de_jax.settings import PositiveFloat, PositiveInt, checked
from de_jax.types import Embeddings, InputError, Metrics


class _Candidates(NamedTuple):
    """A row's document and the negatives mined for it; float32."""

    student: Array  # [B, 1 + N] unscaled scores
    teacher: Array  # [B, 1 + N]; 0 where not known
    is_known: Array  # [B, 1 + N] bool: there is such a document, and the teacher has scored it


@checked
def margin_mse(e: Embeddings, *, temperature: PositiveFloat | None = 1.0) -> tuple[Float[Array, ""], Metrics]:
    """Mean squared error between the student's and the teacher's margins of a document over each of its negatives.

    Margin-MSE (Hofstätter et al. 2021), which scores by dot products that are not normalised and has one negative a row. Ours: the
    mean is over all negatives that the teacher has scored. The temperature brings cosines to the range of the teacher's scores.
    The teacher judges relevance, so no negative is masked by its id.

    Args:
        e: `query` and `doc` [B, D]; `neg_docs` [B, N, D]; `scores` [B, 1 + N].
        temperature: tau > 0, the divisor of the student's scores; None takes the one the model learns.

    Returns:
        The mean over the real rows' scored negatives, in squared units of the teacher's scores, and scalars over the candidates
        with a teacher's score: accuracy, positive_score and negative_score, as in the other losses; and teacher_agreement, the
        share of margins with the same sign as the teacher's. teacher_known is the share of candidates that the teacher has scored.

    Raises:
        InputError: the batch has no mined documents, or no scores of them.

    Example:
        >>> ids, queries = jnp.arange(3), jnp.eye(3)
        >>> teacher = jnp.array([[2.0, 0.5]] * 3)
        >>> e = Embeddings(queries, queries, ids, ids, neg_docs=jnp.full((3, 1, 3), 0.5), scores=teacher)
        >>> loss, metrics = margin_mse(e)
        >>> float(loss), float(metrics["teacher_agreement"])
        (1.0, 1.0)
    """
    own = _candidates(e, "margin_mse")
    margins = scores.scale_of(e, temperature) * _margins(own.student)
    is_known = own.is_known[:, :1] & own.is_known[:, 1:]  # [B, N]
    loss = scores.mean_of_real(jnp.square(margins - _margins(own.teacher)), is_known)
    return loss, _metrics(e, own)


@checked
def kl_distillation(
    e: Embeddings, *, temperature: PositiveFloat | None = 1.0, teacher_temperature: PositiveFloat = 1.0
) -> tuple[Float[Array, ""], Metrics]:
    """Kullback-Leibler divergence of the student's softmax over a row's candidates from the teacher's: KL(teacher || student).

    Distillation by softened softmaxes (Hinton et al. 2015) over the candidates of one query, as dense retrieval uses it (Lin et al.
    2020). Ours: no factor temperature^2; a weight of `combined` does the same. In-batch documents take no part, as the teacher has
    not scored them; `combined` adds a loss that has them.

    Args:
        e: `query` and `doc` [B, D]; `neg_docs` [B, N, D]; `scores` [B, 1 + N].
        temperature: tau > 0, the divisor of the student's scores; None takes the one the model learns.
        teacher_temperature: > 0, the divisor of the teacher's scores.

    Returns:
        The mean in nats over the real rows with two or more candidates scored by the teacher, and `margin_mse`'s scalars.

    Raises:
        InputError: the batch has no mined documents, or no scores of them.

    Example:
        >>> ids, queries = jnp.arange(3), jnp.eye(3)
        >>> teacher = jnp.array([[2.0, 0.5]] * 3)
        >>> e = Embeddings(queries, queries, ids, ids, neg_docs=jnp.full((3, 1, 3), 0.5), scores=teacher)
        >>> round(float(kl_distillation(e)[0]), 3)
        0.09
    """
    own = _candidates(e, "kl_distillation")
    log_student = jax.nn.log_softmax(jnp.where(own.is_known, scores.scale_of(e, temperature) * own.student, EXCLUDED), axis=1)
    log_teacher = jax.nn.log_softmax(jnp.where(own.is_known, own.teacher / teacher_temperature, EXCLUDED), axis=1)
    divergence = jnp.sum(jnp.exp(log_teacher) * (log_teacher - log_student), axis=1, where=own.is_known)
    loss = scores.mean_of_real(divergence, jnp.sum(own.is_known, axis=1) >= 2)
    return loss, _metrics(e, own)


@checked
def relevance_weighted(
    e: Embeddings,
    *,
    weight: Literal["score", "sigmoid"] = "score",
    temperature: PositiveFloat | None = 0.01,
    directions: Directions = "both",
    reduce_directions: Reduction = "sum",
    mask_duplicates: bool = True,
    block_size: PositiveInt | None = None,
) -> tuple[Float[Array, ""], Metrics]:
    """`in_batch_softmax` with rows weighted by the teacher's score of their pair: sum_i w_i loss_i / sum_i w_i.

    After the relevance-aware contrastive loss of Lei et al. (2023), which weights pairs by the scores of the model that is trained.
    Ours: the teacher is fixed, and the weights of a batch sum to 1. A row of little weight is still a negative of the others.

    Args:
        e: `query` and `doc` [B, D]; `scores` [B, 1 + N], only the first column is used; mined negatives as in `in_batch_softmax`.
        weight: w_i is the teacher's "score", 0 where that is negative, for scores in [0, 1] and cosines; or its "sigmoid", for
            the logits of a cross-encoder. A row without a score has weight 0, and so has one whose table holds margins.
        temperature, directions, reduce_directions, mask_duplicates, block_size: see `in_batch_softmax`.

    Returns:
        The loss in nats, and the scalars of `in_batch_softmax` with weight_mean, over real rows.

    Raises:
        InputError: the batch has no scores, or a hyper-parameter is out of its range.

    Example:
        >>> ids = jnp.arange(3)
        >>> e = Embeddings(query=jnp.eye(3), doc=jnp.eye(3), query_id=ids, doc_id=ids, scores=jnp.array([[0.9], [0.1], [0.4]]))
        >>> loss, metrics = relevance_weighted(e, temperature=1.0)
        >>> round(float(loss), 3), round(float(metrics["weight_mean"]), 3)
        (1.103, 0.467)
    """
    teacher = _scores_of(e, "relevance_weighted")[:, 0]
    is_known = jnp.isfinite(teacher) & masks.is_real_row(e.query_id)
    teacher = jnp.where(is_known, teacher, 0.0)
    weights = jnp.where(is_known, jnp.maximum(teacher, 0.0) if weight == "score" else jax.nn.sigmoid(teacher), 0.0)
    loss, metrics, _ = sum_of_softmaxes(
        e,
        scale=scores.scale_of(e, temperature),
        directions=directions,
        reduce_directions=reduce_directions,
        margin=0.0,
        mask_duplicates=mask_duplicates,
        block_size=block_size,
        row_weights=weights,
    )
    return loss, metrics | {"weight_mean": scores.mean_of_real(weights, masks.is_real_row(e.query_id))}


def _scores_of(e: Embeddings, loss: str) -> Float[Array, "B K"]:
    if e.scores is None:
        raise InputError(
            f"{loss} needs a teacher's scores, but batches come without; make some with de-jax score pairs and set "
            "PairsOptions.teacher_scores to them, or train on a table of pairs with a column of scores."
        )
    return jax.lax.stop_gradient(e.scores.astype(jnp.float32))


def _candidates(e: Embeddings, loss: str) -> _Candidates:
    teacher, sets = _scores_of(e, loss), scores.items(e)
    if "neg_docs" not in sets or e.neg_docs is None:
        raise InputError(
            f"{loss} compares a document with negatives mined for its query, but batches come without; name a folder of negatives, "
            "or train on a table of pairs with negatives."
        )
    if teacher.shape[1] != 1 + e.neg_docs.shape[1]:
        raise InputError(
            f"{loss} needs the teacher's scores of all {e.neg_docs.shape[1]} negatives of a row, but it has scored "
            f"{teacher.shape[1] - 1}; what HardNegatives.negative_cache draws has none, so train with mined negatives."
        )
    negatives = real_vectors(sets["neg_docs"]).reshape(e.neg_docs.shape)
    scored = jnp.einsum("BD,BND->BN", real_vectors(sets["query"]), negatives, **EXACT)
    student = jnp.concatenate([scores.positive_scores(sets)[:, None], scored], axis=1)
    is_there = jnp.concatenate([sets["doc"].ids.is_real[:, None], sets["neg_docs"].ids.is_real.reshape(scored.shape)], axis=1)
    is_known = is_there & jnp.isfinite(teacher)
    return _Candidates(student, jnp.where(is_known, teacher, 0.0), is_known)


def _margins(found: Float[Array, "B K"]) -> Float[Array, "B N"]:
    """Of the first candidate over each of the others."""
    return found[:, :1] - found[:, 1:]


def _metrics(e: Embeddings, own: _Candidates) -> Metrics:
    is_known = own.is_known[:, :1] & own.is_known[:, 1:]
    agrees = jnp.sign(_margins(own.student)) == jnp.sign(_margins(own.teacher))
    is_real = jnp.broadcast_to(masks.is_real_row(e.query_id)[:, None], own.is_known.shape)
    highest = jnp.max(own.student[:, 1:], axis=1, where=is_known, initial=EXCLUDED)
    metrics = {
        "accuracy": scores.mean_of_real((own.student[:, 0] > highest).astype(jnp.float32), is_known.any(axis=1)),
        "positive_score": scores.mean_of_real(own.student[:, 0], own.is_known[:, 0]),
        "negative_score": scores.mean_of_real(own.student[:, 1:], own.is_known[:, 1:]),
        "teacher_agreement": scores.mean_of_real(agrees.astype(jnp.float32), is_known),
        "teacher_known": scores.mean_of_real(own.is_known.astype(jnp.float32), is_real),
    }
    return metrics | scores.temperature_metric(e)
