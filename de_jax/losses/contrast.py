"""The contrast of anchors with a set of candidates, in two forms: all scores at once, or a few columns at a time.

`contrast` alone sees a whole [B, K] block of scores. `contrasts` takes memory O(B * block) in place of O(B * K). Its forward pass
keeps a running maximum and sum for each anchor; the derivative computes every block's scores once more, which costs 2 B K D FLOPs
beside the 6 of the other form. Masks are computed block by block from the ids. All contrasts of a loss are one function here, so
that its derivative adds up in one array a set of vectors; each contrast on its own would need two more.

Block i takes every n-th candidate from the i-th on, not a run of neighbours. So, where the rows of a batch are split over devices,
each block has its share of every device: a step gathers one block of candidates, each device scores its own anchors against it, and
no mesh need be named here. Neighbours would leave a block on one device, and XLA would copy all candidates to every device.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from de_jax.losses import masks

EXCLUDED = -1e30
"""Stands for minus infinity: its exponential is 0 in float32, and a row of nothing else still has a finite gradient."""
EXACT = {"precision": jax.lax.Precision.HIGHEST, "preferred_element_type": jnp.float32}
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


def real_vectors(items: Items) -> Float[Array, "K D"]:
    """Zeroes what only fills up: a masked score is ignored going forward, but 0 * NaN would come back in the gradient."""
    return jnp.where(items.ids.is_real[:, None], items.vectors, jnp.zeros_like(items.vectors))


def contrast(
    anchors: Items,
    candidates: Items,
    scale: Float[Array, ""],
    *,
    mask_duplicates: bool,
    hardness: float = 0.0,
    are_real: bool = False,
) -> Contrast:
    """The scores of every anchor against its negatives among the candidates, reduced row by row.

    Args:
        anchors, candidates: queries or documents.
        scale: 1 / tau.
        mask_duplicates: see `masks.is_negative`.
        hardness: a negative of score s weighs exp(hardness * s) in the sum of exponentials; no derivative is taken of that weight.
        are_real: the candidates' vectors are those of `real_vectors` already.
    """
    vectors = real_vectors(anchors), candidates.vectors if are_real else real_vectors(candidates)
    allowed = masks.is_negative(anchors.ids, candidates.ids, mask_duplicates=mask_duplicates)  # [B, K]
    scores = jnp.einsum("BD,KD->BK", *vectors, **EXACT)
    logits = scale * scores + hardness * jax.lax.stop_gradient(scores) if hardness else scale * scores
    return Contrast(
        log_sum_exp=jax.nn.logsumexp(jnp.where(allowed, logits, EXCLUDED), axis=1),
        score_sum=jnp.sum(scores, axis=1, where=allowed),
        num_negatives=jnp.sum(allowed, axis=1, dtype=jnp.float32),
        highest=jnp.max(scores, axis=1, where=allowed, initial=EXCLUDED),
    )


class _Plan(NamedTuple):
    """The settings that are fixed when a loss is traced."""

    pairs: tuple[tuple[str, str], ...]  # the names of anchors and candidates
    mask_duplicates: bool
    hardness: float


class _Seen(NamedTuple):
    """The values of a contrast that the derivative needs, each [B]."""

    highest: Array  # unscaled score
    best: Array  # int32: the candidate with this score, counted block by block; -1 if all are masked
    total: Array  # sum of exp((scale + hardness) * (score - highest))


def contrasts(
    items: dict[str, Items],
    pairs: Sequence[tuple[str, str]],
    scale: Float[Array, ""],
    *,
    mask_duplicates: bool,
    block_size: int,
    hardness: float = 0.0,
) -> list[Contrast]:
    """`contrast` of each pair, `block_size` candidates at a time; equal to it in value and gradient.

    One difference: if several negatives share the highest score exactly, the gradient of `highest` goes to one of them, and not
    to all in equal parts. Only reverse-mode derivatives are defined.

    Args:
        items: the sets of queries and documents that the pairs name.
        pairs: the names of anchors and candidates.
        block_size: candidates in a block, >= 1. Over several devices best a multiple of their number that divides every K.
    """
    blocks = {name: _in_blocks(items[name], block_size) for pair in pairs for name in pair}
    vectors = {name: block.vectors for name, block in blocks.items()}
    ids = {name: block.ids for name, block in blocks.items()}
    results = _contrasts(_Plan(tuple(pairs), mask_duplicates, hardness), vectors, ids, scale)
    num_anchors = [items[anchors].vectors.shape[0] for anchors, _ in pairs]
    return [Contrast(*(field[:num] for field in result)) for num, result in zip(num_anchors, results, strict=True)]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _contrasts(plan: _Plan, vectors: dict[str, Array], ids: dict[str, masks.Ids], scale: Float[Array, ""]) -> list[Contrast]:
    """The contrasts of sets [block, n, ...]; anchors that only fill a set up have no negatives."""
    return _forward(plan, vectors, ids, scale)[0]


def _forward(
    plan: _Plan, vectors: dict[str, Array], ids: dict[str, masks.Ids], scale: Float[Array, ""]
) -> tuple[list[Contrast], tuple]:
    blocks = {name: Items(vectors[name], ids[name]) for name in vectors}
    results, seen = [], []
    for anchors, candidates in plan.pairs:
        result, best, total = _contrast(_flat(blocks[anchors]), blocks[candidates], scale + plan.hardness, plan.mask_duplicates)
        results.append(result)
        seen.append(_Seen(result.highest, best, total))
    return results, (blocks, scale, seen)


def _contrast(
    anchors: Items, candidates: Items, scale: Float[Array, ""], mask_duplicates: bool
) -> tuple[Contrast, Int[Array, " B"], Float[Array, " B"]]:
    """One contrast, with `best` and `total` of `_Seen`."""
    block_size, num_blocks = candidates.vectors.shape[:2]

    def add_block(i: Int[Array, ""], carry: tuple) -> tuple:
        highest, best, total, score_sum, num_negatives = carry
        scores, allowed = _scores(anchors, _block(candidates, i), mask_duplicates)
        masked = jnp.where(allowed, scores, EXCLUDED)
        block_highest = jnp.max(masked, axis=1)
        is_better = block_highest > highest
        new_highest = jnp.where(is_better, block_highest, highest)
        total *= jnp.exp(scale * (highest - new_highest))
        total += jnp.sum(jnp.exp(scale * (masked - new_highest[:, None])), axis=1, where=allowed)
        return (
            new_highest,
            jnp.where(is_better, i * block_size + jnp.argmax(masked, axis=1).astype(jnp.int32), best),
            total,
            score_sum + jnp.sum(scores, axis=1, where=allowed),
            num_negatives + jnp.sum(allowed, axis=1, dtype=jnp.float32),
        )

    zeros = jnp.zeros(anchors.vectors.shape[0], jnp.float32)
    start = (jnp.full_like(zeros, EXCLUDED), jnp.full_like(zeros, -1, jnp.int32), zeros, zeros, zeros)
    highest, best, total, score_sum, num_negatives = jax.lax.fori_loop(0, num_blocks, add_block, start)
    log_sum_exp = jnp.where(total > 0, scale * highest + jnp.log(jnp.where(total > 0, total, 1.0)), EXCLUDED)
    return Contrast(log_sum_exp, score_sum, num_negatives, highest), best, total


def _backward(plan: _Plan, residuals: tuple, cotangents: list[Contrast]) -> tuple[dict[str, Array], None, Float[Array, ""]]:
    blocks, scale, seen = residuals
    # Nothing but zeros: made of the vectors, so that XLA splits them over the devices as it does the vectors.
    by_vectors = {name: (block.vectors > jnp.inf).astype(jnp.float32) for name, block in blocks.items()}
    by_scale = jnp.zeros((), jnp.float32)
    for pair, seen_by_anchors, cotangent in zip(plan.pairs, seen, cotangents, strict=True):
        by_scores_of = functools.partial(_by_scores, plan=plan, scale=scale, seen=seen_by_anchors, cotangent=cotangent)
        by_scale, by_vectors = _add_pair((by_scale, by_vectors), blocks, pair, by_scores_of)
    return {name: by.astype(blocks[name].vectors.dtype) for name, by in by_vectors.items()}, None, by_scale


def _add_pair(gradient: tuple, blocks: dict[str, Items], pair: tuple[str, str], by_scores_of: Callable) -> tuple:
    """The gradient by the scale and by the vectors of every set, with one pair's contrast added."""
    anchors_name, candidates_name = pair
    anchors, candidates = _flat(blocks[anchors_name]), blocks[candidates_name]

    def add_block(i: Int[Array, ""], gradient: tuple) -> tuple:
        by_scale, by_vectors = gradient
        block = _block(candidates, i)
        by_scores, of_scale = by_scores_of(i, anchors, block)
        by_anchors = jnp.einsum("BK,KD->BD", by_scores, block.vectors.astype(jnp.float32), **EXACT)
        by_block = jnp.einsum("BK,BD->KD", by_scores, real_vectors(anchors).astype(jnp.float32), **EXACT)
        by_vectors = dict(by_vectors)
        by_vectors[anchors_name] += by_anchors.reshape(by_vectors[anchors_name].shape)
        by_vectors[candidates_name] = by_vectors[candidates_name].at[:, i].add(by_block)
        return by_scale + of_scale, by_vectors

    return jax.lax.fori_loop(0, candidates.vectors.shape[1], add_block, gradient)


