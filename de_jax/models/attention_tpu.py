"""Attention on TPUs by a kernel that never holds the scores of all pairs of tokens (Rabe and Staats 2021; Dao et al. 2022).

Arrays stay as linear maps write and read them, [b, L, H * d]: a program takes one row, some heads and a block of queries, and goes
through the blocks of keys that they see. Scores lie keys by queries, so that what belongs to a query is a row [1, queries] and only
arrays of `d` columns are transposed. Rows of a batch follow one another, so that a position bias stays on the chip and its gradient
is summed there. Beside the result, one number for each query and head is kept for the backward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Float, Int, UInt32

from de_jax.models.attention import FUSED, MASKED
from de_jax.models.layers import PRODUCT, HashedDropout, first_of_text, first_weight
from de_jax.types import Array

LANES, TILE = 128, 16
"""Columns of a tile of memory, and its rows of bfloat16."""
BLOCKS = (512, 256, 128)
"""Queries and keys of a block: the first that divides the length, where a row is longer than one block."""
MAX_BIASED = 1024
"""Tokens of the longest row whose position bias and its gradient lie on the chip."""
SCORES = 8 * 256**2
"""Scores of a program: heads are taken together up to here, where their number allows it."""
MEMORY = 64 * 2**20
"""Bytes on the chip that a program may take."""


class Form(NamedTuple):
    """All about a call that is not an array."""

    num_heads: int
    head_dim: int
    group: int  # of query heads for a head of keys
    heads: int  # of queries, in a program
    block: int  # of queries and of keys
    scale: float
    cap: float | None
    dropped: int  # of 65,536 weights
    all_heads: int  # of all devices
    length: int  # without padding

    def lanes(self, head: int) -> slice:
        return slice(head * self.head_dim, (head + 1) * self.head_dim)


def lack(query: Float[Array, "b L H d"], bias: Float[Array, "H L L"] | None) -> str | None:
    """A clause on why the kernel does not take these arrays; None if it does."""
    _, length, _, head_dim = query.shape
    if head_dim % 16 or head_dim > 256:
        return f"the kernel for TPUs takes heads of 16, 32, ... 256 dimensions, not {head_dim}"
    if bias is not None and length > MAX_BIASED:
        return f"the kernel for TPUs takes position biases of up to {MAX_BIASED} tokens, not {length}"
    return None


def attend(
    query: Float[Array, "b L H d"],
    key: Float[Array, "b L G d"],
    value: Float[Array, "b L G d"],
    bias: Float[Array, "H L L"] | None,
    segments: Int[Array, "b L"],
    window: Int[Array, " two"] | None,
    seeds: UInt32[Array, " two"] | None = None,
    *,
    scale: float,
    cap: float | None,
    dropped: int = 0,
    all_heads: int = 0,
) -> Float[Array, "b L H d"]:
    """As `attention.attend`, with `window` as an array of before and after.

    `seeds` and `dropped` are those of `HashedDropout`, and `all_heads` the heads of all devices.
    """
    scalars = jnp.full(2, query.shape[1], jnp.int32) if window is None else window
    if seeds is not None:
        drawn = jnp.stack([*seeds, first_weight(query, all_heads)])
        scalars = jnp.concatenate([scalars, jax.lax.bitcast_convert_type(drawn, jnp.int32)])
    (_, length, num_heads, head_dim), num_kv_heads = query.shape, key.shape[2]
    more = -length % (TILE if length <= BLOCKS[0] else LANES)
    block = length + more if length <= BLOCKS[0] else next(size for size in BLOCKS if (length + more) % size == 0)
    group = num_heads // num_kv_heads
    fitting = [n for n in range(1, num_kv_heads + 1) if num_kv_heads % n == 0 and (n == num_kv_heads or n * head_dim % LANES == 0)]
    together = max(n for n in fitting if n == fitting[0] or n * group * block**2 <= SCORES)
    form = Form(num_heads, head_dim, group, group * together, block, scale, cap, dropped, all_heads, length)
    if bias is not None:  # [H, keys, queries]
        bias = jnp.pad(jnp.swapaxes(bias.astype(jnp.float32), 1, 2), ((0, 0), (0, more), (0, more)))
    joined = [jnp.pad(x.reshape(*x.shape[:2], -1), ((0, 0), (0, more), (0, 0))) for x in (query, key, value)]
    out = _fused(form, *joined, bias, jnp.pad(segments, ((0, 0), (0, more)), constant_values=-1), scalars)
    return out[:, :length].reshape(query.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fused(form: Form, query: Array, key: Array, value: Array, bias: Array | None, segments: Array, scalars: Array) -> Array:
    return _fused_forward(form, query, key, value, bias, segments, scalars)[0]


def _fused_forward(form: Form, *arrays: Any) -> tuple[Array, tuple[Any, ...]]:
    query = arrays[0]
    num_rows, length, _ = query.shape
    totals = jax.ShapeDtypeStruct((num_rows, form.num_heads // form.heads, form.heads, length), jnp.float32)
    out, totals = _call(form, _forward_kernel, "forward", arrays, (), [query, totals], 2)
    out, totals = (checkpoint_name(x, PRODUCT) for x in (out, totals))
    return out, (*arrays, out, totals)


def _fused_backward(form: Form, kept: tuple[Any, ...], gradient: Array) -> tuple[Any, ...]:
    *arrays, out, totals = kept
    query, key, value, bias, *_ = arrays
    of_bias = [] if bias is None else [bias]
    width = form.heads // form.group * form.head_dim
    scratch = [pltpu.VMEM((query.shape[1], width), jnp.float32)] * 2
    results = _call(form, _backward_kernel, "backward", arrays, (out, totals, gradient), [query, key, value, *of_bias], 5, scratch)
    return *results[:3], results[3] if of_bias else None, None, None


_fused.defvjp(_fused_forward, _fused_backward)


def _call(
    form: Form, kernel: Callable[..., None], name: str, arrays: Any, more: Any, results: list[Any], products: int, scratch: Any = ()
) -> Sequence[Array]:
    """Runs a kernel over (blocks of heads, rows, blocks of queries)."""
    query, key, value, bias, segments, scalars = arrays
    num_rows, length, _ = query.shape
    block, width = form.block, form.heads * form.head_dim
    num_blocks = length // block
    of_queries = pl.BlockSpec((1, block, width), lambda h, b, i, *_: (b, i, h))
    of_keys = pl.BlockSpec((1, length, width // form.group), lambda h, b, i, *_: (b, 0, h))
    of_totals = pl.BlockSpec((1, 1, form.heads, block), lambda h, b, i, *_: (b, h, 0, i))
    of_bias = pl.BlockSpec((form.heads, length, block), lambda h, b, i, *_: (h, 0, i))
    of_row = pl.BlockSpec((1, 1, length), lambda h, b, i, *_: (b, 0, 0))
    whole_bias = pl.BlockSpec((form.heads, length, length), lambda h, b, i, *_: (h, 0, 0))
    with_bias = lambda spec: [] if bias is None else [spec]  # noqa: E731
    ins = [of_row, of_queries, of_keys, of_keys, *with_bias(of_bias), *([of_queries, of_totals, of_queries] if more else [])]
    outs = [of_queries, of_keys, of_keys, *with_bias(whole_bias)] if more else [of_queries, of_totals]
    operands = [segments[:, None], query, key, value, *with_bias(bias), *more]
    scores = num_rows * form.num_heads * length**2
    return pl.pallas_call(
        functools.partial(kernel, form, num_blocks, bias is not None),
        out_shape=[jax.ShapeDtypeStruct(one.shape, one.dtype) for one in results],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(form.num_heads // form.heads, num_rows, num_blocks),
            in_specs=ins,
            out_specs=outs,
            scratch_shapes=scratch,
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=MEMORY),
        cost_estimate=pl.CostEstimate(
            flops=2 * products * scores * form.head_dim,
            transcendentals=scores,
            bytes_accessed=sum(one.size * one.dtype.itemsize for one in (*operands, *results)),
        ),
        name=f"{FUSED}_{name}",
    )(_seen_blocks(segments, scalars, block), scalars, *operands)


def _seen_blocks(segments: Int[Array, "b L"], scalars: Int[Array, " n"], block: int) -> Int[Array, " blocks"]:
    """The first block of keys that each block of queries sees, and the one after the last, row by row; unread if there is one."""
    num_rows, length = segments.shape
    if length == block:
        return jnp.zeros(1, jnp.int32)
    place = jnp.arange(length)[None, :]
    first = jnp.maximum(first_of_text(segments), place - scalars[0])
    last = jnp.minimum(length - 1 - first_of_text(segments[:, ::-1])[:, ::-1], place + scalars[1])
    lowest = first.reshape(num_rows, -1, block).min(-1) // block
    highest = last.reshape(num_rows, -1, block).max(-1) // block + 1
    return jnp.stack([lowest, highest], axis=-1).astype(jnp.int32).reshape(-1)


def _seen(
    form: Form, num_blocks: int, bounds: Any, scalars: Any, segments: Any
) -> tuple[Callable[[Any, Any], Any], Callable[[Any], Array]]:
    """Of this program's queries: a loop over the blocks of keys that they see, and the mask of such a block.

    The loop calls `step(block, state)`. A mask [keys, queries] is 0 where a query sees a key, else `MASKED`.
    """
    size, part = form.block, _part(num_blocks)
    place = 2 * (pl.program_id(1) * num_blocks + part)
    of_queries = segments[0, :, _block_of(part, size)]  # [1, queries]

    def loop(step: Any, start: Any) -> Any:
        return step(0, start) if num_blocks == 1 else jax.lax.fori_loop(bounds[place], bounds[place + 1], step, start)

    def mask(block: Any) -> Float[Array, "keys queries"]:
        of_keys = jnp.broadcast_to(segments[0, :, _block_of(block, size)], (size, size)).T
        key, query = (jax.lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
        distance = key - query + (block - part) * size
        return jnp.where((of_keys == of_queries) & (distance >= -scalars[0]) & (distance <= scalars[1]), 0.0, MASKED)

    return loop, functools.cache(mask) if num_blocks == 1 else mask


def _kept(form: Form, num_blocks: int, scalars: Any) -> Callable[[int, Any, Array], Array]:
    """Dropout of a head's weights [keys, queries] for a block of keys, by their places in [b, H, L, L]."""
    if not form.dropped:
        return lambda head, block, weights: weights
    row, first_head, part = pl.program_id(1), pl.program_id(0) * form.heads, _part(num_blocks)
    drop = HashedDropout([scalars[place].astype(jnp.uint32) for place in (2, 3)], form.dropped)

    def kept(head: int, block: Any, weights: Array) -> Array:
        key, query = (jax.lax.broadcasted_iota(jnp.int32, weights.shape, axis) for axis in (0, 1))
        start = scalars[4] + ((row * form.all_heads + first_head + head) * form.length + part * form.block) * form.length
        return drop.at((start + block * form.block + query * form.length + key).astype(jnp.uint32), weights)

    return kept


