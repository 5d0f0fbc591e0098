"""Every public setting takes a value that works, or refuses it in one sentence that names it."""

import dataclasses
import functools
import inspect
import math
import re
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toy_run
import wrong_values
from flat_settings import flat

from de_jax import configurables, settings
from de_jax.configurables import read_recipe
from de_jax.data.sources.mixture import mixed_pairs
from de_jax.data.sources.options import PairsOptions
from de_jax.data.sources.seqio_batches import seqio_pairs
from de_jax.data.sources.training_set import beir_pairs
from de_jax.data.text.table_files import Rows
from de_jax.losses.combination import combined, guided, matryoshka
from de_jax.losses.in_batch import in_batch_softmax, samtone
from de_jax.models.bert import BertConfig
from de_jax.models.decoding import Decoding
from de_jax.models.dual_encoder import DualEncoder
from de_jax.models.generator import Generator
from de_jax.models.t5 import T5Config
from de_jax.models.tower import Tower, TowerConfig
from de_jax.recipe import Recipe
from de_jax.settings import LocalPath
from de_jax.training.optim.optimizer import adamw, linear
from de_jax.training.run.settings import Optimization
from de_jax.types import Embeddings, Guide, InputError, Sample

pytestmark = pytest.mark.usefixtures("as_users_have_it")
ANYTHING = (0, -1, math.nan, 1e30, "x")
SIZES = {"vocab_size": 32, "model_dim": 16, "num_layers": 1, "num_heads": 2, "mlp_dim": 16}
TOWER = TowerConfig(T5Config(**SIZES, head_dim=8), projection_dim=8)
MODEL = DualEncoder(TOWER, TOWER)
PARAMS = {"query": {"encoder": {"kernel": np.ones((4, 4), np.float32)}}}
CONFIGS = {T5Config: SIZES, BertConfig: SIZES, TowerConfig: {"encoder": TOWER.encoder}, DualEncoder: {"query": TOWER, "doc": TOWER}}
CONFIGS |= {Generator: {"t5": TOWER.encoder}, Decoding: {}}
CONFIGS |= {config: {} for config in (*configurables.MINERS, *configurables.HOOKS, configurables.Curriculum)}
WRAPPED = {combined: {"losses": (in_batch_softmax,)}, matryoshka: {"loss": in_batch_softmax, "dims": (8, 4)}}
WRAPPED |= {guided: {"loss": in_batch_softmax}}
CONFIGS |= {group: {} for group in configurables.GROUPS if group is not PairsOptions}


def batch():
    vectors = lambda *shape: jnp.ones((*shape, 8)) / 8**0.5  # noqa: E731
    ids = jnp.arange(4, dtype=jnp.int32)
    mined = {"neg_docs": vectors(4, 2), "neg_doc_ids": jnp.full((4, 2), 9), "neg_queries": vectors(4, 1)}
    sample, scores = Sample(jnp.zeros(4), jnp.full((4, 2), 0.5), jnp.ones(4)), jnp.ones((4, 3))
    guide = Guide(vectors(4), vectors(4), vectors(4, 2), vectors(4, 1))
    known = {"sample": sample, "scores": scores, "guide": guide}
    return Embeddings(vectors(4), vectors(4), ids, ids, **mined, neg_query_ids=jnp.full((4, 1), 9), **known)


def use(configurable, changed, dataset_dir):
    """Does with a configurable what is cheap: a config or recipe is made, a function is called or traced on a small input."""
    if configurable in CONFIGS:
        return configurable(**{**CONFIGS[configurable], **changed})
    if configurable is Recipe:
        base = {"model": MODEL, "loss": in_batch_softmax, "data": beir_pairs}
        return Recipe(**{**base, **changed})
    if configurable in configurables.LOSSES:
        return jax.eval_shape(functools.partial(configurable, **{**WRAPPED.get(configurable, {}), **changed}), batch())
    if configurable in configurables.OPTIMIZERS and "params" in settings.hints(configurable):
        return jax.eval_shape(configurable(lambda step: 0.1, PARAMS, **changed).init, PARAMS)
    if configurable in configurables.OPTIMIZERS:
        return configurable(**{"peak": 0.1, "num_steps": 10, **changed})(0)
    if configurable in (beir_pairs, PairsOptions):
        data = {"dataset_dir": str(dataset_dir), "tokenizer": str(dataset_dir / "spiece.model"), "batch_size": 8}
        opened = flat(beir_pairs)(**{**data, **changed})
        if opened.mined:
            opened.mined.check()  # as the trainer does
        return next(opened.batches(0))
    if configurable in configurables.DATA:  # they open files that are not here
        return settings.check(configurable, changed)
    return configurable(**changed)


