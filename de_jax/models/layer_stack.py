"""The layers of an encoder, one after another: rematerialisation for the backward pass, and loops over layers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Float, Int

from de_jax.models.layers import PRODUCT
from de_jax.settings import Range
from de_jax.types import Array

Remat = Literal["none", "dots", "full"]
NumLayers = Annotated[int, Range(0, 1000)]


def make_layers(layer: type[nn.Module], config: Any) -> list[nn.Module]:
    """An encoder's layers, to be bound as its `layers`; each is called with (x, segments, deterministic, *context)."""
    return [_rematerialised(layer, config.remat)(config) for _ in range(config.num_layers)]


def through_layers(
    encoder: Any, x: Float[Array, "b L E"], segments: Int[Array, "b L"], deterministic: bool, *context: Any, of_layer: Any = None
) -> Float[Array, "b L E"]:
    """`x` after all of `encoder.layers`, which `make_layers` made.

    `context` are further arguments of every layer; of `of_layer`, a tree of arrays [layers, ...], each gets its own entries last.
    """
    own = lambda entry: () if of_layer is None else (entry,)  # noqa: E731
    if not encoder.config.scan_layers or encoder.is_initializing() or not encoder.layers:
        for number, layer in enumerate(encoder.layers):
            entry = jax.tree.map(lambda array: array[number], of_layer)  # noqa: B023, called at once
            x = layer(x, segments, deterministic, *context, *own(entry))
        return x
    # The layers as a loop over their stacked parameters: one layer is compiled, whatever their number.
    params = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(layer.variables["params"] for layer in encoder.layers))
    keys = None if deterministic else jax.random.split(encoder.make_rng("dropout"), len(encoder.layers))
    unbound = type(encoder.layers[0])(encoder.config, parent=None)

    def one(x: Array, scanned: tuple[Any, Array | None, Any]) -> tuple[Array, None]:
        layer_params, key, entry = scanned
        rngs = None if key is None else {"dropout": key}
        return unbound.apply({"params": layer_params}, x, segments, deterministic, *context, *own(entry), rngs=rngs), None

    return jax.lax.scan(one, x, (params, keys, of_layer))[0]


def _rematerialised(layer: type[nn.Module], remat: Remat) -> type[nn.Module]:
    if remat == "none":
        return layer
    policy = jax.checkpoint_policies.save_only_these_names(PRODUCT) if remat == "dots" else None
    return nn.remat(layer, policy=policy, static_argnums=(3,), prevent_cse=True)  # `deterministic`, after `self`
