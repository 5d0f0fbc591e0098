"""Token by token: queries of documents by sampling, greedily or by beam search, in one compiled loop.

The draws of a text depend on the run's seed, its document's and its own number alone, so neither the batch nor the devices it is
made on change it, as far as sums in another order do not.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int, UInt32

from de_jax.models.generator import START_ID, Generator
from de_jax.settings import NO_FLAG, NonNegativeInt, PositiveFloat, PositiveInt, Range, check_fields
from de_jax.types import Array, InputError, Params

PAD_ID, END_ID = 0, 1
IMPOSSIBLE = -1e9
"""A log-likelihood; finite, so that differences stay numbers."""


@dataclasses.dataclass(frozen=True)
class Decoding:
    """How queries are made of a model's scores.

    Nogueira and Lin 2019 draw from the ten likeliest tokens; 40 or 80 queries of up to 64 tokens for each passage.

    Attributes:
        method: "sample", "greedy" (the likeliest token each time) or "beam".
        num_queries: of each document; with "beam" the best ones found, with "greedy" one.
        max_length: tokens of a query at most, its end included.
        top_k: how many of the likeliest tokens are drawn from; 0 for all.
        top_p: the smallest set of tokens with at least this likelihood, among the `top_k`, is drawn from; in (0, 1].
        temperature: divides the scores before a draw; > 0.
        num_beams: texts of a document that "beam" keeps; at least `num_queries`.
        length_penalty: a beam's log-likelihood is divided by its length to this power.
        num_tokens: entries of the vocabulary that may be written; tables often have more. Padding never is.
        ends: whether a text may end before `max_length`; without it speed can be measured.
    """

    method: Literal["sample", "greedy", "beam"] = "sample"
    num_queries: PositiveInt = 1
    max_length: PositiveInt = 64
    top_k: NonNegativeInt = 10
    top_p: Annotated[float, Range(0.0, 1.0, above=True)] = 1.0
    temperature: PositiveFloat = 1.0
    num_beams: PositiveInt = 4
    length_penalty: float = 1.0
    num_tokens: Annotated[PositiveInt | None, NO_FLAG] = None
    ends: Annotated[bool, NO_FLAG] = True

    def __post_init__(self) -> None:
        check_fields(self)
        if self.method == "greedy" and self.num_queries > 1:
            raise InputError(f"Decoding.num_queries is {self.num_queries}; it must be 1 where the method is greedy.")
        if self.method == "beam" and self.num_beams < self.num_queries:
            raise InputError(f"Decoding.num_beams is {self.num_beams}; it must be at least num_queries = {self.num_queries}.")


def generate(
    model: Generator, params: Params, docs: Int[Array, "b L"], seeds: UInt32[Array, " b"], seed: Array, decoding: Decoding
) -> Int[Array, "b N T"]:
    """Tokens of each document's queries, ends included, padding after them; `seeds` are of documents, `seed` is of all."""
    if decoding.method == "beam":
        return _beam_search(model, params, docs, decoding)
    read, num_rows = model.read_docs(params, docs), len(docs) * decoding.num_queries
    of_docs = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), seeds)
    of_texts = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)), (0, None))
    keys = of_texts(of_docs, jnp.arange(decoding.num_queries, dtype=jnp.uint32)).reshape(-1)

    def go_on(state: _Texts) -> Array:
        return (state.position < decoding.max_length) & ~jnp.all(state.is_done)

    def step(state: _Texts) -> _Texts:
        logits, earlier = model.next_logits(params, read, state.last, state.earlier, state.position)
        logits = _allowed(logits, decoding)
        chosen = jnp.argmax(logits, axis=-1) if decoding.method == "greedy" else _draw(logits, keys, state.position, decoding)
        chosen = jnp.where(state.is_done, PAD_ID, chosen.astype(jnp.int32))
        tokens = jax.lax.dynamic_update_index_in_dim(state.tokens, chosen, state.position, axis=1)
        return _Texts(state.position + 1, tokens, chosen, state.is_done | (chosen == END_ID), earlier)

    begin = _Texts(
        position=jnp.zeros((), jnp.int32),
        tokens=jnp.full((num_rows, decoding.max_length), PAD_ID, jnp.int32),
        last=jnp.full(num_rows, START_ID, jnp.int32),
        is_done=jnp.repeat(_is_empty(docs), decoding.num_queries),
        earlier=model.no_tokens(num_rows, decoding.max_length),
    )
    return jax.lax.while_loop(go_on, step, begin).tokens.reshape(len(docs), decoding.num_queries, -1)


class _Texts(NamedTuple):
    position: Array  # []
    tokens: Array  # [r, T]
    last: Array  # [r] the token before `position`
    is_done: Array  # [r]
    earlier: Any  # keys and values


def _is_empty(docs: Int[Array, "b L"]) -> Bool[Array, " b"]:
    """Rows that only fill a batch up; nothing waits for their ends."""
    return (docs == 0).all(axis=-1)


def _allowed(logits: Float[Array, "r V"], decoding: Decoding) -> Float[Array, "r V"]:
    ids = jnp.arange(logits.shape[-1])
    may_be = (ids != PAD_ID) & (ids < (decoding.num_tokens or len(ids))) & (decoding.ends | (ids != END_ID))
    return jnp.where(may_be[None, :], logits, -jnp.inf)


