"""Losses made of other losses: summed, over the first dimensions, or with a guide's mask. And the fields that a loss reads."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters.partial_eval import dce_jaxpr
from jaxtyping import Array, Float

from de_jax.losses import contrast, scores
from de_jax.losses.scores import on_any_mesh
from de_jax.settings import ABSENT, NonNegativeFloat, PositiveInt, bound, name_of
from de_jax.types import Embeddings, InputError, LossFn, Metrics

_TIE = 1e-6
"""Similarities that differ by less are equal: float32 rounds those of vectors of length 1 to some 1e-7."""

Loss = Callable[..., Any]
"""A `LossFn`, as an annotation that gin can check."""


@on_any_mesh
def combined(
    e: Embeddings, *, losses: Sequence[Loss], weights: Sequence[NonNegativeFloat] | None = None
) -> tuple[Float[Array, ""], Metrics]:
    """The weighted sum of several losses over one batch.

    Args:
        e: what all of the losses need.
        losses: with their settings bound.
        weights: >= 0, one for each loss; None for 1 each.

    Returns:
        The sum, and: the first loss's own scalars, and for every loss <its name>/loss, unweighted, and <its name>/<scalar>. A name
        that stands twice is numbered: `margin_mse`, `margin_mse_2`.

    Raises:
        InputError: no losses, or weights of another number.

    Example:
        >>> from functools import partial
        >>> from de_jax.losses.in_batch import in_batch_softmax, nce
        >>> ids = jnp.arange(3)
        >>> e = Embeddings(query=jnp.eye(3), doc=jnp.eye(3), query_id=ids, doc_id=ids)
        >>> parts = (partial(in_batch_softmax, temperature=1.0), partial(nce, temperature=1.0))
        >>> loss, metrics = combined(e, losses=parts, weights=(1.0, 0.5))
        >>> round(float(loss), 3), round(float(metrics["nce/loss"]), 3)
        (1.26, 0.313)
    """
    weights = _checked_weights("combined", "losses", losses, weights)
    total = jnp.zeros((), jnp.float32)
    metrics: Metrics = {}
    for loss, weight, name in zip(losses, weights, _names(losses), strict=True):
        value, parts = loss(e)
        total += weight * value
        metrics |= {} if metrics else parts
        metrics |= {f"{name}/{part}": scalar for part, scalar in {**parts, "loss": value}.items()}
    return total, metrics


@on_any_mesh
def matryoshka(
    e: Embeddings,
    *,
    loss: Loss,
    dims: Sequence[PositiveInt] | None = None,
    weights: Sequence[NonNegativeFloat] | None = None,
    normalize: bool = True,
) -> tuple[Float[Array, ""], Metrics]:
    """The weighted sum of a loss over the first dimensions of the embeddings, for several numbers of them.

    Matryoshka representation learning (Kusupati et al. 2022), eq. 1, whose weights are all 1. Embeddings that were trained so can
    be cut to any of these lengths (`de-jax evaluate beir --embedding_dim`). Mined negatives are cut too; a teacher's scores stay.

    Args:
        e: embeddings of D dimensions, and what `loss` needs beside them.
        loss: with its settings bound.
        dims: numbers of dimensions, each from 1 to D and none twice; None for the whole, the half, a quarter and an eighth of D.
            Without D itself whole embeddings are not trained.
        weights: >= 0, one for each of `dims`; None for 1 each.
        normalize: whether cut embeddings are scaled to length 1 again, as in a model with `normalize`.

    Returns:
        The sum, and: the scalars of the loss over the most dimensions, and for each of `dims` loss_dim_<d>, unweighted.

    Raises:
        InputError: `dims` or weights that cannot be, or a loss whose negatives were drawn by whole embeddings and stand for them.

    Example:
        >>> from functools import partial
        >>> from de_jax.losses.in_batch import in_batch_softmax
        >>> ids = jnp.arange(4)
        >>> e = Embeddings(query=jnp.eye(4), doc=jnp.eye(4), query_id=ids, doc_id=ids)
        >>> loss, metrics = matryoshka(e, loss=partial(in_batch_softmax, temperature=1.0), dims=(4, 2))
        >>> round(float(loss), 3), round(float(metrics["loss_dim_4"]), 3)
        (3.617, 1.487)
    """
    whole = e.query.shape[-1]
    dims = [whole >> halvings for halvings in range(4) if whole >> halvings] if dims is None else dims
    weights = _checked_weights("matryoshka", "dims", dims, weights)
    if max(dims) > whole:
        raise InputError(f"matryoshka.dims has {max(dims)}, but embeddings have {whole} dimensions; give 1 to {whole}.")
    if len(set(dims)) < len(dims):
        raise InputError(f"matryoshka.dims is {tuple(dims)}; give each number of dimensions once.")
    if e.sample is not None and any(name_of(part) == "sampled_softmax" for part in parts(loss)):
        raise InputError("sampled_softmax's draws stand for whole embeddings, which matryoshka cuts; take matryoshka.loss = ance.")
    total = jnp.zeros((), jnp.float32)
    metrics: Metrics = {}
    for dim, weight in sorted(zip(dims, weights, strict=True), reverse=True):
        value, parts_of_loss = loss(_first_dims(e, dim, normalize))
        total += weight * value
        metrics = (metrics or parts_of_loss) | {f"loss_dim_{dim}": value}
    return total, metrics


@on_any_mesh
def guided(
    e: Embeddings, *, loss: Loss, margin: NonNegativeFloat = 0.0, relative: bool = False
) -> tuple[Float[Array, ""], Metrics]:
    """A loss without the negatives that a guide finds relevant; the guide is a model that is not trained.

    GISTEmbed (Solatorio 2024, arXiv 2402.16829): a candidate is masked if the guide finds it closer to the anchor than the row's
    query and document are to each other. The rule holds for every block of scores in the loss: queries with documents, each tower
    with itself, and mined negatives. Margins are as in sentence-transformers' `GISTEmbedLoss`. Two things differ. `GISTEmbedLoss`
    has one softmax, of the query, which includes document-document scores. Ours has the blocks of the wrapped loss: `samtone` in
    the direction "query_to_doc" is `GISTEmbedLoss(contrast_positives=False)`. And ours masks a candidate that ties with the row's
    own pair, for example a copy of its document under another id.

    Args:
        e: embeddings with `guide`, the guide's vectors of the same texts, and all other fields that `loss` needs.
        loss: with its settings bound.
        margin: >= 0, in cosines of the guide: the mask begins this far below the own pair's similarity.
        relative: take the margin as a share of the own pair's similarity.

    Returns:
        The loss, and its scalars. `loss_of_chance`, its value if all embeddings are alike, shows how many negatives are left.

    Raises:
        InputError: the batch lacks the guide's vectors of texts that the loss contrasts, or the loss masks nothing.

    Example:
        >>> from functools import partial
        >>> from de_jax.losses.in_batch import in_batch_softmax
        >>> from de_jax.types import Guide
        >>> ids, vectors = jnp.arange(3), jnp.eye(3)
        >>> says = jnp.eye(3)[jnp.array([0, 0, 1])]  # the guide cannot tell the first two rows apart
        >>> e = Embeddings(vectors, vectors, ids, ids, guide=Guide(says, says))
        >>> loss, _ = guided(e, loss=partial(in_batch_softmax, temperature=1.0, directions="query_to_doc"))
        >>> round(float(loss), 3)  # two rows of one negative, one row of two
        0.393
    """
    if not any(_has_masks(part) for part in parts(loss)):
        raise InputError(f"guided.loss is {name_of(loss)}, which masks no negatives; wrap a loss with masks.")
    if e.guide is None:
        raise InputError(
            "guided needs a guide's embeddings of the texts, but batches come without; make some with de-jax encode guide and set "
            "PairsOptions.guide_dir to them."
        )
    if e.neg_docs is not None and e.guide.neg_docs is None:
        raise InputError(
            "guided has no embeddings of the draws of HardNegatives.negative_cache; train with mined negatives, or without a cache."
        )
    own = jnp.einsum("BG,BG->B", e.guide.query, e.guide.doc, **contrast.EXACT)
    limit = own - margin * (jnp.abs(own) if relative else 1.0) - _TIE
    return loss(e._replace(guide=e.guide._replace(limit=limit)))  # type: ignore[no-any-return]


def fields_read(loss: LossFn, e: Embeddings) -> set[str]:
    """The fields of a batch's embeddings that a loss depends on; nothing is computed.

    Args:
        loss: any loss; its metrics do not count.
        e: all that a batch may bring; shapes suffice.

    Example:
        >>> import functools
        >>> import jax.numpy as jnp
        >>> from de_jax.losses import in_batch_softmax
        >>> queries, ids = jnp.eye(3), jnp.arange(3)
        >>> e = Embeddings(queries, queries, ids, ids, neg_queries=jnp.zeros((3, 1, 3)))
        >>> "neg_queries" in fields_read(in_batch_softmax, e)
        True
        >>> "neg_queries" in fields_read(functools.partial(in_batch_softmax, directions="query_to_doc"), e)
        False
    """
    return {path[0].name for path in leaves_read(lambda e: loss(e)[0], e)}


def leaves_read(function: Callable[[Any], Any], tree: Any) -> list[Any]:
    """The key paths of the leaves that a function's result depends on; nothing is computed."""
    traced = jax.make_jaxpr(function)(tree).jaxpr
    _, are_read = dce_jaxpr(traced, [True] * len(traced.outvars))
    return [path for (path, _), is_read in zip(jax.tree_util.tree_leaves_with_path(tree), are_read, strict=True) if is_read]


