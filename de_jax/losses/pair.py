"""PAIR: a softmax over documents for the query, mixed with a term that pushes a document away from other documents."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from de_jax.losses import masks, scores
from de_jax.losses.in_batch import Reduction, in_batch_softmax
from de_jax.settings import PositiveFloat, PositiveInt, Share, checked
from de_jax.types import Embeddings, Metrics

CANDIDATES = {"samtone_eq3": ("doc",), "pair_paper": ("doc", "neg_docs"), "pair_code": ("query", "neg_docs")}
"""What each form contrasts a document with."""


@checked
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
        e: `query` and `doc` [B, D]; `neg_docs` [B, N, D] where there are any.
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
