"""Losses whose negatives are the other rows of the batch: the plain softmax, SamToNe and NCE.

Each takes a batch's embeddings and returns a scalar in nats and the float32 scalars that make it up. The rows of a batch that spans
several devices are one array here, so the negatives span them too.
"""

from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from de_jax.losses import masks, scores
from de_jax.losses.contrast import EXCLUDED, Contrast, Items
from de_jax.losses.scores import on_any_mesh
from de_jax.settings import NonNegativeFloat, PositiveFloat, PositiveInt, ShareBelowOne
from de_jax.types import Embeddings, InputError, Metrics

DIRECTIONS = {"both": ("query_to_doc", "doc_to_query"), "query_to_doc": ("query_to_doc",), "doc_to_query": ("doc_to_query",)}
SIDES: dict[str, scores.Side] = {"query_to_doc": ("query", ("doc", "neg_docs")), "doc_to_query": ("doc", ("query", "neg_queries"))}
SAME_SIDE: dict[str, scores.Side] = {"query_to_doc": ("query", ("query",)), "doc_to_query": ("doc", ("doc",))}
PAIRS = ("query", "doc")
Directions = Literal["both", "query_to_doc", "doc_to_query"]
Reduction = Literal["sum", "mean"]
MarginOn = Literal["score", "logit"]
HardnessOf = Literal["all", "in_batch", "mined"]
SAME_TOWER = {"query": ("query_to_doc",), "doc": ("doc_to_query",), "both": ("query_to_doc", "doc_to_query")}
"""The softmaxes whose anchors are of that tower, and which therefore get its other members as negatives."""


@on_any_mesh
def in_batch_softmax(
    e: Embeddings,
    *,
    temperature: PositiveFloat | None = 0.01,
    directions: Directions = "both",
    reduce_directions: Reduction = "sum",
    label_smoothing: ShareBelowOne = 0.0,
    margin: NonNegativeFloat = 0.0,
    margin_on: MarginOn = "score",
    hardness: NonNegativeFloat = 0.0,
    hardness_of: HardnessOf = "all",
    mask_duplicates: bool = True,
    block_size: PositiveInt | None = None,
) -> tuple[Float[Array, ""], Metrics]:
    """Softmax of each query's document among the batch's documents, and of each document's query among its queries.

    SamToNe (Moiseev et al. 2023), eq. 1, in both directions as that paper trains everywhere. It does not say whether the
    directions are summed or averaged; public JAX code sums them, and so do we. Mined documents of all rows join the
    query-to-doc softmax, mined queries the doc-to-query one. Ours: rows that share a query or a document are not negatives.

    Args:
        e: `query` and `doc` [B, D], L2-normalised; `neg_docs` [B, N, D] and `neg_queries` [B, M, D] if there are any.
        temperature: tau > 0, the divisor of the scores; None takes the one the model learns.
        directions: "both", "query_to_doc" or "doc_to_query".
        reduce_directions: "sum" or "mean" of the directions.
        label_smoothing: share in [0, 1) of the target spread evenly over all candidates, the positive among them.
        margin: >= 0, taken from the positive's score (additive margin softmax, Yang et al. 2019).
        margin_on: "score" takes the margin before the division by tau, as that paper does; "logit" after it, as t5x_retrieval does.
        hardness: >= 0; a negative of score s weighs exp(hardness * s) in its softmax, and no derivative is taken of that weight
            (Lan et al. 2025, arXiv 2503.04812, eq. 5, who set 9; EmbeddingGemma has 5 for mined negatives).
        hardness_of: the negatives that it weights: "mined" for the row, those of other rows ("in_batch"), or "all".
        mask_duplicates: see above; False matches the paper.
        block_size: how many candidates are scored at a time, for batches whose scores do not fit in memory; None: all at once.

    Returns:
        The loss, and its parts: loss_query_to_doc and loss_doc_to_query, each a mean over real rows. For the query-to-doc softmax
        (the doc-to-query one if that is the only direction): loss_of_chance, its value where all embeddings are alike, which
        without a margin is the mean of log(1 + a row's negatives); and the scalars of `scores.score_metrics`.

    Raises:
        InputError: a hyper-parameter is out of its range.

    Example:
        >>> ids = jnp.arange(3)
        >>> e = Embeddings(query=jnp.eye(3), doc=jnp.eye(3), query_id=ids, doc_id=ids)
        >>> loss, metrics = in_batch_softmax(e, temperature=1.0)
        >>> round(float(loss), 3), float(metrics["accuracy"])
        (1.103, 1.0)
    """
    loss, metrics, _ = sum_of_softmaxes(
        e,
        scale=scores.scale_of(e, temperature),
        directions=directions,
        reduce_directions=reduce_directions,
        label_smoothing=label_smoothing,
        margin=margin,
        margin_on=margin_on,
        hardness=hardness,
        hardness_of=hardness_of,
        mask_duplicates=mask_duplicates,
        block_size=block_size,
    )
    return loss, metrics