def outcome(configurable, changed, dataset_dir):
    """What an attempt is refused with; None where it works."""
    try:
        use(configurable, changed, dataset_dir)
    except InputError as error:
        return str(error)
    except Exception as error:
        pytest.fail(f"{configurable.__name__} with {changed} gives {type(error).__name__}: {error}")
    return None


def near_misses(hint):
    """A few values beside each choice that an annotation names."""
    choices = typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()
    nested = [value for part in typing.get_args(hint) for value in near_misses(part)] if not choices else []
    return nested + [f"{choice}s" for choice in choices] + [choice.replace("_", "-").upper() for choice in choices]


def settings_of(configurable):
    """Its settings with their annotations; what only code gives, such as a batch's embeddings, is left out."""
    kinds = inspect.signature(configurable).parameters
    from_code = ("e", "schedule", "params", "devices", "module_args") if configurable is not Recipe else ()
    return {name: hint for name, hint in settings.hints(configurable).items() if name in kinds and name not in from_code}


@pytest.fixture(scope="module")
def dataset_dir(tmp_path_factory):
    return toy_run.write_dataset(tmp_path_factory.mktemp("beir") / "toy")


ALL = (*configurables.MODELS, *configurables.LOSSES, *configurables.OPTIMIZERS, *configurables.DATA, *configurables.MESH)
ALL = (*dict.fromkeys((*ALL, *configurables.MINERS, *configurables.HOOKS, *configurables.GROUPS, *CONFIGS, Recipe)),)


