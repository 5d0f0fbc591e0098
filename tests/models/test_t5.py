"""Our T5 encoder against transformers' torch one, with the same random weights."""

import functools

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import linen as nn
from random_params import tower_params
from transformers import T5Config as TorchConfig
from transformers import T5EncoderModel, UMT5EncoderModel
from transformers import UMT5Config as TorchUMT5Config

from de_jax.models.attention import relative_position_bucket
from de_jax.models.t5 import T5Config
from de_jax.models.tower import Tower, TowerConfig, pool, segments_of

SIZES = {"vocab_size": 97, "model_dim": 32, "num_layers": 2, "num_heads": 4, "head_dim": 8, "mlp_dim": 48}


def tower_config(dtype="float32", pooling="mean", **options):
    return TowerConfig(T5Config(**SIZES, dtype=dtype, **options), pooling=pooling, projection_dim=16)


@functools.partial(jax.jit, static_argnums=0)
def embeddings_of(config, params, tokens):
    return Tower(config).apply(params, tokens)


@functools.partial(jax.jit, static_argnums=0)
def gradient_of(config, params, tokens, dropout_key=None):
    """A loss and its gradient; dropout is on where there is a key."""

    def loss(params):
        rngs = None if dropout_key is None else {"dropout": dropout_key}
        return jnp.sum(Tower(config).apply(params, tokens, dropout_key is None, rngs=rngs) * jnp.arange(16.0)[None, None])

    return jax.value_and_grad(loss)(params)


def torch_model(activation: str, bias_per_layer: bool = False) -> T5EncoderModel | UMT5EncoderModel:
    torch.manual_seed(0)
    config_class, model_class = (TorchUMT5Config, UMT5EncoderModel) if bias_per_layer else (TorchConfig, T5EncoderModel)
    config = config_class(
        vocab_size=97,
        d_model=32,
        num_layers=2,
        num_heads=4,
        d_kv=8,
        d_ff=48,
        feed_forward_proj={"relu": "relu", "gated_gelu": "gated-gelu"}[activation],
    )
    model = model_class(config).eval()
    with torch.no_grad():  # a norm that is all ones would hide a missing scale
        for name, parameter in model.named_parameters():
            if "layer_norm" in name:
                parameter.copy_(torch.rand_like(parameter) + 0.5)
    return model


def our_encoder_params(model: T5EncoderModel | UMT5EncoderModel, activation: str) -> dict:
    weights = {name: value.detach().numpy() for name, value in model.state_dict().items()}
    bias = lambda i: {"rel_embedding": weights[f"encoder.block.{i}.layer.0.SelfAttention.relative_attention_bias.weight"].T}  # noqa: E731
    bias_per_layer = isinstance(model, UMT5EncoderModel)

    def layer(i: int) -> dict:
        attention, mlp = f"encoder.block.{i}.layer.0.", f"encoder.block.{i}.layer.1."
        branches = ("wi_0", "wi_1", "wo") if activation == "gated_gelu" else ("wi", "wo")
        return {
            "pre_attention_layer_norm": {"scale": weights[attention + "layer_norm.weight"]},
            "attention": {
                name: {"kernel": weights[f"{attention}SelfAttention.{letter}.weight"].T}
                for name, letter in (("query", "q"), ("key", "k"), ("value", "v"), ("out", "o"))
            },
            "pre_mlp_layer_norm": {"scale": weights[mlp + "layer_norm.weight"]},
            "mlp": {name: {"kernel": weights[f"{mlp}DenseReluDense.{name}.weight"].T} for name in branches},
            **({"relpos_bias": bias(i)} if bias_per_layer else {}),
        }

    return {
        "embedder": {"embedding": weights["shared.weight"]},
        "encoder": {
            "encoder_norm": {"scale": weights["encoder.final_layer_norm.weight"]},
            **{f"layers_{i}": layer(i) for i in range(2)},
            **({} if bias_per_layer else {"relpos_bias": bias(0)}),
        },
    }


