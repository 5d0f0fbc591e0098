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
    """A model some of whose parameters are constants while it is trained, as DAFT's first stage wants it (Leonhardt et al.).

    Nothing is computed backward through them, and a tower of which every own parameter is frozen runs without dropout. What both
    towers share counts for neither: DAFT's projection is trained while the document tower is not.

    Attributes:
        model: with `embed(params, batch, rng, without_dropout=towers)`.
        patterns: of the frozen parameters; the optimizer leaves them alone by the same (`optimizer.freeze`).
    """

    model: Any
    patterns: tuple[str, ...]

    def init(self, rng: Array) -> Params:
        """The model's fresh parameters."""
        return self.model.init(rng)

    def embed(self, params: Params, batch: Batch, rng: Array | None = None, *, without_dropout: Collection[str] = ()) -> Embeddings:
        """The model's embeddings; `without_dropout` names more towers that run so."""
        constant = lambda path, leaf: jax.lax.stop_gradient(leaf) if paths.matches(self.patterns, path) else leaf  # noqa: E731
        still = {*without_dropout, *self.whole_towers(params)}
        return self.model.embed(paths.map_with_path(constant, params), batch, rng, without_dropout=still)

    def whole_towers(self, params: Params) -> tuple[str, ...]:
        """The towers whose own parameters are all frozen."""
        owned = {tower: paths.all_paths({tower: params[tower]}) for tower in ("query", "doc") if tower in params}
        return tuple(tower for tower, own in owned.items() if all(paths.matches(self.patterns, path) for path in own))
