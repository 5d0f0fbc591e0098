"""A tower: token ids -> embedder -> encoder -> pooling -> projection -> L2 norm, whatever the encoder is."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Float, Int

from de_jax.models import layers
from de_jax.settings import NonNegativeInt, PositiveInt, check_fields
from de_jax.types import Array, InputError, Params

Part = Literal["embedder", "encoder", "projection"]
PARTS: tuple[Part, ...] = ("embedder", "encoder", "projection")
"""The parts of a tower; the units of sharing between two towers."""
ProjectionInit = Literal["lecun_normal", "orthogonal"]
ProjectionActivation = Literal["identity", "tanh", "relu", "gelu"]


@runtime_checkable
class EncoderConfig(Protocol):
    """The shape of an encoder, able to build its two modules. `T5Config`, `BertConfig`, `RotaryConfig`, `StaticConfig` are such."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def model_dim(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def is_gated(self) -> bool:
        """Whether a feed-forward layer has two kernels in."""

    @property
    def max_length(self) -> int | None:
        """Tokens of the longest text that there are positions for; None for any length."""

    def embedder(self) -> nn.Module:
        """(tokens [b, L], segments [b, L], deterministic) -> [b, L, E]."""

    def encoder(self) -> nn.Module:
        """([b, L, E], segments [b, L], deterministic) -> [b, L, E]; tokens of different segments do not see each other."""


@dataclasses.dataclass(frozen=True)
class TowerConfig:
    """One tower. SamToNe (Moiseev et al. 2023): T5 encoder, mean pooling, linear projection, L2 norm.

    Attributes:
        encoder: the text encoder.
        pooling: "mean" over real tokens, or the "first" or the "last" of them; or the "max" of each dimension, "mean_sqrt_len",
            their sum over the root of their number, or "weightedmean", by places from 1 on.
        pooling_start: tokens at a text's beginning that are not pooled, those of a prompt (`include_prompt: false`); 0 for none.
        projection_dim: D, the size of an embedding; None leaves the pooled vector as it is.
        projection_bias: whether the projection has a bias (DAFT's and ANCE's have, T5's has not).
        projection_activation: between the linear map and a norm: nothing, tanh (LaBSE, Feng et al. 2022), relu or the exact gelu.
        projection_residual: whether the pooled vector is added to the activation's result, by a linear map where sizes differ.
        projection_norm: whether a LayerNorm follows (ANCE (Xiong et al. 2021): a linear head, then LayerNorm, not normalised); it
            may stand without a projection.
        normalize: whether embeddings have length 1, so that an inner product is a cosine.
        projection_init: how the projection's kernel starts: "lecun_normal", or "orthogonal", which keeps the inner products of
            pooled vectors wherever D is not smaller than they, so that a trained encoder scores as before under a new projection.
    """

    encoder: EncoderConfig
    pooling: Literal["mean", "first", "last", "max", "mean_sqrt_len", "weightedmean"] = "mean"
    projection_dim: PositiveInt | None = 768
    projection_bias: bool = False
    projection_norm: bool = False
    normalize: bool = True
    projection_init: ProjectionInit = "lecun_normal"
    projection_activation: ProjectionActivation = "identity"
    projection_residual: bool = False
    pooling_start: NonNegativeInt = 0

    def __post_init__(self) -> None:
        check_fields(self)
        for name, value in self._set().items() if self.projection_dim is None else ():
            if name.startswith("projection_") and name != "projection_norm" and value is not None:
                raise InputError(f"{name} is set without a projection; give projection_dim too.")

    def __repr__(self) -> str:
        """The last fields only if they are set: hashes of models depend on it, and runs without those fields continue."""
        told = {**dict(list(vars(self).items())[:8]), **self._set()}
        return f"TowerConfig({', '.join(f'{name}={value!r}' for name, value in told.items())})"

    def _set(self) -> dict[str, Any]:
        """The fields with another value than by default."""
        return {one.name: getattr(self, one.name) for one in dataclasses.fields(self) if getattr(self, one.name) != one.default}

    @property
    def embedding_dim(self) -> int:
        return self.projection_dim or self.encoder.model_dim

    @property
    def embedding_rank(self) -> int:
        """Dimensions of the space that embeddings lie in: a linear projection that is wider than the encoder adds none."""
        if self.projection_activation != "identity":
            return self.embedding_dim
        return min(self.embedding_dim, self.encoder.model_dim)


