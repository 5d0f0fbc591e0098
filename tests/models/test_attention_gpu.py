"""The kernels of a GPU's attention, interpreted on the CPU, beside the plain form."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from often import often

from de_jax.models import attention, attention_gpu
from de_jax.models.attention import FAR, Window, attend
from de_jax.models.bert import BertConfig
from de_jax.models.dual_encoder import Tower, TowerConfig
from de_jax.models.layers import HashedDropout
from de_jax.models.rotary import RotaryConfig
from de_jax.models.t5 import T5Config
from de_jax.training.mesh import sharding

SIZES = {"vocab_size": 32, "model_dim": 32, "num_layers": 3, "num_heads": 4, "mlp_dim": 32, "dropout_rate": 0.0}


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch):
    monkeypatch.setattr(pl, "pallas_call", functools.partial(pl.pallas_call, interpret=True))
    monkeypatch.setattr(attention, "platform", lambda: "gpu")


def rows(lengths, row_length):
    """Segments of rows of texts of these lengths; padding follows."""
    return jnp.asarray([np.repeat([*range(1, len(row) + 1), 0], [*row, row_length - sum(row)]) for row in lengths])


def arrays(segments, heads, key_heads, head_dim, has_bias, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    b, length = segments.shape
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)  # noqa: E731
    query, key, value = (draw(b, length, number, head_dim) for number in (heads, key_heads, key_heads))
    return query, key, value, draw(heads, length, length).astype(jnp.float32) if has_bias else None


def result_and_slopes(attend, segments, inputs):
    def loss(inputs):
        out = jnp.where((segments > 0)[:, :, None, None], attend(*inputs).astype(jnp.float32), 0.0)
        return jnp.sum(jnp.sin(out)), out

    (_, out), slopes = jax.jit(jax.value_and_grad(loss, has_aux=True))(inputs)
    return [out, *jax.tree.leaves(slopes)]


def assert_close(found, expected, share):
    """Differences are at most a share of the largest value."""
    for a, b in zip(found, expected, strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert np.abs(a - b).max() <= share * np.abs(b).max()


DROP = HashedDropout(jnp.asarray([3, 5], jnp.uint32), 2**15)
PACKED = [(30, 1, 61, 20), (100, 28), (5, 3)]


@pytest.mark.parametrize("dtype", often([jnp.float32, jnp.bfloat16], jnp.float32))
@pytest.mark.parametrize(
    ("lengths", "row_length", "sizes", "has_bias", "window", "cap", "drop"),
    [
        pytest.param(PACKED, 128, (2, 2, 32), True, None, None, None, id="T5"),
        pytest.param(PACKED, 130, (2, 2, 24), True, None, None, None, id="odd sizes"),
        pytest.param([(3, 4, 2), (9,)] * 4, 10, (2, 2, 8), True, None, None, None, id="short rows, summed in two shares"),
        pytest.param(PACKED, 128, (4, 2, 16), False, Window(FAR, 0), None, None, id="groups, causal"),
        pytest.param([(150, 40), (190,)], 192, (2, 1, 16), False, Window(20, 20), None, None, id="a window leaves tiles out"),
        pytest.param(
            [(150, 40), (190,)], 192, (2, 1, 16), True, Window(70, 0), 2.0, None, id="bias, groups, causal, a window, a cap"
        ),
        pytest.param(PACKED, 128, (1, 1, 130), False, None, 2.0, None, id="a wide head"),
        pytest.param(PACKED, 130, (4, 2, 16), True, Window(FAR, 0), None, DROP, id="dropout, groups, causal"),
    ],
)
def test_kernels_are_the_plain_form_with_its_gradients(lengths, row_length, sizes, has_bias, window, cap, drop, dtype):
    segments = rows(lengths, row_length)
    inputs = arrays(segments, *sizes, has_bias, dtype)
    widths, options = None if window is None else jnp.asarray(window), {"scale": 0.25, "cap": cap}
    seeds = {} if drop is None else {"seeds": drop.seeds, "dropped": drop.dropped, "all_heads": sizes[0]}
    kernel = lambda *inputs: attention_gpu.attend(*inputs, segments, widths, **options, **seeds)  # noqa: E731
    plain = lambda *inputs: attend(*inputs, segments, window=window, **options, drop=drop, attention="plain")  # noqa: E731
    expected = result_and_slopes(plain, segments, inputs)
    assert_close(result_and_slopes(kernel, segments, inputs), expected, 1e-5 if dtype == jnp.float32 else 0.02)


def test_padding_is_zero_and_has_no_gradient():
    segments = rows([(5, 3), ()], 64)
    inputs = arrays(segments, 2, 2, 16, True)
    out, pull = jax.vjp(lambda *inputs: attention_gpu.attend(*inputs, segments, None, scale=1.0, cap=None), *inputs)
    padding = (segments == 0)[:, :, None, None]
    assert not np.any(np.where(padding, out, 0))
    for slope in pull(jnp.ones_like(out))[:3]:
        np.testing.assert_array_equal(np.where(padding, slope, 0), 0)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "tensor", "is_fused"), [(4, 4, 2, True), (6, 6, 4, False), (4, 1, 2, False), (6, 3, 1, True)]
)
def test_each_device_of_a_mesh_has_its_rows_and_heads(monkeypatch, num_heads, num_kv_heads, tensor, is_fused):
    calls, kernel = [], attention_gpu.attend

    def counted(query, *args, **kwargs):
        calls.append(query.shape)
        return kernel(query, *args, **kwargs)

    monkeypatch.setattr(attention_gpu, "attend", counted)
    segments = rows([(3, 4), (8,)] * 4, 8)
    inputs = arrays(segments, num_heads, num_kv_heads, 8, True, jnp.bfloat16)
    mesh = sharding.make_mesh(data=2, tensor=tensor, devices=jax.devices()[: 2 * tensor])
    on_mesh = sharding.traced_on(mesh, lambda *inputs: attend(*inputs, segments, drop=DROP))
    found = result_and_slopes(on_mesh, segments, jax.device_put(inputs, sharding.replicated(mesh)))
    assert set(calls) == ({(4, 8, num_heads // tensor, 8)} if is_fused else set())
    plain = lambda *inputs: attend(*inputs, segments, drop=DROP, attention="plain")  # noqa: E731
    assert_close(found, result_and_slopes(plain, segments, inputs), 0.02)


@pytest.mark.parametrize("scan_layers", often([False, True], False))
@pytest.mark.parametrize(
    ("config", "options"),
    [
        pytest.param(T5Config, {"head_dim": 8}, id="T5"),
        pytest.param(BertConfig, {}, id="BERT", marks=pytest.mark.soak),
        pytest.param(RotaryConfig, {"head_dim": 8, "window": 4, "global_every": 3}, id="windows", marks=pytest.mark.soak),
        pytest.param(RotaryConfig, {"head_dim": 8, "num_kv_heads": 2, "causal": True}, id="causal", marks=pytest.mark.soak),
    ],
)
def test_every_kind_of_encoder_computes_what_the_plain_form_does(config, options, scan_layers):
    tokens = jnp.asarray(np.random.default_rng(0).integers(2, 32, (3, 24)) * (np.arange(24) < [[24], [17], [3]]))

    def of(attention):
        encoder = config(**SIZES, **options, dtype="bfloat16", scan_layers=scan_layers, attention=attention)
        tower = Tower(TowerConfig(encoder, projection_dim=8))
        params = tower.init(jax.random.key(0), tokens)
        embed = lambda params: tower.apply(params, tokens)  # noqa: E731
        slopes = jax.grad(lambda params: jnp.sum(jnp.sin(embed(params).astype(jnp.float32))))(params)
        return jax.jit(embed)(params), slopes

    (found, of_found), (expected, of_expected) = of("fused"), of("plain")
    assert_close([found], [expected], 0.02)
    found, expected = (np.concatenate([np.ravel(x) for x in jax.tree.leaves(slopes)]) for slopes in (of_found, of_expected))
    assert np.linalg.norm(found - expected) < 0.03 * np.linalg.norm(expected)
