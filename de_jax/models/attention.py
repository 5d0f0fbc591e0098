"""Self-attention within each text of a row, and T5's relative position bias."""

from __future__ import annotations

import functools
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import PartitionSpec
from jaxtyping import Bool, Float, Int

from de_jax.models.layers import (
    HEAD_AXIS,
    Dropout,
    HashedDropout,
    Linear,
    has_bfloat16_units,
    num_head_shares,
    num_row_shares,
    platform,
    product,
    stream_dtype,
)
from de_jax.types import ROW_AXES, Array, InputError

MASKED = -1e9
"""Added to the score of a token of another text; finite, so that a row of padding has weights too."""
FAR = 2**30
"""A distance in tokens that no row has."""
FUSED, PLAIN = "fused_attention", "plain_attention"
"""The scopes of a compiled program's instructions, by how attention is computed."""

AttentionDropout = Literal["per_weight", "per_key"]
"""How attention weights are dropped: each for itself, as in BERT, or a key for all queries of its text at once, as in T5X."""
AttentionKernel = Literal["auto", "fused", "plain"]
"""How attention is computed: by a kernel that never holds the scores of all pairs of tokens, by XLA, or by the kernel if it can."""


class Window(NamedTuple):
    """The farthest earlier and the farthest later token that a token sees; integers, or traced scalars where a loop chooses."""

    before: int | Int[Array, ""]
    after: int | Int[Array, ""]


class SelfAttention(nn.Module):
    """Multi-head self-attention; `use_bias` is of its four linear maps, and `dtype` of its products.

    `scale` is a factor of the scores. The query kernel's initial scale makes up for the difference from 1/sqrt(head_dim); T5, for
    example, uses 1 (Raffel et al. 2020).
    """

    num_heads: int
    head_dim: int
    dropout_rate: float
    attention_dropout: AttentionDropout
    dtype: jnp.dtype
    scale: float = 1.0
    use_bias: bool = False
    attention: AttentionKernel = "auto"

    @nn.compact
    def __call__(
        self, x: Float[Array, "b L E"], bias: Float[Array, "H L L"] | None, segments: Int[Array, "b L"], deterministic: bool
    ) -> Float[Array, "b L E"]:
        model_dim, joined = x.shape[-1], self.num_heads * self.head_dim
        query_std = (model_dim * self.head_dim) ** -0.5 / self.scale
        query, key, value = (
            Linear(joined, std, self.dtype, self.use_bias, name=name)(x).astype(self.dtype)
            for name, std in (("query", query_std), ("key", model_dim**-0.5), ("value", model_dim**-0.5))
        )
        dropout = Dropout(self.dropout_rate)
        drop = dropout.hashed() if self.dropout_rate and not deterministic else None
        if drop and self.attention_dropout == "per_key":
            # One mask of the weights for all queries of a text is a mask of whole value vectors.
            value, drop = drop(value, self.head_dim), None
        kernel: AttentionKernel = "plain" if self.is_initializing() else self.attention
        query, key, value = (one.reshape(*x.shape[:-1], self.num_heads, self.head_dim) for one in (query, key, value))
        context = attend(query, key, value, bias, segments, scale=self.scale, drop=drop, attention=kernel)
        context = context.reshape(*x.shape[:-1], joined)
        return Linear(model_dim, joined**-0.5, self.dtype, self.use_bias, name="out")(context)


def attend(
    query: Float[Array, "b L H d"],
    key: Float[Array, "b L G d"],
    value: Float[Array, "b L G d"],
    bias: Float[Array, "H L L"] | None,
    segments: Int[Array, "b L"],
    *,
    window: Window | None = None,
    scale: float = 1.0,
    cap: float | None = None,
    drop: HashedDropout | None = None,
    attention: AttentionKernel = "auto",
) -> Float[Array, "b L H d"]:
    """softmax(scale * query . key + bias) . value, over the tokens of a query's own segment.

    Args:
        query: in the precision of the products; the softmax is in float32.
        key, value: as `query`, of as many heads or of fewer, each for an equal group of the query's.
        segments: which text of its row a token belongs to; tokens of other segments are not seen. Texts are contiguous.
        window: which keys a query sees of its own segment; None for all.
        cap: scores are cap * tanh(score / cap) before the bias; None leaves them.
        drop: dropout of the weights [b, H, L, L].
        attention: "fused" for the platform's fused kernel, "plain" for none, "auto" for the kernel if it takes these arrays.

    Raises:
        InputError: `attention` is "fused", and no kernel takes these arrays.
    """
    lack = _lack_of_fused(query, key, bias)
    if attention == "fused" and lack:
        raise InputError(f"attention is 'fused', but {lack}; use 'auto' or 'plain'.")
    if attention != "plain" and not lack:
        with jax.named_scope(FUSED):
            return _by_kernel([query, key, value, bias, segments], window, drop, scale=scale, cap=cap)
    plain = lambda q, k, v: attend_visible(q, k, v, bias, _visible(segments, window), scale=scale, cap=cap, drop=drop)  # noqa: E731
    with jax.named_scope(PLAIN):  # on a CPU the gradient computes the weights again: at 512 tokens they were a third of the memory
        return (jax.checkpoint(plain) if platform() == "cpu" else plain)(query, key, value)


def _visible(segments: Int[Array, "b L"], window: Window | None) -> Bool[Array, "b 1 L L"]:
    """Which keys each query sees."""
    own = segments[:, None, :, None] == segments[:, None, None, :]
    if window is None:
        return own
    row = jnp.arange(segments.shape[1])
    distance = row[None, :] - row[:, None]  # key - query
    return own & ((distance >= -window.before) & (distance <= window.after))[None, None]