class Tower(nn.Module):
    """Token ids to embeddings; its parameters are grouped by the names in `PARTS`."""

    config: TowerConfig

    def setup(self) -> None:
        self.embedder = self.config.encoder.embedder()
        self.encoder = self.config.encoder.encoder()
        if self.config.projection_dim or self.config.projection_norm:
            self.projection = Projection(self.config)

    def __call__(
        self, tokens: Int[Array, "b L"], deterministic: bool = True, lengths: Int[Array, "b S"] | None = None
    ) -> Float[Array, "b S D"]:
        """One embedding for each text of a row; token 0 is padding, and `deterministic` turns dropout off.

        `lengths` are tokens of the S texts that stand one after another in a row, 0 where it has fewer; None for one padded text.
        """
        segments = (tokens != 0).astype(jnp.int32) if lengths is None else segments_of(lengths, tokens.shape[1])
        num_texts = 1 if lengths is None else lengths.shape[1]
        return self.from_embedded(self.embedder(tokens, segments, deterministic), segments, num_texts, deterministic)

    def embedded(self, tokens: Int[Array, "b L"]) -> Float[Array, "b L E"]:
        """The encoder's input for padded texts, one in each row, without dropout."""
        return self.embedder(tokens, (tokens != 0).astype(jnp.int32), True)

    def from_embedded(
        self, embedded: Float[Array, "b L E"], segments: Int[Array, "b L"], num_texts: int = 1, deterministic: bool = True
    ) -> Float[Array, "b {num_texts} D"]:
        """The embeddings of texts whose tokens are vectors already."""
        hidden = self.encoder(embedded, segments, deterministic)
        pooled = pool(hidden.astype(jnp.float32), segments, num_texts, self.config.pooling, self.config.pooling_start)
        embeddings = self.projection(pooled) if hasattr(self, "projection") else pooled
        return l2_normalize(embeddings) if self.config.normalize else embeddings


class Projection(nn.Module):
    """From the pooled vector to the embedding, in float32; see the settings `projection_...` of `TowerConfig`."""

    config: TowerConfig

    @nn.compact
    def __call__(self, x: Float[Array, "b S E"]) -> Float[Array, "b S D"]:
        config = self.config
        if config.projection_dim:
            init, shape = getattr(nn.initializers, config.projection_init)(), (x.shape[-1], config.projection_dim)
            product = functools.partial(jnp.einsum, "bse,ed->bsd", precision="highest")
            y = product(x, self.param("kernel", init, shape))
            if config.projection_bias:
                y = y + self.param("bias", nn.initializers.zeros, (config.projection_dim,))[None, None, :]
            y = layers.ACTIVATIONS[config.projection_activation](y)
            if config.projection_residual:
                own = x.shape != y.shape
                y = y + (product(x, layers.Matrix(*shape, "kernel", init, name="residual")()) if own else x)
            x = y
        return nn.LayerNorm(epsilon=1e-5, use_fast_variance=False, name="norm")(x) if config.projection_norm else x


def segments_of(lengths: Int[Array, "b S"], row_length: int) -> Int[Array, "b L"]:
    """Which text of its row each token belongs to, from 1; 0 after the last text."""
    ends = jnp.cumsum(lengths, axis=1)[:, None, :]  # [b, 1, S]
    position = jnp.arange(row_length)[None, :, None]
    number = jnp.sum(position >= ends, axis=2) + 1  # [b, L]
    return jnp.where(position[:, :, 0] < ends[:, :, -1], number, 0)


def pool(
    hidden: Float[Array, "b L E"], segments: Int[Array, "b L"], num_texts: int, pooling: str, start: int = 0
) -> Float[Array, "b {num_texts} E"]:
    """One vector per text, see `TowerConfig.pooling`. A text without tokens from its place `start` on gives zeros."""
    places = layers.places_of(segments)
    segments = jnp.where(places < start, 0, segments) if start else segments
    if pooling == "max":
        greatest = jax.vmap(lambda x, of: jax.ops.segment_max(x, of, num_segments=num_texts + 1))(hidden, segments)[:, 1:]
        return jnp.where(jnp.isneginf(greatest), 0, greatest)
    member = segments[:, None, :] == jnp.arange(1, num_texts + 1)[None, :, None]  # [b, S, L]
    if pooling in ("first", "last"):
        wanted = 1 if pooling == "first" else jnp.sum(member, axis=2, keepdims=True)
        member = member & (jnp.cumsum(member, axis=2) == wanted)
    elif pooling == "weightedmean":
        member = member * (places + 1)[:, None, :]
    count = jnp.maximum(jnp.sum(member, axis=2, keepdims=True), 1)
    summed = jnp.einsum("bsl,ble->bse", member.astype(hidden.dtype), hidden, precision="highest")
    return summed / (jnp.sqrt(count) if pooling == "mean_sqrt_len" else count)


def rounded_kernels(params: Params, dtype: str) -> Params:
    """The parameters with their kernels in the precision that they are multiplied in, so that no step need round them again."""
    return jax.tree_util.tree_map_with_path(lambda path, leaf: leaf.astype(dtype) if path[-1].key == "kernel" else leaf, params)


def l2_normalize(x: Float[Array, "*b D"]) -> Float[Array, "*b D"]:
    """Vectors of length 1; a zero row stays zero, with finite gradients."""
    return x * jax.lax.rsqrt(jnp.maximum(jnp.sum(jnp.square(x), axis=-1, keepdims=True), 1e-12))
