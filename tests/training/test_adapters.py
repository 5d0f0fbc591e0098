"""Low-rank adapters against a model written by hand: W + alpha / r * A B, and nothing else moves."""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from de_jax import recipe_checks
from de_jax.data.text.tokenizing import Side
from de_jax.losses.in_batch import in_batch_softmax
from de_jax.models import dual_encoder
from de_jax.models.bert import BertConfig
from de_jax.models.dual_encoder import DualEncoder
from de_jax.models.layers import Linear, with_lora
from de_jax.models.rotary import RotaryConfig
from de_jax.models.t5 import T5Config
from de_jax.models.tower import TowerConfig
from de_jax.recipe import Devices, Initialization, Optimization, Recipe
from de_jax.training.mesh import sharding
from de_jax.training.optim import paths
from de_jax.training.optim.optimizer import adamw
from de_jax.training.run.checkpoint import Checkpoints, read_base, write_base
from de_jax.training.run.loop import fresh_state
from de_jax.training.run.run_folder import CHECKPOINTS_DIR, describe_run, load_params, load_run
from de_jax.training.step.adapters import AdaptedModel, Lora
from de_jax.types import Batch, InputError, Packed

SIZES = {"vocab_size": 32, "model_dim": 8, "num_layers": 2, "num_heads": 2, "mlp_dim": 12, "dtype": "float32", "dropout_rate": 0.0}
ENCODERS = {
    "t5": T5Config(**SIZES, head_dim=4),
    "bert": BertConfig(**SIZES, max_positions=16),
    "rotary": RotaryConfig(**SIZES, head_dim=4, num_kv_heads=1, window=2, qk_norm=True),
}
LORA = Lora(pattern=r".*/layers_1/.*/kernel", rank=2, alpha=3.0)  # of a loop, the other layer has none


def model_of(kind, shared=(), **changes):
    tower = TowerConfig(dataclasses.replace(ENCODERS[kind], **changes), projection_dim=8)
    return DualEncoder(tower, tower, shared=shared)


def batch(*, is_packed=False):
    rng = np.random.default_rng(0)
    query, doc = rng.integers(1, 32, (2, 8, 6)).astype(np.int32)
    if is_packed:
        lengths = np.tile(np.int32([2, 4]), (4, 1))
        doc = Packed(doc[:4], lengths, np.arange(8, dtype=np.int32))
    return jax.tree.map(jnp.asarray, Batch(query, doc, np.arange(8, dtype=np.int32), np.arange(8, dtype=np.int32)))


def moved(params, seed=1):
    """B is zero at first, and a gradient of A with it."""
    keys = iter(jax.random.split(jax.random.key(seed), 200))
    return jax.tree.map(lambda leaf: leaf + 0.1 * jax.random.normal(next(keys), leaf.shape), params)


def by_hand(node, scale):
    """A tree of parameters with every adapter added to the kernel beside it."""
    if not isinstance(node, dict):
        return node
    own = {name: by_hand(below, scale) for name, below in node.items() if name not in ("lora_a", "lora_b")}
    if "lora_a" in node:
        own["kernel"] = own["kernel"] + scale * node["lora_a"]["kernel"] @ node["lora_b"]["kernel"]
    return own


def joined(frozen, trained):
    return paths.tree_of({**paths.by_path(frozen), **paths.by_path(trained)})


