"""The parts of a training step that another framework needs as well: products with parameters, and attention.

`python -m benchmarks.step_time --parts` times them in turns with the whole step. Each part is compiled alone, forward and backward,
and is called once a layer on arrays of the step's shapes and precisions: the products with every kernel of the encoder, and XLA's
attention between the tokens of packed rows, with dropout of its weights and without a bias of positions.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from de_jax.models.attention import attend
from de_jax.models.dual_encoder import DualEncoder
from de_jax.models.layers import Dropout, product, stream_dtype
from de_jax.training.optim import paths
from de_jax.types import Array, Batch, Packed, Params

Call = tuple[Callable[..., Any], tuple[Any, ...]]
"""A compiled function and its arguments."""


def runs(model: DualEncoder, params: Params, batches: list[Batch]) -> dict[str, Callable[[], None]]:
    """A function for each part, which does its work for all batches.

    Args:
        model: its towers share their encoder, of BERT's or T5's kind.
        params: of the model; copied, since a step gives its own away.
        batches: as the step takes them.
    """
    encoder = model.doc.encoder
    sides = [side for batch in batches for side in (batch.query, batch.doc)]
    segments = [_segments(jnp.asarray(side.tokens if isinstance(side, Packed) else side)) for side in sides]
    kernels = [jnp.array(leaf) for path, leaf in paths.by_path(params).items() if "/encoder/" in path and path.endswith("/kernel")]
    attention = [_attention(encoder, where, layer) for where in segments for layer in range(encoder.num_layers)]
    products = [_product(kernel, where, jnp.dtype(encoder.dtype)) for where, kernel in itertools.product(segments, kernels)]
    return {"products": functools.partial(_call, products), "attention": functools.partial(_call, attention)}


def shares(seconds: dict[str, float]) -> dict[str, Any]:
    """The report: seconds and shares of our step by part, and the speed-up if all but these parts were free.

    Args:
        seconds: of "ours", of each part, and of "peer" if there is one.
    """
    known = {name: seconds[name] for name in ("products", "attention")}
    rest = seconds["ours"] - sum(known.values())
    found = {name: {"seconds": round(value, 4), "share": round(value / seconds["ours"], 3)} for name, value in known.items()}
    bound = {"speedup_bound": round(seconds["peer"] / sum(known.values()), 3)} if "peer" in seconds else {}
    return {**found, "rest": {"seconds": round(rest, 4), "share": round(rest / seconds["ours"], 3)}, **bound}


def _segments(tokens: Array) -> Array:
    """One text a row, up to its padding; which text a token belongs to changes the values of attention and not its time."""
    return (tokens != 0).astype(jnp.int32)


def _attention(encoder: Any, segments: Array, layer: int) -> Call:
    shape = (*segments.shape, encoder.num_heads, encoder.head_dim)
    query, key, value, gradient = jax.random.normal(jax.random.key(layer), (4, *shape), jnp.dtype(encoder.dtype))
    rate = getattr(encoder, "weights_dropout_rate", encoder.dropout_rate)
    return _attention_and_gradient, (rate, jax.random.key(layer), query, key, value, segments, gradient)


@functools.partial(jax.jit, static_argnums=0)
def _attention_and_gradient(
    rate: float, random: Array, query: Array, key: Array, value: Array, segments: Array, gradient: Array
) -> Any:
    def drop(weights: Array) -> Array:
        return Dropout(rate, hashed=True).apply({}, weights, deterministic=False, rngs={"dropout": random})

    scale = query.shape[-1] ** -0.5

    def forward(query: Array, key: Array, value: Array) -> Array:
        return attend(query, key, value, None, segments, scale=scale, drop=drop if rate else None)

    context, backward = jax.vjp(forward, query, key, value)
    return context, backward(gradient.astype(context.dtype))


def _product(kernel: Array, segments: Array, dtype: jnp.dtype) -> Call:
    x = jax.random.normal(jax.random.key(0), (*segments.shape, kernel.shape[0]), dtype)
    gradient = jax.random.normal(jax.random.key(1), (*segments.shape, kernel.shape[1]), stream_dtype(dtype))
    return _product_and_gradient, (x, kernel, gradient)


@jax.jit
def _product_and_gradient(x: Array, kernel: Array, gradient: Array) -> Any:
    y, backward = jax.vjp(lambda x, kernel: product("ble,ef->blf", x, kernel, gradient.dtype), x, kernel)
    return y, backward(gradient)


def _call(calls: list[Call]) -> None:
    for function, arguments in calls:
        jax.block_until_ready(function(*arguments))
