"""Our T5 decoder against transformers' torch one, with the same random weights."""

import jax
import numpy as np
import pytest
from random_params import random_params

from de_jax.models.generator import Generator
from de_jax.models.t5 import T5Config
from de_jax.training.mesh import sharding
from de_jax.types import Batch

SIZES = {"vocab_size": 61, "model_dim": 32, "num_layers": 1, "num_heads": 4, "head_dim": 8, "mlp_dim": 48}
logits_of, loss_of, next_logits, read_docs = (  # compiled: op by op, a test of a model takes many times as long
    jax.jit(method, static_argnums=0) for method in (Generator.logits, Generator.loss, Generator.next_logits, Generator.read_docs)
)
gradient_of = jax.jit(jax.value_and_grad(lambda params, rows, model: model.loss(params, rows)[0]), static_argnums=2)
VERSIONS = {"t5_1_0": ("relu", True), "t5_1_1": ("gated_gelu", False)}


def tokens(lengths, longest, seed=0):
    rng = np.random.default_rng(seed)
    rows = np.zeros((len(lengths), longest), np.int32)
    for row, length in zip(rows, lengths, strict=True):
        row[:length] = rng.integers(3, 61, length)
    return rows


def batch(docs, queries):
    return Batch(query=queries, doc=docs, query_id=np.arange(len(docs)), doc_id=np.arange(len(docs)))


DOCS, QUERIES = tokens([9, 4, 6, 8, 3, 2, 9, 5], 9), tokens([6, 2, 4, 4, 1, 3, 5, 6], 6, seed=1)


def generator(version="t5_1_1", **options):
    """With a dropout rate, which without a key must change nothing."""
    activation, tied = VERSIONS[version]
    return Generator(T5Config(**SIZES, activation=activation, dropout_rate=0.5, dtype="float32", **options), 2, tied)


@pytest.mark.parametrize("bias_per_layer", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_steps_with_kept_keys_and_values_equal_the_whole_text(bias_per_layer):
    model = generator(bias_per_layer=bias_per_layer)
    params = random_params(model.init)
    docs, queries = DOCS[:4], tokens([6] * 8, 6, seed=1)
    expected = logits_of(model, params, np.repeat(docs, 2, axis=0), queries)
    read, earlier = read_docs(model, params, docs), model.no_tokens(8, 6)
    for position in range(6):
        before = queries[:, position - 1] if position else np.zeros(8, np.int32)
        actual, earlier = next_logits(model, params, read, before, earlier, np.int32(position))
        np.testing.assert_allclose(actual, expected[:, position], atol=1e-4)


@pytest.mark.parametrize("version", sorted(VERSIONS))
def test_loss_equals_a_loop_over_tokens(version):
    model = generator(version)
    params = random_params(model.init)
    logits = np.asarray(logits_of(model, params, DOCS, QUERIES), np.float64)
    nll = []
    for row, query in zip(logits, QUERIES, strict=True):
        for scores, token in zip(row, query, strict=True):
            if token:
                nll.append(np.log(np.sum(np.exp(scores))) - scores[token])
    loss, metrics = loss_of(model, params, batch(DOCS, QUERIES))
    np.testing.assert_allclose(loss, np.mean(nll), rtol=1e-5)
    assert 0 <= float(metrics["token_accuracy"]) <= 1


def test_padding_of_documents_and_queries_changes_no_loss_and_no_gradient():
    model = generator()
    params = random_params(model.init)
    narrow = batch(DOCS, QUERIES)
    wide = batch(np.pad(DOCS, ((0, 0), (0, 6))), np.pad(QUERIES, ((0, 0), (0, 3))))
    (expected, gradient), (actual, other) = (gradient_of(params, rows, model) for rows in (narrow, wide))
    np.testing.assert_allclose(actual, expected, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), other, gradient)


def test_a_token_depends_on_those_before_it_alone():
    model = generator()
    params = random_params(model.init)
    changed = QUERIES.copy()
    changed[0, 3] = 60 - changed[0, 3]
    before, after = (np.asarray(logits_of(model, params, DOCS, queries)) for queries in (QUERIES, changed))
    np.testing.assert_array_equal(before[:, :4], after[:, :4])
    assert (np.abs(before - after)[0, 4:].max(axis=-1) > 1e-3).all()


def test_bfloat16_stays_close_to_float32_and_rounding_kernels_before_changes_nothing():
    exact = generator()
    rounded = Generator(**{**exact.__dict__, "t5": T5Config(**{**exact.t5.__dict__, "dtype": "bfloat16"})})
    params = random_params(exact.init)
    expected, actual = (np.asarray(logits_of(model, params, DOCS, QUERIES)) for model in (exact, rounded))
    assert actual.dtype == np.float32
    np.testing.assert_allclose(actual, expected, atol=0.05 * np.abs(expected).max())
    np.testing.assert_array_equal(logits_of(rounded, rounded.inference_params(params), DOCS, QUERIES), actual)


@pytest.mark.parametrize("broadcast", [False, True])
@pytest.mark.soak
@pytest.mark.short_soak
def test_dropout_is_on_when_there_is_a_key(broadcast):
    model, rows = generator(dropout_broadcast=broadcast), batch(DOCS, QUERIES)
    params = random_params(model.init)
    losses = {float(loss_of(model, params, rows, rng)[0]) for rng in (None, jax.random.key(0), jax.random.key(1))}
    assert len(losses) == 3


def test_a_model_is_described_in_json():
    model = generator("t5_1_0", bias_per_layer=False)
    assert Generator.from_json(model.to_json()) == model
    assert hash(Generator.from_json(model.to_json())) == hash(model)


@pytest.mark.soak
def test_eight_devices_have_the_loss_and_the_gradient_of_one():
    model = generator()
    params = random_params(model.init)
    rows = batch(DOCS, QUERIES)
    loss = jax.value_and_grad(lambda params, rows: model.loss(params, rows)[0])
    expected = gradient_of(params, rows, model)
    mesh = sharding.make_mesh(8)
    placed = jax.device_put(params, sharding.replicated(mesh)), sharding.place(rows, mesh)
    actual = jax.jit(sharding.traced_on(mesh, loss))(*placed)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), actual, expected)
