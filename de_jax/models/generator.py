"""A T5 that writes queries for documents: doc2query (Nogueira et al. 2019; with T5, Nogueira and Lin 2019), and its decoder.

The decoder is T5's, 1.0 and 1.1 (Raffel et al. 2020), with T5X's parameter names; keys and values of earlier tokens can be kept.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Bool, Float, Int

from de_jax.models.attention import attend_visible
from de_jax.models.layers import Dropout, Linear, Matrix, normal, product, split_by_rows, stream_dtype
from de_jax.models.t5 import FeedForward, RMSNorm, T5Config, T5Encoder, TokenEmbedder
from de_jax.models.tower import rounded_kernels
from de_jax.settings import PositiveInt, check_fields, of_class
from de_jax.types import Array, Batch, InputError, Metrics, Params

KeysValues = tuple[Array, Array]
"""Keys and values of a sequence for one attention, [b, L, H, d] each."""
START_ID = 0
"""The token before the first token: T5 begins with padding."""


class ReadDocs(NamedTuple):
    """Documents as a decoder attends to them."""

    keys_values: list[KeysValues]  # of each layer, [b, L, H, d]
    visible: Bool[Array, "b 1 1 L"]


@dataclasses.dataclass(frozen=True)
class Generator:
    """An encoder of documents and a decoder of queries. Parameters are {"embedder", "encoder", "decoder"}, float32.

    Attributes:
        t5: sizes of both; `remat` and `scan_layers` concern the encoder.
        num_decoder_layers: None for as many as the encoder has.
        tied_logits: whether the embedding table gives the logits too (T5 1.0), or a kernel of their own (1.1).
        scaled_logits: whether vectors are divided by sqrt(E) before (1.0); None for exactly where logits are tied.
    """

    t5: T5Config
    num_decoder_layers: PositiveInt | None = None
    tied_logits: bool = False
    scaled_logits: bool | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.t5.max_distance <= self.t5.num_buckets // 2:
            raise InputError(
                f"T5Config.max_distance is {self.t5.max_distance}; the decoder's {self.t5.num_buckets} buckets want more than "
                f"{self.t5.num_buckets // 2}."
            )

    def init(self, rng: Array) -> Params:
        """Fresh parameters, float32."""
        tokens = jnp.ones((1, 2), jnp.int32)
        return self._module().init(rng, tokens, tokens)["params"]

    def logits(
        self, params: Params, docs: Int[Array, "B Ld"], queries: Int[Array, "B Lq"], rng: Array | None = None
    ) -> Float[Array, "B Lq V"]:
        """Scores of each token of the queries given those before it, float32. Dropout is on exactly when `rng` is given."""
        rngs = None if rng is None else {"dropout": rng}
        return self._module().apply({"params": params}, docs, queries, rng is None, rngs=rngs)  # type: ignore[return-value]

    def loss(self, params: Params, batch: Batch, rng: Array | None = None) -> tuple[Float[Array, ""], Metrics]:
        """The mean negative log-likelihood, in nats, of the tokens of each row's query given its document, ends included.

        Nothing but `query` and `doc` is looked at, and every token that is not padding counts once; `rng` turns dropout on.
        """
        logits = self.logits(params, batch.doc, batch.query, rng)
        of_target = jnp.take_along_axis(logits, batch.query[..., None], axis=-1)[..., 0]
        nll = jax.nn.logsumexp(logits, axis=-1) - of_target
        counts = (batch.query != 0).astype(jnp.float32)
        total = jnp.maximum(jnp.sum(counts), 1.0)
        is_right = (jnp.argmax(logits, axis=-1) == batch.query).astype(jnp.float32)
        return jnp.sum(nll * counts) / total, {"token_accuracy": jnp.sum(is_right * counts) / total}

    def read_docs(self, params: Params, docs: Int[Array, "b L"]) -> ReadDocs:
        """Encodes documents once for all tokens that follow."""
        keys_values = self._module().apply({"params": params}, docs, method="read_docs")
        return ReadDocs(keys_values, _visible(docs))  # type: ignore[arg-type]

    def no_tokens(self, num_rows: int, max_length: int) -> list[KeysValues]:
        """Room for the keys and values of texts of up to `max_length` tokens."""
        shape = (num_rows, max_length, self.t5.num_heads, self.t5.head_dim)
        empty = jnp.zeros(shape, self.t5.dtype)
        return [(empty, empty) for _ in range(self._num_decoder_layers())]

    def next_logits(
        self, params: Params, docs: ReadDocs, tokens: Int[Array, " r"], earlier: list[KeysValues], position: Array
    ) -> tuple[Float[Array, "r V"], list[KeysValues]]:
        """Scores of the tokens after `tokens`, which stand at `position`, float32; and `earlier` with these tokens in it."""
        variables = {"params": params}
        return self._module().apply(variables, docs, tokens, earlier, position, method="next_logits")  # type: ignore[return-value]

    def inference_params(self, params: Params) -> Params:
        """See `rounded_kernels`."""
        return rounded_kernels(params, self.t5.dtype)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values from which `from_json` makes an equal model."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Generator:
        """The model that `to_json` described."""
        return cls(**{**value, "t5": T5Config(**value["t5"])})

    def _num_decoder_layers(self) -> int:
        return self.num_decoder_layers or self.t5.num_layers

    def _module(self) -> _EncoderDecoder:
        scaled = self.tied_logits if self.scaled_logits is None else self.scaled_logits
        return _EncoderDecoder(self.t5, self._num_decoder_layers(), self.tied_logits, scaled)


DESCRIPTION = of_class(Generator, t5=of_class(T5Config))
"""What `Generator.from_json` makes a model of."""


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


class _EncoderDecoder(nn.Module):
    config: T5Config
    num_decoder_layers: int
    tied_logits: bool
    scaled_logits: bool

    def setup(self) -> None:
        self.embedder = TokenEmbedder(self.config)
        self.encoder = T5Encoder(self.config)
        self.decoder = T5Decoder(self.config, self.num_decoder_layers, self.tied_logits)

    def __call__(self, docs: Int[Array, "b L"], queries: Int[Array, "b T"], deterministic: bool = True) -> Float[Array, "b T V"]:
        read = self.read_docs(docs, deterministic)
        before = jnp.pad(queries, ((0, 0), (1, 0)), constant_values=START_ID)[:, :-1]
        x, _ = self.decoder(self._embedded(before, deterministic), read, _visible(docs), deterministic)
        return self._logits(x)

    def read_docs(self, docs: Int[Array, "b L"], deterministic: bool = True) -> list[KeysValues]:
        segments = (docs != 0).astype(jnp.int32)
        encoded = self.encoder(self.embedder(docs, segments, deterministic), segments, deterministic)
        return self.decoder.read_docs(encoded, deterministic)

    def next_logits(
        self, docs: ReadDocs, tokens: Int[Array, " r"], earlier: list[KeysValues], position: Array
    ) -> tuple[Float[Array, "r V"], list[KeysValues]]:
        x, so_far = self.decoder(self._embedded(tokens[:, None], True), *docs, True, earlier, position)
        return self._logits(x)[:, 0], so_far

    def _embedded(self, tokens: Int[Array, "r Q"], deterministic: bool) -> Float[Array, "r Q E"]:
        return self.embedder(tokens, jnp.ones_like(tokens), deterministic)

    def _logits(self, x: Float[Array, "r Q E"]) -> Float[Array, "r Q V"]:
        if self.scaled_logits:
            x = (x.astype(stream_dtype(x.dtype)) * self.config.model_dim**-0.5).astype(x.dtype)
        return self.decoder.logits(x, self.embedder.variables["params"]["embedding"])


def _visible(docs: Int[Array, "b L"]) -> Bool[Array, "b 1 1 L"]:
    return (docs != 0)[:, None, None, :]
