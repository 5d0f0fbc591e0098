"""The fused kernel for TPUs beside the plain form: in interpret mode, and compiled ahead of time where libtpu is installed."""

import contextlib
import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from often import often

from de_jax.models import attention, layers
from de_jax.models.attention import FAR, Window, attend
from de_jax.models.bert import BertConfig
from de_jax.models.dual_encoder import DualEncoder
from de_jax.models.layers import HashedDropout
from de_jax.models.rotary import RotaryConfig
from de_jax.models.t5 import T5Config
from de_jax.models.tower import TowerConfig
from de_jax.training.mesh import plan, sharding
from de_jax.types import InputError

RNG = np.random.default_rng(0)
SIZES = {"vocab_size": 40, "model_dim": 64, "num_layers": 2, "num_heads": 4, "mlp_dim": 64, "dtype": "float32"}
ROTARY = {**SIZES, "num_kv_heads": 2, "head_dim": 16, "global_every": 2, "window": 5}
ENCODERS = {
    "t5": T5Config(**SIZES, head_dim=16, scan_layers=True, dropout_rate=0.0),
    "umt5": T5Config(**SIZES, head_dim=16, bias_per_layer=True, dropout_rate=0.0),
    "bert": BertConfig(**SIZES, dropout_rate=0.0),
    "mpnet": BertConfig(**SIZES, num_buckets=8, num_token_types=0),
    "local": RotaryConfig(**ROTARY, scan_layers=True),
    "causal": RotaryConfig(**ROTARY, causal=True, attention_cap=2.0, remat="full"),
    "decoder": RotaryConfig(**{**ROTARY, "global_every": 1}, causal=True),
}


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch, request):
    if "libtpu" not in request.fixturenames:
        monkeypatch.setattr(pl, "pallas_call", functools.partial(pl.pallas_call, interpret=True))


