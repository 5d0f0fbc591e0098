"""Optimizers and schedules for `Optimization`: by name, as in `optimizer="adamw"`, or bound with settings by a partial."""

from de_jax.training.optim.lamb import ance_lamb, lamb
from de_jax.training.optim.optimizer import adafactor, adamw, cosine, linear, rsqrt

__all__ = ["adafactor", "adamw", "ance_lamb", "cosine", "lamb", "linear", "rsqrt"]
