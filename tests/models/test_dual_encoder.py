"""What is shared, what is not, and what a gradient reaches."""

import dataclasses
import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_params import random_params

from de_jax.data.batches import layout
from de_jax.losses.in_batch import in_batch_softmax
from de_jax.models.dual_encoder import ARCHITECTURES, MIN_TEMPERATURE, DualEncoder
from de_jax.models.t5 import T5Config
from de_jax.models.tower import PARTS, TowerConfig
from de_jax.training.step.as_trained import ChunkedModel
from de_jax.types import Batch, Embeddings, InputError


def tower(num_layers=1, model_dim=16, projection_dim=8, dropout_rate=0.0, **overrides) -> TowerConfig:
    encoder = T5Config(
        vocab_size=31,
        model_dim=model_dim,
        num_layers=num_layers,
        num_heads=2,
        head_dim=4,
        mlp_dim=16,
        dtype="float32",
        dropout_rate=dropout_rate,
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
    towers = (tower(num_layers=2), tower()) if name == "ade_spl" else (tower(), tower())
    model = DualEncoder(*towers, SHARED[name])
    params = model.shapes()
    own = tuple(part for part in PARTS if part not in SHARED[name])
    assert tuple(params.get("shared", {})) == SHARED[name]
    assert tuple(params.get("query", {})) == own
    assert tuple(params.get("doc", {})) == own
    for of_temperature in (model, dataclasses.replace(model, initial_temperature=0.1)):
        assert of_temperature.shapes() == jax.eval_shape(lambda m=of_temperature: m.init(jax.random.key(0)))


@pytest.mark.parametrize("num_layers", [0, 1, 3])
@pytest.mark.parametrize("architecture", sorted({*ARCHITECTURES} - {"StaticConfig"}))
def test_shapes_are_those_of_the_parameters_whatever_the_number_of_layers(architecture, num_layers):
    sizes = {"vocab_size": 31, "model_dim": 8, "num_layers": num_layers, "num_heads": 2, "mlp_dim": 8}
    one = TowerConfig(ARCHITECTURES[architecture](**sizes), projection_dim=8)
    model = DualEncoder(one, one, ())
    assert model.shapes() == jax.eval_shape(lambda: model.init(jax.random.key(0)))


def test_sde_embeds_a_text_equally_on_both_sides_and_ade_does_not():
    for shared, equal in ((PARTS, True), ((), False)):
        model = DualEncoder(tower(), tower(), shared)
        on_both_sides = jax.jit(lambda p, tokens, m=model: (m.encode_query(p, tokens), m.encode_doc(p, tokens)))
        assert np.array_equal(*on_both_sides(random_params(model.init), batch().query)) == equal


@pytest.mark.parametrize("name", ["ade_spl", "ade_ste"])
def test_query_gradient_reaches_the_query_tower_and_the_shared_parts_only(name):
    model = DualEncoder(tower(), tower(), SHARED[name])
    gradient_of = jax.jit(jax.grad(lambda p: jnp.sum(model.encode_query(p, batch().query) * jnp.arange(8.0)[None])))
    gradients = gradient_of(random_params(model.init))
    moved = {name: any(np.any(leaf) for leaf in jax.tree.leaves(tree)) for name, tree in gradients.items()}
    assert moved == {"query": True, "doc": False, "shared": True}


def test_towers_of_different_depth_and_width_share_a_projection():
    model = DualEncoder(tower(num_layers=1), tower(num_layers=3), ("projection",))
    embeddings = jax.eval_shape(model.embed, model.shapes(), batch())
    assert embeddings.query.shape == embeddings.doc.shape == (4, 8)
    model = DualEncoder(tower(model_dim=8), tower(model_dim=16), ())
    assert jax.eval_shape(model.embed, model.shapes(), batch()).neg_docs.shape == (4, 3, 8)


ADE = DualEncoder(tower(dropout_rate=0.5), tower(dropout_rate=0.5), (), initial_temperature=0.05)
embed = jax.jit(ADE.embed)


def test_mined_negatives_are_embedded_as_documents():
    params = random_params(ADE.init)
    expected = jax.jit(ADE.encode_doc)(params, batch().neg_docs[2])
    np.testing.assert_allclose(embed(params, batch()).neg_docs[2], expected, atol=1e-6)


def packed(texts, row_length):
    """Two texts a row."""
    texts = np.asarray(texts)
    rows = texts.reshape(-1, texts.shape[-1])
    sizes, places = np.full(len(rows), rows.shape[-1]), np.arange(len(rows))
    one = layout.fill(rows, sizes, places // 2, places % 2, num_rows=-(-len(rows) // 2), row_length=row_length, max_texts=2)
    return one._replace(slots=one.slots.reshape(texts.shape[:-1]))


def alike(texts: Batch, row_length: int | None = None) -> Batch:
    """With queries as wide as documents; packed, with another number of texts a row for the queries."""
    wide = texts._replace(query=np.pad(texts.query, ((0, 0), (0, 2))))
    if row_length is None:
        return wide
    query, doc, negatives = (packed(one, row_length) for one in (texts.query, texts.doc, texts.neg_docs))
    query = query._replace(lengths=np.pad(query.lengths, ((0, 0), (0, 3))), slots=query.slots // 2 * 5 + query.slots % 2)
    return wide._replace(query=query, doc=doc, neg_docs=negatives)


@pytest.fixture
def calls(monkeypatch):
    """The number of rows of each call of a tower while the test runs."""
    found, encode_rows = [], DualEncoder.encode_rows

    def counted(self, tower, params, tokens, *rest):
        found.append(len(tokens))
        return encode_rows(self, tower, params, tokens, *rest)

    monkeypatch.setattr(DualEncoder, "encode_rows", counted)
    return found


@pytest.mark.parametrize(
    ("shared", "texts", "num_calls"),
    [
        (PARTS, alike(batch()), 1),
        (PARTS, alike(batch(), 16), 1),
        (PARTS, batch(), 2),  # queries are narrower
        (PARTS, alike(batch(), 16)._replace(query=batch().query), 2),
        ((), alike(batch(), 16), 2),
        (("embedder",), alike(batch()), 2),
    ],
    ids=["padded", "packed", "widths", "layouts", "ade", "ade_ste"],
)
def test_rows_of_one_width_and_tower_are_encoded_by_one_call(shared, texts, num_calls, calls):
    model = DualEncoder(tower(dropout_rate=0.5), tower(dropout_rate=0.5), shared)
    params = random_params(model.init)
    found = jax.jit(model.embed)(params, texts)
    assert len(calls) == num_calls
    alone = batch()
    expected = jax.jit(model.encode_query)(params, alone.query), jax.jit(model.encode_doc)(params, alone.doc)
    for own, other in zip((found.query, found.doc), expected, strict=True):
        np.testing.assert_allclose(own, other, atol=1e-5)
    negatives = jax.jit(model.encode_doc)(params, alone.neg_docs.reshape(12, 7)).reshape(4, 3, 8)
    np.testing.assert_allclose(found.neg_docs, negatives, atol=1e-5)
    calls.clear()
    dropped = jax.jit(functools.partial(model.embed, without_dropout=("doc",)))(params, texts, jax.random.key(0))
    assert len(calls) == 2
    np.testing.assert_allclose(dropped.doc, found.doc, atol=1e-5)
    assert abs(dropped.query - found.query).max() > 0.01


@pytest.mark.parametrize("texts", [alike(batch()), alike(batch(), 16)], ids=["padded", "packed"])
def test_chunks_are_no_larger_than_a_part_of_one_field(texts, calls):
    """Rows that are encoded together would make chunks of all fields at once, so of two or three times the memory."""
    model = DualEncoder(tower(), tower(), PARTS)
    jax.eval_shape(ChunkedModel(model, 2).embed, random_params(model.init), texts)
    rows = [math.prod(np.shape(getattr(one, "tokens", one))[:-1]) for one in (texts.query, texts.doc, texts.neg_docs)]
    assert sorted(set(calls)) == sorted({num // 2 for num in rows})


def test_a_tower_without_layers_encodes_each_field_alone(calls):
    """It has nothing to compile, and joined rows of documents would carry as many places as those of queries."""
    model = DualEncoder(tower(num_layers=0), tower(num_layers=0), PARTS)
    jax.eval_shape(model.embed, random_params(model.init), alike(batch(), 16))
    assert len(calls) == 3


def test_sharing_parts_of_different_shape_is_refused():
    with pytest.raises(InputError, match=r"part 'encoder' is shared, but its parameter .*layers_2"):
        DualEncoder(tower(num_layers=2), tower(num_layers=3))


def test_towers_must_agree_on_the_embedding_size():
    with pytest.raises(InputError, match="8 dimensions and document embeddings 12"):
        DualEncoder(tower(), tower(projection_dim=12), ())


def test_learned_temperature_is_a_parameter_with_a_floor():
    params = random_params(ADE.init)
    start = jax.jit(lambda: ADE.init(jax.random.key(0))["shared"]["temperature"]["log_scale"])()
    for log_scale, scale in ((start, 20.0), (np.float32(50.0), 100.0)):
        params["shared"]["temperature"]["log_scale"] = log_scale
        np.testing.assert_allclose(embed(params, batch()).scale, scale, rtol=1e-6)
    without = dataclasses.replace(ADE, initial_temperature=None)
    assert jax.eval_shape(without.embed, without.shapes(), batch()).scale is None


def test_a_learned_temperature_leaves_its_floor_where_the_loss_wants_a_higher_one():
    limit, vectors = np.float32(-np.log(MIN_TEMPERATURE)), jnp.eye(4)

    @jax.jit
    @jax.grad
    def gradient(log_scale, doc):
        scale = ADE._scale({"shared": {"temperature": {"log_scale": log_scale}}})
        return in_batch_softmax(Embeddings(vectors, 0.1 * doc, jnp.arange(4), jnp.arange(4), scale=scale), temperature=None)[0]

    for doc, signs in ((jnp.roll(vectors, 1, axis=0), (1, 1, 1)), (vectors, (-1, -1, 0))):  # no query finds its document, or all
        found = [gradient(limit + np.float32(beyond), doc) for beyond in (-1e-3, 0, 0.1)]
        assert tuple(map(np.sign, found)) == signs
        np.testing.assert_allclose(found[1], found[0], rtol=0.05)  # whole at the limit, not halved


def test_dropout_is_on_exactly_when_a_key_is_given():
    params, key = random_params(ADE.init), jax.random.key(7)
    plain, dropped, repeated = (embed(params, batch(), *rng).query for rng in ((), (key,), (key,)))
    without = dataclasses.replace(ADE, query=tower(), doc=tower())
    np.testing.assert_array_equal(plain, jax.jit(without.encode_query)(params, batch().query))
    np.testing.assert_array_equal(dropped, repeated)
    assert not np.allclose(plain, dropped)


def test_json_describes_the_model_completely():
    model = DualEncoder(tower(num_layers=1, pooling="first"), tower(normalize=False), ("projection",), initial_temperature=0.02)
    assert DualEncoder.from_json(json.loads(json.dumps(model.to_json()))) == model
