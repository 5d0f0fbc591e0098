"""Which tokens of a text make its score: gradient x input."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from de_jax.models.dual_encoder import DualEncoder
from de_jax.types import Array, Params


@functools.partial(jax.jit, static_argnames=("model", "tower"))
def token_saliency(
    model: DualEncoder, params: Params, tower: str, tokens: Int[Array, "b L"], others: Float[Array, "b D"]
) -> tuple[Float[Array, " b"], Float[Array, "b L"]]:
    """The score of each text with an embedding of the other side, and how much each of its tokens matters.

    Gradient x input (Denil et al. 2014; Shrikumar et al. 2016): a token's vector, as the encoder reads it, times the gradient of
    the score with respect to that vector, element by element. The saliency is the L2 norm of this product over the dimensions, as
    in Atanasova et al. (2020). It has no sign: a token that matters may raise or lower the score.

    Args:
        model: the dual encoder; dropout is off.
        params: its parameters.
        tower: whose texts they are, "query" or "doc".
        tokens: ids with their special tokens, 0 is padding.
        others: the embedding that each text is scored with; it is held fixed.

    Returns:
        The inner products, and the saliency, 0 for padding; float32.
    """
    embedded = model.token_embeddings(tower, params, tokens)

    def total(embedded: Float[Array, "b L E"]) -> tuple[Float[Array, ""], Float[Array, " b"]]:
        scores = jnp.einsum("bd,bd->b", model.encode_embedded(tower, params, embedded, tokens), others, precision="highest")
        return jnp.sum(scores), scores

    gradient, scores = jax.grad(total, has_aux=True)(embedded)  # a row's vectors change no other row's score
    product = gradient.astype(jnp.float32) * embedded.astype(jnp.float32)
    return scores, jnp.where(tokens != 0, jnp.linalg.norm(product, axis=-1), 0.0)
