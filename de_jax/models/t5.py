"""The T5 encoder, 1.0 and 1.1 (Raffel et al. 2020; Shazeer 2020 for the gated layer), with T5X's parameter names."""

from __future__ import annotations

import dataclasses
from typing import Annotated, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Float, Int

from de_jax.models import layers
from de_jax.models.attention import AttentionDropout, AttentionKernel, RelativePositionBias, SelfAttention
from de_jax.models.layers import Dropout, Linear, stream_dtype
from de_jax.settings import PositiveInt, Range, ShareBelowOne, check_fields
from de_jax.types import Array, InputError

NORM_EPSILON = 1e-6


@dataclasses.dataclass(frozen=True)
class T5Config:
    """The shape of a T5 encoder; the defaults are T5 1.1 base.

    Attributes:
        vocab_size: rows of the embedding table; T5's own are padded to 32,128.
        model_dim: width of the residual stream.
        num_layers: 0 leaves the embeddings, as DAFT's lightest query tower has them.
        mlp_dim: width inside a feed-forward layer.
        activation: "gated_gelu" is T5 1.1 (tanh gelu times a linear branch), "relu" is T5 1.0.
        bias_per_layer: whether each layer, of a generator's decoder too, has a relative position bias of its own (umT5, T5X's
            scanned layers), not one for all.
        dropout_rate: share dropped after the embedding, within and after each sub-layer, after the last norm, and of the attention
            weights, a key for all queries of its text at once as in T5X.
        dropout_broadcast: all tokens of a text share the other draws too, as in T5X Retrieval (`broadcast_dims=(-2,)`): mean
            pooling then averages no dropout away. False draws for each token, as transformers does.
        dtype: of the matrix products; parameters, norms and softmax stay float32. Never float16: T5 overflows.
        remat: "none" keeps activations for the backward pass, on a CPU without the weights of attention; "dots" keeps products with
            parameters and the results of fused attention only, "full" keeps the input of each layer only.
        scan_layers: compiles one layer instead of all. Parameters, checkpoints and patterns are the same with and without; a
            step holds a second, stacked copy of the layers' parameters.
        attention: how it is computed: "fused" by the platform's kernel, which never holds the scores of all pairs of tokens,
            "plain" by XLA, "auto" by the kernel if it takes the shapes at hand. The model is the same.
        initializers: of parameters that start at random: None for normal draws, of variance 1 for position biases; "t5x" for T5X's,
            where feed-forward layers' are cut at two deviations, and position biases uniform, of variance 2 / (heads + buckets).
    """

    attention_dropout: ClassVar[AttentionDropout] = "per_key"
    vocab_size: PositiveInt = 32128
    model_dim: PositiveInt = 768
    num_layers: layers.NumLayers = 12
    num_heads: PositiveInt = 12
    head_dim: PositiveInt = 64
    mlp_dim: PositiveInt = 2048
    activation: Literal["gated_gelu", "relu"] = "gated_gelu"
    num_buckets: Annotated[int, Range(4, 65536)] = 32
    max_distance: PositiveInt = 128
    bias_per_layer: bool = False
    dropout_rate: ShareBelowOne = 0.1
    dropout_broadcast: bool = False
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    remat: layers.Remat = "none"
    scan_layers: bool = False
    # Not shown, as they say nothing about a model that has its parameters.
    attention: AttentionKernel = dataclasses.field(default="auto", repr=False)
    initializers: Literal["t5x"] | None = dataclasses.field(default=None, repr=False)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.max_distance <= self.num_buckets // 4:
            raise InputError(
                f"T5Config.max_distance is {self.max_distance}, but {self.num_buckets} buckets hold distances up to "
                f"{self.num_buckets // 4} one by one; it must be more than that."
            )

    @property
    def max_length(self) -> int | None:
        return None  # positions are relative

    @property
    def is_gated(self) -> bool:
        return self.activation == "gated_gelu"

    def dropout(self) -> Dropout:
        """Of everything but the attention weights."""
        return Dropout(self.dropout_rate, self.dropout_broadcast)

    def position_bias(self, bidirectional: bool = True) -> RelativePositionBias:
        return RelativePositionBias(
            self.num_heads, self.num_buckets, self.max_distance, bidirectional, uniform=self.initializers == "t5x"
        )

    def embedder(self) -> nn.Module:
        return TokenEmbedder(self)

    def encoder(self) -> nn.Module:
        return T5Encoder(self)


