"""A tower: token ids -> embedder -> encoder -> pooling -> projection -> L2 norm, whatever the encoder is."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Bool, Float, Int

from de_jax.types import Array

PARTS = ("embedder", "encoder", "projection")
"""What a tower is made of; the units of sharing between two towers."""


@runtime_checkable
class EncoderConfig(Protocol):
    """The shape of an encoder, able to build its two modules. `T5Config` is one."""

    vocab_size: int
    model_dim: int
    dtype: str

    def embedder(self) -> nn.Module:
        """tokens [b, L] -> [b, L, E]."""

    def encoder(self) -> nn.Module:
        """([b, L, E], mask [b, L], deterministic) -> [b, L, E]."""


@dataclasses.dataclass(frozen=True)
class TowerConfig:
    """One tower. SamToNe (Moiseev et al. 2023): T5 encoder, mean pooling, linear projection, L2 norm.

    Attributes:
        encoder: the text encoder.
        pooling: "mean" over real tokens, or the "first" token.
        projection_dim: D, the size of an embedding; None leaves the pooled vector as it is.
        projection_bias: whether the projection has a bias (DAFT's has, T5's has not).
        normalize: whether embeddings have length 1, so that an inner product is a cosine.
    """

    encoder: EncoderConfig
    pooling: Literal["mean", "first"] = "mean"
    projection_dim: int | None = 768
    projection_bias: bool = False
    normalize: bool = True

    @property
    def embedding_dim(self) -> int:
        return self.projection_dim or self.encoder.model_dim


class Tower(nn.Module):
    """Token ids to embeddings; its parameters are grouped by the names in `PARTS`."""

    config: TowerConfig

    def setup(self) -> None:
        self.embedder = self.config.encoder.embedder()
        self.encoder = self.config.encoder.encoder()
        if self.config.projection_dim:
            self.projection = nn.Dense(
                self.config.projection_dim,
                use_bias=self.config.projection_bias,
                dtype=jnp.float32,
                kernel_init=nn.initializers.lecun_normal(),
            )

    def __call__(self, tokens: Int[Array, "b L"], deterministic: bool = True) -> Float[Array, "b D"]:
        mask = tokens != 0
        hidden = self.encoder(self.embedder(tokens), mask, deterministic)
        pooled = pool(hidden.astype(jnp.float32), mask, self.config.pooling)
        embeddings = self.projection(pooled) if self.config.projection_dim else pooled
        return l2_normalize(embeddings) if self.config.normalize else embeddings


def pool(hidden: Float[Array, "b L E"], mask: Bool[Array, "b L"], pooling: str) -> Float[Array, "b E"]:
    """One vector per text: the mean over its real tokens, or its first token. A text of padding alone gives zeros."""
    if pooling == "first":
        return hidden[:, 0] * mask[:, :1]
    count = jnp.maximum(jnp.sum(mask, axis=1, keepdims=True), 1)
    return jnp.einsum("ble,bl->be", hidden, mask.astype(hidden.dtype), precision="highest") / count


def l2_normalize(x: Float[Array, "b D"]) -> Float[Array, "b D"]:
    """Rows of length 1; a zero row stays zero, with finite gradients."""
    return x * jax.lax.rsqrt(jnp.maximum(jnp.sum(jnp.square(x), axis=-1, keepdims=True), 1e-12))


def config_to_json(config: TowerConfig) -> dict[str, Any]:
    """The tower as plain JSON values; the encoder's class is kept under "architecture"."""
    fields = dataclasses.asdict(config)
    return {**fields, "encoder": {"architecture": type(config.encoder).__name__, **fields["encoder"]}}
