"""Texts of a generator: against transformers where nothing is drawn, by their frequencies where something is."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import torch
from transformers import T5Config as TorchConfig
from transformers import T5ForConditionalGeneration

from de_jax.interop.architectures.t5 import generator_origins
from de_jax.interop.pretrained import assemble
from de_jax.models.decoding import Decoding, _draw, generate
from de_jax.models.generator import Generator
from de_jax.models.t5 import T5Config
from de_jax.training.mesh import sharding
from de_jax.types import InputError

VOCAB_SIZE, NUM_TOKENS, LONGEST = 23, 16, 8
GREEDY = Decoding("greedy", 1, LONGEST, num_tokens=NUM_TOKENS)
BEAM = Decoding("beam", 3, LONGEST, num_beams=4, num_tokens=NUM_TOKENS)
SAMPLE = Decoding("sample", 4, LONGEST, top_k=6, top_p=0.95, num_tokens=NUM_TOKENS)
methods = pytest.mark.parametrize("decoding", [SAMPLE, GREEDY, BEAM], ids=lambda decoding: decoding.method)
jitted = jax.jit(generate, static_argnums=(0, 5))


@pytest.fixture(scope="module")
def torch_model():
    torch.manual_seed(4)
    sizes = {"d_model": 16, "num_layers": 2, "num_heads": 2, "d_kv": 8, "d_ff": 24}
    model = T5ForConditionalGeneration(TorchConfig(**sizes, vocab_size=VOCAB_SIZE, decoder_start_token_id=0))
    with torch.no_grad():  # fresh weights hardly look at the document
        for parameter in model.parameters():
            parameter.mul_(2.0)
    return model.eval()


@pytest.fixture(scope="module")
def ours(torch_model):
    sizes = {"model_dim": 16, "num_layers": 2, "num_heads": 2, "head_dim": 8, "mlp_dim": 24}
    model = Generator(T5Config(VOCAB_SIZE, **sizes, activation="relu", dtype="float32"), tied_logits=True)
    stored = {name: functools.partial(np.asarray, value) for name, value in torch_model.state_dict().items()}
    stored = {name: read for name, read in stored.items() if "embed_tokens" not in name and name != "lm_head.weight"}
    like = jax.eval_shape(lambda: model.init(jax.random.key(0)))
    return model, assemble("torch", stored, generator_origins(model), like)


@pytest.fixture(scope="module")
def docs():
    rng = np.random.default_rng(0)
    rows = rng.integers(2, VOCAB_SIZE, (16, 9)).astype(np.int32)
    for row, length in zip(rows, rng.integers(2, 10, 16), strict=True):
        row[length:] = 0
    return rows


def texts(ours, docs, decoding, seed=0, seeds=None, mesh=None):
    model, params = ours
    seeds = np.arange(len(docs), dtype=np.uint32) if seeds is None else seeds
    if mesh is not None:
        place = lambda rows: jax.device_put(rows, sharding.by_rows(mesh))  # noqa: E731
        params, docs, seeds = jax.device_put(params, sharding.replicated(mesh)), place(docs), place(seeds)
    return np.asarray(jitted(model, params, docs, seeds, np.uint32(seed), decoding))


def theirs(torch_model, docs, num_queries, **options):
    out = torch_model.generate(
        input_ids=torch.tensor(docs),
        attention_mask=torch.tensor(docs != 0),
        max_new_tokens=LONGEST,
        num_return_sequences=num_queries,
        do_sample=False,
        suppress_tokens=[0, *range(NUM_TOKENS, VOCAB_SIZE)],
        **options,
    )
    rows = out.numpy().reshape(len(docs), num_queries, -1)[:, :, 1:]
    rows = np.where(np.cumsum(rows == 1, axis=-1) - (rows == 1) > 0, 0, rows)  # where padding is 0, transformers fills up by ends
    return np.pad(rows, ((0, 0), (0, 0), (0, LONGEST - rows.shape[2])))


def test_greedy_texts_are_those_of_transformers(torch_model, ours, docs):
    expected = theirs(torch_model, docs, 1, num_beams=1)
    assert len(np.unique(expected, axis=0)) > 4
    assert 0 < (expected == 1).any(axis=-1).mean() < 1  # some end, some are cut
    np.testing.assert_array_equal(texts(ours, docs, GREEDY), expected)


@pytest.mark.parametrize("length_penalty", [pytest.param(1.0, marks=pytest.mark.soak), 2.0])
@pytest.mark.soak
def test_beams_are_those_of_transformers(torch_model, ours, docs, length_penalty):
    expected = theirs(torch_model, docs, 3, num_beams=4, length_penalty=length_penalty)
    actual = texts(ours, docs, dataclasses.replace(BEAM, length_penalty=length_penalty))
    np.testing.assert_array_equal(actual, expected)


def test_draws_have_the_frequencies_of_top_k_top_p_and_temperature():
    logits = np.log(np.array([0.05, 0.4, 0.1, 0.3, 0.15]))
    keys = jax.random.split(jax.random.key(0), 20000)
    rows = np.tile(logits.astype(np.float32), (20000, 1))
    draw = jax.jit(_draw, static_argnums=3)

    def shares(**options):
        drawn = np.asarray(draw(rows, keys, 0, Decoding(**options)))
        return np.bincount(drawn, minlength=5) / len(drawn)

    hot = np.exp(logits / 2)
    expected = {
        (0, 1.0, 1.0): [0.05, 0.4, 0.1, 0.3, 0.15],
        (3, 1.0, 1.0): np.array([0, 0.4, 0, 0.3, 0.15]) / 0.85,
        (0, 0.6, 1.0): np.array([0, 0.4, 0, 0.3, 0]) / 0.7,
        (3, 0.5, 1.0): np.array([0, 0.4, 0, 0.3, 0]) / 0.7,
        (1, 1.0, 1.0): [0, 1, 0, 0, 0],
        (0, 1.0, 2.0): hot / hot.sum(),
    }
    for (top_k, top_p, temperature), wanted in expected.items():
        np.testing.assert_allclose(shares(top_k=top_k, top_p=top_p, temperature=temperature), wanted, atol=0.015)


def test_a_text_depends_on_the_seeds_and_its_number_alone(ours, docs):
    expected = texts(ours, docs, SAMPLE)
    assert len(np.unique(expected.reshape(-1, LONGEST), axis=0)) > 30
    order = np.array([5, 2, 9])  # another batch, more padding and fewer texts
    two, wider = dataclasses.replace(SAMPLE, num_queries=2), np.pad(docs[order], ((0, 0), (0, 7)))
    np.testing.assert_array_equal(texts(ours, wider, two, seeds=order.astype(np.uint32)), expected[order, :2])
    assert (texts(ours, docs, SAMPLE, seed=1) != expected).any(axis=(1, 2)).mean() > 0.8


@pytest.mark.parametrize("decoding", [SAMPLE, BEAM], ids=lambda decoding: decoding.method)
@pytest.mark.soak
def test_eight_devices_write_what_one_does(ours, docs, decoding):
    np.testing.assert_array_equal(texts(ours, docs, decoding, mesh=sharding.make_mesh(8)), texts(ours, docs, decoding))


@methods
def test_nothing_but_padding_follows_an_end_and_entries_beyond_the_vocabulary_are_never_written(ours, docs, decoding):
    found = texts(ours, docs, decoding).reshape(-1, LONGEST)
    assert found.max() < NUM_TOKENS
    for row in found:
        length = int(np.argmax(row == 1)) + 1 if (row == 1).any() else LONGEST
        assert (row[:length] > 0).all()
        assert (row[length:] == 0).all()


@methods
def test_rows_of_padding_stay_empty(ours, docs, decoding):
    is_filler = np.isin(np.arange(len(docs)), (3, 8))
    found = texts(ours, np.where(is_filler[:, None], 0, docs), decoding)
    assert not found[is_filler].any()
    np.testing.assert_array_equal(found[~is_filler], texts(ours, docs, decoding)[~is_filler])


@pytest.mark.parametrize(
    "wrong",
    [{"num_queries": 0}, {"method": "greedy", "num_queries": 2}, {"method": "beam", "num_queries": 5, "num_beams": 4},
     {"top_p": 0.0}, {"temperature": 0.0}],
)  # fmt: skip
def test_settings_that_cannot_be_are_refused(wrong):
    with pytest.raises(InputError, match=" is "):
        Decoding(**wrong)