_contrasts.defvjp(_forward, _backward)


def _by_scores(
    i: Int[Array, ""], anchors: Items, block: Items, *, plan: _Plan, scale: Float[Array, ""], seen: _Seen, cotangent: Contrast
) -> tuple[Float[Array, "B K"], Float[Array, ""]]:
    """The gradient by the scores of block i, and the block's part of that by the scale."""
    scores, allowed = _scores(anchors, block, plan.mask_duplicates)
    # From the highest score and not from the log-sum-exp, whose rounding at logits of thousands is larger than 1e-5.
    below = jnp.where(allowed, scores - seen.highest[:, None], EXCLUDED)
    has_negative = seen.total > 0
    by_weight = jnp.where(has_negative, cotangent.log_sum_exp / jnp.where(has_negative, seen.total, 1.0), 0.0)
    weights = by_weight[:, None] * jnp.exp((scale + plan.hardness) * below)
    block_size = block.vectors.shape[0]
    is_best = seen.best[:, None] == i * block_size + jnp.arange(block_size, dtype=jnp.int32)[None, :]
    by_scores = scale * weights
    by_scores += jnp.where(allowed, cotangent.score_sum[:, None], 0.0)
    by_scores += jnp.where(is_best, cotangent.highest[:, None], 0.0)
    return by_scores, jnp.sum(weights * scores, where=allowed)