def _part(num_blocks: int) -> Any:
    """Which block of queries is this program's."""
    return pl.program_id(2) if num_blocks > 1 else 0


def _block_of(number: Any, size: int) -> Any:
    return pl.ds(pl.multiple_of(number * size, size), size)


def _dot(a: Array, b: Array, of_a: int, of_b: int) -> Array:
    """Sum over one axis of each, in float32."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(a, b, (((of_a,), (of_b,)), ((), ())), precision=precision, preferred_element_type=jnp.float32)


def _scores(form: Form, query: Array, key: Array) -> Float[Array, "keys queries"]:
    """Before bias and mask."""
    scores = _dot(key, query, 1, 1)
    return scores if form.cap is None else form.cap * jnp.tanh(scores / form.cap)


def _scaled(form: Form, query: Array) -> Array:
    return (query.astype(jnp.float32) * form.scale).astype(query.dtype)


def _forward_kernel(form: Form, num_blocks: int, has_bias: bool, bounds: Any, scalars: Any, segments: Any, *refs: Any) -> None:
    query, key, value, *biases, out, totals = refs
    size, dtype = form.block, query.dtype
    (loop, mask), kept = _seen(form, num_blocks, bounds, scalars, segments), _kept(form, num_blocks, scalars)

    def of_head(head: int) -> None:
        own, of_key = form.lanes(head), form.lanes(head // form.group)
        scaled = _scaled(form, query[0, :, own])

        def step(block: Any, state: tuple[Array, ...]) -> Any:
            highest, total, context = state
            keys = _block_of(block, size)
            scores = _scores(form, scaled, key[0, keys, of_key]) + mask(block)
            for bias in biases:
                scores = scores + bias[head, keys, :]
            higher = jnp.maximum(highest, jnp.max(scores, axis=0, keepdims=True))
            weights, faded = jnp.exp(scores - higher), jnp.exp(highest - higher)
            total = total * faded + jnp.sum(weights, axis=0, keepdims=True)
            weights = kept(head, block, weights).astype(dtype)
            return higher, total, context * faded + _dot(value[0, keys, of_key], weights, 0, 0)

        start = (jnp.full((1, size), -jnp.inf), jnp.zeros((1, size)), jnp.zeros((form.head_dim, size)))
        highest, total, context = loop(step, start)
        out[0, :, own] = (context / total).T.astype(dtype)
        totals[0, 0, head : head + 1, :] = highest + jnp.log(total)

    for head in range(form.heads):
        of_head(head)


def _backward_kernel(form: Form, num_blocks: int, has_bias: bool, bounds: Any, scalars: Any, segments: Any, *refs: Any) -> None:
    (query, key, value), refs = refs[:3], refs[3:]
    biases, refs = refs[:has_bias], refs[has_bias:]
    out, totals, gradient, of_query, of_key, of_value, *of_biases, key_sum, value_sum = refs
    size, dtype, row, part = form.block, query.dtype, pl.program_id(1), _part(num_blocks)
    (loop, mask), kept = _seen(form, num_blocks, bounds, scalars, segments), _kept(form, num_blocks, scalars)

    @pl.when(part == 0)
    def _() -> None:
        key_sum[...] = jnp.zeros_like(key_sum)
        value_sum[...] = jnp.zeros_like(value_sum)

    for of_bias in of_biases:

        @pl.when((row == 0) & (part == 0))
        def _(of_bias: Any = of_bias) -> None:
            of_bias[...] = jnp.zeros_like(of_bias)

    inner = (out[0].astype(jnp.float32) * gradient[0].astype(jnp.float32)).T  # [heads * d, queries]

    def of_head(head: int) -> None:
        own, shared = form.lanes(head), form.lanes(head // form.group)
        scaled, given = _scaled(form, query[0, :, own]), gradient[0, :, own]
        total, mean = totals[0, 0, head : head + 1, :], jnp.sum(inner[own], axis=0, keepdims=True)

        def step(block: Any, found: Array) -> Array:
            keys = _block_of(block, size)
            k = key[0, keys, shared]
            capped = _scores(form, scaled, k)
            scores = capped + mask(block)
            for bias in biases:
                scores = scores + bias[head, keys, :]
            weights = jnp.exp(scores - total)
            value_sum[keys, shared] += _dot(kept(head, block, weights).astype(dtype), given, 1, 0)
            of_scores = weights * (kept(head, block, _dot(value[0, keys, shared], given, 1, 1)) - mean)
            for of_bias in of_biases:
                of_bias[head, keys, _block_of(part, size)] += of_scores
            if form.cap is not None:
                of_scores = of_scores * (1 - jnp.square(capped / form.cap))
            rounded = of_scores.astype(dtype)
            key_sum[keys, shared] += _dot(rounded, scaled, 1, 0)
            return found + _dot(k, rounded, 0, 0)

        found = loop(step, jnp.zeros((form.head_dim, size)))
        of_query[0, :, own] = (form.scale * found).T.astype(dtype)

    for head in range(form.heads):
        of_head(head)

    @pl.when(part == num_blocks - 1)
    def _() -> None:
        of_key[0] = key_sum[...].astype(dtype)
        of_value[0] = value_sum[...].astype(dtype)
