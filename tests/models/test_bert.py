"""Our BERT and RoBERTa encoder against transformers' torch ones, with the same random weights; and what is its own: positions."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from often import often
from random_params import tower_params

from de_jax.models.bert import BertConfig
from de_jax.models.dual_encoder import DualEncoder
from de_jax.models.layers import places_of
from de_jax.models.t5 import T5Config
from de_jax.models.tower import Tower, TowerConfig
from de_jax.types import Batch, InputError

CONFIG = BertConfig(
    vocab_size=97,
    model_dim=32,
    num_layers=2,
    num_heads=4,
    mlp_dim=48,
    max_positions=64,
    norm_epsilon=1e-5,
    dropout_rate=0.0,
    dtype="float32",
)
OFFSETS = {"bert": 0, "roberta": 2}


def torch_model(kind, **settings):
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    sizes |= {"max_position_embeddings": 64, "layer_norm_eps": 1e-5, **settings}
    if kind == "bert":
        model = transformers.BertModel(transformers.BertConfig(**sizes), add_pooling_layer=False)
    else:
        model = transformers.RobertaModel(transformers.RobertaConfig(**sizes, pad_token_id=1), add_pooling_layer=False)
    with torch.no_grad():  # norms of ones and biases of zeros would hide a missing one
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 if parameter.ndim > 1 else torch.rand_like(parameter) + 0.5)
    return model.eval()


def our_params(model):
    weights = {name: value.detach().numpy() for name, value in model.state_dict().items()}
    linear = lambda name: {"kernel": weights[f"{name}.weight"].T, "bias": weights[f"{name}.bias"]}  # noqa: E731
    norm = lambda name: {"scale": weights[f"{name}.weight"], "bias": weights[f"{name}.bias"]}  # noqa: E731

    def layer(name):
        maps = {part: linear(f"{name}.attention.self.{part}") for part in ("query", "key", "value")}
        return {
            "attention": {**maps, "out": linear(f"{name}.attention.output.dense")},
            "attention_layer_norm": norm(f"{name}.attention.output.LayerNorm"),
            "mlp": {"wi": linear(f"{name}.intermediate.dense"), "wo": linear(f"{name}.output.dense")},
            "mlp_layer_norm": norm(f"{name}.output.LayerNorm"),
        }

    return {
        "embedder": {
            "embedding": weights["embeddings.word_embeddings.weight"],
            "position": {"embedding": weights["embeddings.position_embeddings.weight"]},
            "token_type": {"embedding": weights["embeddings.token_type_embeddings.weight"]},
            "norm": norm("embeddings.LayerNorm"),
        },
        "encoder": {f"layers_{i}": layer(f"encoder.layer.{i}") for i in range(2)},
    }


def random_tokens(lengths, longest):
    rng = np.random.default_rng(0)
    tokens = np.zeros((len(lengths), longest), np.int32)
    for row, length in zip(tokens, lengths, strict=True):
        row[:length] = rng.integers(2, 97, length)
    return tokens


def tower_config(config=CONFIG, **settings):
    return TowerConfig(config, **{"projection_dim": 16, **settings})


@functools.partial(jax.jit, static_argnums=0)
def embeddings_of(config, params, tokens, dropout_key=None):
    """Dropout is on where there is a key."""
    rngs = None if dropout_key is None else {"dropout": dropout_key}
    return Tower(config).apply(params, tokens, dropout_key is None, rngs=rngs)


@pytest.mark.parametrize("kind", OFFSETS)
def test_encoder_equals_transformers(kind):
    reference = torch_model(kind)
    tokens = random_tokens([62, 3, 40], 62)
    mask = tokens != 0
    theirs = np.where(mask, tokens, {"bert": 0, "roberta": 1}[kind])
    with torch.no_grad():
        expected = reference(input_ids=torch.tensor(theirs), attention_mask=torch.tensor(mask)).last_hidden_state.numpy()
    num_token_types = reference.config.type_vocab_size
    config = dataclasses.replace(CONFIG, position_offset=OFFSETS[kind], num_token_types=num_token_types)
    params = our_params(reference)

    @jax.jit
    def hidden(params, tokens):
        segments = (tokens != 0).astype(jnp.int32)
        x = config.embedder().apply({"params": params["embedder"]}, tokens, segments, True)
        return config.encoder().apply({"params": params["encoder"]}, x, segments, True)

    actual = np.asarray(hidden(params, tokens))
    np.testing.assert_allclose(actual[mask], expected[mask], atol=1e-5 * np.abs(expected[mask]).max())
    expected_params = tower_params(tower_config(config, projection_dim=None))["params"]
    assert jax.tree.map(lambda leaf: leaf.shape, expected_params) == jax.tree.map(lambda leaf: leaf.shape, params)


def test_places_start_anew_with_each_text():
    segments = jnp.asarray([[1, 1, 2, 2, 2, 0], [1, 2, 3, 0, 0, 0], [0, 0, 0, 0, 0, 0]])
    np.testing.assert_array_equal(places_of(segments), [[0, 1, 0, 1, 2, 0], [0, 0, 0, 0, 0, 0], [0] * 6])


@pytest.mark.parametrize(
    ("offset", "pooling"),
    often([(0, "mean"), (2, "first"), (0, "max"), (0, "mean_sqrt_len"), (0, "weightedmean")], (0, "mean"), (2, "first")),
)
def test_packed_texts_have_the_embeddings_and_gradients_of_padded_ones(pooling, offset):
    config = tower_config(dataclasses.replace(CONFIG, position_offset=offset, max_positions=9 + offset), pooling=pooling)
    model, params = Tower(config), tower_params(config)
    padded = random_tokens([5, 2, 7, 1, 9], 9)
    texts = [row[row != 0] for row in padded]
    rows = [np.concatenate([texts[4], texts[1], [0]]), np.concatenate([texts[0], texts[2]])]
    rows += [np.concatenate([texts[3], np.zeros(11, np.int32)])]
    packed, lengths = np.stack(rows).astype(np.int32), np.array([[9, 2, 0], [5, 7, 0], [1, 0, 0]], np.int32)
    weight = jnp.asarray(np.random.default_rng(0).standard_normal((5, 1, 16)), jnp.float32)

    def of_padded(params):
        embeddings = model.apply(params, padded)
        return jnp.sum(embeddings * weight), embeddings

    def of_packed(params):
        embeddings = model.apply(params, packed, True, lengths).reshape(9, 1, 16)[jnp.array([3, 1, 4, 6, 0])]
        return jnp.sum(embeddings * weight), embeddings

    (_, expected), expected_gradient = jax.jit(jax.value_and_grad(of_padded, has_aux=True))(params)
    (_, actual), gradient = jax.jit(jax.value_and_grad(of_packed, has_aux=True))(params)
    np.testing.assert_allclose(actual, expected, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4, rtol=1e-4), gradient, expected_gradient)


@pytest.mark.soak
def test_a_loop_over_layers_changes_nothing_whatever_is_kept():
    tokens, params = random_tokens([7, 3], 8), tower_params(tower_config())

    def gradient(**options):
        model = Tower(tower_config(dataclasses.replace(CONFIG, **options)))
        loss = lambda p: jnp.sum(model.apply(p, tokens) * jnp.arange(16.0)[None, None])  # noqa: E731
        return jax.jit(jax.value_and_grad(loss))(params)

    expected = gradient()
    for remat in ("dots", "full"):
        actual = gradient(remat=remat, scan_layers=True)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), actual, expected)


def test_bfloat16_stays_close_to_float32_and_dropout_changes_it():
    tokens = random_tokens([20, 13], 20)
    exact, rounded = (tower_config(dataclasses.replace(CONFIG, dtype=dtype, dropout_rate=0.3)) for dtype in ("float32", "bfloat16"))
    params = tower_params(exact)
    a, b = (np.asarray(embeddings_of(config, params, tokens)) for config in (exact, rounded))
    assert np.sum(a * b, axis=-1).min() > 0.999
    assert not np.allclose(a, embeddings_of(exact, params, tokens, jax.random.key(1)), atol=0.05)


NUM_DRAWS, DROPPED = 250, 0.3
TEXTS = [24, 9]  # tokens


def torch_draws(part):
    """Embeddings of two texts [r, 2, D] with dropout in one part of the model, and [2, D] without."""
    rates = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0, f"{part}_prob": DROPPED}
    reference, tokens = torch_model("bert", **rates), np.tile(random_tokens(TEXTS, max(TEXTS)), (NUM_DRAWS, 1))
    mask = torch.tensor(tokens != 0)

    def embed():
        with torch.no_grad():
            hidden = reference(input_ids=torch.tensor(tokens), attention_mask=mask).last_hidden_state
            pooled = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
            return torch.nn.functional.normalize(pooled, dim=-1).numpy().reshape(NUM_DRAWS, 2, -1)

    clean = embed()[0]
    reference.train()
    return embed(), clean, our_params(reference)


def statistics_of(draws, clean):
    """Of each draw and text: its cosine to the embedding without dropout, and its squared distance to the mean of all draws."""
    return np.stack([np.sum(draws * clean, axis=-1), np.square(draws - draws.mean(0)).sum(-1)])


@pytest.mark.parametrize(
    ("part", "is_packed"),
    [("attention_probs_dropout", False), ("attention_probs_dropout", True), ("hidden_dropout", True)],
    ids=["attention", "attention, packed rows in a rematerialised loop", "hidden, packed rows in a rematerialised loop"],
)
def test_dropout_has_the_effect_that_it_has_in_torch(part, is_packed):
    theirs, clean, params = torch_draws(part)
    rates = (0.0, DROPPED) if part == "attention_probs_dropout" else (DROPPED, 0.0)
    options = {"remat": "full", "scan_layers": True} if is_packed else {}
    config = dataclasses.replace(CONFIG, dropout_rate=rates[0], attention_dropout_rate=rates[1], **options)
    model = Tower(tower_config(config, projection_dim=None))
    tokens, lengths = random_tokens(TEXTS, max(TEXTS)), None
    if is_packed:
        tokens, lengths = tokens[tokens != 0][None], np.tile(TEXTS, (NUM_DRAWS, 1))
    tokens = np.tile(tokens, (NUM_DRAWS, 1))
    draw = jax.jit(lambda params, key: model.apply({"params": params}, tokens, False, lengths, rngs={"dropout": key}))
    ours = np.asarray(draw(params, jax.random.key(0))).reshape(NUM_DRAWS, 2, -1)
    a, b = statistics_of(ours, clean), statistics_of(theirs, clean)
    error = np.sqrt((a.var(axis=1) + b.var(axis=1)) / NUM_DRAWS)
    assert (np.abs(a.mean(axis=1) - b.mean(axis=1)) < 4 * error).all(), (a.mean(axis=1), b.mean(axis=1), error)
    assert np.abs(np.corrcoef(a[0].T)[0, 1]) < 4 / np.sqrt(NUM_DRAWS)  # the two texts' draws are independent


def test_head_with_norm_is_ances():
    head = torch.nn.Sequential(torch.nn.Linear(32, 16), torch.nn.LayerNorm(16))
    tokens = random_tokens([9, 4], 9)
    settings = {"pooling": "first", "normalize": False}
    with_head = tower_config(**settings, projection_bias=True, projection_norm=True)
    params = tower_params(with_head)["params"]
    assert {name: leaf.shape for name, leaf in params["projection"].pop("norm").items()} == {"scale": (16,), "bias": (16,)}
    pooled = embeddings_of(tower_config(**settings, projection_dim=None), {"params": {**params, "projection": {}}}, tokens)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn_like(parameter))
        expected = head(torch.tensor(np.asarray(pooled))).numpy()
    linear, norm = ([parameter.detach().numpy() for parameter in module.parameters()] for module in head)
    projection = {"kernel": linear[0].T, "bias": linear[1], "norm": {"scale": norm[0], "bias": norm[1]}}
    actual = embeddings_of(with_head, {"params": {**params, "projection": projection}}, tokens)
    np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_t5_queries_and_bert_docs_are_a_pair_where_their_projections_agree():
    t5 = T5Config(vocab_size=31, model_dim=16, num_layers=1, num_heads=2, head_dim=4, mlp_dim=16, dtype="float32")
    model = DualEncoder(TowerConfig(t5, projection_dim=8), TowerConfig(CONFIG, projection_dim=8), ())
    tokens, ids = random_tokens([6, 5], 6) % 31, np.arange(2, dtype=np.int32)
    embeddings = jax.eval_shape(model.embed, model.shapes(), Batch(tokens, tokens, ids, ids))
    assert embeddings.query.shape == embeddings.doc.shape == (2, 8)
    assert DualEncoder.from_json(model.to_json()) == model
    with pytest.raises(InputError, match="8 dimensions and document embeddings 32"):
        DualEncoder(TowerConfig(t5, projection_dim=8), TowerConfig(CONFIG, projection_dim=None), ())


@pytest.mark.parametrize("offset", OFFSETS.values(), ids=OFFSETS)
def test_texts_longer_than_the_positions_are_refused(offset):
    config = TowerConfig(dataclasses.replace(CONFIG, position_offset=offset), projection_dim=8)
    model = DualEncoder(TowerConfig(T5Config(), projection_dim=8), config, ())
    longest = 64 - offset
    model.check_length("doc", longest)
    model.check_length("query", 100_000)
    with pytest.raises(InputError, match=f"max_doc_length is {longest + 1}, but the doc tower has positions for {longest} tokens"):
        model.check_length("doc", longest + 1)


def test_sizes_that_contradict_are_refused():
    with pytest.raises(InputError, match="model_dim is 32, which num_heads = 5"):
        dataclasses.replace(CONFIG, num_heads=5)
    of_a_projection = {
        "projection_bias": True,
        "projection_init": "orthogonal",
        "projection_activation": "tanh",
    }
    for name, value in of_a_projection.items():
        TowerConfig(CONFIG, **{name: value})
        with pytest.raises(InputError, match=f"{name} is set without a projection"):
            TowerConfig(CONFIG, projection_dim=None, **{name: value})
