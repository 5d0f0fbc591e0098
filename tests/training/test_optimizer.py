"""Schedules meet their end value; freezing, decay and factors follow the patterns."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from de_jax.training.optim import optimizer
from de_jax.types import InputError

PARAMS = {
    "query": {"encoder": {"mlp": {"kernel": jnp.full((4, 4), 2.0)}, "norm": {"scale": jnp.full(4, 2.0)}}},
    "doc": {"encoder": {"mlp": {"kernel": jnp.full((4, 4), 2.0)}, "norm": {"scale": jnp.full(4, 2.0)}}},
}
OPTIMIZERS = {"adafactor": optimizer.adafactor, "adamw": optimizer.adamw}


def constant(_):
    return jnp.asarray(0.1)


def moved(tx, gradients, params=PARAMS):
    """How far each parameter moves in one update."""
    updates, _ = jax.jit(tx.update)(gradients, tx.init(params), params)
    return jax.tree.map(lambda update: np.abs(np.asarray(update)).max(), updates)


ones = jax.tree.map(jnp.ones_like, PARAMS)


@pytest.mark.parametrize("schedule", [optimizer.linear, optimizer.cosine, optimizer.rsqrt])
def test_schedule_rises_to_the_peak_and_reaches_its_end_at_the_last_step(schedule):
    rates = [float(schedule(peak=1e-3, num_steps=50, warmup_steps=10, end=1e-5)(step)) for step in range(50)]
    assert rates[0] == 0.0
    np.testing.assert_allclose(rates[:11], np.linspace(0, 1e-3, 11), rtol=1e-5)
    assert np.all(np.diff(rates[10:]) < 0)
    np.testing.assert_allclose(rates[-1], 1e-5, rtol=1e-3)


def test_linear_without_warmup_starts_at_the_peak_and_ends_at_zero():
    schedule = optimizer.linear(peak=1e-3, num_steps=20000)
    np.testing.assert_allclose([float(schedule(0)), float(schedule(19999))], [1e-3, 0.0])


def test_rsqrt_halves_after_four_times_the_warmup():
    schedule = optimizer.rsqrt(peak=1.0, num_steps=1000, warmup_steps=100)
    np.testing.assert_allclose(float(schedule(400)), 0.5, rtol=1e-5)


@pytest.mark.parametrize("arguments", [{"num_steps": 0}, {"warmup_steps": 11}, {"peak": 0.0}])
def test_impossible_schedules_are_refused(arguments):
    with pytest.raises(InputError):
        optimizer.linear(**{"peak": 1e-3, "num_steps": 10, **arguments})


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_frozen_parameters_keep_every_bit_over_many_updates(name):
    tx = optimizer.make_optimizer(OPTIMIZERS[name], constant, PARAMS, frozen=["doc/.*"])
    params, state = PARAMS, tx.init(PARAMS)
    for _ in range(3):
        updates, state = tx.update(ones, state, params)
        params = optax.apply_updates(params, updates)
    jax.tree.map(np.testing.assert_array_equal, params["doc"], PARAMS["doc"])
    assert all(
        np.all(new != old) for new, old in zip(jax.tree.leaves(params["query"]), jax.tree.leaves(PARAMS["query"]), strict=True)
    )


def test_frozen_gradients_do_not_count_in_the_clipping_norm():
    huge = {"query": jax.tree.map(lambda x: 1e-3 * x, ones["query"]), "doc": jax.tree.map(lambda x: 1e6 * x, ones["doc"])}
    sgd = lambda schedule, params: optax.sgd(1.0)  # noqa: E731
    tx = optimizer.make_optimizer(sgd, constant, PARAMS, clip_norm=1.0, frozen=["doc/.*"])
    np.testing.assert_allclose(jax.tree.leaves(moved(tx, huge)["query"]), 1e-3, rtol=1e-5)


def test_clipping_limits_the_global_norm():
    sgd = lambda schedule, params: optax.sgd(1.0)  # noqa: E731
    tx = optimizer.make_optimizer(sgd, constant, PARAMS, clip_norm=0.5)
    updates, _ = tx.update(ones, tx.init(PARAMS), PARAMS)
    np.testing.assert_allclose(float(optax.tree.norm(updates)), 0.5, rtol=1e-5)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_learning_rate_factor_scales_exactly_the_matched_updates(name):
    plain = moved(optimizer.make_optimizer(OPTIMIZERS[name], constant, PARAMS), ones)
    scaled = moved(optimizer.make_optimizer(OPTIMIZERS[name], constant, PARAMS, learning_rate_factors={"doc/.*": 0.1}), ones)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), scaled["query"], plain["query"])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, 0.1 * b, rtol=1e-5), scaled["doc"], plain["doc"])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weight_decay_shrinks_kernels_and_leaves_norms(name):
    tx = OPTIMIZERS[name](constant, PARAMS, weight_decay=0.5)
    zeros = jax.tree.map(jnp.zeros_like, PARAMS)
    updates, _ = tx.update(zeros, tx.init(PARAMS), PARAMS)
    np.testing.assert_allclose(updates["query"]["encoder"]["mlp"]["kernel"], -0.1 * 0.5 * 2.0, rtol=1e-5)
    np.testing.assert_array_equal(updates["query"]["encoder"]["norm"]["scale"], 0.0)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_towers_in_turn_are_trained_by_turns_at_the_rate_of_the_run(name):
    """Each as if it alone were trained, in its own updates; the shared part in every one."""
    params = {**PARAMS, "shared": {"projection": {"kernel": jnp.full((4, 4), 2.0)}}}
    rates = jnp.asarray([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    schedule = lambda step: rates[step]  # noqa: E731
    tx = optimizer.make_optimizer(OPTIMIZERS[name], schedule, params, alternate=["query/.*", "doc/.*"], clip_norm=None)
    alone = optimizer.make_optimizer(OPTIMIZERS[name], lambda own: rates[2 * own], PARAMS["query"], clip_norm=None)
    expected, alone_state = PARAMS["query"], alone.init(PARAMS["query"])
    state, gradients = tx.init(params), jax.tree.map(jnp.ones_like, params)
    for step in range(4):
        updates, state = jax.jit(tx.update)(gradients, state, params)
        after = optax.apply_updates(params, updates)
        moves = {tower: not np.array_equal(after[tower]["encoder"]["norm"]["scale"], params[tower]["encoder"]["norm"]["scale"])
                 for tower in ("query", "doc")}  # fmt: skip
        assert moves == {"query": step % 2 == 0, "doc": step % 2 == 1}
        assert np.all(after["shared"]["projection"]["kernel"] != params["shared"]["projection"]["kernel"])
        params = after
        if step % 2 == 0:
            updates, alone_state = alone.update(jax.tree.map(jnp.ones_like, expected), alone_state, expected)
            expected = optax.apply_updates(expected, updates)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), params["query"], expected)


def test_the_gradient_of_what_an_update_trains_is_clipped_as_one():
    params = {name: {"x": jnp.zeros(())} for name in ("query", "doc", "shared")}
    sgd = lambda schedule, params: optax.sgd(1.0)  # noqa: E731
    tx = optimizer.make_optimizer(sgd, lambda step: 1.0, params, alternate=["query/.*", "doc/.*"], clip_norm=1.0)
    state, gradients = tx.init(params), jax.tree.map(lambda x: x + 3.0, params)
    for turn in ("query", "doc"):
        updates, state = tx.update(gradients, state, params)
        expected = {name: {"x": -(0.5**0.5) if name in (turn, "shared") else 0.0} for name in params}
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), updates, expected)


@pytest.mark.parametrize(
    ("patterns", "sentence"),
    [
        (["query/.*"], "has one pattern"),
        (["query/.*", ".*"], "two patterns .* match query/"),
        (["query/.*", "dox/.*"], "matches no"),
    ],
)
def test_turns_that_are_none_are_refused(patterns, sentence):
    with pytest.raises(InputError, match=sentence):
        optimizer.make_optimizer(optimizer.adamw, constant, PARAMS, alternate=patterns)


def test_a_frozen_part_stays_frozen_in_its_towers_turn():
    tx = optimizer.make_optimizer(
        optimizer.adamw, constant, PARAMS, frozen=["query/encoder/norm/.*"], alternate=["query/.*", "doc/.*"]
    )
    by_how_much = moved(tx, ones)
    assert by_how_much["query"]["encoder"]["mlp"]["kernel"] > 0
    assert by_how_much["query"]["encoder"]["norm"]["scale"] == by_how_much["doc"]["encoder"]["mlp"]["kernel"] == 0


def test_a_turn_in_which_nothing_is_trained_is_refused():
    with pytest.raises(
        InputError, match=r"Optimization\.alternate trains 'doc/\.\*' in turn, and Optimization\.frozen freezes all of it"
    ):
        optimizer.make_optimizer(
            optimizer.adamw, constant, PARAMS, frozen=["doc/encoder/.*", "doc/.*"], alternate=["query/.*", "doc/.*"]
        )


def test_adafactor_descends():
    tx = optimizer.adafactor(constant, PARAMS)
    updates, _ = tx.update(ones, tx.init(PARAMS), PARAMS)
    assert all(np.all(leaf < 0) for leaf in jax.tree.leaves(updates))


def test_pattern_that_matches_nothing_is_refused_with_the_towers():
    message = r"freeze pattern 'document/.*' matches no parameter; the towers are 'query' and 'doc'"
    with pytest.raises(InputError, match=message):
        optimizer.make_optimizer(optimizer.adamw, constant, PARAMS, frozen=["document/.*"])
    with pytest.raises(InputError, match="learning rate pattern"):
        optimizer.make_optimizer(optimizer.adamw, constant, PARAMS, learning_rate_factors={"queries/.*": 2.0})
    with pytest.raises(InputError, match="not a regular expression"):
        optimizer.make_optimizer(optimizer.adamw, constant, PARAMS, frozen=["(doc"])
    with pytest.raises(InputError, match="nothing would be trained"):
        optimizer.make_optimizer(optimizer.adamw, constant, PARAMS, frozen=[".*"])


def in_numpy(value, gradients, rate, offset):
    """Adafactor of a small matrix, written from section 8 of Shazeer and Stern 2018: its values, and the sizes of its steps."""
    memory, sizes = np.zeros_like(value), []
    for number, gradient in enumerate(gradients, start=1):
        decay = 1 - (number + offset) ** -0.8
        memory = decay * memory + (1 - decay) * (gradient**2 + 1e-30)
        step = gradient / np.sqrt(memory)
        step /= max(1, np.sqrt(np.mean(step**2)))
        sizes.append(np.sqrt(np.mean(step**2)))
        value = value - rate * max(1e-3, np.sqrt(np.mean(value**2))) * step
    return value, sizes


@pytest.mark.parametrize("offset", [0, 1_000_000])
def test_the_memory_of_adafactor_begins_where_it_is_told_to(offset):
    """With the clock of a continued T5X run, steps of a shrinking gradient keep their size; from 0 on, they shrink."""
    rng = np.random.default_rng(0)
    value, gradients = rng.normal(size=(5, 7)), [rng.normal(size=(5, 7)) * 0.97**number for number in range(60)]
    expected, sizes = in_numpy(value, gradients, 0.1, offset)
    assert (min(sizes) > 0.999) == bool(offset)
    params = {"kernel": jnp.asarray(value, jnp.float32)}
    tx = optimizer.adafactor(constant, params, decay_offset=offset)
    state, update = tx.init(params), jax.jit(tx.update)
    for gradient in gradients:
        updates, state = update({"kernel": jnp.asarray(gradient, jnp.float32)}, state, params)
        params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(params["kernel"], expected, rtol=1e-4)


@pytest.mark.parametrize("start", [0.0, -0.7])
def test_a_scalar_moves_whatever_its_value(start):
    params = {"temperature": {"log_scale": jnp.asarray(start)}, "kernel": jnp.ones((2, 2))}
    steps = moved(optimizer.adafactor(constant, params), jax.tree.map(jnp.ones_like, params), params)
    assert steps["temperature"]["log_scale"] == pytest.approx(0.1)


@pytest.mark.parametrize("schedule", [optimizer.linear, optimizer.cosine])
def test_a_decay_may_end_elsewhere_than_the_run(schedule):
    rate = schedule(peak=1.0, num_steps=100, warmup_steps=10, decay_steps=1001)
    np.testing.assert_allclose(rate(10), 1.0)
    assert 0.9 < rate(99) < 1
    assert rate(1000) == pytest.approx(0, abs=1e-6)
    with pytest.raises(InputError, match="warmup_steps is 101, but the run has 100 steps"):
        schedule(peak=1.0, num_steps=100, warmup_steps=101, decay_steps=1001)