@on_any_mesh
def samtone(
    e: Embeddings,
    *,
    temperature: PositiveFloat | None = 0.01,
    same_tower: Literal["query", "doc", "both"] = "query",
    directions: Directions = "both",
    reduce_directions: Reduction = "sum",
    margin: NonNegativeFloat = 0.0,
    margin_on: MarginOn = "score",
    mask_duplicates: bool = True,
    block_size: PositiveInt | None = None,
) -> tuple[Float[Array, ""], Metrics]:
    """`in_batch_softmax` with the other queries, or documents, of the batch among the negatives of a query, or document.

    SamToNe (Moiseev et al. 2023), eq. 2, whose printed numerator p_j means p_i. The paper trains with "query" and
    compares "both" in section 3.4; a softmax whose tower is not named stays plain. With mined negatives it is silent: ours
    join the softmax across the towers only, so the same-tower terms stay within the batch.

    Args:
        e: `query` and `doc` [B, D], L2-normalised; `neg_docs` [B, N, D] and `neg_queries` [B, M, D] if there are any.
        temperature: tau > 0, the divisor of the scores; None takes the one the model learns.
        same_tower: which anchors get the others of their own tower as negatives: "query", "doc" or "both".
        directions: "both", "query_to_doc" or "doc_to_query"; must include the softmaxes that `same_tower` names.
        reduce_directions: "sum" or "mean" of the directions.
        margin, margin_on: see `in_batch_softmax`.
        mask_duplicates: rows that share a query or a document are no negatives of each other, across the towers and within;
            False matches the paper, where the same document twice in a batch hurts "both" (table 3).
        block_size: how many candidates are scored at a time, for batches whose scores do not fit in memory; None: all at once.

    Returns:
        The loss, and `in_batch_softmax`'s scalars with same_tower_share: the part of the softmaxes' denominators that is due to
        same-tower terms, a mean over real rows and the softmaxes that have them.

    Raises:
        InputError: a hyper-parameter is out of its range.

    Example:
        >>> ids = jnp.arange(3)
        >>> e = Embeddings(query=jnp.eye(3), doc=jnp.eye(3), query_id=ids, doc_id=ids)
        >>> loss, metrics = samtone(e, temperature=1.0, same_tower="query")
        >>> round(float(loss), 3), round(float(metrics["same_tower_share"]), 3)
        (1.456, 0.298)
    """
    with_same_tower = SAME_TOWER[same_tower]
    if not set(with_same_tower) <= set(DIRECTIONS[directions]):
        raise InputError(
            f"same_tower={same_tower!r} adds to the {' and '.join(with_same_tower)} softmax, but directions={directions!r}."
        )
    loss, metrics, shares = sum_of_softmaxes(
        e,
        scale=scores.scale_of(e, temperature),
        directions=directions,
        reduce_directions=reduce_directions,
        margin=margin,
        margin_on=margin_on,
        mask_duplicates=mask_duplicates,
        block_size=block_size,
        with_same_tower=with_same_tower,
    )
    return loss, {**metrics, "same_tower_share": jnp.mean(jnp.stack(shares))}


@on_any_mesh
def nce(
    e: Embeddings, *, temperature: PositiveFloat | None = 0.01, mask_duplicates: bool = True, block_size: PositiveInt | None = None
) -> tuple[Float[Array, ""], Metrics]:
    """-log of the document's share against the one document of the batch that scores highest for the query.

    The baseline "NCE Neg" of ANCE (Xiong et al. 2021), table 1: one direction, the hardest in-batch negative only. That
    paper scores by dot product with no temperature: temperature=1 over embeddings that are not normalised. Mined negatives
    take no part.

    Args:
        e: `query` and `doc` [B, D].
        temperature: tau > 0, the divisor of the scores; None takes the one the model learns.
        mask_duplicates: rows that share a query or a document are no negatives of each other.
        block_size: how many candidates are scored at a time, for batches whose scores do not fit in memory; None: all at once.

    Returns:
        The mean over real rows, in nats, and scalars: loss_query_to_doc; loss_of_chance, log 2 for a row with a negative; accuracy
        and positive_score; negative_score, over all in-batch negatives; and hardest_score, over the hardest negatives, which the
        loss uses.

    Raises:
        InputError: a hyper-parameter is out of its range.

    Example:
        >>> ids = jnp.arange(3)
        >>> e = Embeddings(query=jnp.eye(3), doc=jnp.eye(3), query_id=ids, doc_id=ids)
        >>> loss, metrics = nce(e, temperature=1.0)
        >>> round(float(loss), 3), float(metrics["hardest_score"])
        (0.313, 0.0)
    """
    scale = scores.scale_of(e, temperature)
    sets = scores.items(e)
    positive = scores.positive_scores(sets)
    (negatives,) = scores.contrasts(sets, [("query", ("doc",))], scale, mask_duplicates=mask_duplicates, block_size=block_size)
    has_negative = negatives.num_negatives > 0
    hardest = jnp.where(has_negative, scale * negatives.highest, EXCLUDED)
    is_real = masks.is_real_row(e.query_id)
    loss = scores.mean_of_real(scores.softmax_loss(scale * positive, hardest), is_real)
    return loss, {
        "loss_query_to_doc": loss,
        "loss_of_chance": scores.mean_of_real(jnp.log1p(has_negative.astype(jnp.float32)), is_real),
        "hardest_score": scores.mean_of_real(negatives.highest, is_real & has_negative),
        **scores.score_metrics(e, positive, negatives),
    }


