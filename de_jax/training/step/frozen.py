"""Frozen parameters are left out of the gradient, and a fully frozen tower gives the same embeddings in every update."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

import jax

from de_jax.training.optim import paths
from de_jax.types import Array, Batch, Embeddings, Params


@dataclasses.dataclass(frozen=True)
class FrozenModel:
    """A model with some of its parameters constant in training, as in DAFT's first stage (Leonhardt et al.).

    The backward pass computes nothing for them. A tower runs without dropout if all its own parameters are frozen. Shared
    parameters belong to neither tower: DAFT trains the projection while the document tower is frozen.

    Attributes:
        model: with `embed(params, batch, rng, without_dropout=towers)`.
        patterns: of the frozen parameters; `optimizer.freeze` uses the same patterns.
    """

    model: Any
    patterns: tuple[str, ...]

    def init(self, rng: Array) -> Params:
        """The model's fresh parameters."""
        return self.model.init(rng)

    def embed(self, params: Params, batch: Batch, rng: Array | None = None, *, without_dropout: Collection[str] = ()) -> Embeddings:
        """The model's embeddings; `without_dropout` names further towers that run without it."""
        constant = lambda path, leaf: jax.lax.stop_gradient(leaf) if paths.matches(self.patterns, path) else leaf  # noqa: E731
        still = {*without_dropout, *self.whole_towers(params)}
        return self.model.embed(paths.map_with_path(constant, params), batch, rng, without_dropout=still)

    def whole_towers(self, params: Params) -> tuple[str, ...]:
        """The towers whose own parameters are all frozen."""
        owned = {tower: paths.all_paths({tower: params[tower]}) for tower in ("query", "doc") if tower in params}
        return tuple(tower for tower, own in owned.items() if all(paths.matches(self.patterns, path) for path in own))