class TokenEmbedder(nn.Module):
    """Token ids to vectors; no positions, those are in the encoder's bias."""

    config: T5Config

    @nn.compact
    def __call__(self, tokens: Int[Array, "b L"], segments: Int[Array, "b L"], deterministic: bool) -> Float[Array, "b L E"]:
        shape = (self.config.vocab_size, self.config.model_dim)
        table = self.param("embedding", nn.initializers.normal(1.0), shape)
        return table[tokens].astype(stream_dtype(jnp.dtype(self.config.dtype)))


class RMSNorm(nn.Module):
    """Division by the root mean square, in float32; no mean is subtracted and there is no bias."""

    dtype: str

    @nn.compact
    def __call__(self, x: Float[Array, "b L E"]) -> Float[Array, "b L E"]:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        x = x.astype(jnp.float32)
        x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + NORM_EPSILON)
        return (x * scale[None, None, :]).astype(self.dtype)


class FeedForward(nn.Module):
    """Position-wise layer: relu (1.0), or tanh gelu of `wi_0` times `wi_1` (1.1)."""

    config: T5Config

    @nn.compact
    def __call__(self, x: Float[Array, "b L E"], segments: Int[Array, "b L"], deterministic: bool) -> Float[Array, "b L E"]:
        config, std, dtype = self.config, self.config.model_dim**-0.5, jnp.dtype(self.config.dtype)
        truncated = config.initializers == "t5x"
        linear = lambda name: Linear(config.mlp_dim, std, dtype, truncated=truncated, name=name)(x)  # noqa: E731
        is_gated = config.activation == "gated_gelu"
        hidden = layers.gated(nn.gelu, linear("wi_0"), linear("wi_1")) if is_gated else nn.relu(linear("wi"))
        hidden = config.dropout()(hidden, deterministic, segments)
        return Linear(config.model_dim, config.mlp_dim**-0.5, dtype, truncated=truncated, name="wo")(hidden)


class T5Layer(nn.Module):
    """Attention and feed-forward, each normalised before and added to the residual stream after."""

    config: T5Config

    def setup(self) -> None:
        config = self.config
        if config.bias_per_layer:
            self.relpos_bias = config.position_bias()
        self.pre_attention_layer_norm = RMSNorm(config.dtype)
        self.attention = SelfAttention(
            config.num_heads,
            config.head_dim,
            config.dropout_rate,
            config.attention_dropout,
            jnp.dtype(config.dtype),
            attention=config.attention,
        )
        self.pre_mlp_layer_norm = RMSNorm(config.dtype)
        self.mlp = FeedForward(config)
        self.dropout = config.dropout()

    def __call__(
        self, x: Float[Array, "b L E"], segments: Int[Array, "b L"], deterministic: bool, bias: Float[Array, "H L L"] | None
    ) -> Float[Array, "b L E"]:
        x = layers.split_by_rows(x)
        if bias is None:
            bias = self.relpos_bias(x.shape[1])
        attended = self.attention(self.pre_attention_layer_norm(x), bias, segments, deterministic)
        x = x + self.dropout(attended, deterministic, segments)
        hidden = self.mlp(self.pre_mlp_layer_norm(x), segments, deterministic)
        return x + self.dropout(hidden, deterministic, segments)


class T5Encoder(nn.Module):
    """Embedded tokens to contextual vectors."""

    config: T5Config

    def setup(self) -> None:
        config = self.config
        if not config.bias_per_layer:
            self.relpos_bias = config.position_bias()
        self.layers = layers.make_layers(T5Layer, config)
        self.encoder_norm = RMSNorm(config.dtype)
        self.dropout = config.dropout()

    def __call__(self, x: Float[Array, "b L E"], segments: Int[Array, "b L"], deterministic: bool) -> Float[Array, "b L E"]:
        # Texts of a row are contiguous, so that distances between two tokens of one text are those within the row.
        bias = None if self.config.bias_per_layer else self.relpos_bias(x.shape[1])
        x = layers.through_layers(self, self.dropout(x, deterministic, segments), segments, deterministic, bias)
        return self.dropout(self.encoder_norm(x), deterministic, segments)
