"""Parameters drawn by numpy, of a model whose start is not under test: `init` would compile a program for every model."""

import jax
import numpy as np

from de_jax.models.tower import Tower


def random_params(init, seed=0):
    """Parameters of the shapes that `init` gives for a key; a kernel keeps the variance of its input."""
    shapes = jax.eval_shape(lambda: init(jax.random.key(0)))
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        if leaf.ndim < 2:  # norms of ones and biases of zeros would hide a missing one
            return rng.uniform(0.5, 1.5, leaf.shape).astype(leaf.dtype)
        std = leaf.shape[0] ** -0.5 if path[-1].key == "kernel" else 1.0
        return (std * rng.standard_normal(leaf.shape)).astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def tower_params(config, seed=0):
    """Of one tower, as its `apply` takes them."""
    return random_params(lambda key: Tower(config).init(key, np.ones((1, 2), np.int32)), seed)
