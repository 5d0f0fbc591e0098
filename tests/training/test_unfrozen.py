"""A run that continues with other frozen parameters: what stays trained keeps its optimizer state, what is new begins with none."""

import contextlib
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from de_jax.training.mesh import sharding
from de_jax.training.optim import paths
from de_jax.training.optim.optimizer import adafactor, adamw, make_optimizer
from de_jax.training.run.checkpoint import Checkpoints
from de_jax.training.run.loop import completed
from de_jax.types import InputError, TrainState

NUM_STEPS = 3
SHAPES = {
    "query": {"mlp": {"kernel": (16, 32)}, "norm": {"scale": (16,)}},
    "doc": {"mlp": {"kernel": (16, 32)}},
    "shared": {"projection": {"kernel": (32, 8)}, "log_scale": ()},
}
ALONE = {
    "adamw": optax.adamw(1e-2, weight_decay=0.0),
    "adafactor": adafactor(lambda step: 1e-2, {}, min_dim_size_to_factor=8),
    "accumulated": optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
}
"""The same optimizers of one parameter, as optax has them."""
OPTIMIZERS = {
    "adamw": functools.partial(adamw, weight_decay=0.0),
    "adafactor": functools.partial(adafactor, min_dim_size_to_factor=8),
    "accumulated": lambda schedule, params: optax.MultiSteps(optax.adam(schedule), 2).gradient_transformation(),
}
FROZEN = {"none": (), "query": ("query/.*",), "doc": ("doc/.*", ".*/log_scale")}


def drawn(step):
    """A tree of the parameters' shapes."""
    draw = np.random.default_rng(step).normal
    return jax.tree.map(lambda shape: jnp.asarray(draw(size=shape), jnp.float32), SHAPES, is_leaf=lambda node: type(node) is tuple)


def tx_of(optimizer, frozen):
    return make_optimizer(OPTIMIZERS[optimizer], lambda step: 1e-2, drawn(0), clip_norm=None, frozen=FROZEN[frozen])


def first(optimizer, frozen):
    params = drawn(0)
    opt_state = tx_of(optimizer, frozen).init(params)
    return TrainState(jnp.int32(0), params, opt_state, jax.random.key_data(jax.random.key(0)))


def updated(tx, state, step):
    updates, opt_state = jax.jit(tx.update)(drawn(step), state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    return state._replace(step=state.step + 1, params=params, opt_state=opt_state)


def like(optimizer, frozen, num_devices=1):
    mesh = sharding.make_mesh(fsdp=num_devices, data=1)
    abstract = jax.eval_shape(functools.partial(first, optimizer, frozen))
    return sharding.with_shardings(abstract, sharding.state_shardings(abstract, mesh))


def continued(folder, optimizer, now, num_devices=1):
    """The state after its last checkpoint, and the warnings."""
    with contextlib.closing(Checkpoints(folder)) as checkpoints, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        state = checkpoints.restore(NUM_STEPS, like(optimizer, now, num_devices))
    return completed(functools.partial(first, optimizer, now), state), [str(one.message) for one in told]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder and the last state of a run by its optimizer and what it froze."""

    @functools.cache
    def run(optimizer, frozen):
        tx, state = tx_of(optimizer, frozen), first(optimizer, frozen)
        for step in range(NUM_STEPS):
            state = updated(tx, state, step + 1)
        folder = tmp_path_factory.mktemp(f"{optimizer}_{frozen}")
        with contextlib.closing(Checkpoints(folder, keep=1)) as checkpoints:
            checkpoints.save(NUM_STEPS, state)
        return folder, state

    return run


def alone(optimizer, path, steps):
    """A parameter's value and its optimizer's state after updates of it alone."""
    tx, value = ALONE[optimizer], paths.by_path(drawn(0))[path]
    state = tx.init(value)
    for step in steps:
        update, state = tx.update(paths.by_path(drawn(step))[path], state, value)
        value = value + update
    return value, state


@pytest.mark.parametrize(("then", "now"), [("query", "none"), ("query", "doc")])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_next_update_is_that_of_every_parameter_alone(runs, optimizer, then, now):
    folder, saved = runs(optimizer, then)
    state, told = continued(folder, optimizer, now)
    assert jax.tree.structure(state) == jax.tree.structure(first(optimizer, now))
    jax.tree.map(np.testing.assert_array_equal, state.params, saved.params)
    was, is_now = ({path for path in paths.all_paths(drawn(0)) if not paths.matches(FROZEN[one], path)} for one in (then, now))
    counts = f"of {len(was & is_now)} parameters is kept, it is new for {len(is_now - was)}, and dropped for {len(was - is_now)}."
    assert [counts in sentence for sentence in told] == [True]
    after = paths.by_path(updated(tx_of(optimizer, now), state, NUM_STEPS + 1).params)
    for path in paths.all_paths(drawn(0)):
        steps = range(1, NUM_STEPS + 1) if path in was else ()
        value, own = alone(optimizer, path, steps)
        if path in is_now and path not in was:  # no moments, but the run's counts
            _, counted = alone(optimizer, path, range(1, NUM_STEPS + 1))
            own = jax.tree.map(lambda ours, theirs: theirs if ours.dtype == jnp.int32 else jnp.zeros_like(ours), own, counted)
        if path in is_now:
            value = value + ALONE[optimizer].update(paths.by_path(drawn(NUM_STEPS + 1))[path], own, value)[0]
        np.testing.assert_allclose(after[path], value, atol=1e-6, err_msg=path)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_moments_that_stay_are_bit_equal_on_eight_devices_and_lie_where_they_should(runs, optimizer):
    folder, saved = runs(optimizer, "query")
    state, _ = continued(folder, optimizer, "none", num_devices=8)
    placed = like(optimizer, "none", num_devices=8)
    jax.tree.map(lambda array, place: np.testing.assert_equal(array.sharding, place.sharding), state, placed)
    assert any(not leaf.is_fully_replicated for leaf in jax.tree.leaves(state.opt_state))
    before = {path.replace("inner_states/trained/inner_state/", ""): leaf for path, leaf in paths.by_path(saved.opt_state).items()}
    after = paths.by_path(state.opt_state)
    assert before.keys() < after.keys()
    for path, leaf in after.items():
        np.testing.assert_array_equal(leaf, before.get(path, np.zeros(leaf.shape, leaf.dtype)), err_msg=path)


def test_the_same_frozen_parameters_are_continued_without_a_word(runs):
    folder, saved = runs("adamw", "query")
    state, told = continued(folder, "adamw", "query")
    assert told == []
    jax.tree.map(np.testing.assert_array_equal, state, saved)


@pytest.mark.parametrize("then", ["none", "query"])
def test_the_state_of_another_optimizer_is_refused_whatever_was_frozen(runs, then):
    folder, _ = runs("adamw", then)
    with pytest.raises(InputError, match=r"is of another model: 'opt_state/.*' has .* there and .* here"):
        continued(folder, "adafactor", "none")
