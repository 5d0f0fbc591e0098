"""A permuted model computes the same, in another order of dimensions."""

import jax
import numpy as np
import pytest
from random_params import random_params

from de_jax.models.bert import BertConfig
from de_jax.models.dual_encoder import DualEncoder
from de_jax.models.t5 import T5Config
from de_jax.models.tower import TowerConfig
from experiments.permuted_model import order_of, permuted

ENCODERS = {
    "bert": BertConfig(vocab_size=20, model_dim=16, num_layers=1, num_heads=2, mlp_dim=24, max_positions=12, dtype="float32"),
    "t5": T5Config(vocab_size=20, model_dim=16, num_layers=1, num_heads=2, head_dim=8, mlp_dim=24, dtype="float32"),
}


@pytest.mark.parametrize("name", ["bert", pytest.param("t5", marks=pytest.mark.soak)])
def test_embeddings_have_the_same_values_in_another_order(name):
    tower = TowerConfig(ENCODERS[name], pooling="first", projection_dim=None)
    model = DualEncoder(tower, tower)
    params = random_params(model.init)
    tokens = np.random.default_rng(0).integers(1, 20, (3, 7)).astype(np.int32)
    embed = jax.jit(model.encode_query)
    before, after = embed(params, tokens), embed(permuted(params, 16, 5), tokens)
    order = order_of(16, 5)
    np.testing.assert_allclose(after, np.asarray(before)[:, order], atol=1e-5)
    assert not np.allclose(after, before, atol=1e-2)
