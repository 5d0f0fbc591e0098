"""A frozen tower is a constant: no dropout, no gradient, not one bit of its parameters."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from de_jax.losses.in_batch import in_batch_softmax
from de_jax.models.dual_encoder import DualEncoder
from de_jax.models.t5 import T5Config
from de_jax.models.tower import TowerConfig
from de_jax.training.optim.optimizer import adamw, make_optimizer
from de_jax.training.step.as_trained import ChunkedModel, FrozenModel
from de_jax.training.step.train_step import init_state, make_train_step
from de_jax.types import Batch, Embeddings

TOWER = TowerConfig(
    T5Config(vocab_size=32, model_dim=8, num_layers=1, num_heads=2, head_dim=4, mlp_dim=8, dtype="float32", dropout_rate=0.5),
    projection_dim=8,
)
MODEL = DualEncoder(TOWER, TOWER, shared=("projection",))
FROZEN = ("doc/.*",)


@pytest.fixture(scope="module")
def params():
    return jax.jit(MODEL.init)(jax.random.key(0))


@pytest.fixture(scope="module")
def batch():
    tokens = np.random.default_rng(0).integers(1, 32, (2, 4, 6)).astype(np.int32)
    return jax.tree.map(jnp.asarray, Batch(*tokens, np.arange(4, dtype=np.int32), np.arange(4, dtype=np.int32)))


@pytest.mark.parametrize("inner", [MODEL, ChunkedModel(MODEL, 2)], ids=["whole", "chunked"])
@pytest.mark.soak
@pytest.mark.short_soak
def test_a_tower_frozen_as_a_whole_has_no_dropout_and_the_other_has(params, batch, inner):
    model = FrozenModel(inner, FROZEN)
    embed = jax.jit(model.embed)
    first, second = (embed(params, batch, jax.random.key(seed)) for seed in (1, 2))
    np.testing.assert_array_equal(first.doc, second.doc)
    np.testing.assert_allclose(first.doc, jax.jit(MODEL.encode_doc)(params, batch.doc), atol=1e-6)
    assert np.abs(np.asarray(first.query - second.query)).max() > 0.01


def test_a_tower_frozen_in_part_keeps_its_dropout(params, batch):
    model = FrozenModel(MODEL, ("doc/encoder/.*",))
    embed = jax.jit(model.embed)
    first, second = (embed(params, batch, jax.random.key(seed)) for seed in (1, 2))
    assert np.abs(np.asarray(first.doc - second.doc)).max() > 0.01
    assert FrozenModel(MODEL, ("doc/.*", "query/.*")).whole_towers(params) == ("query", "doc")


def test_other_towers_without_dropout_are_added_to_those_that_are_frozen():
    found = []
    inner = SimpleNamespace(embed=lambda *args, without_dropout: found.append(without_dropout) or Embeddings(*[None] * 4))
    params = {"query": {"encoder": np.zeros(1)}, "doc": {"encoder": np.zeros(1)}}
    FrozenModel(inner, ("doc/.*",)).embed(params, Batch(None, None, None, None), None, without_dropout=("query",))
    assert found == [{"query", "doc"}]


def test_gradients_are_zero_where_frozen_and_those_of_the_model_elsewhere(params, batch):
    def value(model, params):
        return in_batch_softmax(model.embed(params, batch), temperature=0.1)[0]

    frozen, free = (jax.jit(jax.grad(functools.partial(value, model)))(params) for model in (FrozenModel(MODEL, FROZEN), MODEL))
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(frozen["doc"]))
    assert optax.tree.norm(free["doc"]) > 0
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-6), frozen["query"], free["query"])
    assert optax.tree.norm(frozen["shared"]) > 0


def test_training_moves_no_bit_of_a_frozen_tower_and_no_cost_is_paid_for_it(batch):
    make_tx = functools.partial(make_optimizer, adamw, lambda step: jnp.float32(0.1), frozen=FROZEN)
    loss = functools.partial(in_batch_softmax, temperature=0.1)
    first = init_state(MODEL, make_tx, jax.random.key(0))
    last, flops = {}, {}
    for name, model in (("frozen", FrozenModel(MODEL, FROZEN)), ("free", MODEL)):
        step, state = jax.jit(make_train_step(model, loss, make_tx(first.params))), first
        flops[name] = step.lower(state, batch).compile().cost_analysis()["flops"]
        for _ in range(3):
            state, _ = step(state, batch)
        last[name] = state.params
    jax.tree.map(np.testing.assert_array_equal, last["frozen"]["doc"], first.params["doc"])
    pairs = zip(*map(jax.tree.leaves, (last["frozen"]["query"], first.params["query"])), strict=True)
    assert all(np.any(new != old) for new, old in pairs)
    assert flops["frozen"] < 0.8 * flops["free"]
