"""Products of low precision with their own derivative, and dropout."""

import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_params import random_params, tower_params

from de_jax.models import layers
from de_jax.models.attention import SelfAttention, attend
from de_jax.models.bert import BertConfig
from de_jax.models.dual_encoder import DualEncoder
from de_jax.models.layers import Dropout, HashedDropout, Linear, compiling_for, gelu, product
from de_jax.models.t5 import T5Config
from de_jax.models.tower import Tower, TowerConfig

FLOAT32 = jnp.dtype(jnp.float32)
PRODUCTS = {
    "ble,ef->blf": ((3, 5, 8), (8, 6)),
    "ble,ve->blv": ((3, 5, 8), (6, 8)),
    "bqhd,bkhd->bhqk": ((3, 5, 2, 4), (3, 5, 2, 4)),
    "bhqk,bkhd->bhqd": ((3, 2, 5, 5), (3, 5, 2, 4)),
}


def operands(subscripts, dtype):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in PRODUCTS[subscripts]]


@pytest.mark.parametrize("subscripts", PRODUCTS)
def test_product_and_its_gradients_equal_einsum_in_float32(subscripts):
    a, b = operands(subscripts, jnp.float32)

    def with_gradients(multiply):
        value, pull_back = jax.vjp(multiply, a, b)
        return value, *pull_back(jnp.cos(value))

    expected = jax.jit(lambda: with_gradients(lambda a, b: jnp.einsum(subscripts, a, b, precision="highest")))()
    actual = jax.jit(lambda: with_gradients(lambda a, b: product(subscripts, a, b, FLOAT32)))()
    for ours, theirs in zip(actual, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("subscripts", PRODUCTS)
def test_bfloat16_product_is_accumulated_in_float32_and_its_gradients_keep_the_operands_dtypes(subscripts):
    a, b = operands(subscripts, jnp.bfloat16)
    b = b.astype(jnp.float32)  # as a parameter comes
    wide = np.einsum(subscripts, np.asarray(a, np.float64), np.asarray(b, np.float64))
    actual, *gradients = jax.jit(lambda a, b: _value_and_gradients(subscripts, a, b))(a, b)
    assert actual.dtype == jnp.float32
    np.testing.assert_allclose(actual, wide, atol=1e-5)
    assert [gradient.dtype for gradient in gradients] == [jnp.bfloat16, jnp.float32]


def _value_and_gradients(subscripts, a, b):
    value, pull_back = jax.vjp(lambda a, b: product(subscripts, a, b, FLOAT32), a, b)
    return value, *pull_back(jnp.ones_like(value))


@pytest.mark.parametrize("kernel", [(48, 16), (16, 48)])
@pytest.mark.parametrize("subscripts", ["ble,ef->blf", "ble,ve->blv"])
def test_a_cpu_copies_only_the_narrower_operand_of_a_kernels_gradient(subscripts, kernel):
    """XLA's product on a CPU wants the tokens last in its first operand, so it copies that one, transposed."""
    a, b = jnp.ones((4, 40, kernel[subscripts[4:6].index("e")])), jnp.ones(kernel)
    compiled = jax.jit(lambda a, b: _value_and_gradients(subscripts, a, b)[2]).lower(a, b).compile().as_text()
    assert "f32[160,16]" in compiled or "f32[16,160]" in compiled  # the shapes that are looked for are written so
    assert "f32[48,160]" not in compiled


def test_parameter_gradient_of_a_bfloat16_product_is_not_rounded():
    x = jnp.ones((1, 300, 1), jnp.bfloat16)
    linear = Linear(1, 1.0, jnp.dtype(jnp.bfloat16))
    params = random_params(lambda key: linear.init(key, x))
    gradient = jax.jit(jax.grad(lambda p: jnp.sum(linear.apply(p, x).astype(jnp.float32))))(params)
    assert float(gradient["params"]["kernel"][0, 0]) == 300.0  # bfloat16 has no 301 and sums 300 ones to 256


@pytest.mark.parametrize(
    ("shape", "num_heads", "head_dim", "mlp_dim"),
    [
        pytest.param((1, 1), 1, 1, 1, marks=pytest.mark.soak),
        ((3, 1), 3, 8, 33),
        ((2, 7), 3, 8, 33),
        pytest.param((4, 32), 1, 1, 1, marks=pytest.mark.soak),
    ],
)
def test_bfloat16_gradients_of_odd_sizes_exist(shape, num_heads, head_dim, mlp_dim):
    encoder = T5Config(vocab_size=9, model_dim=6, num_layers=1, num_heads=num_heads, head_dim=head_dim, mlp_dim=mlp_dim)
    config, tokens = TowerConfig(encoder, projection_dim=4), np.ones(shape, np.int32)
    embed = lambda p: Tower(config).apply(p, tokens, False, rngs={"dropout": jax.random.key(1)})  # noqa: E731
    gradients = jax.jit(jax.grad(lambda p: jnp.sum(embed(p)[..., 0])))(tower_params(config))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))


