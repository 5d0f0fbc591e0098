"""Low-rank adapters of linear maps (LoRA: Hu et al. 2022), added to the outputs of the maps while a model is applied."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from flax import linen as nn

from de_jax.models.layers import Dropout, Linear, product, stream_dtype
from de_jax.types import Array

A, B = "lora_a", "lora_b"
"""Where the parameters of a `Linear` hold those of its adapter, each a kernel: [E, r] and [r, F]."""


def applied(*, scale: float, dropout_rate: float) -> contextlib.AbstractContextManager[None]:
    """Within it, a `Linear` with an adapter gives x W + scale * dropout(x) A B; every other module does as ever.

    Adapters are looked for in the parameters, and W is never summed with A B. `scale` is alpha / r, and `dropout_rate` is of an
    adapter's input, wherever the model's own dropout is on.
    """
    dropout = Dropout(dropout_rate, parent=None)

    def with_adapter(call: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        y, linear = call(*args, **kwargs), context.module
        if not isinstance(linear, Linear) or context.method_name != "__call__" or not linear.has_variable("params", A):
            return y
        kernel: Callable[[str], Array] = lambda name: linear.get_variable("params", name)["kernel"]  # noqa: E731
        x: Array = args[0]
        if dropout_rate and linear.has_rng("dropout"):
            x = dropout.apply({}, x, False, rngs={"dropout": linear.make_rng("dropout")})
        between = stream_dtype(linear.dtype)
        low = product("ble,er->blr", x.astype(linear.dtype), kernel(A), between)
        return y + scale * product("blr,rf->blf", low.astype(linear.dtype), kernel(B), between)

    return nn.intercept_methods(with_adapter)
