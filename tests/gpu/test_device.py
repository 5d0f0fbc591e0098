"""What runs on a GPU equals float64 loops, the CPU and itself. On a GPU machine: python -m benchmarks.gpu --part correctness."""

import json
import os
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import naive
import numpy as np
import pytest
import toy_run
from random_params import random_params

from de_jax import losses
from de_jax.data.batches import layout
from de_jax.models import attention
from de_jax.models.attention import FAR, Window
from de_jax.models.bert import BertConfig
from de_jax.models.dual_encoder import DualEncoder
from de_jax.models.layers import HashedDropout
from de_jax.models.rotary import RotaryConfig
from de_jax.models.t5 import T5Config
from de_jax.models.tower import TowerConfig
from de_jax.retrieval.index import ExactIndex
from de_jax.training.run.run_folder import load_run
from de_jax.types import Batch, Embeddings

pytestmark = pytest.mark.gpu

SIZES = {"vocab_size": 256, "model_dim": 128, "num_layers": 2, "num_heads": 4, "mlp_dim": 256, "dropout_rate": 0.0}
ENCODERS = {"t5": T5Config, "bert": BertConfig, "rotary": RotaryConfig}
SECONDS = 400  # of a training run, with its compilation


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("name", "options"),
    [("in_batch_softmax", {}), ("samtone", {"same_tower": "both"}), ("pair", {}), ("dance", {}), ("ance", {"in_batch": True})],
)
def test_losses_are_those_of_float64_loops(name, options, precision):
    rng = np.random.default_rng(0)
    rows = [rng.standard_normal(shape).astype(np.float32) for shape in ((16, 64), (16, 64), (16, 2, 64), (16, 2, 64))]
    query, doc, neg_docs, neg_queries = (
        jnp.asarray(values / np.linalg.norm(values, axis=-1, keepdims=True), precision).astype(jnp.float32) for values in rows
    )
    ids = jnp.arange(16, dtype=jnp.int32)
    e = Embeddings(query, doc, ids, ids, neg_docs=neg_docs, neg_queries=neg_queries if name == "dance" else None)
    found = jax.jit(lambda e: getattr(losses, name)(e, temperature=0.05, **options)[0])(e)
    expected = getattr(naive, name)(jax.tree.map(np.asarray, e), temperature=0.05, **options)
    assert float(found) == pytest.approx(expected[0] if isinstance(expected, tuple) else expected, rel=1e-5)


def embedded(model, params, batch, device):
    with jax.default_device(device):  # the precision is the library's own, as users have it
        found = jax.jit(model.embed)(*jax.device_put((params, batch), device))
        return np.stack([found.query, found.doc])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ENCODERS)
def test_towers_are_those_of_the_cpu(name, dtype, monkeypatch):
    tower = TowerConfig(ENCODERS[name](**SIZES, dtype=dtype), projection_dim=64)
    model = DualEncoder(tower, tower)
    params = random_params(model.init)
    rng = np.random.default_rng(1)
    lengths = rng.integers(1, 65, 16)
    tokens = np.where(np.arange(64) < lengths[:, None], rng.integers(1, 256, (16, 64)), 0).astype(np.int32)
    ids = np.arange(16, dtype=np.int32)
    batch = Batch(tokens, tokens[::-1].copy(), ids, ids)
    found = embedded(model, params, batch, jax.devices()[0])
    monkeypatch.setattr(attention, "platform", lambda: "cpu")
    expected = embedded(model, params, batch, jax.devices("cpu")[0])
    limit = 1e-5 if dtype == "float32" else 2e-2
    np.testing.assert_allclose(found, expected, atol=limit)


def packed_texts(rng, num_texts=12, longest=48):
    """The same texts with a row each and packed, several a row; and the place of each in the packed rows."""
    lengths = rng.integers(1, longest + 1, num_texts).astype(np.int32)
    padded = np.where(np.arange(longest) < lengths[:, None], rng.integers(1, 256, (num_texts, longest)), 0).astype(np.int32)
    row, place = layout.fit(lengths, 128, 16)
    shape = {"num_rows": int(row.max()) + 1, "row_length": 128, "max_texts": 16}
    return padded, layout.fill(padded, lengths, row, place, **shape)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ENCODERS)