def assert_close(actual, expected, atol):
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=atol), actual, expected)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("kind", "options", "is_packed"),
    [
        ("t5", {"scan_layers": True, "shared": ("embedder", "encoder", "projection")}, False),
        ("rotary", {"scan_layers": True}, True),
        ("rotary", {"remat": "full"}, False),
        ("bert", {"remat": "dots", "shared": ("embedder", "encoder")}, True),
        ("t5", {"scan_layers": True, "remat": "dots"}, True),
    ],
)
def test_embeddings_and_gradients_are_those_of_a_model_whose_kernels_are_summed_by_hand(kind, options, is_packed):
    model = model_of(kind, **options)
    adapted, texts = AdaptedModel(model, LORA), batch(is_packed=is_packed)._replace(query=None)
    trained, frozen = LORA.split(jax.jit(adapted.init)(jax.random.key(0)))
    assert {path.split("/")[2] for path in paths.all_paths(trained)} == {"layers_1"}
    assert {path.rsplit("/", 2)[1] for path in paths.all_paths(trained)} == {"lora_a", "lora_b"}

    def of(embed, prepare):
        def value(trained):
            found = embed(prepare(joined(frozen, trained)), texts).doc
            return jnp.sum(jnp.cos(found)), found

        return jax.jit(jax.value_and_grad(value, has_aux=True))

    ours, theirs = of(adapted.embed, lambda params: params), of(model.embed, functools.partial(by_hand, scale=1.5))
    for where in (trained, moved(trained)):
        ((_, found), gradient), ((_, expected_found), expected) = ours(where), theirs(where)
        if where is trained:
            np.testing.assert_array_equal(found, expected_found)
        assert_close(found, expected_found, 1e-6)
        assert_close(gradient, expected, 1e-5)
        of_b = {path: leaf for path, leaf in paths.by_path(gradient).items() if "/lora_b/" in path and "query/encoder" not in path}
        assert of_b
        assert all(np.any(leaf) for leaf in of_b.values())  # only documents are embedded
    whole = joined(frozen, moved(trained))
    assert_close(LORA.merged(whole), by_hand(whole, 1.5), 1e-6)


def test_an_adapter_starts_as_in_peft():
    layer = {"attention": {name: {"kernel": np.zeros((64, 8))} for name in ("query", "value")}}
    params = {"query": {"encoder": {"layers_0": layer}}}
    found = paths.by_path(Lora(rank=4).added_to(params, jax.random.key(0)))
    values = np.stack([leaf for path, leaf in found.items() if "/lora_a/" in path])
    assert values.shape == (2, 64, 4)
    assert 0.95 / 8 < np.abs(values).max() <= 1 / 8
    np.testing.assert_allclose(values.std(), 1 / 8 / 3**0.5, rtol=0.1)
    assert len(np.unique(values)) == values.size
    assert not any(np.any(leaf) for path, leaf in found.items() if "/lora_b/" in path)


def recipe_of(model, lora, optimization=None, mesh=sharding.make_mesh):
    return Recipe(
        model=model,
        data=lambda share: None,
        loss=functools.partial(in_batch_softmax, temperature=0.1),
        optimization=optimization or Optimization(optimizer=adamw, learning_rate=0.01, num_steps=10),
        initialization=Initialization(init_from="nowhere"),
        devices=Devices(mesh=mesh),
        adapters=lora,
    )