@pytest.mark.parametrize("configurable", ALL, ids=lambda configurable: configurable.__name__)
def test_any_value_of_any_setting_works_or_is_refused_in_one_sentence(configurable, dataset_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("DE_JAX_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    tried = [(name, value) for name, hint in settings_of(configurable).items() for value in (*ANYTHING, *near_misses(hint))]
    said = {(name, repr(value)): outcome(configurable, {name: value}, dataset_dir) for name, value in tried}
    refused = {setting: sentence for setting, sentence in said.items() if sentence}
    for setting, sentence in refused.items():
        assert sentence.endswith("."), (setting, sentence)
        assert "\n" not in sentence, (setting, sentence)
        assert " at 0x" not in sentence, (setting, sentence)
    misses = {(name, repr(value)) for name, hint in settings_of(configurable).items() for value in (math.nan, *near_misses(hint))}
    assert misses <= refused.keys()
    assert len(refused) >= 2 * len(settings_of(configurable))


def test_each_setting_refuses_the_values_that_it_refused_when_there_were_four_checkers():
    now, before = wrong_values.table(), wrong_values.read(Path(__file__).parent / "golden" / "refused_values.txt")
    assert len(now.keys() & before.keys()) > 300
    lost = {name: set(before[name].split()) - set(now[name].split()) for name in now.keys() & before.keys()}
    assert {name: values for name, values in lost.items() if values} == {}


def test_every_setting_has_an_annotation():
    for configurable in ALL:
        names = set(inspect.signature(configurable).parameters)
        assert names == set(settings.hints(configurable)), configurable


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        (
            "TowerConfig.pooling=cls",
            "TowerConfig.pooling is 'cls'; it must be 'mean', 'first', 'last', 'max', 'mean_sqrt_len' or ",
        ),
        ("TowerConfig.pooling=median", "'mean', 'first', 'last', 'max', 'mean_sqrt_len' or 'weightedmean'"),
        ("T5Config.activation=gelu", "T5Config.activation is 'gelu'; it must be 'gated_gelu' or 'relu' (did you mean"),
        ("T5Config.activation=gated-gelu", "(did you mean 'gated_gelu'?)."),
        ("T5Config.activation=swiglu", "'gated_gelu' or 'relu'"),
        ("T5Config.dtype=float16", "'float32' or 'bfloat16'"),
        ("query/T5Config.remat=ful", "query/T5Config.remat is 'ful'; it must be 'none', 'dots' or 'full' (did you mean 'full'?)."),
        ("T5Config.dropout_rate=2", "T5Config.dropout_rate is 2; it must be less than 1."),
        ("T5Config.dropout_rate=-1", "it must be at least 0."),
        ("T5Config.num_buckets=2", "it must be at least 4."),
        ("T5Config.num_heads=0", "it must be at least 1."),
        ("DualEncoder.shared=projection", "DualEncoder.shared is 'projection'; it must be a tuple, such as ('projection',)."),
        ("DualEncoder.initial_temperature=0", "it must be at least 0.01, or None."),
        ("Optimization.clip_norm=-1", "Optimization.clip_norm is -1; it must be more than 0, or None."),
        ("Optimization.clip_norm=one", "Optimization.clip_norm is 'one'; it must be a number, or None."),
        ("Logging.keep_checkpoints=0", "it must be at least 1."),
        ("Logging.log_every_steps=0", "it must be at least 1."),
        ("Logging.save_every_steps=0", "it must be at least 1."),
        ("Logging.evaluate_every_steps=0", "it must be at least 1."),
        ("Devices.num_chunks=0", "it must be at least 1."),
        ("Initialization.seed=one", "Initialization.seed is 'one'; it must be a whole number."),
        ("Optimization.num_steps=1e1", "Optimization.num_steps is 10.0; it must be a whole number, written 10."),
        ("Optimization.frozen=query/.*", "it must be a tuple, such as ('query/.*',)."),
        ("Optimization.learning_rate_factors={'q/.*': -1.0}", "Optimization.learning_rate_factors['q/.*'] is -1.0; it must be at"),
        ("Recipe.model=@linear", "Recipe.model is linear; it must be DualEncoder(...)."),
        ("PairsOptions.length_multiple=0", "PairsOptions.length_multiple is 0; it must be at least 1."),
        ("PairsOptions.batch_size=0", "it must be at least 1."),
        ("beir_pairs.dataset_dir=https://host/scifact", "it must be a path, or an address gs:// or s3://, because other addresses"),
        ("Initialization.init_from=hdfs://host/run", "it must be a path, or an address gs:// or s3://"),
        (
            "Initialization.init_new=('.*/projection/.*',)",
            "Initialization.init_new is ('.*/projection/.*',), but without init_from all parameters",
        ),
        (
            "Initialization.init_layers={'query': (0,)}",
            "but without init_from all parameters start fresh; set Initialization.init_from, or leave",
        ),
        ("samtone.temperature=-0.05", "samtone.temperature is -0.05; it must be more than 0, or None."),
    ],
)
def test_a_value_that_trains_something_else_is_refused(setting, sentence):
    with pytest.raises(InputError) as refused:
        read_recipe(["recipes/samtone_query.gin"], [setting])
    assert sentence in str(refused.value)


def test_tensorflows_own_folders_may_be_addresses():
    settings.check(seqio_pairs, {"task_cache_dirs": ["hdfs://host/cache"]})
    with pytest.raises(InputError, match=r"PairsOptions\.cache_dir is 'hdfs://host'; it must be a path, or an address gs://"):
        PairsOptions(cache_dir="hdfs://host")
    assert PairsOptions(guide_dir="gs://bucket/guide").guide_dir == "gs://bucket/guide"


@pytest.mark.parametrize("text", ["~/.bashrc is read by bash", "s3://my-bucket/key", "gs://a/b", "hdfs://host/run"])
@pytest.mark.parametrize("num_rows", [1, 1001])
def test_a_text_that_looks_like_a_path_is_trained_on_as_it_is(text, num_rows):
    rows = [{"question": f"{text} {number}", "answer": text} for number in range(num_rows)]

    @settings.checked
    def read(path: LocalPath | Rows = "", *, options: PairsOptions = PairsOptions()):
        return path, options

    found, options = read(rows, options=PairsOptions(query_prompt="~/", doc_prompt=text))
    assert found is rows
    assert (options.query_prompt, options.doc_prompt) == ("~/", text)


