"""Embeddings in fewer bytes: a byte or a bit for each dimension, as `sentence_transformers.quantize_embeddings` makes them."""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Float, Int8, UInt8

from de_jax.retrieval.index import check_finite
from de_jax.types import Array, InputError

PRECISIONS = ("float32", "int8", "binary")
_NUM_STEPS = 255


def quantize(embeddings: Float[Any, "n D"], precision: str, ranges: Float[Any, "2 D"] | None = None) -> Array:
    """Embeddings in a precision; the bytes are those of sentence-transformers.

    "int8": the range of each dimension is cut into 255 equal steps, and a value is the number of its step, less 128; values
    outside the range get its first or last step. "binary": whether a value is above 0, eight dimensions a byte, less 128.

    Args:
        embeddings: finite.
        precision: out of `PRECISIONS`.
        ranges: the least and the greatest value of each dimension, for "int8"; by default those of `embeddings`. Compared
            embeddings need the same ranges.

    Returns:
        float32 [n, D], int8 [n, D], or for "binary" int8 [n, ceil(D / 8)].

    Raises:
        InputError: another precision, a value that is not finite, or no ranges and fewer than two embeddings.

    Example:
        >>> quantize(np.array([[0.0, -1.0], [100.5, 4.1], [255.0, 509.0]]), "int8").tolist()
        [[-128, -128], [-28, -126], [127, 127]]
        >>> quantize(np.array([[0.1, -0.1, 0.2]]), "binary").tolist()
        [[32]]
    """
    check_precision(precision)
    check_finite(embeddings, kind="text")
    if precision == "float32":
        return np.asarray(embeddings, np.float32)
    if precision == "binary":
        return (np.packbits(np.asarray(embeddings) > 0, axis=1) - np.uint8(128)).view(np.int8)
    starts, steps = steps_of(ranges_of(embeddings) if ranges is None else ranges)
    numbers = np.clip(np.floor((embeddings - starts) / steps), 0, _NUM_STEPS)
    return (numbers - 128).astype(np.int8)


def ranges_of(embeddings: Float[Any, "n D"]) -> Float[np.ndarray, "2 D"]:
    """The least and the greatest value of each dimension, float32; the more embeddings, the better they suit others.

    Raises:
        InputError: fewer than two embeddings.
    """
    if len(embeddings) < 2:
        raise InputError(
            f"int8 needs the range of each dimension, which {len(embeddings)} embeddings do not show; give ranges, the least and "
            "the greatest values [2, D] of many."
        )
    return np.stack([np.min(embeddings, axis=0), np.max(embeddings, axis=0)]).astype(np.float32)


def steps_of(ranges: Float[Any, "2 D"]) -> tuple[Float[np.ndarray, " D"], Float[np.ndarray, " D"]]:
    """Where the first step of each dimension begins, and how wide its steps are: 1 where the range is empty.

    Raises:
        InputError: a range that is not finite or ends before it begins.
    """
    starts, ends = np.asarray(ranges, np.float32)
    if not np.isfinite(ranges).all() or (ends < starts).any():
        raise InputError("ranges must be finite, the least values [D] first and the greatest [D] after them.")
    steps = (ends - starts) / _NUM_STEPS
    return starts, np.where(steps == 0, np.float32(1), steps)


def signs(codes: Int8[Any, "n E"] | UInt8[Any, "n E"], dim: int) -> Float[np.ndarray, "n D"]:
    """The embeddings that "binary" codes stand for: 1 where a value was above 0, else -1."""
    return 2 * np.unpackbits(packed_bits(codes), axis=1)[:, :dim].astype(np.float32) - 1


def packed_bits(codes: Int8[Any, "n E"] | UInt8[Any, "n E"]) -> UInt8[np.ndarray, "n E"]:
    """The bits that "binary" packs, without the 128 that it takes away."""
    codes = np.asarray(codes)
    return codes if codes.dtype == np.uint8 else codes.view(np.uint8) ^ np.uint8(128)


def check_precision(precision: str) -> None:
    """Refuses precisions outside `PRECISIONS`."""
    if precision not in PRECISIONS:
        raise InputError(f"precision is {precision!r}; it is one of {', '.join(PRECISIONS)}.")
