"""LAMB, which scales each parameter's step by its own norm: as published, and as ANCE's code has it."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from de_jax.settings import NonNegativeFloat, PositiveFloat, ShareBelowOne, checked
from de_jax.training.optim.optimizer import DECAYED, decay_mask
from de_jax.types import Array, Params, Schedule

MAX_WEIGHT_NORM = 10.0
"""The largest parameter norm in `ance_lamb`; a larger norm counts as this value."""


@checked
def lamb(
    schedule: Schedule,
    params: Params,
    *,
    b1: ShareBelowOne = 0.9,
    b2: ShareBelowOne = 0.999,
    eps: PositiveFloat = 1e-6,
    weight_decay: NonNegativeFloat = 0.01,
    decayed: Sequence[str] = DECAYED,
) -> optax.GradientTransformation:
    """LAMB (You et al. 2020).

    Args:
        weight_decay: per update, before the step is scaled to the parameter's norm.
        schedule, params, b1, b2, eps, decayed: as of `adamw`.
    """
    mask = decay_mask(weight_decay, decayed, params)
    return optax.lamb(schedule, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, mask=mask)


@checked
def ance_lamb(
    schedule: Schedule,
    params: Params,
    *,
    b1: ShareBelowOne = 0.9,
    b2: ShareBelowOne = 0.999,
    eps: PositiveFloat = 1e-8,
    weight_decay: NonNegativeFloat = 0.0,
    decayed: Sequence[str] = DECAYED,
) -> optax.GradientTransformation:
    """LAMB as ANCE (Xiong et al. 2021) was trained with, by its public code: no bias correction, and a parameter's norm counts at
    most 10. The first updates are therefore smaller than `lamb`'s; arguments are `lamb`'s.
    """
    mask = decay_mask(weight_decay, decayed, params)
    decay = optax.add_decayed_weights(weight_decay, mask=mask) if weight_decay else optax.identity()
    scaled = optax.stateless_with_tree_map(_scaled_to_norm)
    return optax.chain(_raw_moments(b1, b2, eps), decay, scaled, optax.scale_by_learning_rate(schedule))


def _raw_moments(b1: float, b2: float, eps: float) -> optax.GradientTransformation:
    """m / (sqrt(v) + eps) of running means that start at 0 and stay uncorrected."""

    def init(params: Params) -> optax.ScaleByAdamState:
        zeros = [jax.tree.map(jnp.zeros_like, params) for _ in range(2)]
        return optax.ScaleByAdamState(jnp.zeros((), jnp.int32), *zeros)

    def update(gradients: Any, state: Any, params: Params | None = None) -> tuple[Any, optax.ScaleByAdamState]:
        mu = jax.tree.map(lambda g, m: b1 * m + (1 - b1) * g, gradients, state.mu)
        nu = jax.tree.map(lambda g, v: b2 * v + (1 - b2) * jnp.square(g), gradients, state.nu)
        steps = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + eps), mu, nu)
        return steps, optax.ScaleByAdamState(state.count + 1, mu, nu)

    return optax.GradientTransformation(init, update)


def _scaled_to_norm(step: Array, param: Array) -> Array:
    """The step times the ratio of the parameter's norm to its own; as it is where either is 0."""
    weight_norm = jnp.minimum(jnp.linalg.norm(param.reshape(-1)), MAX_WEIGHT_NORM)
    step_norm = jnp.linalg.norm(step.reshape(-1))
    has_ratio = (weight_norm > 0) & (step_norm > 0)
    return step * jnp.where(has_ratio, weight_norm / jnp.where(has_ratio, step_norm, 1.0), 1.0)