@pytest.mark.soak
@pytest.mark.short_soak
def test_a_step_moves_adapters_alone_and_a_run_is_saved_and_goes_on_by_them(tmp_path, tokenizer):
    encoder = dataclasses.replace(ENCODERS["t5"], vocab_size=36, num_layers=1, dtype="bfloat16")
    tower = TowerConfig(encoder, projection_dim=8)
    lora = Lora(
        pattern=".*/attention/(query|value)/kernel", rank=2, dropout=0.1, trained=("shared/projection/.*",), base_dtype="bfloat16"
    )
    optimization = Optimization(
        optimizer=adamw,
        learning_rate=0.01,
        num_steps=10,
        frozen=("doc/.*",),
        learning_rate_factors={"query/.*/value/.*": 0.0, "query/embedder/.*": 3.0},
    )
    recipe = recipe_of(DualEncoder(tower, tower, shared=("projection",)), lora, optimization)
    mesh = sharding.make_mesh(2, 1, 2)
    abstract = recipe.shapes()
    shardings = sharding.state_shardings(abstract, mesh)
    like = sharding.with_shardings(abstract, shardings)
    step = sharding.compiled_step(recipe.train_step(abstract.params), shardings, mesh)
    first = fresh_state(recipe.init, lambda params: params, like)
    before = jax.tree.map(np.asarray, first)
    low = {path for path, leaf in paths.by_path(before.base).items() if leaf.dtype == jnp.bfloat16}
    assert low == {path for path in paths.all_paths(before.base) if path.endswith(("/kernel", "/embedding"))}
    describe_run(tmp_path, model=recipe.model, query=Side(tokenizer, 6), doc=Side(tokenizer, 6), adapters=lora)
    write_base(tmp_path, before.base)  # of a run that was killed
    write_base(tmp_path, first.base)
    state, _ = step(first, sharding.place(batch(), mesh))
    with contextlib.closing(Checkpoints(tmp_path / CHECKPOINTS_DIR, keep=1)) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.wait()
        again = checkpoints.restore(1, like)._replace(base=read_base(tmp_path, like.base))
    saved = jax.tree.map(np.asarray, state)
    after, gone_on = (step(one, sharding.place(batch(), mesh))[0] for one in (state, again))
    jax.tree.map(np.testing.assert_array_equal, gone_on, after)
    jax.tree.map(np.testing.assert_array_equal, after.base, before.base)
    still = {path for path, leaf in paths.by_path(after.params).items() if np.array_equal(leaf, paths.by_path(before.params)[path])}
    assert still == {path for path in paths.all_paths(before.params) if path.startswith("doc/") or "/value/" in path}
    moments = {path for path in paths.all_paths({"state": after.opt_state}) if "/encoder/" in path}
    assert moments
    assert all("/query/encoder/" in path and "/lora_" in path for path in moments)

    run = load_run(tmp_path)
    everywhere = jax.tree.map(lambda _: sharding.replicated(mesh), recipe.model.shapes())
    placed = load_params(tmp_path, sharding.with_shardings(recipe.model.shapes(), everywhere))
    for params in (run.params, placed):
        assert_close(params, by_hand(jax.tree.map(lambda leaf: leaf.astype(np.float32), saved.all_params), lora.scale), 1e-6)
    with pytest.raises(InputError, match="was begun with adapters/rank 2, not 4"):
        describe_run(tmp_path, model=recipe.model, query=run.query, doc=run.doc, adapters=dataclasses.replace(lora, rank=4))
    with pytest.raises(InputError, match="was begun with adapters"):
        describe_run(tmp_path, model=recipe.model, query=run.query, doc=run.doc)


def test_a_linear_map_and_its_gradient_are_those_of_a_sum_by_hand():
    linear, keys = Linear(5, 1.0, jnp.dtype(jnp.float32)), jax.random.split(jax.random.key(0), 4)
    shapes = {"kernel": (4, 5), "lora_a/kernel": (4, 2), "lora_b/kernel": (2, 5)}
    params = {name: jax.random.normal(key, shape) for key, (name, shape) in zip(keys, shapes.items(), strict=False)}
    x = jax.random.normal(keys[3], (2, 3, 4)) / 8

    def ours(params):
        with with_lora(scale=1.5, dropout_rate=0.0):
            return jnp.sum(jnp.cos(linear.apply({"params": paths.tree_of(params)}, x)))

    def by_hand(params):
        w, a, b = params.values()
        return jnp.sum(jnp.cos(x @ (w + 1.5 * a @ b)))

    found, expected = (jax.jit(jax.value_and_grad(function))(dict(params)) for function in (ours, by_hand))
    assert_close(found, expected, 1e-5)


