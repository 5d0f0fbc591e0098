"""The rotary encoder's own sides; that it is ModernBERT, Qwen3 and Gemma 3 is in tests/interop/test_architectures.py."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_params import random_params, tower_params

from de_jax.models import attention, rotary
from de_jax.models.dual_encoder import DualEncoder
from de_jax.models.rotary import RotaryConfig
from de_jax.models.tower import Tower, TowerConfig
from de_jax.training.mesh import sharding
from de_jax.training.mesh.sharding import state_shardings
from de_jax.types import InputError, TrainState

CONFIG = RotaryConfig(
    vocab_size=31,
    model_dim=16,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    mlp_dim=24,
    max_positions=64,
    qk_norm=True,
    post_norms=True,
    attention_cap=2.0,
    global_every=2,
    window=3,
    dtype="float32",
)
LENGTHS = (9, 5, 1)


def tower_of(**changes):
    return TowerConfig(dataclasses.replace(CONFIG, **changes), pooling="last", projection_dim=None)


def texts(side):
    """Three texts in rows of their own, padded on one side."""
    rng = np.random.default_rng(0)
    rows = [rng.integers(1, 31, length) for length in LENGTHS]
    pad = lambda row: (0, 16 - len(row)) if side == "right" else (16 - len(row), 0)  # noqa: E731
    return np.stack([np.pad(row, pad(row)) for row in rows]).astype(np.int32)


@functools.partial(jax.jit, static_argnums=0)
def embeddings_of(config, params, tokens, lengths=None, key=None):
    rngs = None if key is None else {"dropout": key}
    return Tower(config).apply(params, tokens, key is None, lengths, rngs=rngs)


@pytest.mark.parametrize("causal", [True, False])
def test_last_tokens_of_texts_padded_on_either_side_and_packed_are_the_same(causal):
    config = tower_of(causal=causal, scan_layers=True)
    params = tower_params(config)
    right = np.asarray(embeddings_of(config, params, texts("right")))[:, 0]
    left = np.asarray(embeddings_of(config, params, texts("left")))[:, 0]
    tokens = texts("right")
    packed = np.pad(tokens[tokens != 0], (0, 1))[None]
    together = np.asarray(embeddings_of(config, params, packed, np.array([[*LENGTHS, 0]])))[0]
    np.testing.assert_allclose(left, right, atol=1e-5)
    np.testing.assert_allclose(together[:3], right, atol=1e-5)
    np.testing.assert_array_equal(together[3], 0)
    assert np.abs(right - right[0]).max() > 0.1


@pytest.mark.soak
def test_a_loop_over_layers_rematerialisation_and_a_mesh_change_no_gradient():
    tokens, model = np.resize(texts("right"), (8, 16)), DualEncoder(tower_of(), tower_of())
    params = random_params(model.init)

    def gradient(mesh=None, **changes):
        model = DualEncoder(tower_of(**changes), tower_of(**changes))
        of_params = jax.grad(lambda params, tokens: jnp.sum(jnp.sin(3 * model.encode_doc(params, tokens))))
        if mesh is None:
            return jax.jit(of_params)(params, tokens)
        placed = state_shardings(TrainState(0, model.shapes(), (), None), mesh).params
        lie = {"in_shardings": (placed, sharding.by_rows(mesh)), "out_shardings": placed}
        return jax.jit(sharding.traced_on(mesh, of_params), **lie)(jax.device_put(params, placed), tokens)

    expected = gradient()
    for remat, mesh in (("dots", None), ("full", sharding.make_mesh(fsdp=2, tensor=2))):
        actual = gradient(mesh, remat=remat, scan_layers=True)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), actual, expected)


def test_bfloat16_stays_close_to_float32_and_dropout_changes_it():
    exact, rounded = (tower_of(dtype=dtype, dropout_rate=0.3, scan_layers=True) for dtype in ("float32", "bfloat16"))
    params, tokens = tower_params(exact), texts("right")
    a, b = (np.asarray(embeddings_of(config, params, tokens))[:, 0] for config in (exact, rounded))
    assert np.sum(a * b, axis=-1).min() > 0.999
    assert not np.allclose(a, embeddings_of(exact, params, tokens, None, jax.random.key(1))[:, 0], atol=0.05)


def naive_attention(query, key, value, segments, seen, scale, cap):
    """By loops, in float64."""
    out = np.zeros(query.shape)
    group = query.shape[2] // key.shape[2]
    for b, i, h in np.ndindex(query.shape[:3]):
        keys = [j for j in range(key.shape[1]) if segments[b, i] == segments[b, j] and seen[i, j]]
        scores = np.array([scale * query[b, i, h] @ key[b, j, h // group] for j in keys])
        weights = np.exp(cap * np.tanh(scores / cap))
        out[b, i, h] = weights / weights.sum() @ np.stack([value[b, j, h // group] for j in keys])
    return out


def heads(rng, dtype=np.float64):
    return [rng.standard_normal((2, 8, number, 16)).astype(dtype) for number in (4, 2, 2)]


SEGMENTS = np.array([[1] * 8, [1, 1, 1, 2, 2, 3, 0, 0]])
SEEN = np.abs(np.arange(8)[:, None] - np.arange(8)) <= 2
WINDOW = attention.Window(2, 2)


def test_capped_attention_of_groups_within_a_window_is_that_of_loops():
    query, key, value = heads(np.random.default_rng(0))
    expected = naive_attention(query, key, value, SEGMENTS, SEEN, 0.5, 1.5)
    arrays = [jnp.asarray(array, jnp.float32) for array in (query, key, value)]
    actual = jax.jit(lambda *of: attention.attend(*of, None, SEGMENTS, window=WINDOW, scale=0.5, cap=1.5))(*arrays)
    np.testing.assert_allclose(actual, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "distances"),
    [
        ({}, range(-3, 4)),
        ({"window_after": 1}, range(-3, 2)),
        ({"window": 0, "window_after": 2}, range(3)),
        ({"window_after": 1, "causal": True}, range(-3, 1)),
    ],
)
def test_a_window_reaches_as_far_as_its_two_widths(changes, distances):
    config = dataclasses.replace(CONFIG, **changes)
    assert config.windows == (-min(distances), max(distances))
    chosen = jax.jit(lambda is_global: rotary._window(config, is_global))
    for is_global, reach in ((True, range(-7, 1 if config.causal else 8)), (False, distances)):
        seen = np.array([[key - query in reach for key in range(8)] for query in range(8)])
        for window in (rotary._window(config, np.bool_(is_global)), chosen(is_global)):
            np.testing.assert_array_equal(attention._visible(jnp.ones((1, 8), int), window)[0, 0], seen)


def test_one_token_is_not_scaled():
    table = jnp.ones((31, 16))
    config = dataclasses.replace(CONFIG, scale_embeddings=True, unscaled_token=3)
    x = config.embedder().apply({"params": {"embedding": table}}, jnp.array([[2, 3]]), jnp.ones((1, 2), int), True)
    np.testing.assert_array_equal(x[0, :, 0], [4, 1])


def test_default_rules_split_every_kernel_and_table_and_nothing_else():
    model = DualEncoder(tower_of(vocab_size=32), tower_of(vocab_size=32))
    mesh = sharding.make_mesh(fsdp=2, tensor=2)
    shardings = state_shardings(TrainState(0, model.shapes(), (), None), mesh).params
    for path, of in jax.tree_util.tree_leaves_with_path(shardings):
        name = path[-1].key
        assert bool([axis for axis in of.spec if axis]) == (name in ("kernel", "embedding")), path


def test_a_part_of_the_layers_stays_global_and_local_as_it_was():
    config = dataclasses.replace(CONFIG, num_layers=6, norm_embeddings=False)
    for layers in ((0, 2, 4), (1, 3), (1, 2, 3, 4), (4, 5), (1, 3, 4), ()):
        part = config.of_layers(layers)
        assert [part.is_global(number) for number in range(part.num_layers)] == [config.is_global(layer) for layer in layers]
    with pytest.raises(InputError, match=r"layers \(0, 1, 3, 4, 5, 2\) of the encoder are global, local, local, global"):
        config.of_layers((0, 1, 3, 4, 5, 2))
    with pytest.raises(InputError, match=r"layers \(2, 4\) leave out layer 0"):
        dataclasses.replace(config, norm_embeddings=True).of_layers((2, 4))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 3}, "num_heads is 4, which num_kv_heads = 3 does not divide"),
        ({"head_dim": 5}, "head_dim is 5; positions turn pairs of dimensions"),
        ({"first_global": 2}, "first_global is 2; it must be less than global_every = 2"),
        ({"window": -1}, "window is -1; it must be at least 0"),
        ({"norm_sums": True}, "norm_sums is set; norm_embeddings and post_norms must be False"),
        ({"rope_few_turns": 4.0}, "rope_few_turns is 4.0; it must be less than rope_many_turns = 4.0"),
    ],
)
def test_sizes_that_contradict_are_refused(changes, message):
    with pytest.raises(InputError, match=message):
        dataclasses.replace(CONFIG, **changes)
