"""A T5 that writes queries for documents: doc2query (Nogueira et al. 2019; with T5, Nogueira and Lin 2019)."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Bool, Float, Int

from de_jax.models.layers import stream_dtype
from de_jax.models.t5 import T5Config, T5Encoder, TokenEmbedder
from de_jax.models.t5_decoder import KeysValues, T5Decoder
from de_jax.models.tower import rounded_kernels
from de_jax.settings import PositiveInt, check_fields, of_class
from de_jax.types import Array, Batch, InputError, Metrics, Params

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
