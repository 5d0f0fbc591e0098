"""Which parts of its argument the result of a function depends on, found from its trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.interpreters.partial_eval import dce_jaxpr

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
    return {path[0].name for path in leaves_read(lambda e: loss(e)[0], e)}


def leaves_read(function: Callable[[Any], Any], tree: Any) -> list[Any]:
    """The key paths of the leaves that a function's result depends on; nothing is computed."""
    traced = jax.make_jaxpr(function)(tree).jaxpr
    _, are_read = dce_jaxpr(traced, [True] * len(traced.outvars))
    return [path for (path, _), is_read in zip(jax.tree_util.tree_leaves_with_path(tree), are_read, strict=True) if is_read]
