"""A batch larger than memory, exactly: encoders run chunk by chunk, the loss still sees the whole batch."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from de_jax.types import Array, Batch, Embeddings, InputError, Params

Encode = Callable[..., Array]
"""(params, tokens [b, L], rng or None, lengths [b, S] or None) -> embeddings [b, S, D]."""


def chunked(encode: Encode, num_chunks: int) -> Encode:
    """`encode` over `num_chunks` chunks in turn, each forgotten forward and computed again backward.

    GradCache (Gao et al. 2021): activations of one chunk at a time are in memory, at the price of a second forward pass;
    values and gradients are those of `encode`, except for dropout, which is drawn for each chunk.

    Args:
        encode: row-wise, so that chunks do not touch each other.
        num_chunks: divides the number of rows.
    """

    def run(params: Params, tokens: Array, rng: Array | None = None, lengths: Array | None = None) -> Array:
        num_rows = len(tokens)
        if num_rows % num_chunks:
            raise InputError(f"{num_rows} rows cannot be cut into {num_chunks} equal chunks; change Devices.num_chunks.")
        # Neighbouring rows go to different chunks: a device keeps its own rows. Contiguous chunks would move every row,
        # and each device would compute the whole gradient.
        cut = lambda rows: rows.reshape(num_rows // num_chunks, num_chunks, -1).swapaxes(0, 1)  # noqa: E731
        chunks = jax.tree.map(cut, (tokens, lengths))  # [chunks, b, ...]

        @jax.checkpoint
        def one(index: Array, chunk: tuple[Array, Array | None]) -> Array:
            return encode(params, chunk[0], None if rng is None else jax.random.fold_in(rng, index), chunk[1])

        embeddings = jax.lax.map(lambda args: one(*args), (jnp.arange(num_chunks), chunks))  # [chunks, b, S, D]
        return embeddings.swapaxes(0, 1).reshape(num_rows, *embeddings.shape[2:])

    return run


@dataclasses.dataclass(frozen=True)
class ChunkedModel:
    """A model whose towers run in chunks while it is trained; parameters and embeddings are the model's own."""

    model: Any
    num_chunks: int

    def init(self, rng: Array) -> Params:
        """The model's fresh parameters."""
        return self.model.init(rng)

    def embed(self, params: Params, batch: Batch, rng: Array | None = None, **options: Any) -> Embeddings:
        """The model's embeddings of the whole batch; `options` are the model's own."""
        return self.model.embed(params, batch, rng, wrap=functools.partial(chunked, num_chunks=self.num_chunks), **options)