@contextlib.contextmanager
def on_tpu():
    """Attention alone is told of a TPU, so that all else is computed as on the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "platform", lambda: "tpu")
        yield


def row_segments(num_rows, length):
    """Packed texts, one text, and a text with padding."""
    cuts = np.sort(RNG.integers(1, length, (num_rows, 3)), axis=1)
    segments = 1 + (np.arange(length)[None, :, None] >= cuts[:, None]).sum(-1)
    segments[0] = 1
    segments[1][segments[1] == 4] = 0
    return jnp.asarray(segments, jnp.int32)


def errors(query, key, value, bias, kind, segments, **settings):
    """Of context and gradients by the kernel, as shares of the largest value by the plain form."""
    arrays = (query, key, value, *([] if bias is None else [bias]))
    weights = jnp.asarray(RNG.standard_normal(query.shape), jnp.float32)

    def found(attention):
        def context(query, key, value, bias=None):
            return attend(query, key, value, bias, segments, attention=attention, **settings)

        def total(*arrays):
            return jnp.sum(context(*arrays).astype(jnp.float32) * weights)

        return jax.jit(lambda *of: (context(*of), jax.grad(total, range(len(of)))(*of)))(*arrays)

    expected = found("plain")
    with on_tpu():
        actual = found(kind)
    share = lambda a, b: float(np.abs(np.float32(a) - np.float32(b)).max() / np.abs(np.float32(b)).max())  # noqa: E731
    return jax.tree.leaves(jax.tree.map(share, actual, expected))


@pytest.mark.parametrize("dtype", often(["float32", "bfloat16"], "float32"))
@pytest.mark.parametrize(
    ("length", "heads", "kv_heads", "head_dim", "with_bias", "settings"),
    [
        pytest.param(64, 4, 4, 32, True, {}, marks=pytest.mark.soak),
        (41, 4, 2, 32, True, {"window": Window(5, 3)}),  # padded to whole tiles
        (48, 6, 2, 64, False, {"window": Window(FAR, 0), "cap": 2.0}),
        (768, 2, 1, 32, False, {"window": Window(200, 0)}),  # three blocks, of which some see no others
        pytest.param(640, 2, 2, 64, True, {"cap": 3.0}, marks=pytest.mark.soak),
        (41, 4, 4, 16, True, {"drop": HashedDropout(jnp.arange(7, 9, dtype=jnp.uint32), 20_000)}),
        (640, 4, 2, 64, False, {"window": Window(30, 9), "drop": HashedDropout(jnp.arange(7, 9, dtype=jnp.uint32), 20_000)}),
    ],
)
def test_context_and_gradients_are_those_of_the_plain_form(length, heads, kv_heads, head_dim, with_bias, settings, dtype):
    query, key, value = (jnp.asarray(RNG.standard_normal((3, length, n, head_dim)), dtype) for n in (heads, kv_heads, kv_heads))
    bias = jnp.asarray(RNG.standard_normal((heads, length, length)), jnp.float32) if with_bias else None
    found = errors(query, key, value, bias, "fused", row_segments(3, length), scale=0.3, **settings)
    assert max(found) < (1e-5 if dtype == "float32" else 0.02)


def test_bfloat16_is_as_close_as_it_rounds():
    query, key, value = (jnp.asarray(RNG.standard_normal((3, 41, n, 32)), jnp.bfloat16) for n in (4, 2, 2))
    bias, drop = (
        jnp.asarray(RNG.standard_normal((4, 41, 41)), jnp.float32),
        HashedDropout(jnp.arange(7, 9, dtype=jnp.uint32), 20_000),
    )
    found = errors(query, key, value, bias, "fused", row_segments(3, 41), scale=0.3, window=Window(5, 3), drop=drop)
    assert 1e-5 < max(found) < 0.02


def test_a_traced_window_is_a_window():
    query, key, value = (jnp.asarray(RNG.standard_normal((2, 32, 2, 16)), jnp.float32) for _ in range(3))
    segments = row_segments(2, 32)
    expected = attend(query, key, value, None, segments, window=Window(3, 0))
    with on_tpu():
        of = jax.jit(lambda before: attend(query, key, value, None, segments, window=Window(before, 0), attention="fused"))
        np.testing.assert_allclose(of(3), expected, atol=1e-5)


def loss_and_gradient(config, mesh=None, rng=None, **changes):
    tower = TowerConfig(dataclasses.replace(config, **changes))
    model = DualEncoder(tower, tower)
    params = jax.tree.map(
        lambda leaf: leaf + 0.1 * jnp.cos(jnp.arange(leaf.size)).reshape(leaf.shape), model.init(jax.random.key(0))
    )
    tokens = np.random.default_rng(1).integers(1, 40, (8, 24)).astype(np.int32)
    lengths = np.array([[7, 6, 11], [24, 0, 0], [3, 2, 1], [5, 5, 5]] * 2)

    def loss(params):
        return jnp.sum(jnp.sin(3 * model.encode_rows("doc", params, tokens, rng, lengths)))

    of = jax.value_and_grad(loss)
    if mesh is None:
        return jax.jit(of)(params)
    return jax.jit(sharding.traced_on(mesh, of), in_shardings=sharding.replicated(mesh))(params)


@pytest.mark.parametrize("name", often(ENCODERS, "t5"))
def test_every_encoder_has_the_loss_and_the_gradient_of_the_plain_form(name):
    expected = loss_and_gradient(ENCODERS[name], attention="plain")
    with on_tpu():
        actual = loss_and_gradient(ENCODERS[name], attention="fused")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), actual, expected)


@pytest.mark.parametrize("name", often(["t5", "bert", "causal"], "causal"))
@pytest.mark.soak
def test_devices_of_a_mesh_attend_in_their_own_rows_and_heads(name):
    settings = {"rng": jax.random.key(3), "attention_dropout_rate": 0.3} if name == "bert" else {}
    expected = loss_and_gradient(ENCODERS[name], attention="plain", **settings)
    with on_tpu():
        actual = loss_and_gradient(ENCODERS[name], sharding.make_mesh(fsdp=2, tensor=2), attention="fused", **settings)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), actual, expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 24}, "but the kernel for TPUs takes heads of 16, 32, .* not 24; use 'auto' or 'plain'"),
        ({"length": 1040}, "position biases of up to 1024 tokens, not 1040"),
        ({"heads": 3}, "the mesh does not divide the rows or the heads"),
    ],
)
def test_what_the_kernel_does_not_take_is_refused_or_computed_by_xla(changes, message):
    settings = {"head_dim": 16, "length": 32, "heads": 4, **changes}
    heads = jnp.ones((8, settings["length"], settings["heads"], settings["head_dim"]))
    bias, segments = jnp.ones((settings["heads"], *2 * (settings["length"],))), jnp.ones((8, settings["length"]), jnp.int32)

    def of(kind):
        call = lambda: attend(heads, heads, heads, bias, segments, attention=kind)  # noqa: E731
        return jax.eval_shape(sharding.traced_on(sharding.make_mesh(tensor=2), call))

    with on_tpu():
        assert of("auto").shape == heads.shape
        with pytest.raises(InputError, match=message):
            of("fused")


def test_a_cpu_has_no_fused_kernel():
    heads = jnp.ones((1, 16, 1, 16))
    with pytest.raises(InputError, match="attention is 'fused', but there is no fused kernel for this cpu; use 'auto' or 'plain'"):
        attend(heads, heads, heads, None, jnp.ones((1, 16), int), attention="fused")


@pytest.fixture
def libtpu():
    return pytest.importorskip("libtpu")


def compiled(topology, config, length, **axes):
    """The text of a tower's gradient for 16 packed rows, on as many chips as the axes have."""
    mesh = sharding.make_mesh(**axes, devices=plan.open_topology(topology).devices[: math.prod(axes.values())])
    model = DualEncoder(TowerConfig(config), TowerConfig(config))
    placed = functools.partial(jax.ShapeDtypeStruct, sharding=sharding.replicated(mesh))
    params = jax.tree.map(lambda leaf: placed(leaf.shape, leaf.dtype), model.shapes())
    tokens, lengths = (jax.ShapeDtypeStruct((16, size), np.int32, sharding=sharding.by_rows(mesh)) for size in (length, 4))

    def loss(params, tokens, lengths):
        return jnp.sum(model.encode_rows("doc", params, tokens, None, lengths))

    with layers.compiling_for("tpu"):
        lowered = jax.jit(sharding.traced_on(mesh, jax.grad(loss))).lower(params, tokens, lengths)
    return lowered.compile(plan.compiler_options(-1.0)).as_text()