def test_packed_texts_are_those_of_a_row_each_with_their_gradients(name, dtype):
    tower = TowerConfig(ENCODERS[name](**SIZES, dtype=dtype), projection_dim=64)
    model = DualEncoder(tower, tower)
    params, ids = random_params(model.init), jnp.arange(12, dtype=jnp.int32)
    padded, packed = packed_texts(np.random.default_rng(4))

    def loss(params, texts):
        return losses.samtone(model.embed(params, Batch(texts, texts, ids, ids)), temperature=0.1, same_tower="both")[0]

    found, expected = (jax.jit(jax.value_and_grad(loss))(params, texts) for texts in (packed, padded))
    limit = 1e-4 if dtype == "float32" else 3e-2
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.abs(a - b).max() <= limit * max(np.abs(b).max(), 1e-3)


DROP = HashedDropout(jnp.asarray([3, 5], jnp.uint32), 2**14)
ATTENTION = {
    "t5": (4, True, None, None),
    "bert": (4, False, None, DROP),
    "causal, grouped heads": (2, False, Window(FAR, 0), None),
    "windows": (4, False, Window(16, 16), None),
}
"""By kind of encoder: heads of keys beside four of queries, whether there is a position bias, the window, dropout of weights."""


@pytest.mark.parametrize("kind", ATTENTION)
@pytest.mark.parametrize("length", [48, 256])
def test_fused_attention_is_the_plain_form_in_float32_with_its_gradient(kind, length):
    num_key_heads, has_bias, window, drop = ATTENTION[kind]
    rng = np.random.default_rng(2)
    query, key, value = (
        jnp.asarray(rng.standard_normal((4, length, n, 64)), jnp.bfloat16) for n in (4, num_key_heads, num_key_heads)
    )
    bias = jnp.asarray(rng.standard_normal((4, length, length)), jnp.float32) if has_bias else None
    segments = jnp.asarray(np.repeat([[1, 2, 3, 0]], 4, 0).repeat(length // 4, axis=1), jnp.int32)
    real = (segments > 0)[:, :, None, None]

    def total(query, key, value, bias, form):
        context = attention.attend(query, key, value, bias, segments, window=window, scale=0.125, drop=drop, attention=form)
        return jnp.sum(jnp.where(real, jnp.sin(context.astype(jnp.float32)), 0.0))

    gradient = jax.jit(jax.value_and_grad(total, argnums=range(4 if has_bias else 3)), static_argnames="form")
    on_device = "fused" if jax.default_backend() == "gpu" else "auto"
    found = gradient(query, key, value, bias, form=on_device)
    expected = gradient(*(x.astype(jnp.float32) for x in (query, key, value)), bias, form="plain")
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert np.linalg.norm(a - b) <= 0.02 * np.linalg.norm(b)


def test_the_exact_index_ranks_as_numpy_does():
    rng = np.random.default_rng(5)
    docs, queries = (rng.standard_normal((n, 48)).astype(np.float32) for n in (5000, 33))
    ids = [f"{row:05d}" for row in range(len(docs))]
    scores = queries.astype(np.float64) @ docs.T.astype(np.float64)
    found = ExactIndex(docs, ids).search(queries, 20)
    expected = np.argsort(-scores, axis=1, kind="stable")[:, :20]
    np.testing.assert_allclose(found.scores, np.take_along_axis(scores, expected, 1), rtol=1e-5)
    assert np.mean(found.doc_rows == expected) > 0.99  # two scores may be equal in float32


def test_a_killed_run_of_200_updates_ends_with_the_same_bits(tmp_path):
    """XLA adds the gradients of equal tokens in any order unless it is told not to."""
    data = toy_run.write_dataset(tmp_path / "data")
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_deterministic_ops=true"
    env = {**os.environ, "XLA_FLAGS": flags, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    changes = {
        "Optimization__num_steps": 200,
        "Logging__save_every_steps": 50,
        "Logging__log_every_steps": 1,
        "Logging__evaluate_every_steps": 200,
    }

    def start(name):
        line = [sys.executable, "-m", "de_jax", "train", *toy_run.arguments(data, tmp_path / name, **changes)]
        return subprocess.Popen(line, env=env, stdout=subprocess.DEVNULL)

    assert start("whole").wait(SECONDS) == 0
    process, metrics = start("killed"), tmp_path / "killed" / "metrics.jsonl"
    deadline = time.monotonic() + SECONDS
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 120:
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert start("killed").wait(SECONDS) == 0
    whole, killed = (load_run(tmp_path / name).params for name in ("whole", "killed"))
    jax.tree.map(np.testing.assert_array_equal, killed, whole)
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()][-1] == 200