def test_paths_are_those_that_are_annotated_so(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))

    @settings.checked
    def opened(
        path: LocalPath | None = None, *, paths: Sequence[LocalPath] = (), name: str = "", options: PairsOptions = PairsOptions()
    ):
        return path, paths, name, options.cache_dir

    home = str(tmp_path / "a")
    assert opened("~/a", paths=["~/a"], name="~/a", options=PairsOptions(cache_dir="~/a")) == (home, [home], "~/a", home)


def test_the_settings_of_a_function_are_those_of_its_signature_with_the_values_that_are_bound():
    def loss(e, temperature: float = 0.1, *rest, mask=True, **more):
        return e, temperature, mask

    part = functools.partial(loss, "e", temperature=0.5)
    found = {name: (one.hint, one.value) for name, one in settings.settings_of(part).items()}
    assert found == {"e": (typing.Any, "e"), "temperature": (float, 0.5), "mask": (typing.Any, True)}
    assert settings.settings_of(loss)["e"].value is settings.ABSENT
    assert settings.with_values(part, e="f", mask=False)() == ("f", 0.5, False)
    assert settings.with_values(loss, mask=False)("g") == ("g", 0.1, False)
    changed = settings.with_values(Optimization(num_steps=3), learning_rate=0.5)
    assert [settings.settings_of(changed)[name].value for name in ("num_steps", "learning_rate")] == [3, 0.5]
    assert [settings.settings_of(value) for value in (3, "a", {})] == [{}, {}, {}]


def test_a_macro_is_checked_as_the_setting_that_takes_it():
    with pytest.raises(InputError, match=r"PairsOptions\.batch_size is 'many'; it must be a whole number\."):
        read_recipe(["recipes/sde.gin"], ["SIZE=many", "PairsOptions.batch_size=%SIZE"])


def test_an_error_holds_names_and_no_addresses():
    with pytest.raises(InputError) as refused:
        read_recipe(["recipes/sde.gin", "models/t5_1_1_tiny.gin"], ["Optimization.optimizer=@linear()"])
    assert "linear()" in str(refused.value)
    assert " at 0x" not in str(refused.value)
    assert "\n" not in str(refused.value)


def test_an_array_and_a_tracer_pass_and_nothing_of_the_check_is_compiled():
    loss = lambda tau: in_batch_softmax(batch(), temperature=tau)[0]  # noqa: E731
    settings.check(in_batch_softmax, {"temperature": jnp.float32(-1.0)})
    checked, bare = settings.checked(lambda x: x), lambda x: x
    assert str(jax.make_jaxpr(lambda x: checked(x=x))(1.0)) == str(jax.make_jaxpr(lambda x: bare(x=x))(1.0))
    with pytest.raises(InputError, match="more than 0"):
        loss(0.0)


def test_numbers_of_numpy_are_checked():
    for value in (np.array(-1.0), np.float32(-1.0), np.True_, np.str_("a"), np.float32):
        with pytest.raises(InputError, match=r"Optimization\.learning_rate is"):
            settings.check_value("Optimization.learning_rate", value, settings.PositiveFloat)
    settings.check_value("Optimization.learning_rate", np.array(1.0), settings.PositiveFloat)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"loss": functools.partial(samtone, temprature=0.05)}, "samtone has no setting 'temprature' (did you mean temperature?)."),
        (
            {"loss": functools.partial(combined, losses=(functools.partial(samtone, tau=1.0),))},
            "samtone has no setting 'tau'.",
        ),
        ({"data": functools.partial(beir_pairs, "d", option=1)}, "beir_pairs has no setting 'option' (did you mean options?)."),
        (
            {"data": functools.partial(mixed_pairs, {"a": functools.partial(beir_pairs, option=1)})},
            "beir_pairs has no setting 'option' (did you mean options?).",
        ),
        ({"loss": functools.partial(samtone, 1, 2, 3)}, "Recipe.loss is samtone, which cannot be called with embeddings alone;"),
    ],
)
def test_arguments_that_a_function_does_not_have_are_named(changed, sentence):
    with pytest.raises(InputError, match=re.escape(sentence)):
        use(Recipe, changed, None)
    with pytest.raises(InputError, match="adamw has no setting 'weigth_decay'"):
        Optimization(optimizer=functools.partial(adamw, weigth_decay=0.1))


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        (
            {"schedule": functools.partial(linear, peak=5e-4)},
            "the schedule's peak is what Optimization.learning_rate says; set that",
        ),
        ({"schedule": functools.partial(linear, num_steps=9)}, "the schedule's num_steps is what Optimization.num_steps says"),
        (
            {"optimizer": optax.adamw},
            "is optax's adamw, whose arguments are not (schedule, params); wrap it",
        ),
        (
            {"optimizer": functools.partial(optax.lion, b1=0.5)},
            "optax's lion, whose arguments are not (schedule, params)",
        ),
    ],
)
def test_what_would_be_ignored_or_fail_in_optax_is_refused(changed, sentence):
    with pytest.raises(InputError, match=re.escape(sentence)):
        Optimization(**changed)
    assert Optimization(optimizer=lambda schedule, params: optax.lion(schedule)).tx({"a": np.ones(3)})