def kernels(text):
    return len(re.findall(r'custom_call_target="tpu_custom_call".*fused_attention', text))


@pytest.mark.parametrize("topology", ["v5e:2x2", pytest.param("v6e:2x2", marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", often(["t5", "bert", "causal"], "t5"))
def test_a_compiled_step_holds_no_scores_of_all_pairs(libtpu, topology, name):
    """The plain form does, which shows that they are looked for as they are written."""
    config = dataclasses.replace(ENCODERS[name], dtype="bfloat16", remat="none", scan_layers=False)
    for kind, are_held in (("fused", False), ("plain", True)):
        text = compiled(topology, dataclasses.replace(config, attention=kind), 256, data=1)
        assert bool(re.search(r"f32\[16,\d+,256,256\]", text)) == are_held
        assert kernels(text) == (0 if are_held else 2 * config.num_layers)


def test_activations_of_other_chips_are_not_gathered(libtpu):
    config = dataclasses.replace(ENCODERS["t5"], dtype="bfloat16", scan_layers=False, attention="fused")
    text = compiled("v5e:2x2", config, 128, fsdp=2, tensor=2)
    assert kernels(text) == 2 * config.num_layers
    gathered = re.findall(r"= (\S+) all-gather", text)
    assert not [one for one in gathered if "128," in one]
