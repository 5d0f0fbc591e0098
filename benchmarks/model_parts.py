"""The parts of a training step or of encoding, each alone; another framework needs products and attention as well.

`--parts` of `benchmarks.step_time` and `benchmarks.encode_throughput` times them in turns with the whole. Each part is compiled
alone, in a step forward and backward, and is called once a layer on arrays of the real shapes and precisions: the products with
every kernel of the encoder, and XLA's attention between the tokens of packed rows, in a step with dropout of its weights, and
without a bias of positions. Encoding has three more: gelu, norms with the sums before them, and the host's work without a device's.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from de_jax.models.attention import attend
from de_jax.models.bert import BertConfig, norm_of
from de_jax.models.dual_encoder import DualEncoder
from de_jax.models.layers import HashedDropout, gelu, product, stream_dtype
from de_jax.retrieval.encode import EncodeFn
from de_jax.training.optim import paths
from de_jax.types import Array, Batch, Packed, Params

Call = tuple[Callable[..., Any], tuple[Any, ...]]
"""A compiled function and its arguments."""


def of_step(model: DualEncoder, params: Params, batches: list[Batch]) -> dict[str, Callable[[], None]]:
    """A function for each part of a training step, which does its work for all batches.

    Args:
        model: its towers share their encoder, of BERT's or T5's kind.
        params: of the model; copied, since a step gives its own away.
        batches: as the step takes them.
    """
    encoder = model.doc.encoder
    sides = [side for batch in batches for side in (batch.query, batch.doc)]
    segments = [_segments(jnp.asarray(side.tokens if isinstance(side, Packed) else side)) for side in sides]
    attention = [_attention(encoder, where, layer) for where in segments for layer in range(encoder.num_layers)]
    pairs = itertools.product(segments, _kernels(params))
    products = [_product(kernel, where, jnp.dtype(encoder.dtype)) for where, kernel in pairs]
    return {"products": functools.partial(_call, products), "attention": functools.partial(_call, attention)}


def of_encoding(config: BertConfig, params: Params, encode: Callable[[EncodeFn], Any]) -> dict[str, Callable[[], Any]]:
    """A function for each part of encoding, which does its work for all micro-batches.

    Args:
        config: of the encoder.
        params: of the model, for inference.
        encode: encodes all texts by a tower.
    """
    batches: list[Array] = []

    def no_tower(tokens: Array, lengths: Array) -> Array:
        return np.zeros((*lengths.shape, config.model_dim), np.float32)

    def recording(tokens: Array, lengths: Array) -> Array:
        batches.append(jnp.asarray(tokens))
        return no_tower(tokens, lengths)

    encode(recording)
    low, stream = jnp.dtype(config.dtype), stream_dtype(jnp.dtype(config.dtype))
    kernels, heads = _kernels(params), (config.num_heads, config.head_dim)
    calls: dict[str, list[Call]] = {name: [] for name in ("products", "attention", "gelu", "norms")}
    for tokens in batches:
        x, hidden = (_drawn(stream, *tokens.shape, dim) for dim in (config.model_dim, config.mlp_dim))
        head, segments = _drawn(low, *tokens.shape, *heads), _segments(tokens)
        calls["products"] += [(_multiply, (_drawn(low, *tokens.shape, kernel.shape[0]), kernel)) for kernel in kernels]
        calls["attention"] += [(_attend, (head, head, head, segments))] * config.num_layers
        calls["gelu"] += [(_gelu, (hidden, low))] * config.num_layers
        calls["norms"] += [(_sum_and_norm, (config, x, x))] * (2 * config.num_layers)
    return {**{name: functools.partial(_call, of) for name, of in calls.items()}, "host": functools.partial(encode, no_tower)}


def shares(seconds: dict[str, float]) -> dict[str, Any]:
    """The report: seconds and shares of our time by part, and the speed-up if all but products and attention were free.

    Args:
        seconds: of "ours", of each part, and of "peer" if there is one.
    """
    known = {name: value for name, value in seconds.items() if name not in ("ours", "peer")}
    known["rest"] = seconds["ours"] - sum(known.values())
    found = {name: {"seconds": round(value, 4), "share": round(value / seconds["ours"], 3)} for name, value in known.items()}
    needed = seconds["products"] + seconds["attention"]
    return {**found, **({"speedup_bound": round(seconds["peer"] / needed, 3)} if "peer" in seconds else {})}


def _kernels(params: Params) -> list[Array]:
    return [jnp.array(leaf) for path, leaf in paths.by_path(params).items() if "encoder/" in path and path.endswith("/kernel")]


@functools.cache  # so that it lies in the processor's cache, as the values of a tower do
def _drawn(dtype: jnp.dtype, *shape: int) -> Array:
    return jax.random.normal(jax.random.key(0), shape, dtype)


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
    drop = HashedDropout(jax.random.bits(random, (2,), jnp.uint32), round(rate * 2**16)) if rate else None
    scale = query.shape[-1] ** -0.5

    def forward(query: Array, key: Array, value: Array) -> Array:
        return attend(query, key, value, None, segments, scale=scale, drop=drop)

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


@jax.jit
def _attend(query: Array, key: Array, value: Array, segments: Array) -> Array:
    return attend(query, key, value, None, segments, scale=query.shape[-1] ** -0.5)


@jax.jit
def _multiply(x: Array, kernel: Array) -> Array:
    return product("ble,ef->blf", x, kernel, stream_dtype(x.dtype))


@functools.partial(jax.jit, static_argnums=1)
def _gelu(x: Array, dtype: jnp.dtype) -> Array:
    return gelu(x).astype(dtype)


@functools.partial(jax.jit, static_argnums=0)
def _sum_and_norm(config: BertConfig, x: Array, y: Array) -> Array:
    ones = {"scale": jnp.ones(config.model_dim), "bias": jnp.zeros(config.model_dim)}
    return norm_of(config).apply({"params": ones}, x + y)


def _call(calls: list[Call]) -> None:
    for function, arguments in calls:
        jax.block_until_ready(function(*arguments))