def random_tokens(lengths: list[int], longest: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    tokens = np.zeros((len(lengths), longest), np.int32)
    for row, length in zip(tokens, lengths, strict=True):
        row[:length] = rng.integers(2, 97, length)
    return tokens


@pytest.mark.parametrize(
    ("activation", "bias_per_layer"), [("relu", False), ("gated_gelu", False), ("gated_gelu", True)], ids=["t5", "t5_1_1", "umt5"]
)
def test_encoder_equals_transformers(activation, bias_per_layer):
    reference = torch_model(activation, bias_per_layer)
    tokens = random_tokens([200, 3, 77], 200)
    mask = tokens != 0
    with torch.no_grad():
        expected = reference(input_ids=torch.tensor(tokens), attention_mask=torch.tensor(mask)).last_hidden_state.numpy()
    config = T5Config(**SIZES, activation=activation, bias_per_layer=bias_per_layer, dtype="float32")
    params = our_encoder_params(reference, activation)

    @jax.jit
    def hidden(params, tokens):
        segments = (tokens != 0).astype(jnp.int32)
        x = config.embedder().apply({"params": params["embedder"]}, tokens, segments, True)
        return config.encoder().apply({"params": params["encoder"]}, x, segments, True)

    actual = np.asarray(hidden(params, tokens))
    scale = np.abs(expected[mask]).max()
    np.testing.assert_allclose(actual[mask] / scale, expected[mask] / scale, atol=1e-5)


@pytest.mark.soak
def test_random_parameters_are_drawn_as_t5x_draws_them_where_asked_for():
    sizes = {"vocab_size": 8, "model_dim": 256, "num_layers": 1, "num_heads": 12, "head_dim": 64, "mlp_dim": 512}
    drawn = {name: _drawn(T5Config(**sizes, initializers=name)) for name in (None, "t5x")}
    variance_scaling = nn.initializers.variance_scaling  # T5X's own call: scale, mode and distribution of its gin files
    for path, mode, distribution in [
        ("layers_0/mlp/wi_0/kernel", "fan_in", "truncated_normal"),
        ("layers_0/mlp/wi_1/kernel", "fan_in", "truncated_normal"),
        ("layers_0/mlp/wo/kernel", "fan_in", "truncated_normal"),
        ("layers_0/attention/key/kernel", "fan_in", "normal"),
        ("layers_0/attention/value/kernel", "fan_in", "normal"),
        ("layers_0/attention/out/kernel", "fan_in", "normal"),
        ("relpos_bias/rel_embedding", "fan_avg", "uniform"),
    ]:
        own = drawn["t5x"][path]
        theirs = variance_scaling(1.0, mode, distribution)(jax.random.key(1), own.shape)
        num_draws = own.size
        assert own.std() == pytest.approx(theirs.std(), rel=4 / np.sqrt(num_draws)), path
        assert np.abs(own).max() == pytest.approx(np.abs(theirs).max(), rel=0.03 if distribution != "normal" else 0.3), path
    largest = {name: np.abs(params["layers_0/mlp/wo/kernel"]).max() * 512**0.5 for name, params in drawn.items()}
    assert largest["t5x"] < 2.3 < largest[None]
    assert drawn[None]["relpos_bias/rel_embedding"].std() == pytest.approx(1, rel=0.2)
    query = drawn["t5x"]["layers_0/attention/query/kernel"]
    assert query.std() * 8 == pytest.approx(256**-0.5, rel=0.02)  # T5X divides its draws by the root of head_dim


def _drawn(config):
    x = jnp.zeros((1, 4, config.model_dim))
    params = config.encoder().init(jax.random.key(0), x, jnp.ones((1, 4), jnp.int32), True)["params"]
    return {"/".join(path): np.asarray(leaf) for path, leaf in flax.traverse_util.flatten_dict(params).items()}


def test_relative_position_bucket_equals_transformers():
    from transformers.models.t5.modeling_t5 import T5Attention

    bucket_of = jax.jit(relative_position_bucket, static_argnums=(1, 2))
    distance = np.arange(600, dtype=np.int32)[None, :] - np.arange(600, dtype=np.int32)[:, None]
    for num_buckets, max_distance in ((32, 128), (16, 64)):
        expected = T5Attention._relative_position_bucket(torch.tensor(distance), True, num_buckets, max_distance)
        np.testing.assert_array_equal(bucket_of(distance, num_buckets, max_distance), expected)


def test_embedding_does_not_depend_on_padding():
    short, config = random_tokens([9, 5], 9), tower_config()
    params = tower_params(config)
    padded = np.pad(short, ((0, 0), (0, 23)))
    np.testing.assert_allclose(embeddings_of(config, params, short), embeddings_of(config, params, padded), atol=1e-6)


@pytest.mark.parametrize(("pooling", "dtype"), [("mean", "float32"), ("first", "bfloat16")])
def test_packed_texts_have_the_embeddings_and_gradients_of_padded_ones(pooling, dtype):
    config = tower_config(dtype, pooling)
    tower, params = Tower(config), tower_params(config)
    sizes = [5, 2, 7, 1, 9]
    padded = random_tokens(sizes, 9)
    texts = [row[row != 0] for row in padded]
    rows = [np.concatenate([texts[4], texts[1], [0]]), np.concatenate([texts[0], texts[2]])]
    rows += [np.concatenate([texts[3], np.zeros(11, np.int32)])]
    packed, lengths = np.stack(rows).astype(np.int32), np.array([[9, 2, 0], [5, 7, 0], [1, 0, 0]], np.int32)
    weight = jnp.asarray(np.random.default_rng(0).standard_normal((5, 1, 16)), jnp.float32)

    def of_padded(params):
        embeddings = tower.apply(params, padded)
        return jnp.sum(embeddings * weight), embeddings

    def of_packed(params):
        embeddings = tower.apply(params, packed, True, lengths).reshape(9, 1, 16)[jnp.array([3, 1, 4, 6, 0])]
        return jnp.sum(embeddings * weight), embeddings

    if dtype == "bfloat16":  # has 8 bits, and sums are taken in another order
        np.testing.assert_allclose(jax.jit(of_packed)(params)[1], jax.jit(of_padded)(params)[1], atol=2e-2)
        return
    (_, expected), expected_gradient = jax.jit(jax.value_and_grad(of_padded, has_aux=True))(params)
    (_, actual), gradient = jax.jit(jax.value_and_grad(of_packed, has_aux=True))(params)
    np.testing.assert_allclose(actual, expected, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4, rtol=1e-4), gradient, expected_gradient)


