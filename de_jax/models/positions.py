"""How fast rotary positions turn, and how that is changed for texts longer than a model was first trained on."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from jaxtyping import Float

Scaling = Literal["linear", "llama3", "yarn"]


def speeds(
    head_dim: int,
    base: float,
    scaling: Scaling = "linear",
    factor: float = 1.0,
    *,
    length: int = 8192,
    few_turns: float = 1.0,
    many_turns: float = 4.0,
) -> Float[np.ndarray, " h"]:
    """The angle of each pair of dimensions from one token to the next, in radians: base^(-2i / head_dim), slowed down.

    Pairs that turn at most `few_turns` times within `length` tokens are slowed down by `factor`. Pairs with at least `many_turns`
    turns keep their speed, and a linear ramp lies in between. Llama 3 (Grattafiori et al. 2024) computes the ramp from the number
    of turns. YaRN (Peng et al. 2024) computes it from the index of the pair, and rounds the ends of the ramp outwards.

    Args:
        head_dim: even.
        base: the longest wavelength is near 2 pi times this.
        scaling: "linear" slows all pairs down (Chen et al. 2023).
        factor: 1 changes nothing.
        length: tokens of the texts that the model was trained on before.
        few_turns, many_turns: 1 and 4 in Llama 3, 1 and 32 in YaRN.

    Example:
        >>> speeds(4, 100.0).round(3).tolist()
        [1.0, 0.1]
        >>> speeds(4, 100.0, "llama3", 8.0, length=60).round(3).tolist()  # 10 turns, and 1
        [1.0, 0.012]
    """
    pair = np.arange(head_dim // 2)
    unscaled = base ** -(2 * pair / head_dim)
    if scaling == "linear":
        return unscaled / factor
    if scaling == "llama3":
        kept = (length * unscaled / (2 * math.pi) - few_turns) / (many_turns - few_turns)
    else:
        pair_of = lambda turns: head_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))  # noqa: E731
        first = max(math.floor(pair_of(many_turns)), 0)
        last = min(math.ceil(pair_of(few_turns)), head_dim - 1)
        kept = 1 - (pair - first) / (last - first or 0.001)
    kept = np.clip(kept, 0, 1)
    return unscaled * (kept + (1 - kept) / factor)


def size(scaling: Scaling, factor: float) -> float:
    """The factor of turned queries and keys: 1, or in YaRN slightly more, which sharpens attention over longer texts."""
    return 0.1 * math.log(factor) + 1 if scaling == "yarn" and factor > 1 else 1.0