@pytest.mark.parametrize(
    ("returned", "sentence"),
    [
        (lambda loss, e: loss, "it must return (a real number, a dict of numbers by name)."),
        (lambda loss, e: (loss, None), "it must return (a real number, a dict of numbers by name)."),
        (lambda loss, e: (e.query.sum(axis=1), {}), "it must return (a real number, a dict of numbers by name)."),
        (lambda loss, e: (jnp.int32(3), {}), "it must return (a real number, a dict of numbers by name)."),
        (lambda loss, e: (loss, {"a": loss, "b": e.query}), "a dict of numbers by name); the metric 'b' does not fit."),
        (lambda loss, e: (loss, {"a": None}), "; the metric 'a' does not fit."),
        (lambda loss, e: (loss, {1: loss}), "; the metric 1 does not fit."),
        (lambda loss, e: (loss, {"grad_norm/top": loss}), "whose metric 'grad_norm/top' is one of the run's own; rename it."),
        (lambda loss, e: (jnp.float32(3), {}), "which reads no embedding; compute it from e.query and e.doc."),
        (lambda loss, e: (3 * loss, {"loss": loss}), "whose metric 'loss' is one of the run's own; rename it."),
    ],
)
def test_what_a_loss_may_return_is_said_before_anything_is_read(returned, sentence):
    def own(e):
        return returned(in_batch_softmax(e)[0], e)

    options = PairsOptions(tokenizer="nowhere/spiece.model")
    with pytest.raises(InputError, match=re.escape("Recipe.loss is own") + ".*" + re.escape(sentence)):
        use(Recipe, {"loss": own, "data": functools.partial(beir_pairs, "nowhere", options=options)}, None).check()


def test_whole_numbers_of_numpy_are_whole_numbers():
    found = dataclasses.replace(TOWER.encoder, num_layers=np.int64(2), dropout_rate=np.float64(0.5))
    assert (type(found.num_layers), found.num_layers, type(found.dropout_rate)) == (int, 2, float)  # as JSON and FAISS take them
    with pytest.raises(InputError, match="a whole number"):
        dataclasses.replace(TOWER.encoder, num_layers=True)


@pytest.mark.parametrize("config", [T5Config, BertConfig])
def test_a_tower_without_layers_averages_its_embeddings(config):
    tokens = jnp.asarray([[3, 4, 5, 0]])
    encoder = config(**{**SIZES, "num_layers": 0}, dtype="float32", dropout_rate=0.0)
    tower = TowerConfig(encoder, projection_dim=None, normalize=False)
    params = Tower(tower).init(jax.random.key(0), tokens)["params"]
    plain = Tower(tower).apply({"params": params}, tokens)
    scanned = Tower(dataclasses.replace(tower, encoder=dataclasses.replace(encoder, scan_layers=True)))
    np.testing.assert_array_equal(scanned.apply({"params": params}, tokens), plain)
    embedded = encoder.embedder().apply({"params": params["embedder"]}, tokens, jnp.asarray([[1, 1, 1, 0]]), True)
    if config is T5Config:  # which has a norm after its layers
        embedded = embedded / jnp.sqrt(jnp.mean(embedded**2, axis=-1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(plain[0, 0], embedded[0, :3].mean(axis=0), rtol=1e-5, atol=1e-6)


def test_a_mapping_of_anything_takes_anything():
    settings.check_value("seqio_pairs.module_args", {"a": 1, "b": "x", "c": None}, Mapping[str, typing.Any] | None)