def test_mean_pooling_leaves_padding_and_other_texts_out():
    hidden = jnp.asarray([[[1.0], [3.0], [100.0]], [[5.0], [7.0], [9.0]]])
    np.testing.assert_array_equal(pool(hidden, jnp.asarray([[1, 1, 0], [0, 0, 0]]), 1, "mean"), [[[2.0]], [[0.0]]])
    np.testing.assert_array_equal(pool(hidden, jnp.asarray([[1, 2, 2], [2, 2, 0]]), 2, "mean"), [[[1.0], [51.5]], [[0.0], [6.0]]])
    np.testing.assert_array_equal(pool(hidden, jnp.asarray([[1, 2, 2], [2, 2, 0]]), 2, "first"), [[[1.0], [3.0]], [[0.0], [5.0]]])


def test_segments_follow_the_lengths():
    lengths = jnp.asarray([[2, 1, 0], [0, 0, 0], [4, 0, 0]])
    np.testing.assert_array_equal(segments_of(lengths, 4), [[1, 1, 2, 0], [0, 0, 0, 0], [1, 1, 1, 1]])


TOKENS = random_tokens([7, 3], 8)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"remat": "none"}, marks=pytest.mark.soak),
        pytest.param({"remat": "dots"}, marks=pytest.mark.soak),
        {"remat": "full"},
        pytest.param({"bias_per_layer": True}, marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_a_loop_over_layers_changes_nothing(options):
    plain, looped = tower_config(bias_per_layer="bias_per_layer" in options), tower_config(**options, scan_layers=True)
    params = tower_params(plain)
    shapes = jax.eval_shape(lambda: Tower(looped).init(jax.random.key(0), TOKENS))
    assert jax.tree.structure(params) == jax.tree.structure(shapes)
    expected, actual = (gradient_of(config, params, TOKENS) for config in (plain, looped))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), actual, expected)


def test_a_loop_over_layers_compiles_one_layer_and_drops_out_in_each():
    loop, unrolled = (tower_config(dropout_rate=0.5, scan_layers=scan) for scan in (True, False))
    params, key = tower_params(loop), jax.random.key(1)

    def lowered(config):
        embed = lambda p: Tower(config).apply(p, TOKENS, False, rngs={"dropout": key})  # noqa: E731
        return jax.jit(embed).lower(params)

    assert lowered(loop).as_text().count("dot_general") < lowered(unrolled).as_text().count("dot_general")
    run = lowered(loop).compile()
    assert "while(" in run.as_text()
    assert float(jnp.sum(run(params))) != float(jnp.sum(run(jax.tree.map(np.zeros_like, params))))