def sum_of_softmaxes(
    e: Embeddings,
    *,
    scale: Float[Array, ""],
    directions: str,
    reduce_directions: str,
    margin: float,
    mask_duplicates: bool,
    block_size: int | None,
    margin_on: str = "score",
    label_smoothing: float = 0.0,
    hardness: float = 0.0,
    hardness_of: str = "all",
    with_same_tower: tuple[str, ...] = (),
    row_weights: Float[Array, " B"] | None = None,
) -> tuple[Float[Array, ""], Metrics, list[Float[Array, ""]]]:
    """The loss, its metrics, and the same-tower share of each softmax in `with_same_tower`; rows count alike, or by weight."""
    is_real = masks.is_real_row(e.query_id)
    weights = is_real.astype(jnp.float32) if row_weights is None else jnp.where(is_real, row_weights, 0.0)
    sets = scores.items(e)
    positive = scores.positive_scores(sets)
    margin_of_logit = margin if margin_on == "logit" else scale * margin
    logit = scale * positive - margin_of_logit
    names = DIRECTIONS[directions]
    sides = [SIDES[name] for name in names] + [SAME_SIDE[name] for name in with_same_tower]
    masked = {"mask_duplicates": mask_duplicates, "block_size": block_size}
    negatives_of = _weighted_contrasts(sets, sides, scale, hardness, hardness_of, **masked)
    across = dict(zip(names, negatives_of, strict=False))
    within = dict(zip(with_same_tower, negatives_of[len(names) :], strict=True))

    def mean_loss(logit: Float[Array, " B"], negatives: Contrast) -> Float[Array, ""]:
        loss = scores.softmax_loss(logit, negatives.log_sum_exp)
        if label_smoothing:
            mean_logit = (logit + scale * negatives.score_sum) / (1.0 + negatives.num_negatives)
            loss += label_smoothing * (logit - mean_logit)
        return scores.weighted_mean(loss, weights)

    losses, contrasts, shares = {}, dict(across), []
    for direction, negatives in across.items():
        if direction in within:
            negatives = contrasts[direction] = scores.merge([negatives, within[direction]])
            share = jnp.exp(within[direction].log_sum_exp - jnp.logaddexp(logit, negatives.log_sum_exp))
            shares.append(scores.mean_of_real(share, is_real))
        losses[direction] = mean_loss(logit, negatives)
    chance = mean_loss(jnp.zeros_like(logit) - margin_of_logit, scores.alike(contrasts[names[0]]))
    reduce = jnp.mean if reduce_directions == "mean" else jnp.sum
    metrics: Metrics = {f"loss_{direction}": loss for direction, loss in losses.items()}
    metrics |= {"loss_of_chance": chance, **scores.score_metrics(e, positive, across[names[0]])}
    return reduce(jnp.stack(list(losses.values()))), metrics, shares


def _weighted_contrasts(
    sets: dict[str, Items], sides: list[scores.Side], scale: Float[Array, ""], hardness: float, hardness_of: str, **masked: Any
) -> list[Contrast]:
    """`scores.contrasts`, with negatives weighted by their scores; those mined for a row may weigh otherwise than the others."""
    if not hardness or hardness_of == "all":
        return scores.contrasts(sets, sides, scale, hardness=hardness, **masked)
    of_others, of_own = (hardness, 0.0) if hardness_of == "in_batch" else (0.0, hardness)
    found = scores.contrasts(_of_other_rows(sets), sides, scale, hardness=of_others, **masked)
    for place, (anchors, candidates) in enumerate(sides):
        own = [
            scores.contrast_of_own(sets[anchors], sets[name], scale, hardness=of_own, mask_duplicates=masked["mask_duplicates"])
            for name in candidates
            if name in sets and name not in PAIRS
        ]
        found[place] = scores.merge([found[place], *own])
    return found


def _of_other_rows(sets: dict[str, Items]) -> dict[str, Items]:
    """The sets with mined negatives as members of the row that they were mined for, which masks them for that row's anchors."""

    def owned(items: Items) -> Items:
        num_rows = sets["query"].vectors.shape[0]
        row = jnp.repeat(jnp.arange(num_rows, dtype=jnp.int32), items.vectors.shape[0] // num_rows)
        return items._replace(ids=items.ids._replace(row=row))

    return {name: items if name in PAIRS else owned(items) for name, items in sets.items()}