def test_dropout_is_of_the_adapters_input_alone():
    linear = Linear(4, 1.0, jnp.dtype(jnp.float32))
    x = 1.0 + jnp.arange(240.0).reshape(2, 30, 4) / 240
    params = {"kernel": jnp.eye(4), "lora_a": {"kernel": jnp.eye(4)}, "lora_b": {"kernel": jnp.eye(4)}}
    with with_lora(scale=2.0, dropout_rate=0.25):
        dropped = linear.apply({"params": params}, x, rngs={"dropout": jax.random.key(0)})
        kept = linear.apply({"params": params}, x)
    np.testing.assert_allclose(kept, 3 * x, rtol=1e-6)
    added = (dropped - x) / (2 * x)  # 0, or 1 / the share that stays
    is_dropped = np.abs(added) < 1e-6
    np.testing.assert_allclose(np.where(is_dropped, 4 / 3, added), 4 / 3, rtol=1e-5)
    assert 0.1 < is_dropped.mean() < 0.4


@pytest.mark.parametrize(
    ("encoders", "pattern", "expected"),
    [
        (("query", "doc"), "query/encoder/.*/kernel", ("doc",)),
        (("query", "doc"), ".*/encoder/.*/kernel", ()),
        (("shared",), ".*/encoder/.*/kernel", ()),
        (("query", "doc"), "doc/encoder/.*/kernel", ("query",)),
    ],
)
def test_a_tower_of_which_nothing_but_a_projection_is_trained_runs_without_dropout(encoders, pattern, expected):
    params = {tower: {"encoder": {"layers_0": {"wi": {"kernel": np.zeros((4, 4))}}}} for tower in encoders}
    params["shared"] = {**params.get("shared", {}), "projection": {"kernel": np.zeros((4, 4))}}
    lora = Lora(pattern=pattern, rank=2, trained=("shared/projection/.*",))
    assert AdaptedModel(None, lora).still_towers(lora.added_to(params, jax.random.key(0))) == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pattern": ".*/q_proj/kernel"}, r"matches no parameter; a kernel near it is 'query/encoder/layers_0/.*/kernel' or '"),
        ({"pattern": "("}, r"Lora\.pattern '\(' is not a regular expression"),
        ({"pattern": ".*"}, r"matches doc/embedder/embedding, but only kernels of encoders get adapters, such as .*Lora\.trained"),
        ({"pattern": ".*/projection/kernel"}, "matches doc/projection/kernel, but only kernels of encoders"),
        ({"pattern": ".*/encoder_norm/scale"}, "matches doc/encoder/encoder_norm/scale, but only kernels"),
        ({"rank": 9}, r"Lora\.rank is 9, but doc/encoder/layers_0/attention/key/kernel has the shape \(8, 8\); give at most 8"),
        ({"rank": 0}, r"Lora\.rank is 0; it must be at least 1"),
        ({"rank": -1}, r"Lora\.rank is -1; it must be at least 1"),
        ({"alpha": float("nan")}, r"Lora\.alpha is nan"),
        ({"alpha": 0.0}, r"Lora\.alpha is 0\.0"),
        ({"dropout": 1.0}, r"Lora\.dropout is 1\.0"),
        ({"trained": (".*/head/.*",)}, r"Lora\.trained pattern '\.\*/head/\.\*' matches no parameter"),
        (
            {"trained": (".*/attention/.*",)},
            "Lora.trained matches doc/encoder/layers_0/attention/key/kernel, which has an adapter",
        ),
    ],
)
def test_settings_that_cannot_be_are_refused_in_one_sentence(settings, message):
    with pytest.raises(InputError, match=message):
        Lora(**{"rank": 2, **settings}).kernels(model_of("t5").shapes())


class Own(nn.Module):
    """The layers of an encoder of one's own: of different widths, the last one with another name."""

    with_linear: bool

    @nn.compact
    def __call__(self, x, segments, deterministic):
        for name, features in (("layers_0", 8), ("layers_1", 6), ("last", 8)):
            own = {"std": 1.0, "dtype": jnp.dtype("float32")} if self.with_linear else {}
            x = nn.remat(Linear if self.with_linear else nn.Dense)(features, **own, name=name)(x)
        return x


