"""Norms by group against sums of squares in float64, and the thirds of towers of any depth."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from de_jax.losses.in_batch import in_batch_softmax
from de_jax.models.bert import BertConfig
from de_jax.models.dual_encoder import DualEncoder
from de_jax.models.t5 import T5Config
from de_jax.models.tower import TowerConfig
from de_jax.recipe import Initialization, Logging, Recipe
from de_jax.training.optim import paths
from de_jax.training.optim.optimizer import adamw, linear, make_optimizer
from de_jax.training.step import grad_norms
from de_jax.training.step.adapters import Lora
from de_jax.training.step.train_step import batch_shapes, init_state, make_train_step
from de_jax.types import Batch, InputError

ENCODER = T5Config(vocab_size=31, model_dim=8, num_layers=2, num_heads=2, head_dim=4, mlp_dim=8, dtype="float32", dropout_rate=0.0)
MODEL = DualEncoder(TowerConfig(ENCODER, projection_dim=4), TowerConfig(ENCODER, projection_dim=4), ("projection",))
GROUPS = {"queries": "query/.*", "first": ".*/layers_0/.*", "all": ".*"}


def shapes(num_query_layers, num_doc_layers, shared=(), kind=ENCODER):
    towers = [TowerConfig(dataclasses.replace(kind, num_layers=n), projection_dim=4) for n in (num_query_layers, num_doc_layers)]
    return jax.eval_shape(DualEncoder(*towers, shared).init, jax.random.key(0))


def layers_of(params, pattern):
    found = [
        re.fullmatch(r"(\w+)/encoder/layers_(\d+)/.*", path) for path in paths.all_paths(params) if re.fullmatch(pattern, path)
    ]
    return sorted({(match[1], int(match[2])) for match in found})


@pytest.mark.soak
@pytest.mark.short_soak
def test_a_steps_norms_are_those_of_the_gradient_before_it_is_clipped():
    rng = np.random.default_rng(0)
    tokens, ids = rng.integers(1, 31, (2, 6, 5)).astype(np.int32), np.arange(6, dtype=np.int32)
    batch = Batch(*tokens, ids, ids)
    loss = functools.partial(in_batch_softmax, temperature=0.05)
    tx = functools.partial(make_optimizer, adamw, linear(peak=1e-3, num_steps=5), clip_norm=1e-3)
    state = init_state(MODEL, tx, jax.random.key(0))
    step = make_train_step(MODEL, loss, tx(state.params), grad_norms.group_norms(state.params, GROUPS))
    metrics = jax.jit(step)(state, batch)[1]
    gradients = jax.jit(jax.grad(lambda params, batch: loss(MODEL.embed(params, batch))[0]))(state.params, batch)
    squares = {
        paths.path_of(path): np.sum(np.square(np.asarray(leaf, np.float64)))
        for path, leaf in jax.tree_util.tree_leaves_with_path(gradients)
    }
    for name, pattern in GROUPS.items():
        expected = np.sqrt(sum(square for path, square in squares.items() if re.fullmatch(pattern, path)))
        np.testing.assert_allclose(metrics[f"grad_norm/{name}"], expected, rtol=1e-5)
    np.testing.assert_allclose(metrics["grad_norm/all"], metrics["grad_norm"], rtol=1e-6)
    assert metrics["grad_norm"] > 1e-2


def test_a_step_without_groups_has_the_metrics_of_old():
    assert grad_norms.group_norms(shapes(1, 1), None)({"a": jnp.ones(2)}) == {}


@pytest.mark.parametrize(
    ("num_layers", "expected"),
    [
        (1, {"middle": [0]}),
        (2, {"bottom": [0], "top": [1]}),
        (6, {"bottom": [0, 1], "middle": [2, 3], "top": [4, 5]}),
        (12, {"bottom": [0, 1, 2, 3], "middle": [4, 5, 6, 7], "top": [8, 9, 10, 11]}),
    ],
)
def test_thirds_share_out_the_layers_of_a_tower(num_layers, expected):
    params = shapes(num_layers, num_layers, ("embedder", "encoder", "projection"), BertConfig(31, 8, num_heads=2, mlp_dim=8))
    found = grad_norms.thirds(params)
    assert found.keys() == {"embedder", *expected, "projection"}
    assert {name: [layer for _, layer in layers_of(params, found[name])] for name in expected} == expected


def test_towers_of_different_depth_have_their_own_thirds():
    params = shapes(1, 3)
    found = grad_norms.thirds(params)
    assert {name: layers_of(params, found[name]) for name in ("bottom", "middle", "top")} == {
        "bottom": [("doc", 0)],
        "middle": [("doc", 1), ("query", 0)],
        "top": [("doc", 2)],
    }
    for name in ("embedder", "projection"):
        towers = {path.partition("/")[0] for path in paths.all_paths(params) if re.fullmatch(found[name], path)}
        assert towers == {"query", "doc"}


def test_thirds_of_adapters_are_those_of_the_whole_model():
    whole = {"shared": {"encoder": {f"layers_{n}": {"attention": {"query": {"kernel": np.ones((4, 4))}}} for n in range(12)}}}
    lora = Lora(pattern=".*/layers_[0-5]/.*", rank=1)
    trained, _ = lora.split(lora.added_to(whole, jax.random.key(0)))
    found = grad_norms.thirds(trained, whole)
    assert {name: [layer for _, layer in layers_of(trained, pattern)] for name, pattern in found.items()} == {
        "bottom": [0, 1, 2, 3],
        "middle": [4, 5],
    }
    recipe = Recipe(
        model=MODEL,
        data=lambda share: None,
        loss=functools.partial(in_batch_softmax, temperature=0.1),
        logging=Logging(grad_norm_groups="thirds"),
        initialization=Initialization(init_from="nowhere"),
        adapters=Lora(pattern=".*/layers_0/attention/query/kernel", rank=1),
    )
    metrics = jax.eval_shape(recipe.train_step(recipe.shapes().params), recipe.shapes(), batch_shapes(8, 8, 8))[1]
    assert {name for name in metrics if name.startswith("grad_norm/")} == {"grad_norm/bottom"}


def test_thirds_without_a_parameter_are_refused():
    params = {"encoder": {"layers_0": {"kernel": np.ones((4, 4))}}, "embedder": {"embedding": np.ones((4, 4))}}
    with pytest.raises(InputError, match=r"groups are 'thirds', which are of a dual encoder's .*; give a pattern for each name"):
        grad_norms.group_norms(params, "thirds")


def test_a_pattern_that_matches_nothing_is_refused():
    params = shapes(1, 1)
    with pytest.raises(InputError, match=r"gradient norm pattern 'shared/\.\*' matches no parameter"):
        grad_norms.group_norms(params, {"a": "shared/.*"})
