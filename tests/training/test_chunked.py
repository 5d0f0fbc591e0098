"""Chunks change neither values nor gradients, and on a mesh no row leaves its device for them."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from de_jax.losses.combination import combined, matryoshka
from de_jax.losses.distillation import margin_mse
from de_jax.losses.in_batch import in_batch_softmax
from de_jax.models.dual_encoder import DualEncoder
from de_jax.models.t5 import T5Config
from de_jax.models.tower import TowerConfig
from de_jax.training.mesh import sharding
from de_jax.training.step.as_trained import ChunkedModel, chunked
from de_jax.types import Batch, InputError, Packed

ENCODER = T5Config(
    vocab_size=61, model_dim=16, num_layers=1, num_heads=2, head_dim=8, mlp_dim=32, dtype="float32", dropout_rate=0.0
)
MODEL = DualEncoder(TowerConfig(ENCODER, projection_dim=8), TowerConfig(ENCODER, projection_dim=8), ("projection",))


def batch(num_rows=32):
    rng = np.random.default_rng(0)
    ids = np.arange(num_rows, dtype=np.int32)
    draw = lambda *shape: rng.integers(1, 61, shape).astype(np.int32)  # noqa: E731
    negatives = np.arange(2 * num_rows, dtype=np.int32).reshape(num_rows, 2) + 1000
    scores = rng.normal(size=(num_rows, 3)).astype(np.float32)
    scores[rng.random(scores.shape) < 0.2] = np.nan
    texts = draw(num_rows, 6), draw(num_rows, 10)
    return Batch(*texts, ids, ids, neg_docs=draw(num_rows, 2, 10), neg_doc_ids=negatives, scores=scores)


@pytest.fixture(scope="module")
def params():
    return jax.jit(MODEL.init)(jax.random.key(0))


def value_and_grad(model, params, rows):
    return jax.jit(jax.value_and_grad(functools.partial(loss_of, model)))(params, rows)


@pytest.fixture(scope="module")
def whole(params):
    return value_and_grad(MODEL, params, packed_batch())


def loss_of(model, params, rows):
    """Of whole and of cut embeddings, with mined negatives and a teacher's scores."""
    parts = (functools.partial(in_batch_softmax, temperature=0.05), functools.partial(matryoshka, loss=margin_mse, dims=(8, 3)))
    return combined(model.embed(params, rows), losses=parts)[0]


def packed_batch():
    """The texts of `batch()`, every one of them cut to its first tokens, two a row."""
    rows, rng = batch(), np.random.default_rng(1)

    def pack(tokens):
        texts = tokens.reshape(-1, tokens.shape[-1])
        lengths = rng.integers(1, texts.shape[1] // 2 + 1, len(texts)).astype(np.int32).reshape(-1, 2)
        packed = np.zeros((len(lengths), texts.shape[1]), np.int32)
        for row, (first, second) in enumerate(lengths.tolist()):
            packed[row, : first + second] = texts[2 * row : 2 * row + 2].reshape(-1)[: first + second]
        slots = np.random.default_rng(2).permutation(len(texts)).astype(np.int32)
        return Packed(packed, lengths, slots.reshape(tokens.shape[:-1]))

    return rows._replace(query=pack(rows.query), doc=pack(rows.doc), neg_docs=pack(rows.neg_docs))


@pytest.mark.soak
def test_chunks_of_packed_rows_change_neither_loss_nor_gradient(params, whole):
    pieces = value_and_grad(ChunkedModel(MODEL, 4), params, packed_batch())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), pieces, whole)


@pytest.mark.soak
def test_packed_rows_on_eight_devices_give_the_gradient_of_one(params, whole):
    mesh = sharding.make_mesh(8)
    model = ChunkedModel(MODEL, 2)
    placed = jax.device_put(params, sharding.replicated(mesh)), sharding.place(packed_batch(), mesh)
    step = jax.jit(jax.value_and_grad(functools.partial(loss_of, model))).lower(*placed).compile()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), step(*placed), whole)
    # No device computes another's rows: token ids of whole rows are not gathered.
    assert not re.findall(r"s32\[\d+,(?:\d+,)?(?:6|10)\]\S* (?:all-gather|all-to-all|collective-permute)\(", step.as_text())


def test_chunks_change_neither_loss_nor_gradient(params):
    pieces, whole = (value_and_grad(model, params, batch()) for model in (ChunkedModel(MODEL, 4), MODEL))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), pieces, whole)


def test_rows_come_back_in_their_order():
    tokens = jnp.arange(24, dtype=jnp.int32).reshape(12, 2)
    identity = lambda params, rows, rng, lengths: rows.astype(jnp.float32)  # noqa: E731
    np.testing.assert_array_equal(chunked(identity, 4)({}, tokens), tokens)


def test_each_chunk_draws_its_own_dropout():
    draw = lambda params, rows, rng, lengths: jax.random.uniform(rng, rows.shape)  # noqa: E731
    drawn = chunked(draw, 4)({}, jnp.zeros((8, 3), jnp.int32), jax.random.key(0))
    assert len(np.unique(drawn)) == drawn.size


@pytest.mark.soak
def test_no_row_changes_its_device(params):
    mesh = sharding.make_mesh(8)
    placed = jax.device_put(params, sharding.replicated(mesh))

    def gathered(model):
        step = jax.jit(jax.grad(functools.partial(loss_of, model)))
        text = step.lower(placed, sharding.place(batch(), mesh)).compile().as_text()
        # Token ids are the only int32 matrices of a text's width: if one is gathered, a device encodes others' rows.
        assert not re.findall(r"s32\[\d+,(?:\d+,)?(?:6|10)\]\S* (?:all-gather|all-to-all|collective-permute)\(", text)
        return len(re.findall(r" all-gather\(", text))

    assert gathered(ChunkedModel(MODEL, 2)) <= gathered(MODEL)


def test_rows_that_do_not_divide_are_refused(params):
    with pytest.raises(InputError, match="32 rows cannot be cut into 5"):
        jax.eval_shape(functools.partial(loss_of, ChunkedModel(MODEL, 5)), params, batch())
    with pytest.raises(InputError, match=r"batch_size 24 is not divisible by the 8 devices of the mesh times 2 chunks; take 16"):
        sharding.check_batch_size(24, sharding.make_mesh(8), 2)
