"""BERT's encoder (Devlin et al. 2019) and related encoders: absolute positions, and a LayerNorm after each sum.

RoBERTa (Liu et al. 2019) counts positions otherwise, DistilBERT (Sanh et al. 2019) has no token types, and MPNet (Song et al. 2020)
has T5's relative position bias too.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, ClassVar, Literal

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Float, Int

from de_jax.models import layers
from de_jax.models.attention import AttentionDropout, AttentionKernel, RelativePositionBias, SelfAttention
from de_jax.models.layers import TABLE_STD, Dropout, Linear, Table, gelu, places_of, stream_dtype
from de_jax.settings import NonNegativeInt, PositiveFloat, PositiveInt, Range, ShareBelowOne, check_fields
from de_jax.types import Array, InputError

MAX_DISTANCE = 128
"""Tokens, from which on a relative position bias is the same for all distances."""


@dataclasses.dataclass(frozen=True)
class BertConfig:
    """The shape of a BERT encoder; the defaults are BERT base, uncased.

    Attributes:
        vocab_size: rows of the word table.
        model_dim: width of the residual stream; a head has model_dim / num_heads of it.
        num_layers: 0 leaves the embeddings, as DAFT's lightest query tower has them.
        mlp_dim: width inside a feed-forward layer.
        max_positions: rows of the position table.
        position_offset: row of a text's first token in it: 0 in BERT, 2 in RoBERTa, which leaves the first two unused.
        num_token_types: rows of the type table; texts are always of type 0, the others are kept for other libraries. 0 for no
            table, as in DistilBERT and MPNet.
        num_buckets: of a relative position bias that all layers share, with exact distances below a quarter of them and none told
            apart beyond 128 (MPNet's 32); 0 for no bias.
        norm_epsilon: 1e-12 in BERT, 1e-5 in RoBERTa.
        dropout_rate: share dropped of the embeddings, the attention weights and each sub-layer's result.
        attention_dropout_rate: of the attention weights, where it differs.
        dtype: of the matrix products; parameters, norms and softmax stay float32.
        remat, scan_layers, attention: as of `T5Config`.
    """

    attention_dropout: ClassVar[AttentionDropout] = "per_weight"
    is_gated: ClassVar[bool] = False
    vocab_size: PositiveInt = 30522
    model_dim: PositiveInt = 768
    num_layers: layers.NumLayers = 12
    num_heads: PositiveInt = 12
    mlp_dim: PositiveInt = 3072
    max_positions: PositiveInt = 512
    position_offset: NonNegativeInt = 0
    num_token_types: NonNegativeInt = 2
    num_buckets: Annotated[int, Range(0, 65536)] = 0
    norm_epsilon: PositiveFloat = 1e-12
    dropout_rate: ShareBelowOne = 0.1
    attention_dropout_rate: ShareBelowOne | None = None
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    remat: layers.Remat = "none"
    scan_layers: bool = False
    attention: AttentionKernel = dataclasses.field(default="auto", repr=False)  # no property of a model with its parameters

    def __post_init__(self) -> None:
        check_fields(self)
        if self.position_offset >= self.max_positions:
            raise InputError(
                f"BertConfig.position_offset is {self.position_offset}; it must be less than max_positions = {self.max_positions}."
            )
        if self.model_dim % self.num_heads:
            raise InputError(f"BertConfig.model_dim is {self.model_dim}, which num_heads = {self.num_heads} does not divide.")
        if self.num_buckets and not 4 <= self.num_buckets < 4 * MAX_DISTANCE:
            raise InputError(f"BertConfig.num_buckets is {self.num_buckets}; it must be 0, or from 4 to {4 * MAX_DISTANCE - 1}.")

    @property
    def head_dim(self) -> int:
        return self.model_dim // self.num_heads

    @property
    def weights_dropout_rate(self) -> float:
        """Of the attention weights."""
        return self.dropout_rate if self.attention_dropout_rate is None else self.attention_dropout_rate

    @property
    def max_length(self) -> int | None:
        return self.max_positions - self.position_offset

    def embedder(self) -> nn.Module:
        return BertEmbedder(self)

    def encoder(self) -> nn.Module:
        return BertEncoder(self)


class BertEmbedder(nn.Module):
    """Sum of a token's word, position and type vectors, normalised. Positions start again in each text of a row."""

    config: BertConfig

    @nn.compact
    def __call__(self, tokens: Int[Array, "b L"], segments: Int[Array, "b L"], deterministic: bool) -> Float[Array, "b L E"]:
        config = self.config
        words = self.param("embedding", nn.initializers.normal(TABLE_STD), (config.vocab_size, config.model_dim))
        positions = Table(config.max_positions, config.model_dim, name="position")()
        x = words[tokens].astype(jnp.float32) + positions[places_of(segments) + config.position_offset]
        if config.num_token_types:
            x = x + Table(config.num_token_types, config.model_dim, name="token_type")()[:1][None]
        return Dropout(config.dropout_rate)(norm_of(config, "norm")(x), deterministic)


class BertFeedForward(nn.Module):
    """Position-wise layer with the exact gelu."""

    config: BertConfig

    @nn.compact
    def __call__(self, x: Float[Array, "b L E"]) -> Float[Array, "b L E"]:
        config, dtype = self.config, jnp.dtype(self.config.dtype)
        hidden = Linear(config.mlp_dim, config.model_dim**-0.5, dtype, use_bias=True, name="wi")(x)
        return Linear(config.model_dim, config.mlp_dim**-0.5, dtype, use_bias=True, name="wo")(gelu(hidden))


class BertLayer(nn.Module):
    """Attention and feed-forward, each added to the residual stream, which is normalised after."""

    config: BertConfig

    def setup(self) -> None:
        config = self.config
        self.attention = SelfAttention(
            config.num_heads,
            config.head_dim,
            config.weights_dropout_rate,
            config.attention_dropout,
            jnp.dtype(config.dtype),
            scale=config.head_dim**-0.5,
            use_bias=True,
            attention=config.attention,
        )
        self.attention_layer_norm = norm_of(config)
        self.mlp = BertFeedForward(config)
        self.mlp_layer_norm = norm_of(config)
        self.dropout = Dropout(config.dropout_rate)

    def __call__(
        self, x: Float[Array, "b L E"], segments: Int[Array, "b L"], deterministic: bool, bias: Float[Array, "H L L"] | None
    ) -> Float[Array, "b L E"]:
        x = layers.split_by_rows(x)
        x = self.attention_layer_norm(x + self.dropout(self.attention(x, bias, segments, deterministic), deterministic))
        return self.mlp_layer_norm(x + self.dropout(self.mlp(x), deterministic))


class BertEncoder(nn.Module):
    """Embedded tokens to contextual vectors."""

    config: BertConfig

    def setup(self) -> None:
        config = self.config
        if config.num_buckets:
            self.relpos_bias = RelativePositionBias(config.num_heads, config.num_buckets, MAX_DISTANCE)
        self.layers = layers.make_layers(BertLayer, config)

    def __call__(self, x: Float[Array, "b L E"], segments: Int[Array, "b L"], deterministic: bool) -> Float[Array, "b L E"]:
        bias = self.relpos_bias(x.shape[1]) if self.config.num_buckets else None
        return layers.through_layers(self, x, segments, deterministic, bias)


def norm_of(config: BertConfig, name: str | None = None) -> nn.LayerNorm:
    """In float32, as one pass over squares would lose the small differences that a variance is made of."""
    dtype = stream_dtype(jnp.dtype(config.dtype))
    return nn.LayerNorm(epsilon=config.norm_epsilon, dtype=dtype, use_fast_variance=False, name=name)
