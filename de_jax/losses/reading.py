"""Which parts of a batch a loss depends on, found from its trace."""

from __future__ import annotations

import jax
from jax.extend.core import Literal

from de_jax.types import Embeddings, LossFn


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
    traced = jax.make_jaxpr(lambda e: loss(e)[0])(e).jaxpr
    needed = {var for var in traced.outvars if not isinstance(var, Literal)}
    for equation in reversed(traced.eqns):
        if not needed.isdisjoint(equation.outvars):
            needed.update(var for var in equation.invars if not isinstance(var, Literal))
    leaves, _ = jax.tree_util.tree_flatten_with_path(e)
    return {path[0].name for (path, _), var in zip(leaves, traced.invars, strict=True) if var in needed}
