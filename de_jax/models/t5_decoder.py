"""The T5 decoder, 1.0 and 1.1 (Raffel et al. 2020), with T5X's parameter names; keys and values of earlier tokens can be kept."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Bool, Float

from de_jax.models.attention import attend_visible
from de_jax.models.layers import Dropout, Linear, Matrix, normal, product, split_by_rows
from de_jax.models.t5 import FeedForward, RMSNorm, T5Config
from de_jax.types import Array

KeysValues = tuple[Array, Array]
"""Keys and values of a sequence for one attention, [b, L, H, d] each."""


class DecoderAttention(nn.Module):
    """Multi-head attention from one sequence to another, whose keys and values are made apart from it."""

    config: T5Config

    def setup(self) -> None:
        config, dtype = self.config, jnp.dtype(self.config.dtype)
        joined, std = config.num_heads * config.head_dim, config.model_dim**-0.5
        self.query = Linear(joined, std * config.head_dim**-0.5, dtype)
        self.key = Linear(joined, std, dtype)
        self.value = Linear(joined, std, dtype)
        self.out = Linear(config.model_dim, joined**-0.5, dtype)
        self.dropout = Dropout(config.dropout_rate)

    def keys_and_values(self, x: Float[Array, "b L E"], deterministic: bool) -> KeysValues:
        """Of the sequence that is attended to."""
        key, value = self._heads(self.key(x)), self._heads(self.value(x))
        # As in the encoder: one mask of the weights for all queries is a mask of whole value vectors.
        kept = self.dropout(jnp.ones(value.shape[:-1], value.dtype), deterministic)
        return key, value * kept[..., None]

    def __call__(
        self, x: Float[Array, "b Q E"], keys_values: KeysValues, bias: Float[Array, "H Q K"] | None, visible: Bool[Array, ...]
    ) -> Float[Array, "b Q E"]:
        context = attend_visible(self._heads(self.query(x)), *keys_values, bias, visible)
        return self.out(context.reshape(*x.shape[:-1], -1))

    def _heads(self, x: Float[Array, "b L e"]) -> Float[Array, "b L H d"]:
        return x.astype(self.config.dtype).reshape(*x.shape[:-1], self.config.num_heads, self.config.head_dim)


class T5DecoderLayer(nn.Module):
    """Attention to the tokens before, attention to the document, and feed-forward, each on a residual stream."""

    config: T5Config

    def setup(self) -> None:
        config = self.config
        if config.bias_per_layer:
            self.relpos_bias = config.position_bias(bidirectional=False)
        self.pre_self_attention_layer_norm = RMSNorm(config.dtype)
        self.self_attention = DecoderAttention(config)
        self.pre_cross_attention_layer_norm = RMSNorm(config.dtype)
        self.encoder_decoder_attention = DecoderAttention(config)
        self.pre_mlp_layer_norm = RMSNorm(config.dtype)
        self.mlp = FeedForward(config)
        self.dropout = config.dropout()

    def __call__(
        self,
        x: Float[Array, "r Q E"],
        doc: KeysValues,
        doc_visible: Bool[Array, "b 1 1 L"],
        bias: Float[Array, "H Q K"] | None,
        visible: Bool[Array, "1 1 Q K"],
        deterministic: bool,
        earlier: KeysValues | None,
        position: Array | int,
    ) -> tuple[Float[Array, "r Q E"], KeysValues]:
        """`x` after the layer, and the keys and values of all tokens so far."""
        x = split_by_rows(x)
        normed = self.pre_self_attention_layer_norm(x)
        own = self.self_attention.keys_and_values(normed, deterministic)
        if earlier is not None:
            own = tuple(jax.lax.dynamic_update_slice_in_dim(*pair, position, axis=1) for pair in zip(earlier, own, strict=True))  # type: ignore[assignment]
        if bias is None:
            bias = self.relpos_bias(own[0].shape[1], position + jnp.arange(x.shape[1]))
        one_text = jnp.ones(x.shape[:2], jnp.int32)
        x = x + self.dropout(self.self_attention(normed, own, bias, visible), deterministic, one_text)
        normed = self.pre_cross_attention_layer_norm(x)
        # All texts of a document ask it at once, so that its keys and values are there once.
        asking = normed.reshape(len(doc[0]), -1, normed.shape[-1])  # [b, r / b * Q, E]
        attended = self.encoder_decoder_attention(asking, doc, None, doc_visible).reshape(x.shape)
        x = x + self.dropout(attended, deterministic, one_text)
        return x + self.dropout(self.mlp(self.pre_mlp_layer_norm(x), one_text, deterministic), deterministic, one_text), own


class T5Decoder(nn.Module):
    """Embedded tokens to the scores of the next ones, given documents.

    Rows may be several texts of each document, one document after another: r is then a multiple of b.
    """

    config: T5Config
    num_layers: int
    tied_logits: bool

    def setup(self) -> None:
        config = self.config
        if not config.bias_per_layer:
            self.relpos_bias = config.position_bias(bidirectional=False)
        self.layers = [T5DecoderLayer(config) for _ in range(self.num_layers)]
        self.decoder_norm = RMSNorm(config.dtype)
        self.dropout = config.dropout()
        if not self.tied_logits:
            init = normal(config.model_dim**-0.5, config.initializers == "t5x")
            self.logits_dense = Matrix(config.model_dim, config.vocab_size, "kernel", init)

    def read_docs(self, encoded: Float[Array, "b L E"], deterministic: bool) -> list[KeysValues]:
        """The keys and values of the encoded documents that each layer attends to."""
        return [layer.encoder_decoder_attention.keys_and_values(encoded, deterministic) for layer in self.layers]

    def __call__(
        self,
        x: Float[Array, "r Q E"],
        docs: list[KeysValues],
        doc_visible: Bool[Array, "b 1 1 L"],
        deterministic: bool,
        earlier: list[KeysValues] | None = None,
        position: Array | int = 0,
    ) -> tuple[Float[Array, "r Q E"], list[KeysValues]]:
        """Vectors to take logits of, and each layer's keys and values with those of the embedded tokens `x` written in.

        `earlier`, of each layer [r, K, H, d], is filled before `position`, where `x` begins; None if `x` is the whole text.
        """
        num_keys = x.shape[1] if earlier is None else earlier[0][0].shape[1]
        positions = position + jnp.arange(x.shape[1])
        bias = None if self.config.bias_per_layer else self.relpos_bias(num_keys, positions)
        visible = (jnp.arange(num_keys)[None, :] <= positions[:, None])[None, None]
        one_text = jnp.ones(x.shape[:2], jnp.int32)
        x = self.dropout(x, deterministic, one_text)
        so_far = []
        for index, layer in enumerate(self.layers):
            before = None if earlier is None else earlier[index]
            x, own = layer(x, docs[index], doc_visible, bias, visible, deterministic, before, position)
            so_far.append(own)
        return self.dropout(self.decoder_norm(x), deterministic, one_text), so_far

    def logits(self, x: Float[Array, "r Q E"], table: Float[Array, "V E"]) -> Float[Array, "r Q V"]:
        """Scores of every entry of the vocabulary, float32; `table` is the embedding, for tied logits."""
        x, float32 = x.astype(self.config.dtype), jnp.dtype(jnp.float32)
        if self.tied_logits:
            return product("ble,ve->blv", x, table, float32)
        return product("ble,ev->blv", x, self.logits_dense(), float32)
