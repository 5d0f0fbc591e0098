"""An encoder that is a table: each token has its vector, wherever it stands, and pooling makes a text's of them."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

from flax import linen as nn
from jaxtyping import Float, Int

from de_jax.models.t5 import TokenEmbedder
from de_jax.settings import PositiveInt, check_fields
from de_jax.types import Array


@dataclasses.dataclass(frozen=True)
class StaticConfig:
    """The table of a static model, such as sentence-transformers' StaticEmbedding or model2vec: no positions, layers or norms.

    Attributes:
        vocab_size, model_dim: its rows and columns.
        dtype: of the vectors before they are pooled; the table stays float32.
    """

    num_layers: ClassVar[int] = 0
    num_heads: ClassVar[int] = 0
    head_dim: ClassVar[int] = 0
    mlp_dim: ClassVar[int] = 0
    is_gated: ClassVar[bool] = False
    max_length: ClassVar[int | None] = None
    vocab_size: PositiveInt = 30522
    model_dim: PositiveInt = 1024
    dtype: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        check_fields(self)

    def embedder(self) -> nn.Module:
        return TokenEmbedder(self)  # type: ignore[arg-type]

    def encoder(self) -> nn.Module:
        return Unchanged()


class Unchanged(nn.Module):
    """Gives the embedder's vectors."""

    def __call__(self, x: Float[Array, "b L E"], segments: Int[Array, "b L"], deterministic: bool) -> Float[Array, "b L E"]:
        return x