@dataclasses.dataclass(frozen=True)
class OwnConfig(T5Config):
    with_linear: bool = True

    def encoder(self):
        return Own(self.with_linear)


@pytest.mark.parametrize("pattern", [".*/layers_0/kernel", ".*/last/kernel"])
def test_adapters_of_an_encoder_of_ones_own_are_applied_where_it_has_our_linear_maps_and_refused_elsewhere(pattern, monkeypatch):
    monkeypatch.setitem(dual_encoder.ARCHITECTURES, "OwnConfig", OwnConfig)
    for with_linear in (True, False):
        tower = TowerConfig(OwnConfig(**SIZES, with_linear=with_linear))
        model = DualEncoder(tower, tower)
        adapted = AdaptedModel(model, Lora(pattern, rank=2))
        params = jax.eval_shape(adapted.init, jax.random.key(0))
        assert len([path for path in paths.all_paths(params) if "/lora_" in path]) == 2
        with (
            contextlib.nullcontext() if with_linear else pytest.raises(InputError, match=r"lora_a/kernel would change no embedding")
        ):
            adapted.check(params)
    with pytest.raises(
        InputError, match=r"adapter shared/encoder/.*/lora_a/kernel would change no .* de_jax\.models\.layers\.Linear"
    ):
        recipe_of(model, adapted.adapters).check({})


@pytest.mark.parametrize("kind", ENCODERS)
def test_every_kernel_of_our_encoders_applies_its_adapter(kind):
    adapted = AdaptedModel(model_of(kind, scan_layers=True), Lora(pattern=".*/encoder/.*/kernel", rank=2))
    adapted.check(jax.eval_shape(adapted.init, jax.random.key(0)))


@pytest.mark.parametrize("kind", ["bert", "rotary"])
def test_tables_of_a_base_in_bfloat16_are_added_as_the_opened_run_adds_them(kind):
    changes = {"num_token_types": 2, **({"scale_embeddings": True} if kind == "rotary" else {})}
    model, tokens = model_of(kind, num_layers=0, **changes), jnp.arange(1, 7)[None, :]
    stored = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), jax.jit(model.init)(jax.random.key(0)))
    embedded = jax.jit(functools.partial(model.token_embeddings, "doc"))
    trained, opened = (embedded(params, tokens) for params in (stored, jax.tree.map(lambda leaf: leaf.astype(jnp.float32), stored)))
    np.testing.assert_allclose(trained, opened, rtol=1e-6, atol=1e-6)


def test_only_matrices_get_adapters():
    params = {"query": {"encoder": {"layers_0": {"heads": {"kernel": np.zeros((8, 2, 4))}}}}}
    with pytest.raises(
        InputError, match=r"matches query/encoder/layers_0/heads/kernel, but its shape is \(8, 2, 4\); only matrices"
    ):
        Lora(".*/heads/kernel", rank=2).kernels(params)


def test_a_fresh_part_must_be_trained_and_a_base_should_not_be_random(monkeypatch):
    monkeypatch.setattr("de_jax.recipe_checks.check_init_from", lambda *args, **options: None)
    model, start = model_of("t5"), Initialization(init_from="nowhere", init_new=(".*/projection/.*",))
    recipe = dataclasses.replace(recipe_of(model, Lora(rank=2)), initialization=start)
    with pytest.raises(InputError, match=r"projection/kernel starts fresh by .*; name it in Lora\.trained too"):
        recipe_checks.check_before_data(recipe, sharding.make_mesh(), model.shapes(), is_fresh=True)
    recipe = dataclasses.replace(recipe, adapters=Lora(rank=2, trained=start.init_new))
    recipe_checks.check_before_data(recipe, sharding.make_mesh(), model.shapes(), is_fresh=True)
    with pytest.warns(UserWarning, match="would leave the random parameters"):
        dataclasses.replace(recipe, initialization=Initialization())
