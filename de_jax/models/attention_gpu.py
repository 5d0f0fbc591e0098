"""Attention within the texts of packed rows on a GPU: kernels that never hold the scores of all pairs of tokens.

FlashAttention-2 (Dao 2023) in Pallas for Triton, which compiles without a GPU too. A square tile of queries and keys is left out
where no text or window has both. Every sum has one order, so that a repeated step gives the same bits. Scores, weights and sums are
float32, and factors of products have the precision of the queries.

cuDNN's attention wants a bias as [b, H, L, L] once texts are packed, or the largest number of texts in a row; on an H100 the former
took 1.8 times as long as these kernels, and the latter 3.8 times, with gradients that differed from run to run.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Bool, Float, Int, UInt32

from de_jax.models.layers import PRODUCT, HashedDropout, first_weight
from de_jax.types import Array

LOG2E = math.log2(math.e)
MASKED = -1e30
"""A score of base 2 below all others; finite, so that differences of two are numbers."""
PROGRAMS, ROWS = 1024, 4
"""That sum a bias's gradient: about as many as fill a GPU, of at least so many rows each."""
MAX_HEAD_DIM = 256


class Form(NamedTuple):
    """All about a call that is not an array."""

    tile: int  # of queries and of keys
    warps: int  # of a program
    scale: float
    cap: float | None
    dropped: int  # of 65,536 weights
    places: tuple[int, int]  # of weights, from one row and from one query to the next


def lack(query: Float[Array, "b L H d"], bias: Array | None) -> str | None:
    """A clause on why the kernels do not take these arrays; None if they do."""
    if query.dtype != jnp.bfloat16 or query.shape[3] > MAX_HEAD_DIM:
        return f"the kernel for GPUs takes bfloat16 and heads of up to {MAX_HEAD_DIM} dimensions"
    return None


def attend(
    query: Float[Array, "b L H d"],
    key: Float[Array, "b L G d"],
    value: Float[Array, "b L G d"],
    bias: Float[Array, "H L L"] | None,
    segments: Int[Array, "b L"],
    window: Int[Array, " 2"] | None,
    seeds: UInt32[Array, " 2"] | None = None,
    *,
    scale: float,
    cap: float | None,
    dropped: int = 0,
    all_heads: int = 0,
) -> Float[Array, "b L H d"]:
    """As `attention.attend`, with `window` as an array of before and after, and zeros for padding.

    `seeds` and `dropped` are those of `HashedDropout`, and `all_heads` the heads of all devices. Rows are padded to whole tiles,
    and heads to a power of two, which Triton wants. Tiles are as large as a GPU's registers allow.
    """
    _, length, _, head_dim = query.shape
    if seeds is not None:
        seeds = jnp.stack([*seeds, first_weight(query, all_heads)])
    tile, warps = (64, 4) if head_dim <= 128 else (32, 8)
    tile = min(tile, max(16, pl.next_power_of_2(length)))
    more, wider = -length % tile, pl.next_power_of_2(max(head_dim, 16)) - head_dim
    if more or wider:
        query, key, value = (jnp.pad(x, ((0, 0), (0, more), (0, 0), (0, wider))) for x in (query, key, value))
        segments = jnp.pad(segments, ((0, 0), (0, more)))
        bias = None if bias is None else jnp.pad(bias, ((0, 0), (0, more), (0, more)))
    form = Form(tile, warps, scale, cap, dropped, (all_heads * length**2 % 2**32, length))
    return _attention(form, query, key, value, bias, segments, window, seeds)[:, :length, :, :head_dim]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(form: Form, *arrays: Any) -> Array:
    return _forward(form, *arrays)[0]