@pytest.mark.parametrize("width", [1, 6, 7])
def test_dropout_zeroes_its_share_and_keeps_the_mean(width):
    x = np.ones((20000 // width, 3, width), np.float32)
    y = np.asarray(jax.jit(lambda x: Dropout(0.3).apply({}, x, False, rngs={"dropout": jax.random.key(0)}))(x))
    assert y.shape == x.shape
    np.testing.assert_allclose(np.mean(y == 0), 0.3, atol=0.01)
    np.testing.assert_allclose(np.unique(y), [0.0, 2**16 / (2**16 - round(0.3 * 2**16))], rtol=1e-6)
    columns = (y == 0).reshape(-1, width)
    if width > 1:  # the two values that share a draw are independent
        assert abs(np.corrcoef(columns[:, 0], columns[:, 1])[0, 1]) < 0.05


def test_hashed_dropout_decides_on_each_value_alone_by_key_and_place():
    shape, rate = (40, 6, 50, 50), 0.3
    apply = jax.jit(lambda key: HashedDropout(jax.random.bits(key, (2,), jnp.uint32), round(rate * 2**16))(jnp.ones(shape)))
    kept, other = (np.asarray(apply(jax.random.key(seed))) for seed in (0, 1))
    np.testing.assert_array_equal(kept, apply(jax.random.key(0)))
    assert set(np.unique(kept)) == {0, np.float32(1 / (1 - round(rate * 2**16) / 2**16))}
    noise = (1 - rate) * rate  # of one decision; the sum of n of them stays below five deviations
    dropped, others = ((values == 0) - rate for values in (kept, other))
    for axis in range(4):
        of_line = dropped.sum(axis=axis)
        assert abs(of_line.sum()) < 5 * (noise * dropped.size) ** 0.5
        assert of_line.var() == pytest.approx(noise * shape[axis], rel=0.05)
    for step in (1, 2, 50, 2500, 15000):
        assert abs((dropped.ravel()[step:] * dropped.ravel()[:-step]).sum()) < 5 * noise * dropped.size**0.5
    assert abs((dropped * others).sum()) < 5 * noise * dropped.size**0.5


def test_dropout_is_off_when_deterministic_or_of_rate_zero():
    x = jnp.arange(6.0).reshape(1, 2, 3)
    assert Dropout(0.5).apply({}, x, True) is x
    assert Dropout(0.0).apply({}, x, False) is x


def test_gelu_and_its_gradient_are_those_of_flax():
    x = jnp.linspace(-6, 6, 97)
    theirs = functools.partial(jax.nn.gelu, approximate=False)
    for ours, expected in ((gelu(x), theirs(x)), (jax.vmap(jax.grad(gelu))(x), jax.vmap(jax.grad(theirs))(x))):
        np.testing.assert_allclose(ours, expected, atol=1e-6)
    half = x.astype(jnp.bfloat16)  # rounded once, also where 1 + erf cancels
    np.testing.assert_array_equal(gelu(half), gelu(half.astype(jnp.float32)).astype(jnp.bfloat16))


def test_inference_params_give_bit_equal_embeddings():
    sizes = {"vocab_size": 31, "model_dim": 16, "num_layers": 1, "num_heads": 2, "head_dim": 8, "mlp_dim": 24}
    towers = {"query": "float32", "doc": "bfloat16"}
    model = DualEncoder(
        *(TowerConfig(T5Config(**sizes, dtype=dtype), projection_dim=8) for dtype in towers.values()), ("projection",)
    )
    params = random_params(model.init)
    tokens = np.random.default_rng(0).integers(1, 31, (3, 6)).astype(np.int32)
    for tower, encode in (("query", model.encode_query), ("doc", model.encode_doc)):
        rounded = model.inference_params(params, tower)
        assert set(rounded) == {tower, "shared"}
        assert rounded[tower]["encoder"]["layers_0"]["mlp"]["wo"]["kernel"].dtype == towers[tower]
        np.testing.assert_array_equal(jax.jit(encode)(rounded, tokens), jax.jit(encode)(params, tokens))


def packed_rows(num_rows):
    """Rows of two texts and padding."""
    return jnp.tile(jnp.asarray([[1, 1, 1, 2, 2, 0]]), (num_rows, 1))


def test_dropout_per_text_draws_once_for_all_tokens_of_a_text_and_anew_for_the_next():
    segments = packed_rows(4000)
    dropped = Dropout(0.3, per_text=True).apply({}, jnp.ones((4000, 6, 5)), False, segments, rngs={"dropout": jax.random.key(0)})
    dropped = np.asarray(dropped == 0)
    for text in (slice(0, 3), slice(3, 5)):
        assert (dropped[:, text] == dropped[:, text][:, :1]).all()
    np.testing.assert_allclose(dropped.mean(axis=(0, 1)), 0.3, atol=0.02)
    first, second = dropped[:, 0].ravel(), dropped[:, 3].ravel()
    assert abs(np.corrcoef(first, second)[0, 1]) < 4 / np.sqrt(len(first))


@pytest.mark.parametrize(("config", "is_shared"), [(BertConfig, False), (T5Config, True)])
def test_bert_drops_each_attention_weight_and_t5_a_key_for_all_queries_of_its_text(config, is_shared):
    """Equal tokens attend to all alike, so their context tells how many weights were dropped."""
    attention = SelfAttention(2, 4, 0.5, config.attention_dropout, FLOAT32)
    x, segments = jnp.ones((50, 6, 8)), packed_rows(50)
    params = attention.init(jax.random.key(0), x, None, segments, True)
    context = np.asarray(attention.apply(params, x, None, segments, False, rngs={"dropout": jax.random.key(1)}))
    differs = np.abs(np.diff(context[:, :3], axis=1)).max(axis=(1, 2)) > 1e-6
    assert not differs.any() if is_shared else differs.mean() > 0.8
    assert (np.abs(context[:, 0] - context[:, 3]).max(axis=1) > 1e-6).mean() > 0.8  # the next text draws anew


@pytest.mark.parametrize("encoder", [T5Config, BertConfig], ids=["T5", "BERT"])
@pytest.mark.parametrize("target", ["gpu", "tpu"])
def test_products_of_float32_are_float32s_on_an_accelerator_too(encoder, target):
    """Whose default for float32 arrays is TF32 or bfloat16."""
    tower = TowerConfig(
        encoder(vocab_size=32, model_dim=16, num_layers=1, num_heads=2, mlp_dim=16, dtype="float32", attention="plain"),
        projection_dim=8,
    )
    model, tokens = DualEncoder(tower, tower), jnp.ones((2, 4), int)
    loss = lambda params: jnp.sum(model.encode_query(params, tokens))  # noqa: E731
    with compiling_for(target):
        lowered = jax.jit(jax.value_and_grad(loss)).lower(model.shapes()).as_text()
    products = [line for line in lowered.splitlines() if "stablehlo.dot_general" in line]
    assert len(products) > 20
    assert not [line for line in products if "precision = [HIGHEST, HIGHEST]" not in line]


@pytest.mark.parametrize(("capability", "has_it"), [("9.0", True), ("8.0", True), ("7.5", False), ("gfx90a", False)])
def test_the_fused_kernel_is_for_gpus_that_multiply_bfloat16(monkeypatch, capability, has_it):
    gpu = types.SimpleNamespace(platform="gpu", compute_capability=capability)
    monkeypatch.setattr(jax, "local_devices", lambda: [gpu])
    assert layers.has_bfloat16_units.__wrapped__() == has_it


def test_parameters_of_equal_layers_are_one_draw_with_the_values_of_their_own_keys():
    encoder = BertConfig(vocab_size=16, model_dim=8, num_layers=3, num_heads=2, mlp_dim=8, dropout_rate=0.0)
    tower = Tower(TowerConfig(encoder, projection_dim=4))
    alone = jax.jit(lambda key: tower.init(key, jnp.ones((1, 2), jnp.int32))["params"])
    together = jax.jit(lambda key: layers.drawn_together(lambda: alone.__wrapped__(key)))
    jax.tree.map(np.testing.assert_array_equal, together(jax.random.key(1)), alone(jax.random.key(1)))
    texts = [program.lower(jax.random.key(1)).as_text() for program in (together, alone)]
    draws = [len(re.findall("call @_(?:normal|uniform)", text)) for text in texts]  # JAX 0.10 calls the one, 0.12 the other
    assert draws[0] < draws[1]


@pytest.mark.parametrize("dropped", [0, 6554])
def test_a_gradient_on_a_cpu_keeps_no_weights_of_all_pairs_of_tokens(dropped):
    rows, length, heads, dim = 2, 64, 4, 8
    query, key, value = jax.random.normal(jax.random.key(0), (3, rows, length, heads, dim))
    bias, segments = jnp.ones((heads, length, length)), jnp.ones((rows, length), jnp.int32)
    drop = HashedDropout(jnp.array([1, 2], jnp.uint32), dropped) if dropped else None
    _, back = jax.vjp(lambda *of: attend(*of, bias, segments, drop=drop), query, key, value)
    assert max(one.size for one in jax.tree.leaves(back)) == bias.size < rows * bias.size