def attend_visible(
    query: Float[Array, "b Q H d"],
    key: Float[Array, "b K G d"],
    value: Float[Array, "b K G d"],
    bias: Float[Array, "H Q K"] | None,
    visible: Bool[Array, ...],
    *,
    scale: float = 1.0,
    cap: float | None = None,
    drop: HashedDropout | None = None,
) -> Float[Array, "b Q H d"]:
    """As `attend`, of any queries over any keys: `visible`, which broadcasts to [b, H, Q, K], is true if a query sees a key.

    Queries are scaled, scores masked by a sum, and the product divided instead of the weights, so that a CPU's kernel does all of
    it block by block (a choice or a division in between would write out [b, H, Q, K]).
    """
    group = query.shape[2] // key.shape[2]
    if group > 1:
        key, value = jnp.repeat(key, group, axis=2), jnp.repeat(value, group, axis=2)
    float32 = jnp.dtype(jnp.float32)
    scores = product("bqhd,bkhd->bhqk", (query.astype(float32) * scale).astype(query.dtype), key, float32)
    if cap is not None:
        scores = cap * jnp.tanh(scores / cap)
    if bias is not None:
        scores = scores + bias[None]
    scores = scores + jnp.where(visible, 0.0, MASKED)
    weights = jnp.exp(scores - jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True)))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    context = product("bhqk,bkhd->bhqd", (drop(weights) if drop else weights).astype(query.dtype), value, float32) / total
    return jnp.swapaxes(context, 1, 2).astype(stream_dtype(query.dtype))


def _kernels() -> Any:
    """The module of this platform's fused kernels, or None; most processes need no Pallas, which takes .4 s to import."""
    if platform() == "gpu" and has_bfloat16_units():
        from de_jax.models import attention_gpu

        return attention_gpu
    if platform() == "tpu":
        from de_jax.models import attention_tpu

        return attention_tpu
    return None


def _lack_of_fused(query: Float[Array, "b L H d"], key: Float[Array, "b L G d"], bias: Array | None) -> str | None:
    """A clause on why no fused kernel takes these arrays; None if one does."""
    kernels = _kernels()
    if kernels is None:
        return f"there is no fused kernel for this {platform()}"
    if lack := kernels.lack(query, bias):
        return lack
    if query.shape[0] % num_row_shares() or query.shape[2] % num_head_shares() or key.shape[2] % num_head_shares():
        return "the mesh does not divide the rows or the heads"
    return None


def _by_kernel(
    arrays: list[Any], window: Window | None, drop: HashedDropout | None, **settings: float | None
) -> Float[Array, "b L H d"]:
    """As `attend`; each device of a mesh has its rows and its heads."""
    kernel, query = functools.partial(_kernels().attend, **settings), arrays[0]
    arrays = [*arrays, None if window is None else jnp.stack([jnp.asarray(width, jnp.int32) for width in window])]
    if drop is not None:
        kernel = functools.partial(kernel, dropped=drop.dropped, all_heads=query.shape[2])
        arrays.append(drop.seeds)
    if num_row_shares() * num_head_shares() > 1:
        rows, heads, everywhere = PartitionSpec(ROW_AXES), PartitionSpec(HEAD_AXIS), PartitionSpec()
        of_heads = PartitionSpec(ROW_AXES, None, HEAD_AXIS)
        specs = (of_heads, of_heads, of_heads, heads, rows, everywhere, everywhere)[: len(arrays)]
        kernel = jax.shard_map(kernel, in_specs=specs, out_specs=of_heads, check_vma=False)
    return kernel(*arrays)


class RelativePositionBias(nn.Module):
    """One learned score per head and bucketed distance between two tokens, shared by all layers (Raffel et al. 2020)."""

    num_heads: int
    num_buckets: int
    max_distance: int
    bidirectional: bool = True
    uniform: bool = False
    """Initial scores: uniform, of variance 2 / (heads + buckets), or normal, of variance 1."""

    @nn.compact
    def __call__(  # the length is an int, or a symbol of `jax.export`
        self, length: Any, query_positions: Int[Array, " Q"] | None = None
    ) -> Float[Array, "H Q L"]:
        """Of the tokens at `query_positions`, by default all, with each of `length` tokens."""
        init = nn.initializers.variance_scaling(1.0, "fan_avg", "uniform") if self.uniform else nn.initializers.normal(1.0)
        table = self.param("rel_embedding", init, (self.num_heads, self.num_buckets))
        positions = jnp.arange(length)
        distance = positions[None, :] - (positions if query_positions is None else query_positions)[:, None]
        return table[:, relative_position_bucket(distance, self.num_buckets, self.max_distance, self.bidirectional)]


def relative_position_bucket(
    distance: Int[Array, "Q L"], num_buckets: int, max_distance: int, bidirectional: bool = True
) -> Int[Array, "Q L"]:
    """The bucket of each signed distance key - query (Raffel et al. 2020, T5).

    Where attention is in both directions, half of the buckets serve each sign; otherwise all serve keys before the query. Half of
    those of a sign are exact distances, the rest grow logarithmically up to `max_distance`, and everything farther shares the last.
    """
    per_sign = num_buckets // 2 if bidirectional else num_buckets
    exact = per_sign // 2
    magnitude = jnp.abs(distance) if bidirectional else jnp.maximum(-distance, 0)
    # The logarithm of 0 is never used: such distances are exact.
    log_ratio = jnp.log(jnp.maximum(magnitude, 1).astype(jnp.float32) / exact) / math.log(max_distance / exact)
    coarse = jnp.minimum(exact + (log_ratio * (per_sign - exact)).astype(jnp.int32), per_sign - 1)
    return jnp.where((distance > 0) & bidirectional, per_sign, 0) + jnp.where(magnitude < exact, magnitude, coarse)
