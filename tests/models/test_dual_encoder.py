"""What is shared, what is not, and what a gradient reaches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from de_jax.models.dual_encoder import DualEncoder
from de_jax.models.t5 import T5Config
from de_jax.models.tower import PARTS, TowerConfig
from de_jax.types import Batch, InputError


def tower(num_layers=2, model_dim=16, projection_dim=8, **overrides) -> TowerConfig:
    encoder = T5Config(
        vocab_size=31,
        model_dim=model_dim,
        num_layers=num_layers,
        num_heads=2,
        head_dim=4,
        mlp_dim=16,
        dtype="float32",
        dropout_rate=0.0,
    )
    return TowerConfig(encoder, projection_dim=projection_dim, **overrides)


def batch() -> Batch:
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.integers(1, 31, shape).astype(np.int32)  # noqa: E731
    ids = np.arange(4, dtype=np.int32)
    return Batch(draw(4, 5), draw(4, 7), ids, ids, neg_docs=draw(4, 3, 7), neg_doc_ids=np.arange(12, dtype=np.int32).reshape(4, 3))


SHARED = {"sde": PARTS, "ade": (), "ade_spl": ("projection",), "ade_ste": ("embedder",)}


@pytest.mark.parametrize("name", SHARED)
def test_shared_parts_exist_once_and_the_others_twice(name):
    params = DualEncoder(tower(), tower(), SHARED[name]).init(jax.random.key(0))
    own = tuple(part for part in PARTS if part not in SHARED[name])
    assert tuple(params.get("shared", {})) == SHARED[name]
    assert tuple(params.get("query", {})) == own
    assert tuple(params.get("doc", {})) == own


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("temperature", [None, 0.1])
def test_shapes_are_those_of_fresh_parameters(name, temperature):
    towers = (tower(), tower(num_layers=1)) if name == "ade_spl" else (tower(), tower())
    model = DualEncoder(*towers, SHARED[name], temperature)
    assert model.shapes() == jax.eval_shape(model.init, jax.random.key(0))


def test_sde_embeds_a_text_equally_on_both_sides_and_ade_does_not():
    tokens = batch().query
    for shared, equal in ((PARTS, True), ((), False)):
        model = DualEncoder(tower(), tower(), shared)
        params = model.init(jax.random.key(0))
        assert np.array_equal(model.encode_query(params, tokens), model.encode_doc(params, tokens)) == equal


@pytest.mark.parametrize("name", SHARED)
def test_query_gradient_reaches_the_query_tower_and_the_shared_parts_only(name):
    model = DualEncoder(tower(), tower(), SHARED[name])
    params = model.init(jax.random.key(0))
    gradients = jax.grad(lambda p: jnp.sum(model.encode_query(p, batch().query) * jnp.arange(8.0)[None]))(params)
    moved = {name: any(np.any(leaf) for leaf in jax.tree.leaves(tree)) for name, tree in gradients.items()}
    assert moved == {name: name != "doc" for name in params}


def test_towers_of_different_depth_and_width_share_a_projection():
    model = DualEncoder(tower(num_layers=1), tower(num_layers=3), ("projection",))
    embeddings = model.embed(model.init(jax.random.key(0)), batch())
    assert embeddings.query.shape == embeddings.doc.shape == (4, 8)
    model = DualEncoder(tower(model_dim=8), tower(model_dim=16), ())
    assert model.embed(model.init(jax.random.key(0)), batch()).neg_docs.shape == (4, 3, 8)


def test_mined_negatives_are_embedded_as_documents():
    model = DualEncoder(tower(), tower(), ())
    params = model.init(jax.random.key(0))
    embeddings = model.embed(params, batch())
    np.testing.assert_allclose(embeddings.neg_docs[2], model.encode_doc(params, batch().neg_docs[2]), atol=1e-6)


def test_sharing_parts_of_different_shape_is_refused():
    with pytest.raises(InputError, match=r"part 'encoder' is shared, but its parameter .*layers_2"):
        DualEncoder(tower(num_layers=2), tower(num_layers=3))


def test_towers_must_agree_on_the_embedding_size():
    with pytest.raises(InputError, match="8 dimensions and document embeddings 12"):
        DualEncoder(tower(), tower(projection_dim=12), ())


def test_learned_temperature_is_a_parameter_with_a_floor():
    model = DualEncoder(tower(), tower(), initial_temperature=0.05)
    params = model.init(jax.random.key(0))
    np.testing.assert_allclose(model.embed(params, batch()).scale, 20.0, rtol=1e-6)
    params["shared"]["temperature"]["log_scale"] = jnp.asarray(50.0)
    np.testing.assert_allclose(model.embed(params, batch()).scale, 100.0, rtol=1e-6)
    assert DualEncoder(tower(), tower()).embed(DualEncoder(tower(), tower()).init(jax.random.key(0)), batch()).scale is None


def test_dropout_is_on_exactly_when_a_key_is_given():
    import dataclasses

    encoder = dataclasses.replace(tower().encoder, dropout_rate=0.5)
    model = DualEncoder(TowerConfig(encoder, projection_dim=8), TowerConfig(encoder, projection_dim=8))
    params = model.init(jax.random.key(0))
    plain, again = (model.embed(params, batch()).query for _ in range(2))
    dropped, repeated = (model.embed(params, batch(), jax.random.key(7)).query for _ in range(2))
    np.testing.assert_array_equal(plain, again)
    np.testing.assert_array_equal(dropped, repeated)
    assert not np.allclose(plain, dropped)


def test_json_describes_the_model_completely():
    model = DualEncoder(tower(num_layers=1, pooling="first"), tower(normalize=False), ("projection",), initial_temperature=0.02)
    import json

    assert DualEncoder.from_json(json.loads(json.dumps(model.to_json()))) == model
