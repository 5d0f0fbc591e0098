"""Hard negatives without a miner: a cache of the documents of earlier batches, from which each query draws by its own scores.

The streaming negative cache of Lindgren et al. (2021), used by DAFT (Leonhardt et al.). In a step

1. every query is scored against all cached embeddings, and draws negatives in proportion to exp(score / temperature);
2. the drawn documents are encoded again with the current parameters and their gradient, and join the batch as `neg_docs`;
3. the new embeddings return to their slots, and the batch's documents take the oldest slots;
4. after the update, the oldest embeddings may be computed again, without a gradient.

The slots lie in equal shares on the devices that split the rows of a batch. A query's noise depends on the step, its row and the
slot alone, so a run draws the same on any mesh, and after a restart.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from de_jax.losses import masks, scores
from de_jax.losses.combination import parts
from de_jax.losses.contrast import EXACT, EXCLUDED
from de_jax.settings import ABSENT, PositiveInt, Share, bound, check_fields, name_of
from de_jax.types import PADDING_ID, ROW_AXES, Array, Batch, CachedDocs, Embeddings, InputError, LossFn, Metrics, Packed, Sample

QUERY_BLOCK = 32
"""Queries scored at a time: some arrays of 32 K values are in memory, 64 MiB each for 512k slots on one device."""


class Drawn(NamedTuple):
    """The negatives of each query, in the order in which they were drawn."""

    slots: Array  # [B, N] int32; K where the cache holds too few
    tokens: Array  # [B, N, Ld] int32; 0 there
    doc_ids: Array  # [B, N] int32; PADDING_ID there
    sample: Sample


@dataclasses.dataclass(frozen=True)
class NegativeCache:
    """The size of the cache, and how documents are drawn and replaced; the default sizes are DAFT's.

    `capacity`: K, documents; at least a batch, and a multiple of the number of devices that split the rows.
    `num_negatives`: N, drawn for each query without replacement.
    `refresh_fraction`: the share of the slots that are encoded again after every step, rounded up to whole batches; at most as
        many whole batches as the slots hold.
    `num_candidates`: the highest-scoring documents, among which a query draws and which make its softmax; None for the whole cache.
    """

    capacity: PositiveInt = 512_000
    num_negatives: PositiveInt = 64
    num_candidates: PositiveInt | None = None
    refresh_fraction: Share = 0.0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.num_negatives > self.capacity:
            raise InputError(
                f"NegativeCache.num_negatives is {self.num_negatives} of a capacity of {self.capacity}; give 1 to {self.capacity}."
            )
        if self.num_candidates and not self.num_negatives <= self.num_candidates <= self.capacity:
            raise InputError(
                f"NegativeCache.num_candidates is {self.num_candidates}; give {self.num_negatives}, the number of negatives, to "
                f"{self.capacity}, the capacity."
            )

    def check(self, batch_size: int, num_row_shares: int) -> None:
        """Refuses a capacity that is smaller than a batch, or that the devices cannot share evenly."""
        if self.capacity < batch_size:
            raise InputError(
                f"NegativeCache.capacity {self.capacity} is less than the {batch_size} documents of a batch; give at least as many."
            )
        if self.capacity % num_row_shares:
            lower = self.capacity - self.capacity % num_row_shares
            raise InputError(
                f"NegativeCache.capacity {self.capacity} is not divisible by the {num_row_shares} devices that split the rows of a "
                f"batch; take {lower or num_row_shares} or {lower + num_row_shares}."
            )

    def empty(self, doc_length: int, dim: int) -> CachedDocs:
        """No documents yet; of at most `doc_length` tokens, with embeddings of `dim` dimensions."""
        none = lambda: jnp.full(self.capacity, -1, jnp.int32)  # noqa: E731  # each its own memory, as a step takes them over
        return CachedDocs(
            tokens=jnp.zeros((self.capacity, doc_length), jnp.int32),
            query_id=none(),
            doc_id=none(),
            embedding=jnp.zeros((self.capacity, dim), jnp.float32),
            entered=none(),
            encoded=none(),
        )

    def draw(self, cache: CachedDocs, batch: Batch, e: Embeddings, temperature: float | None, key: Array) -> Drawn:
        """Negatives of each query by the scores of the cached embeddings; see `sample`.

        `batch` and `e` are the queries before and after their tower; a `temperature` of None is the one the model learns.
        InputError: the batch has mined negatives already, or documents of several passages.
        """
        if batch.neg_docs is not None:
            raise InputError("HardNegatives.negative_cache and negatives_dir both give documents as negatives; set one of them.")
        if jnp.ndim(batch.doc.slots if isinstance(batch.doc, Packed) else batch.doc[..., 0]) > 1:
            raise InputError("HardNegatives.negative_cache is for documents of one passage; set max_passages to 1.")
        e = jax.lax.stop_gradient(e)
        return sample(cache, e, scores.scale_of(e, temperature), self.num_negatives, key, self.num_candidates)

    def update(self, cache: CachedDocs, batch: Batch, e: Embeddings, drawn: Drawn, step: Array) -> CachedDocs:
        """The cache with the embeddings that a step made: `e.neg_docs`, those of `drawn`, and of the batch's documents."""
        return enter(_put_back(cache, drawn, e.neg_docs, step), batch, e, step)

    def num_refreshed(self, batch_size: int) -> int:
        """Slots that are encoded again after a step, in whole batches."""
        return min(math.ceil(self.refresh_fraction * self.capacity / batch_size), self.capacity // batch_size) * batch_size

    def refresh(self, cache: CachedDocs, encode: Callable[[Array], Array], batch_size: int, step: Array) -> CachedDocs:
        """The cache with its oldest embeddings computed again.

        Args:
            cache: the documents.
            encode: tokens [b, Ld] to embeddings [b, D].
            batch_size: a multiple of it is encoded, so that the devices can share the documents.
            step: the update whose parameters `encode` has.
        """
        num_docs = self.num_refreshed(batch_size)
        if not num_docs:
            return cache
        is_there = cache.doc_id != PADDING_ID
        slots = _highest(jnp.where(is_there, step - cache.encoded, -1), num_docs)
        embedding = encode(cache.tokens[slots])
        return _write(cache, jnp.where(is_there[slots], slots, self.capacity), embedding=embedding, encoded=step)


def sample(
    cache: CachedDocs, e: Embeddings, scale: Float[Array, ""], num_negatives: int, key: Array, num_candidates: int | None = None
) -> Drawn:
    """Draws without replacement from the softmax of each query's scaled scores with the cached documents.

    Gumbel-max: the highest of logits with Gumbel noise is a draw from their softmax, the next a draw from the rest, and so on.
    Documents that are the query's own positive, or that entered with the same query, are left out (`masks.is_negative`).

    `weights` are p_1, ..., p_(N-1) and the rest, 1 - p_1 - ... - p_(N-1). Given the first N - 1 draws, the last draw represents all
    other candidates, so the estimate is unbiased ("sum and sample", Kool et al. 2020); with N = 1 it is the draw itself.

    Args:
        cache: K documents, empty slots among them.
        e: `query` [B, D], with the ids of the batch.
        scale: 1 / tau.
        num_negatives: N <= K.
        key: decides the noise, together with the row of the query and the slot.
        num_candidates: the highest scores that count; None for all.
    """
    capacity = len(cache.doc_id)
    no_row = jnp.full_like(cache.doc_id, masks.NO_ROW)
    candidates = masks.Ids(no_row, cache.query_id, cache.doc_id, cache.doc_id != PADDING_ID)

    def of_query(anchor: tuple[Array, masks.Ids]) -> tuple[Array, ...]:
        query, ids = anchor
        allowed = masks.is_negative(jax.tree.map(lambda x: x[None], ids), candidates, mask_duplicates=True)[0]  # [K]
        logits = jnp.where(allowed, scale * jnp.einsum("D,KD->K", query, cache.embedding, **EXACT), -jnp.inf)
        if num_candidates:
            allowed &= jnp.zeros(capacity, bool).at[_highest(logits, num_candidates)].set(True)
            logits = jnp.where(allowed, logits, -jnp.inf)
        # "high": the 24 bits of a float32 draw would give many of 512k slots the same noise at the upper end, where it counts.
        noise = jax.random.gumbel(jax.random.fold_in(key, ids.row), (capacity,), mode="high")
        slots = _highest(logits + noise, num_negatives)
        return slots, logits[slots], jax.nn.logsumexp(logits), jnp.sum(allowed, dtype=jnp.float32)

    slots, logits, log_sum_exp, num_allowed = jax.lax.map(of_query, (e.query, masks.pair_ids(e)), batch_size=QUERY_BLOCK)
    is_there = logits > -jnp.inf  # [B, N]
    log_sum_exp = jnp.maximum(log_sum_exp, EXCLUDED)
    share = jnp.exp(logits - log_sum_exp[:, None])
    is_last = jnp.arange(num_negatives)[None, :] == jnp.sum(is_there, axis=1, keepdims=True) - 1
    left = jnp.maximum(1.0 - (jnp.cumsum(share, axis=1) - share), 0.0)
    return Drawn(
        slots=jnp.where(is_there, slots, capacity),
        tokens=jnp.where(is_there[:, :, None], cache.tokens[slots], 0),
        doc_ids=jnp.where(is_there, cache.doc_id[slots], PADDING_ID),
        sample=Sample(log_sum_exp, weights=jnp.where(is_last, left, share), num_negatives=num_allowed),
    )


def enter(cache: CachedDocs, batch: Batch, e: Embeddings, step: Array) -> CachedDocs:
    """The cache with the batch's documents: each in its present slot if it has one, else in the slot of the oldest document."""
    capacity, doc_id = len(cache.doc_id), e.doc_id
    same = doc_id[:, None] == cache.doc_id[None, :]  # [B, K]
    is_cached, own_slot = same.any(axis=1), jnp.argmax(same, axis=1)
    earlier = jnp.tril(doc_id[:, None] == doc_id[None, :], k=-1).any(axis=1)  # stands in an earlier row too
    is_real = masks.is_real_row(e.query_id) & ~earlier
    is_new = is_real & ~is_cached
    entered = cache.entered.at[jnp.where(is_cached, own_slot, capacity)].set(step, mode="drop")  # their slots are not free
    free = _highest(-entered, min(len(doc_id), capacity))  # empty ones first
    new_slot = free[jnp.cumsum(is_new) - is_new]
    return _write(
        cache,
        jnp.where(is_real, jnp.where(is_cached, own_slot, new_slot), capacity),
        tokens=padded(batch.doc, cache.tokens.shape[1]),
        query_id=e.query_id,
        doc_id=doc_id,
        embedding=e.doc,
        entered=step,
        encoded=step,
    )


def padded(texts: Array | Packed, length: int) -> Int[Array, "B {length}"]:
    """One text a row, of at most `length` tokens, from tokens [B, L] or `Packed`."""
    if not isinstance(texts, Packed):
        return jnp.pad(texts, ((0, 0), (0, length - texts.shape[1])))
    num_rows, row_length = texts.tokens.shape
    slots = jnp.maximum(texts.slots, 0)
    starts = jnp.cumsum(texts.lengths, axis=1) - texts.lengths + row_length * jnp.arange(num_rows)[:, None]  # among all tokens
    steps = jnp.arange(length)[None, :]
    is_token = (steps < texts.lengths.reshape(-1)[slots][:, None]) & (texts.slots >= 0)[:, None]
    places = jnp.where(is_token, starts.reshape(-1)[slots][:, None] + steps, 0)
    return jnp.where(is_token, texts.tokens.reshape(-1)[places], 0)


def metrics(cache: CachedDocs, step: Array) -> Metrics:
    """The share of the slots that hold a document, and how many updates ago their embeddings were made, on average."""
    is_there = (cache.doc_id != PADDING_ID).astype(jnp.float32)
    age = jnp.sum(is_there * (step - cache.encoded).astype(jnp.float32)) / jnp.maximum(jnp.sum(is_there), 1.0)
    return {"cache/filled": jnp.mean(is_there), "cache/staleness": age}


def temperature_of(loss: LossFn) -> float | None:
    """The temperature of `sampled_softmax`, whose draws stand for all negatives; without it, the first that the loss has."""
    found: list[tuple[bool, float | None]] = []
    for part in parts(loss):
        if (temperature := bound(part, "temperature")) is not ABSENT:
            found.append((name_of(part) == "sampled_softmax", temperature))
    if not found:
        raise InputError(
            f"HardNegatives.negative_cache draws by the temperature of the loss, but {name_of(loss)} has none; take another loss."
        )
    told = {temperature for is_sampled, temperature in found if is_sampled}
    if len(told) > 1:
        raise InputError(
            f"the loss has sampled_softmax at the temperatures {' and '.join(map(str, told))}, but the draws of "
            "HardNegatives.negative_cache are of one temperature; give all the same."
        )
    return max(found, key=lambda one: one[0])[1]


def _put_back(cache: CachedDocs, drawn: Drawn, embeddings: Float[Array, "B N D"], step: Array) -> CachedDocs:
    """The cache with the new embeddings of the drawn documents. If several rows update a slot, the last wins: dropout makes their
    embeddings differ."""
    capacity, slots = len(cache.doc_id), drawn.slots.reshape(-1)
    number = jnp.arange(len(slots))
    last = jnp.full(capacity, -1).at[slots].max(number, mode="drop")
    slots = jnp.where(last.at[slots].get(mode="fill", fill_value=-1) == number, slots, capacity)
    return _write(cache, slots, embedding=embeddings.reshape(len(slots), -1), encoded=step)


def _write(cache: CachedDocs, slots: Int[Array, " n"], **values: Any) -> CachedDocs:
    """The cache with new values in some slots; slot K is ignored."""
    changed = {name: getattr(cache, name).at[slots].set(new, mode="drop") for name, new in values.items()}
    return cache._replace(**changed)


def _highest(values: Array, number: int) -> Int[Array, " {number}"]:
    """The slots of the highest values [K], best first; equal values in slot order. Each device searches its own share."""
    mesh = jax.sharding.get_abstract_mesh()
    if not set(ROW_AXES) <= set(mesh.axis_names):
        return jax.lax.top_k(values, number)[1]
    rows = jax.sharding.PartitionSpec(ROW_AXES)
    num_shares = math.prod(mesh.shape[axis] for axis in ROW_AXES)
    share = len(values) // num_shares
    of_share = jax.shard_map(lambda own: jax.lax.top_k(own, min(number, share)), in_specs=rows, out_specs=rows)
    best, places = of_share(values)  # [shares * n]
    slots = places + share * jnp.repeat(jnp.arange(num_shares), len(places) // num_shares)
    return slots[jax.lax.top_k(best, number)[1]]