def _scores(anchors: Items, block: Items, mask_duplicates: bool) -> tuple[Float[Array, "B K"], Bool[Array, "B K"]]:
    """The scores with a block, and which of them are of negatives."""
    allowed = masks.is_negative(anchors.ids, block.ids, mask_duplicates=mask_duplicates)
    return jnp.einsum("BD,KD->BK", anchors.vectors, block.vectors, **EXACT), allowed


def _in_blocks(items: Items, block_size: int) -> Items:
    """A set as [block, n, ...], filled up with excluded items where the block size does not divide it."""
    num_items = items.vectors.shape[0]
    block_size = min(block_size, num_items)
    num_blocks = -(-num_items // block_size)

    def reshape(values: Array) -> Array:
        missing = block_size * num_blocks - num_items
        filled = jnp.pad(values, [(0, missing)] + [(0, 0)] * (values.ndim - 1)) if missing else values  # is_real: False
        return filled.reshape(block_size, num_blocks, *values.shape[1:])

    return jax.tree.map(reshape, items)


def _flat(blocks: Items) -> Items:
    """[block, n, ...] as [block * n, ...]: the order of before."""
    return jax.tree.map(lambda values: values.reshape(-1, *values.shape[2:]), blocks)


def _block(blocks: Items, i: Int[Array, ""]) -> Items:
    """Block i of [block, n, ...], zeroed where it only fills up."""
    block = jax.tree.map(lambda values: jax.lax.dynamic_index_in_dim(values, i, 1, keepdims=False), blocks)
    return block._replace(vectors=real_vectors(block))
