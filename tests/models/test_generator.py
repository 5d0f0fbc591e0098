"""Our T5 decoder against transformers' torch one, with the same random weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from de_jax.models.generator import Generator
from de_jax.models.t5 import T5Config
from de_jax.types import Batch

SIZES = {"vocab_size": 61, "model_dim": 32, "num_layers": 2, "num_heads": 4, "head_dim": 8, "mlp_dim": 48}
VERSIONS = {"t5_1_0": ("relu", True), "t5_1_1": ("gated_gelu", False)}


def tokens(lengths, longest, seed=0):
    rng = np.random.default_rng(seed)
    rows = np.zeros((len(lengths), longest), np.int32)
    for row, length in zip(rows, lengths, strict=True):
        row[:length] = rng.integers(3, 61, length)
    return rows


def batch(docs, queries):
    return Batch(query=queries, doc=docs, query_id=np.arange(len(docs)), doc_id=np.arange(len(docs)))


def generator(version="t5_1_1", **options):
    activation, tied = VERSIONS[version]
    return Generator(T5Config(**SIZES, activation=activation, dropout_rate=0.0, dtype="float32", **options), 3, tied)


def test_steps_with_kept_keys_and_values_equal_the_whole_text():
    model = generator()
    params = model.init(jax.random.key(0))
    docs, queries = tokens([9, 4], 9), tokens([6, 6, 6, 6], 6, seed=1)
    expected = model.logits(params, np.repeat(docs, 2, axis=0), queries)
    read, earlier = model.read_docs(params, docs), model.no_tokens(4, 6)
    for position in range(6):
        before = queries[:, position - 1] if position else np.zeros(4, np.int32)
        actual, earlier = model.next_logits(params, read, jnp.asarray(before), earlier, jnp.asarray(position))
        np.testing.assert_allclose(actual, expected[:, position], atol=1e-4)


@pytest.mark.parametrize("version", sorted(VERSIONS))
def test_loss_equals_a_loop_over_tokens(version):
    model = generator(version)
    params = model.init(jax.random.key(0))
    docs, queries = tokens([9, 4, 6], 9), tokens([5, 2, 1], 5, seed=1)
    logits = np.asarray(model.logits(params, docs, queries), np.float64)
    nll = []
    for row, query in zip(logits, queries, strict=True):
        for scores, token in zip(row, query, strict=True):
            if token:
                nll.append(np.log(np.sum(np.exp(scores))) - scores[token])
    loss, metrics = model.loss(params, batch(docs, queries))
    np.testing.assert_allclose(loss, np.mean(nll), rtol=1e-5)
    assert 0 <= float(metrics["token_accuracy"]) <= 1


def test_padding_of_documents_and_queries_changes_no_loss_and_no_gradient():
    model = generator()
    params = model.init(jax.random.key(0))
    docs, queries = tokens([9, 4], 9), tokens([5, 2], 5, seed=1)
    narrow = batch(docs, queries)
    wide = batch(np.pad(docs, ((0, 0), (0, 6))), np.pad(queries, ((0, 0), (0, 3))))
    loss = jax.value_and_grad(lambda params, rows: model.loss(params, rows)[0])
    (expected, gradient), (actual, other) = loss(params, narrow), loss(params, wide)
    np.testing.assert_allclose(actual, expected, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), other, gradient)


def test_a_token_depends_on_those_before_it_alone():
    model = generator()
    params = model.init(jax.random.key(0))
    docs, queries = tokens([9], 9), tokens([6], 6, seed=1)
    changed = queries.copy()
    changed[0, 3] = 60 - changed[0, 3]
    before, after = model.logits(params, docs, queries), model.logits(params, docs, changed)
    np.testing.assert_array_equal(before[:, :4], after[:, :4])
    assert (np.abs(np.asarray(before - after)[0, 4:]).max(axis=-1) > 1e-3).all()


def test_bfloat16_stays_close_to_float32_and_rounding_kernels_before_changes_nothing():
    exact = generator()
    rounded = Generator(**{**exact.__dict__, "t5": T5Config(**{**exact.t5.__dict__, "dtype": "bfloat16"})})
    params = exact.init(jax.random.key(0))
    docs, queries = tokens([9, 4], 9), tokens([6, 3], 6, seed=1)
    expected, actual = (np.asarray(model.logits(params, docs, queries)) for model in (exact, rounded))
    assert actual.dtype == np.float32
    np.testing.assert_allclose(actual, expected, atol=0.05 * np.abs(expected).max())
    np.testing.assert_array_equal(rounded.logits(rounded.inference_params(params), docs, queries), actual)


def test_dropout_is_on_when_there_is_a_key():
    model = Generator(T5Config(**SIZES, dropout_rate=0.5, dtype="float32"))
    params = model.init(jax.random.key(0))
    rows = batch(tokens([9, 4], 9), tokens([6, 3], 6, seed=1))
    losses = {float(model.loss(params, rows, rng)[0]) for rng in (None, jax.random.key(0), jax.random.key(1))}
    assert len(losses) == 3


def test_a_model_is_described_in_json():
    model = generator("t5_1_0", bias_per_layer=False)
    assert Generator.from_json(model.to_json()) == model
    assert hash(Generator.from_json(model.to_json())) == hash(model)
