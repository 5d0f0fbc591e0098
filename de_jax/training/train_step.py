"""One update, pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import optax

from de_jax.types import Array, Batch, Embeddings, LossFn, Metrics, Params, TrainState


@runtime_checkable
class Initialisable(Protocol):
    """What a first state needs of a model."""

    def init(self, rng: Array) -> Params:
        """Fresh parameters."""


@runtime_checkable
class Model(Initialisable, Protocol):
    """What a step needs of a model; `DualEncoder` is one."""

    def embed(self, params: Params, batch: Batch, rng: Array | None = None) -> Embeddings:
        """A batch through both towers; dropout is on exactly when `rng` is given."""


TrainStep = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]


def init_state(model: Initialisable, make_tx: Callable[[Params], optax.GradientTransformation], rng: Array) -> TrainState:
    """The state before the first step.

    Args:
        model: gives the parameters.
        make_tx: the optimizer for these parameters.
        rng: the run's key; one half makes the parameters, the other is kept for dropout.
    """
    init_rng, step_rng = jax.random.split(rng)
    params = model.init(init_rng)
    key = jax.random.key_data(step_rng)
    return TrainState(step=jnp.zeros((), jnp.int32), params=params, opt_state=make_tx(params).init(params), rng=key)


def make_train_step(
    model: Model, loss: LossFn, tx: optax.GradientTransformation, group_norms: Callable[[Params], Metrics] = lambda gradients: {}
) -> TrainStep:
    """One update of a dual encoder; see `update_step`.

    The loss sees the whole batch, wherever its rows lie, so in-batch negatives span every device and the gradient is that of
    one device.

    Args:
        model, loss, tx: what is trained, and how.
        group_norms: of the gradients as they are before `tx` clips them, by name; see `grad_norms`. They become metrics.
    """

    def loss_of(params: Params, batch: Batch, rng: Array) -> tuple[Array, Metrics]:
        return loss(model.embed(params, batch, rng))

    return update_step(loss_of, tx, group_norms)


def update_step(
    loss_of: Callable[[Params, Batch, Array], tuple[Array, Metrics]],
    tx: optax.GradientTransformation,
    group_norms: Callable[[Params], Metrics] = lambda gradients: {},
) -> TrainStep:
    """A function from (state, global batch) to (next state, metrics), whatever model the loss is of.

    Randomness is a function of the step: a resumed run repeats it.

    Args:
        loss_of: (parameters, batch, key) to the loss and its parts.
        tx, group_norms: as of `make_train_step`.
    """

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        rng = jax.random.fold_in(jax.random.wrap_key_data(state.rng), state.step)
        (value, parts), gradients = jax.value_and_grad(loss_of, has_aux=True)(state.params, batch, rng)
        updates, opt_state = tx.update(gradients, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        norms = {f"grad_norm/{name}": norm for name, norm in group_norms(gradients).items()}
        metrics = {"loss": value, "grad_norm": optax.global_norm(gradients), **norms, **parts}
        return TrainState(state.step + 1, params, opt_state, state.rng), metrics

    return train_step