def test_dropout_broadcast_shares_every_draw_among_the_tokens_of_a_text():
    """Equal tokens without position scores stay equal in all layers, in each text of a packed row, if no draw is a token's own."""
    segments = jnp.tile(jnp.asarray([[1] * 5 + [2] * 3]), (4, 1))
    x = jnp.broadcast_to(jax.random.normal(jax.random.key(0), (32,)), (4, 8, 32))

    def hidden(dropout_broadcast):
        config = T5Config(**SIZES, dtype="float32", dropout_rate=0.3, dropout_broadcast=dropout_broadcast, scan_layers=True)
        encoder = config.encoder()
        params = jax.tree_util.tree_map_with_path(
            lambda path, leaf: leaf * ("rel_embedding" not in jax.tree_util.keystr(path)),
            jax.jit(lambda: encoder.init(jax.random.key(1), x, segments, True))(),
        )
        dropped = jax.jit(lambda params: encoder.apply(params, x, segments, False, rngs={"dropout": jax.random.key(2)}))
        return np.asarray(dropped(params))

    shared, own = hidden(True), hidden(False)
    for text in (slice(0, 5), slice(5, 8)):
        np.testing.assert_allclose(shared[:, text], np.broadcast_to(shared[:, text][:, :1], shared[:, text].shape), atol=1e-5)
    for different in (shared[:, 0] - shared[:, 5], shared[0] - shared[1], own[:, 0] - own[:, 1]):
        assert np.abs(different).max() > 0.1


@pytest.mark.soak
def test_dropout_broadcast_moves_a_mean_pooled_embedding_more_and_packed_rows_as_padded_ones():
    texts, num_draws = random_tokens([60, 30], 60), 100
    padded = np.tile(texts, (num_draws, 1)), None
    packed = np.tile(texts[texts != 0], (num_draws, 1)), np.tile([60, 30], (num_draws, 1))

    def cosines(tokens, lengths, **options):
        tower = Tower(TowerConfig(T5Config(**{**SIZES, "num_layers": 1}, dtype="float32", **options), projection_dim=None))
        params = jax.jit(tower.init)(jax.random.key(0), texts)
        rngs = {"dropout": jax.random.key(1)}
        dropped = jax.jit(lambda params: tower.apply(params, tokens, False, lengths, rngs=rngs))(params).reshape(num_draws, 2, -1)
        return np.asarray(jnp.sum(dropped * jax.jit(tower.apply)(params, texts).reshape(1, 2, -1), axis=-1))

    own, shared, in_rows = (
        cosines(*texts, dropout_broadcast=broadcast) for texts, broadcast in ((padded, False), (padded, True), (packed, True))
    )
    assert (shared.mean(axis=0) < own.mean(axis=0) - 0.05).all()
    error = np.sqrt((shared.var(axis=0) + in_rows.var(axis=0)) / num_draws)
    assert (np.abs(shared.mean(axis=0) - in_rows.mean(axis=0)) < 4 * error).all()


def test_text_of_padding_alone_gives_finite_gradients():
    config = tower_config()
    gradients = gradient_of(config, tower_params(config), random_tokens([4, 0], 8))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))


@pytest.mark.soak
def test_remat_changes_no_gradient():
    params, key = tower_params(tower_config()), jax.random.key(1)
    expected, *others = (
        gradient_of(tower_config(remat=remat, dropout_rate=0.1), params, TOKENS, key) for remat in ("none", "dots", "full")
    )
    for actual in others:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), actual, expected)


def test_bfloat16_stays_close_to_float32():
    tokens = random_tokens([20, 13], 20)
    exact, rounded = (tower_config(dtype) for dtype in ("float32", "bfloat16"))
    params = tower_params(exact)
    exact, rounded = (np.asarray(embeddings_of(config, params, tokens)) for config in (exact, rounded))
    assert rounded.dtype == np.float32
    assert np.sum(exact * rounded, axis=-1).min() > 0.999
