"""Both forms of LAMB against loops over numpy arrays in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from de_jax.training.optim.lamb import ance_lamb, lamb
from de_jax.training.optim.optimizer import make_optimizer
from de_jax.types import InputError

RATES = [0.1, 0.05, 0.02, 0.01]


def schedule(step):
    return jnp.asarray(RATES)[step]


def params(scale=1.0):
    rng = np.random.default_rng(0)
    kernel, bias = (rng.normal(size=shape).astype(np.float32) for shape in ((4, 3), (3,)))
    return {"doc": {"encoder": {"kernel": scale * kernel, "bias": bias, "zero": np.zeros(2, np.float32)}}}


def gradients(number):
    rng = np.random.default_rng(number + 1)
    return jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), params())


def by_loops(start, *, eps, weight_decay, corrected, max_norm):
    """The parameters after all updates."""
    leaves = {name: np.asarray(leaf, np.float64) for name, leaf in start["doc"]["encoder"].items()}
    m, v = ({name: np.zeros_like(leaf) for name, leaf in leaves.items()} for _ in range(2))
    for number, rate in enumerate(RATES):
        for name, leaf in leaves.items():
            g = np.asarray(gradients(number)["doc"]["encoder"][name], np.float64)
            m[name] = 0.9 * m[name] + 0.1 * g
            v[name] = 0.999 * v[name] + 0.001 * g * g
            by = (1 - 0.9 ** (number + 1), 1 - 0.999 ** (number + 1)) if corrected else (1.0, 1.0)
            step = m[name] / by[0] / (np.sqrt(v[name] / by[1]) + eps)
            if name == "kernel":
                step = step + weight_decay * leaf
            norms = min(np.linalg.norm(leaf), max_norm), np.linalg.norm(step)
            leaves[name] = leaf - rate * step * (norms[0] / norms[1] if min(norms) > 0 else 1.0)
    return leaves


def trained(optimizer, start):
    tx = optimizer(schedule, start)
    state, found = tx.init(start), start
    for number in range(len(RATES)):
        updates, state = jax.jit(tx.update)(gradients(number), state, found)
        found = jax.tree.map(jnp.add, found, updates)
    return found["doc"]["encoder"]


@pytest.mark.parametrize("scale", [1.0, 20.0])
@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (lamb, {"eps": 1e-6, "weight_decay": 0.01, "corrected": True, "max_norm": np.inf}),
        (ance_lamb, {"eps": 1e-8, "weight_decay": 0.0, "corrected": False, "max_norm": 10.0}),
    ],
)
def test_updates_equal_loops(optimizer, options, scale):
    expected = by_loops(params(scale), **options)
    for name, found in trained(optimizer, params(scale)).items():
        np.testing.assert_allclose(found, expected[name], rtol=1e-5, atol=1e-6, err_msg=name)


def test_ance_lamb_decays_the_kernels_that_a_pattern_names():
    decaying = lambda schedule, params: ance_lamb(schedule, params, weight_decay=0.1)  # noqa: E731
    expected = by_loops(params(), eps=1e-8, weight_decay=0.1, corrected=False, max_norm=10.0)
    for name, found in trained(decaying, params()).items():
        np.testing.assert_allclose(found, expected[name], rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("optimizer", [lamb, ance_lamb])
def test_a_pattern_without_a_parameter_is_refused(optimizer):
    bound = lambda schedule, params: optimizer(schedule, params, weight_decay=0.1, decayed=("query/.*",))  # noqa: E731
    with pytest.raises(InputError, match=r"weight decay pattern 'query/\.\*' matches no parameter"):
        make_optimizer(bound, schedule, params())
