"""A BERT that predicts masked tokens (Devlin et al. 2019)."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Float, Int

from de_jax.models.bert import BertConfig, norm_of
from de_jax.models.layers import Linear, product
from de_jax.settings import check_fields
from de_jax.types import Array, Metrics, Params


class MaskedTexts(NamedTuple):
    """A batch for a model that predicts masked tokens; int32."""

    tokens: Array  # [B, L], some of them masked; 0 is padding
    places: Array  # [B, M] which of a row's tokens are asked for
    targets: Array  # [B, M] what stood there
    doc_id: Array  # [B] the text in which a row begins


@dataclasses.dataclass(frozen=True)
class MaskedLanguageModel:
    """An encoder and a head over the vocabulary. Parameters are {"embedder", "encoder", "head"}, float32.

    The head is BERT's: a linear map, gelu and a norm, then the products with the word table, and a bias for each word.

    Attributes:
        encoder: its sizes.
    """

    encoder: BertConfig

    def __post_init__(self) -> None:
        check_fields(self)

    def init(self, rng: Array) -> Params:
        """Fresh parameters, float32."""
        tokens = jnp.ones((1, 2), jnp.int32)
        return self._module().init(rng, tokens, tokens)["params"]

    def logits(
        self, params: Params, tokens: Int[Array, "B L"], places: Int[Array, "B M"], rng: Array | None = None
    ) -> Float[Array, "B M V"]:
        """Scores of each word at each of the places of a row, float32. Dropout is on exactly when `rng` is given."""
        rngs = None if rng is None else {"dropout": rng}
        return self._module().apply({"params": params}, tokens, places, rng is None, rngs=rngs)  # type: ignore[return-value]

    def loss(self, params: Params, batch: MaskedTexts, rng: Array | None = None) -> tuple[Float[Array, ""], Metrics]:
        """The mean negative log-likelihood, in nats, of the original tokens at the places of all rows.

        Args:
            params: the model's.
            batch: texts with masked tokens.
            rng: turns dropout on.
        """
        logits = self.logits(params, batch.tokens, batch.places, rng)
        of_target = jnp.take_along_axis(logits, batch.targets[..., None], axis=-1)[..., 0]
        is_right = (jnp.argmax(logits, axis=-1) == batch.targets).astype(jnp.float32)
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - of_target), {"token_accuracy": jnp.mean(is_right)}

    def _module(self) -> _EncoderWithHead:
        return _EncoderWithHead(self.encoder)


class _EncoderWithHead(nn.Module):
    config: BertConfig

    def setup(self) -> None:
        self.embedder = self.config.embedder()
        self.encoder = self.config.encoder()
        self.head = _Head(self.config)

    def __call__(self, tokens: Int[Array, "b L"], places: Int[Array, "b M"], deterministic: bool = True) -> Float[Array, "b M V"]:
        segments = (tokens != 0).astype(jnp.int32)
        hidden = self.encoder(self.embedder(tokens, segments, deterministic), segments, deterministic)
        asked = jnp.take_along_axis(hidden, places[..., None], axis=1)  # [b, M, E]
        return self.head(asked, self.embedder.variables["params"]["embedding"])


class _Head(nn.Module):
    config: BertConfig

    @nn.compact
    def __call__(self, x: Float[Array, "b M E"], table: Float[Array, "V E"]) -> Float[Array, "b M V"]:
        config, dtype = self.config, jnp.dtype(self.config.dtype)
        x = Linear(config.model_dim, config.model_dim**-0.5, dtype, use_bias=True, name="dense")(x)
        x = norm_of(config, "norm")(nn.gelu(x, approximate=False))
        bias = self.param("bias", nn.initializers.zeros, (config.vocab_size,))
        return product("ble,ve->blv", x.astype(dtype), table, jnp.dtype(jnp.float32)) + bias[None, None, :]