def parts(loss: LossFn) -> Iterator[LossFn]:
    """A loss and all that it is made of, itself first."""
    yield loss
    for name in ("loss", "losses"):
        if (inner := bound(loss, name)) is not ABSENT:
            for one in inner if isinstance(inner, Sequence) else (inner,):
                yield from parts(one)


def _has_masks(loss: LossFn) -> bool:
    """Whether a loss leaves negatives out by `masks`; of a loss that is not ours nothing is known."""
    is_ours = inspect.unwrap(getattr(loss, "func", loss)).__module__.startswith("de_jax.losses.")
    return not is_ours or "mask_duplicates" in inspect.signature(loss).parameters


def _first_dims(e: Embeddings, dim: int, normalize: bool) -> Embeddings:
    """The batch with embeddings [..., dim]; zeros where an embedding only fills the batch up."""
    if dim == e.query.shape[-1]:
        return e

    def cut(name: str, items: contrast.Items) -> Float[Array, "*n d"]:
        vectors = contrast.real_vectors(items).reshape(getattr(e, name).shape)[..., :dim].astype(jnp.float32)
        if not normalize:
            return vectors
        return vectors * jax.lax.rsqrt(jnp.maximum(jnp.sum(jnp.square(vectors), axis=-1, keepdims=True), 1e-24))

    vectors: dict[str, Any] = {name: cut(name, items) for name, items in scores.items(e).items()}
    return e._replace(**vectors)


def _checked_weights(loss: str, of: str, values: Sequence[Any], weights: Sequence[float] | None) -> Sequence[float]:
    if not values:
        raise InputError(f"{loss}.{of} is empty; give at least one.")
    if weights is not None and len(weights) != len(values):
        raise InputError(f"{loss}.weights has {len(weights)} numbers for {len(values)} {of}; give one for each.")
    return weights if weights is not None else (1.0,) * len(values)


def _names(losses: Sequence[LossFn]) -> list[str]:
    names = [name_of(loss) for loss in losses]
    before = [names[:place].count(name) for place, name in enumerate(names)]
    return [f"{name}_{count + 1}" if count else name for name, count in zip(names, before, strict=True)]