def _forward(form: Form, *arrays: Any) -> tuple[Array, tuple[Any, ...]]:
    """The result, with all that its gradient needs."""
    query, key, _, bias, segments, window, seeds = arrays
    b, length, heads, _ = query.shape
    own, whole, own_sum = _of_queries(form, query, key)
    ranges = _ranges(_meeting(segments, window, form.tile), axis=2)
    out, total = _call(
        _forward_kernel,
        2,
        form,
        (length // form.tile, heads, b),
        [own, whole, whole, _of_head(bias), _of_row(segments), _all(window), _all(seeds), _of_row(ranges)],
        [own, own_sum],
        [query, jax.ShapeDtypeStruct((b, heads, length), jnp.float32)],
    )(*arrays, ranges)
    out, total = (checkpoint_name(x, PRODUCT) for x in (out, total))
    return out, (*arrays, out, total)


def _backward(form: Form, saved: tuple[Any, ...], slope: Array) -> tuple[Any, ...]:
    query, key, value, bias, segments, window, seeds, out, total = saved
    (b, length, heads, head_dim), key_heads, num = query.shape, key.shape[2], query.shape[1] // form.tile
    group, slope = heads // key_heads, slope.astype(query.dtype)
    mean = jnp.einsum("blhd,blhd->bhl", out.astype(jnp.float32), slope.astype(jnp.float32))
    arrays = (*saved[:7], slope, total, mean)
    meeting = _meeting(segments, window, form.tile)
    of_keys, of_queries = _ranges(meeting, axis=2), _ranges(meeting, axis=1)
    shared = [_of_row(segments), _all(window), _all(seeds)]

    own, whole, own_sum = _of_queries(form, query, key)
    specs = [own, whole, whole, _of_head(bias), *shared, own, own_sum, own_sum, _of_row(of_keys)]
    of_query = _call(_query_kernel, 3, form, (num, heads, b), specs, own, query)(*arrays, of_keys)

    grouped = pl.BlockSpec((None, length, group, head_dim), lambda i, g, b: (b, 0, g, 0))
    sums = pl.BlockSpec((None, group, length), lambda i, g, b: (b, g, 0))
    specs = [grouped, own, own, _of_head(bias, group), *shared, grouped, sums, sums, _of_row(of_queries)]
    of_both = _call(_key_kernel, 4, form, (num, key_heads, b), specs, [own, own], [key, value])(*arrays, of_queries)
    return of_query, *of_both, None if bias is None else _bias_slope(form, arrays, meeting), None, None, None


_attention.defvjp(_forward, _backward)


def _bias_slope(form: Form, arrays: tuple[Any, ...], meeting: Bool[Array, "b n n"]) -> Float[Array, "H L L"]:
    """The gradient of a bias: each program sums one tile of one head over a share of the rows."""
    (rows, num, _), bias = meeting.shape, arrays[3]
    shares = max(1, min(rows // ROWS, PROGRAMS // (num * num * bias.shape[0])))
    tile = lambda p: (lax.div(p, num), lax.rem(p, num))  # noqa: E731
    specs = [*map(_all, arrays), _all(meeting)]
    specs[3] = pl.BlockSpec((None, form.tile, form.tile), lambda p, h, share: (h, *tile(p)))
    own = pl.BlockSpec((None, None, form.tile, form.tile), lambda p, h, share: (share, h, *tile(p)))
    parts = jax.ShapeDtypeStruct((shares, *bias.shape), jnp.float32)
    kernel = _call(_bias_kernel, 2, form, (num * num, bias.shape[0], shares), specs, own, parts)
    summed = kernel(*arrays, meeting.astype(jnp.int32))
    return jnp.sum(summed, axis=0).astype(bias.dtype)


def _call(kernel: Any, products: int, form: Form, grid: tuple[int, ...], in_specs: Any, out_specs: Any, results: Any) -> Any:
    """Runs a kernel of so many products for a tile of scores; a plan reads its FLOPs from the name of a scope."""
    call = pl.pallas_call(
        functools.partial(kernel, form),
        grid=grid,
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), results),
        compiler_params=triton.CompilerParams(num_warps=form.warps, num_stages=2),
        name=f"attention{kernel.__name__.removesuffix('_kernel')}",
    )

    def counted(query: Array, *others: Any) -> Any:
        with jax.named_scope(f"flops={2 * products * query.size * query.shape[1]}"):
            return call(query, *others)

    return counted


def _of_queries(form: Form, query: Array, key: Array) -> tuple[pl.BlockSpec, ...]:
    """For programs of a tile, a head and a row: the tile's vectors, the head's whole keys, and the tile's numbers."""
    (_, length, _, head_dim), group = query.shape, query.shape[2] // key.shape[2]
    return (
        pl.BlockSpec((None, form.tile, None, head_dim), lambda i, h, b: (b, i, h, 0)),
        pl.BlockSpec((None, length, None, head_dim), lambda i, h, b: (b, 0, lax.div(h, group), 0)),
        pl.BlockSpec((None, None, form.tile), lambda i, h, b: (b, h, i)),
    )


def _of_head(bias: Array | None, group: int | None = None) -> pl.BlockSpec | None:
    return None if bias is None else pl.BlockSpec((group, *bias.shape[1:]), lambda i, h, b: (h, 0, 0))


def _of_row(x: Array) -> pl.BlockSpec:
    return pl.BlockSpec((None, *x.shape[1:]), lambda i, h, b: (b, *[0] * (x.ndim - 1)))


def _all(x: Array | None) -> pl.BlockSpec | None:
    return None if x is None else pl.BlockSpec(x.shape, lambda *_: (0,) * x.ndim)


def _meeting(segments: Int[Array, "b L"], window: Int[Array, " 2"] | None, tile: int) -> Bool[Array, "b n n"]:
    """Which tiles of queries have to do with which tiles of keys: a text of both may lie between their first and last one."""
    tiles = segments.reshape(segments.shape[0], -1, tile)
    first, last = jnp.min(jnp.where(tiles > 0, tiles, jnp.iinfo(jnp.int32).max), axis=2), jnp.max(tiles, axis=2)
    meeting = (first[:, :, None] <= last[:, None, :]) & (first[:, None, :] <= last[:, :, None])
    if window is None:
        return meeting
    place = jnp.arange(tiles.shape[1]) * tile
    distance = place[None, :] - place[:, None]
    return meeting & ((distance + tile > -window[0]) & (distance - tile < window[1]))[None]


def _ranges(meeting: Bool[Array, "b n n"], axis: int) -> Int[Array, "b n 2"]:
    """The first tile along `axis`, and the one after the last."""
    first, after = jnp.argmax(meeting, axis), meeting.shape[axis] - jnp.argmax(jnp.flip(meeting, axis), axis)
    return jnp.stack([first, jnp.where(jnp.any(meeting, axis), after, 0)], axis=2).astype(jnp.int32)


def _forward_kernel(form: Form, query, key, value, bias, segments, window, seeds, ranges, out, total) -> None:
    tile, place, head, row = form.tile, *map(pl.program_id, range(3))
    queries, texts = query[...], segments[pl.ds(place * tile, tile)]

    def step(number, carry):
        summed, top, total = carry
        keys = pl.ds(number * tile, tile)
        seen = _seen(texts, segments[keys], number - place, window)
        scores, _ = _scores(form, queries, key[keys, :], _tile(bias, place, number, tile))
        new_top = jnp.maximum(top, jnp.max(jnp.where(seen, scores, MASKED), axis=1))
        weights = jnp.where(seen, jnp.exp2(scores - new_top[:, None]), 0.0)
        shrunk = jnp.exp2(top - new_top)
        kept = weights * _kept(form, seeds, row, head, place, number)
        summed = summed * shrunk[:, None] + triton.dot(kept.astype(queries.dtype), value[keys, :])
        return summed, new_top, total * shrunk + jnp.sum(weights, axis=1)

    none = jnp.zeros(queries.shape, jnp.float32), jnp.full(tile, MASKED, jnp.float32), jnp.zeros(tile, jnp.float32)
    summed, top, weight = lax.fori_loop(ranges[place, 0], ranges[place, 1], step, none)
    weight = jnp.where(weight > 0, weight, 1.0)  # padding sees nothing
    out[...] = (summed / weight[:, None]).astype(out.dtype)
    total[...] = top + jnp.log2(weight)


def _query_kernel(form: Form, query, key, value, bias, segments, window, seeds, slope, total, mean, ranges, out) -> None:
    tile, place, head, row = form.tile, *map(pl.program_id, range(3))
    queries, slopes, totals, means, texts = query[...], slope[...], total[...], mean[...], segments[pl.ds(place * tile, tile)]

    def step(number, summed):
        keys = pl.ds(number * tile, tile)
        seen = _seen(texts, segments[keys], number - place, window)
        scores, steepness = _scores(form, queries, key[keys, :], _tile(bias, place, number, tile))
        kept = _kept(form, seeds, row, head, place, number)
        _, of_scores = _slopes(scores, seen, kept, value[keys, :], slopes, totals, means)
        return summed + triton.dot((of_scores * steepness).astype(queries.dtype), key[keys, :])

    summed = lax.fori_loop(ranges[place, 0], ranges[place, 1], step, jnp.zeros(queries.shape, jnp.float32))
    out[...] = (summed * form.scale).astype(out.dtype)


def _key_kernel(form: Form, query, key, value, bias, segments, window, seeds, slope, total, mean, ranges, of_key, of_value) -> None:
    tile, place, first_head, row = form.tile, pl.program_id(0), pl.program_id(1) * query.shape[1], pl.program_id(2)
    keys, values, texts = key[...], value[...], segments[pl.ds(place * tile, tile)]

    def step(head, number, carry):
        these = pl.ds(number * tile, tile)
        queries, slopes = query[these, head, :], slope[these, head, :]
        seen = _seen(segments[these], texts, place - number, window)
        scores, steepness = _scores(form, queries, keys, _tile(bias, number, place, tile, head))
        kept = _kept(form, seeds, row, first_head + head, number, place)
        weights, of_scores = _slopes(scores, seen, kept, values, slopes, total[head, these], mean[head, these])
        of_keys, of_values = (x.astype(keys.dtype).T for x in (of_scores * steepness, weights))
        return carry[0] + triton.dot(of_keys, queries), carry[1] + triton.dot(of_values, slopes)

    carry = jnp.zeros(keys.shape, jnp.float32), jnp.zeros(keys.shape, jnp.float32)
    for head in range(query.shape[1]):
        carry = lax.fori_loop(ranges[place, 0], ranges[place, 1], functools.partial(step, head), carry)
    of_key[...] = (carry[0] * form.scale).astype(of_key.dtype)
    of_value[...] = carry[1].astype(of_value.dtype)


def _bias_kernel(form: Form, query, key, value, bias, segments, window, seeds, slope, total, mean, meeting, out) -> None:
    tile, (rows, num, _), head = form.tile, meeting.shape, pl.program_id(1)
    place, number = lax.div(pl.program_id(0), num), lax.rem(pl.program_id(0), num)
    these, keys, key_head = pl.ds(place * tile, tile), pl.ds(number * tile, tile), lax.div(head, query.shape[2] // key.shape[2])
    scores_of_places = bias[...]

    def add(row, _, summed):
        seen = _seen(segments[row, these], segments[row, keys], number - place, window)
        scores, _ = _scores(form, query[row, these, head, :], key[row, keys, key_head, :], scores_of_places)
        slopes, totals, means = slope[row, these, head, :], total[row, head, these], mean[row, head, these]
        kept = _kept(form, seeds, row, head, place, number)
        return summed + _slopes(scores, seen, kept, value[row, keys, key_head, :], slopes, totals, means)[1]

    step = lambda row, summed: lax.fori_loop(0, meeting[row, place, number], functools.partial(add, row), summed)  # noqa: E731
    share = pl.cdiv(rows, pl.num_programs(2))
    start = pl.program_id(2) * share
    out[...] = lax.fori_loop(start, jnp.minimum(start + share, rows), step, jnp.zeros((tile, tile), jnp.float32))


def _tile(bias: Any, place: Any, number: Any, tile: int, *head: int) -> Array | None:
    return None if bias is None else bias[(*head, pl.ds(place * tile, tile), pl.ds(number * tile, tile))]


def _scores(form: Form, queries: Array, keys: Array, bias: Array | None) -> tuple[Array, Array | float]:
    """Scores times log2(e), as powers of two are quicker, and their slopes by those before the cap."""
    scores = triton.dot(queries, keys.T) * form.scale
    if form.cap is None:
        return (scores if bias is None else scores + bias) * LOG2E, 1.0
    bent = 1 - 2 / (jnp.exp2(scores * (2 * LOG2E / form.cap)) + 1)  # tanh
    return (form.cap * bent if bias is None else form.cap * bent + bias) * LOG2E, 1 - bent * bent


def _seen(texts: Array, of_keys: Array, tiles_ahead: Any, window: Any) -> Array:
    """Which keys of a tile, some tiles ahead of that of the queries, each query sees."""
    seen = (texts[:, None] == of_keys[None, :]) & (texts > 0)[:, None]
    if window is None:
        return seen
    place = jnp.arange(texts.shape[0])
    distance = tiles_ahead * texts.shape[0] + (place[None, :] - place[:, None])
    return seen & (distance >= -window[0]) & (distance <= window[1])


def _kept(form: Form, seeds: Any, row: Any, head: Any, place: Any, number: Any) -> Array | float:
    """Factors of a tile's weights: 0 drops one."""
    if seeds is None:
        return 1.0
    tile, (of_row, of_query) = jnp.arange(form.tile, dtype=jnp.uint32), form.places
    row, head, place, number = (jnp.asarray(x, jnp.uint32) for x in (row, head, place, number))
    start = seeds[2] + row * np.uint32(of_row) + head * np.uint32(of_query**2 % 2**32)
    queries, keys = (place * form.tile + tile) * np.uint32(of_query) + start, number * form.tile + tile
    drop, ones = HashedDropout((seeds[0], seeds[1]), form.dropped), jnp.ones((form.tile, form.tile), jnp.float32)
    return drop.at(queries[:, None] + keys[None, :], ones)


def _slopes(
    scores: Array, seen: Array, kept: Array | float, values: Array, slopes: Array, totals: Array, means: Array
) -> tuple[Array, Array]:
    """Weights of values, and the gradient of scores with the bias, each [queries, keys] of a tile."""
    weights = jnp.where(seen, jnp.exp2(scores - totals[:, None]), 0.0)
    return weights * kept, weights * (triton.dot(slopes, values.T) * kept - means[:, None])
