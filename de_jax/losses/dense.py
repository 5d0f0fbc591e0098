"""One set of candidates, reduced to what each anchor sees of it: the dense form, and the records that every form shares.

`contrast` is the only place that sees a whole [B, K] block of scores; `streaming.contrasts` gives the same a few columns at a time.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

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
    anchors: Items, candidates: Items, scale: Float[Array, ""], *, mask_duplicates: bool, are_real: bool = False
) -> Contrast:
    """The scores of every anchor against its negatives among the candidates, reduced row by row.

    Args:
        anchors, candidates: queries or documents.
        scale: 1 / tau.
        mask_duplicates: see `masks.is_negative`.
        are_real: the candidates' vectors are those of `real_vectors` already.
    """
    vectors = real_vectors(anchors), candidates.vectors if are_real else real_vectors(candidates)
    allowed = masks.is_negative(anchors.ids, candidates.ids, mask_duplicates=mask_duplicates)  # [B, K]
    scores = jnp.einsum("BD,KD->BK", *vectors, **EXACT)
    return Contrast(
        log_sum_exp=jax.nn.logsumexp(jnp.where(allowed, scale * scores, EXCLUDED), axis=1),
        score_sum=jnp.sum(scores, axis=1, where=allowed),
        num_negatives=jnp.sum(allowed, axis=1, dtype=jnp.float32),
        highest=jnp.max(scores, axis=1, where=allowed, initial=EXCLUDED),
    )