def _draw(logits: Float[Array, "r V"], keys: Array, position: Array, decoding: Decoding) -> Int[Array, " r"]:
    """One token of each row, by one uniform number each.

    Candidates stand in the order of their ids, so that two of nearly the same score do not change places between two machines.
    """
    logits = logits / decoding.temperature
    ids = None
    if 0 < decoding.top_k < logits.shape[-1]:
        logits, ids = jax.lax.top_k(logits, decoding.top_k)
        order = jnp.argsort(ids, axis=-1)
        logits, ids = (jnp.take_along_axis(array, order, axis=-1) for array in (logits, ids))
    probs = jax.nn.softmax(logits, axis=-1)
    if decoding.top_p < 1:
        descending = -jnp.sort(-probs, axis=-1)
        before = jnp.cumsum(descending, axis=-1) - descending
        least = jnp.min(jnp.where(before < decoding.top_p, descending, jnp.inf), axis=-1, keepdims=True)
        probs = jnp.where(probs >= least, probs, 0.0)
    up_to = jnp.cumsum(probs, axis=-1)
    uniform = jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, position)))(keys)
    # Above the sum up to the last candidate no draw falls, whatever is rounded: the draw is below 1 and a share of that sum.
    place = jnp.sum(up_to <= uniform[:, None] * up_to[:, -1:], axis=-1)
    place = jnp.minimum(place, up_to.shape[-1] - 1)
    return place if ids is None else jnp.take_along_axis(ids, place[:, None], axis=-1)[:, 0]


class _Beams(NamedTuple):
    position: Array  # []
    tokens: Array  # [b, W, T] unfinished texts, best first
    scores: Array  # [b, W] their log-likelihoods
    ended: Array  # [b, W, T] the best finished texts
    ended_scores: Array  # [b, W], divided by the length
    is_open: Array  # [b] whether an unfinished text may still become one of them
    earlier: Any  # keys and values


def _beam_search(model: Generator, params: Params, docs: Int[Array, "b L"], decoding: Decoding) -> Int[Array, "b N T"]:
    """The likeliest texts that beam search finds, best first.

    The default of transformers: each step takes the 2W best continuations. Texts that end among the first W are kept as finished,
    and the W best unfinished texts continue. A document is done when its best unfinished text scores no higher than the worst of
    its W finished texts; both scores are divided by length^length_penalty.
    """
    read, width, longest = model.read_docs(params, docs), decoding.num_beams, decoding.max_length
    num_docs = len(docs)

    def go_on(state: _Beams) -> Array:
        return (state.position < longest) & jnp.any(state.is_open)

    def step(state: _Beams) -> _Beams:
        last = jnp.take(state.tokens, jnp.maximum(state.position - 1, 0), axis=2)
        last = jnp.where(state.position == 0, START_ID, last).reshape(-1)
        logits, earlier = model.next_logits(params, read, last, state.earlier, state.position)
        log_probs = _allowed(jax.nn.log_softmax(logits, axis=-1), decoding).reshape(num_docs, width, -1)
        totals = (state.scores[:, :, None] + log_probs).reshape(num_docs, -1)  # [b, W * V]
        scores, found = jax.lax.top_k(totals, 2 * width)
        beam, token = found // log_probs.shape[-1], (found % log_probs.shape[-1]).astype(jnp.int32)
        texts = jnp.take_along_axis(state.tokens, beam[:, :, None], axis=1)  # [b, 2W, T]
        texts = jax.lax.dynamic_update_index_in_dim(texts, token, state.position, axis=2)
        length = state.position + 1
        ends = (token == END_ID) | (length == longest)
        is_kept = ends & (jnp.arange(2 * width) < width)[None, :] & state.is_open[:, None]
        divided = jnp.where(is_kept, scores / length.astype(jnp.float32) ** decoding.length_penalty, IMPOSSIBLE)
        all_scores = jnp.concatenate([state.ended_scores, divided], axis=1)
        ended_scores, best = jax.lax.top_k(all_scores, width)
        ended = jnp.take_along_axis(jnp.concatenate([state.ended, texts], axis=1), best[:, :, None], axis=1)
        scores, rest = jax.lax.top_k(jnp.where(ends, IMPOSSIBLE, scores), width)
        tokens = jnp.take_along_axis(texts, rest[:, :, None], axis=1)
        of_beam = jnp.take_along_axis(beam, rest, axis=1)
        best_open = scores[:, 0] / length.astype(jnp.float32) ** decoding.length_penalty
        is_open = state.is_open & (best_open > ended_scores[:, -1])
        return _Beams(length, tokens, scores, ended, ended_scores, is_open, _rearranged(earlier, of_beam))

    nothing = jnp.full((num_docs, width, longest), PAD_ID, jnp.int32)
    begin = _Beams(
        position=jnp.zeros((), jnp.int32),
        tokens=nothing,
        scores=jnp.where(jnp.arange(width) == 0, 0.0, IMPOSSIBLE)[None, :] + jnp.zeros((num_docs, 1)),
        ended=nothing,
        ended_scores=jnp.full((num_docs, width), IMPOSSIBLE),
        is_open=~_is_empty(docs),
        earlier=model.no_tokens(num_docs * width, longest),
    )
    return jax.lax.while_loop(go_on, step, begin).ended[:, : decoding.num_queries]


def _rearranged(earlier: Any, of_beam: Int[Array, "b W"]) -> Any:
    """Keys and values [b * W, ...] of the beams that each beam continues."""
    taken = functools.partial(jnp.take_along_axis, indices=of_beam[:, :, None, None, None], axis=1)
    return jax.tree.map(lambda array: taken(array.reshape(*of_beam.shape, *array.shape[1:])).reshape(array.shape), earlier)
