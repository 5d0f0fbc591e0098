"""Scores of a batch, reduced to what the losses need: positive scores, and the log-sum-exp of each anchor's negatives.

Every loss of this package is built of these two:

    softmax of a positive among negatives   log(1 + exp(lse - logit))   `softmax_loss`
    ratio of a positive to its negatives    lse - logit                 PAIR as the SamToNe paper prints it

where `lse` runs over any number of blocks of candidates. `contrast` is the only place that sees a whole [B, K] block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from de_jax.losses import masks
from de_jax.types import Embeddings, InputError, Metrics

EXCLUDED = -1e30
"""Stands for minus infinity: its exponential is 0 in float32, and a row of nothing else still has a finite gradient."""


_EXACT = {"precision": jax.lax.Precision.HIGHEST, "preferred_element_type": jnp.float32}
"""At tau = .01 a score that was rounded to bfloat16, or multiplied in it as TPUs do by default, moves its logit by up to .2."""


class Items(NamedTuple):
    """K queries or documents: anchors or candidates of a softmax."""

    vectors: Array  # [K, D]
    ids: masks.Ids


class Contrast(NamedTuple):
    """What each anchor sees of its negatives; float32. Where it has none: EXCLUDED, 0, 0, EXCLUDED."""

    log_sum_exp: Array  # [B] of the scaled scores
    score_sum: Array  # [B] of the unscaled scores
    num_negatives: Array  # [B]
    highest: Array  # [B] unscaled score


def queries(e: Embeddings) -> Items:
    """The batch's own queries."""
    return _items(e.query, masks.pair_ids(e))


def docs(e: Embeddings) -> Items:
    """The batch's own documents."""
    return _items(e.doc, masks.pair_ids(e))


def neg_docs(e: Embeddings) -> list[Items]:
    """The mined documents of all rows as one block of B*N candidates; empty where the batch has none."""
    if e.neg_docs is None or e.neg_docs.shape[1] == 0:
        return []
    return [_items(e.neg_docs.reshape(-1, e.neg_docs.shape[-1]), masks.neg_doc_ids(e, e.neg_docs.shape[1]))]


def neg_queries(e: Embeddings) -> list[Items]:
    """The mined queries of all rows as one block of B*M candidates; empty where the batch has none."""
    if e.neg_queries is None or e.neg_queries.shape[1] == 0:
        return []
    return [_items(e.neg_queries.reshape(-1, e.neg_queries.shape[-1]), masks.neg_query_ids(e, e.neg_queries.shape[1]))]


def positive_scores(e: Embeddings) -> Float[Array, " B"]:
    """The score of each query with its own document: their cosine where the embeddings are L2-normalised."""
    return jnp.einsum("BD,BD->B", queries(e).vectors, docs(e).vectors, **_EXACT)


def contrast(anchors: Items, blocks: Sequence[Items], scale: Float[Array, ""], *, mask_duplicates: bool) -> Contrast:
    """The scores of every anchor against its negatives in all `blocks`, reduced row by row.

    Args:
        anchors: B queries or documents of the batch.
        blocks: at least one set of candidates; they add up.
        scale: 1 / tau.
        mask_duplicates: see `masks.is_negative`.
    """
    parts = [_contrast_block(anchors, block, scale, mask_duplicates=mask_duplicates) for block in blocks]
    return merge(parts)


def merge(parts: Sequence[Contrast]) -> Contrast:
    """The contrast with several blocks from the contrasts with each."""
    stacked = Contrast(*(jnp.stack(field, axis=1) for field in zip(*parts, strict=True)))  # fields [B, blocks]
    return Contrast(
        log_sum_exp=jax.nn.logsumexp(stacked.log_sum_exp, axis=1),
        score_sum=jnp.sum(stacked.score_sum, axis=1),
        num_negatives=jnp.sum(stacked.num_negatives, axis=1),
        highest=jnp.max(stacked.highest, axis=1),
    )


def softmax_loss(logit: Float[Array, " B"], log_sum_exp: Float[Array, " B"]) -> Float[Array, " B"]:
    """-log of the positive's share of its softmax, in nats; 0 where there is no negative.

    Written as a softplus, since the difference of two large log-sum-exps would lose small losses to rounding.
    """
    return jax.nn.softplus(log_sum_exp - logit)


def mean_of_real(values: Float[Array, " B"], is_real: Bool[Array, " B"]) -> Float[Array, ""]:
    """The mean over rows that are no padding; 0 where all of them are."""
    total = jnp.sum(jnp.where(is_real, values, 0.0))
    return total / jnp.maximum(jnp.sum(is_real, dtype=jnp.float32), 1.0)


def score_metrics(e: Embeddings, positive: Float[Array, " B"], negatives: Contrast) -> Metrics:
    """How the queries' own documents stand among the documents they were contrasted with.

    Returns:
        accuracy: share of the rows whose positive scores above every negative; a tie is not above.
        positive_score, negative_score: mean unscaled score.
        temperature: where it is learned.
    """
    is_real = masks.is_real_row(e.query_id)
    metrics = {
        "accuracy": mean_of_real((positive > negatives.highest).astype(jnp.float32), is_real),
        "positive_score": mean_of_real(positive, is_real),
        "negative_score": jnp.sum(negatives.score_sum) / jnp.maximum(jnp.sum(negatives.num_negatives), 1.0),
    }
    if e.scale is not None:
        metrics["temperature"] = 1.0 / e.scale.astype(jnp.float32)
    return metrics


def scale_of(e: Embeddings, temperature: float | None) -> Float[Array, ""]:
    """1 / tau: the given temperature's, or the model's learned one where `temperature` is None.

    Raises:
        InputError: the temperature is not positive, or is both given and learned, or neither.
    """
    if temperature is None:
        if e.scale is None:
            raise InputError("temperature=None asks for a learned temperature, but the model has none; give a number.")
        return e.scale.astype(jnp.float32)
    if e.scale is not None:
        raise InputError(f"temperature={temperature} is given, but the model learns its own; set temperature=None.")
    if not temperature > 0:
        raise InputError(f"temperature={temperature} must be greater than 0.")
    return jnp.asarray(1.0 / temperature, jnp.float32)


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raises InputError, naming the choices, where `value` is none of them."""
    if value not in choices:
        raise InputError(f"{name}={value!r} is unknown; choose one of {', '.join(map(repr, choices))}.")


def _items(vectors: Float[Array, "K D"], ids: masks.Ids) -> Items:
    """Zeroes what only fills up: a masked score is ignored going forward, but 0 * NaN would come back in the gradient."""
    return Items(jnp.where(ids.is_real[:, None], vectors, jnp.zeros_like(vectors)), ids)


def _contrast_block(anchors: Items, block: Items, scale: Float[Array, ""], *, mask_duplicates: bool) -> Contrast:
    allowed = masks.is_negative(anchors.ids, block.ids, mask_duplicates=mask_duplicates)  # [B, K]
    scores = jnp.einsum("BD,KD->BK", anchors.vectors, block.vectors, **_EXACT)
    return Contrast(
        log_sum_exp=jax.nn.logsumexp(jnp.where(allowed, scale * scores, EXCLUDED), axis=1),
        score_sum=jnp.sum(scores, axis=1, where=allowed),
        num_negatives=jnp.sum(allowed, axis=1, dtype=jnp.float32),
        highest=jnp.max(scores, axis=1, where=allowed, initial=EXCLUDED),
    )
