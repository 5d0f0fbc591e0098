"""What a recipe starts from: towers, tokenizers and first parameters of a pretrained model, and what is refused."""

import dataclasses
import json
import shutil
import warnings

import jax
import numpy as np
import pytest
from pretrained_folders import WORDS, write_encoder, write_sentence_transformer
from random_params import random_params

from de_jax import cli
from de_jax.configurables import read_recipe
from de_jax.data.text import beir
from de_jax.interop import any_model, fine_tuning
from de_jax.interop.fine_tuning import initial_params
from de_jax.models.dual_encoder import DualEncoder
from de_jax.training.mesh import sharding
from de_jax.training.optim import paths
from de_jax.types import InputError

LENGTHS = {"PairsOptions.max_query_length": 16, "PairsOptions.max_doc_length": 16}
QUIET = {**LENGTHS, "PairsOptions.batch_size": 8, "Optimization.num_steps": 2, "linear.warmup_steps": 0}
QUIET["pretrained_tower.dropout_rate"] = 0.0  # most of what is compiled else


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    write_sentence_transformer(root / "bert", "bert", dense=True, prompts={"prompts": {"query": "query : "}})
    write_sentence_transformer(root / "t5", "t5", dense=False)
    write_sentence_transformer(root / "plain", "bert")
    docs = [(f"d{i}", "", f"{WORDS[i % 4]} of texts {WORDS[i // 4]}") for i in range(16)]
    queries = [(f"q{i}", f"{WORDS[i % 4]} {WORDS[i // 4]}") for i in range(16)]
    beir.write(root / "data", docs, queries, {"train": {f"q{i}": {f"d{i}": 1} for i in range(16)}})
    return root


def fresh(query, doc, shared=(), **options):
    """A model of two folders' towers, and its parameters on the mesh as a trainer has them."""
    query, doc = (
        fine_tuning.pretrained_tower(source=source, tower=name) for source, name in ((str(query), "query"), (str(doc), "doc"))
    )
    model = DualEncoder(query=query, doc=doc, shared=shared, **options)
    return on_mesh(model)


def on_mesh(model):
    return jax.device_put(random_params(model.init, seed=1), sharding.replicated(sharding.make_mesh()))


def by_path(params):
    return dict(zip(paths.all_paths(params), map(np.asarray, jax.tree.leaves(params)), strict=True))


def test_towers_take_the_parts_of_the_model_that_each_is_given(folders):
    bert, t5 = (str(folders / name) for name in ("bert", "t5"))
    params = by_path(initial_params({"query": t5, "doc": bert}, fresh(t5, bert)))
    for tower, source in (("query", t5), ("doc", bert)):
        there = by_path(any_model.read(source).params)
        assert {path for path in params if path.startswith(tower)} == {path.replace("shared", tower, 1) for path in there}
        for path, array in there.items():
            np.testing.assert_array_equal(params[path.replace("shared", tower, 1)], array)


def test_one_model_starts_both_towers_shared_or_not(folders):
    bert = str(folders / "bert")
    there = by_path(any_model.read(bert).params)
    for shared in (("embedder", "encoder", "projection"), ("projection",)):
        params = initial_params(bert, fresh(bert, bert, shared))
        for path, array in by_path(params).items():
            np.testing.assert_array_equal(array, there["shared" + path[path.index("/") :]])
        assert len(set(map(id, jax.tree.leaves(params)))) == len(jax.tree.leaves(params))  # each is given to a step to overwrite


def test_a_tower_without_a_source_and_named_parameters_stay_fresh(folders):
    bert = str(folders / "bert")
    before = fresh(bert, bert, initial_temperature=0.05)
    after = initial_params({"doc": bert}, before, new=["shared/temperature/.*", "doc/projection/.*"])
    there = by_path(any_model.read(bert).params)
    for path, array in by_path(after).items():
        kept = path.startswith(("query/", "shared/", "doc/projection/"))
        np.testing.assert_array_equal(array, by_path(before)[path] if kept else there[path.replace("doc", "shared", 1)])


@pytest.mark.parametrize("kind", ["bert", "t5"])
def test_a_tower_is_cut_from_a_deeper_model(folders, kind):
    source = str(folders / kind)
    whole = fine_tuning.pretrained_tower(source=source)
    assert whole.encoder.num_layers > 1
    last = whole.encoder.num_layers - 1
    model = DualEncoder(query=fine_tuning.pretrained_tower(source=source, layers=(1,)), doc=whole, shared=("projection",))
    before = on_mesh(model)
    after = by_path(initial_params(source, before, layers={"query": (last,)}))
    there = by_path(any_model.read(source).params)
    for path, array in after.items():
        origin = path.replace("query/encoder/layers_0/", f"shared/encoder/layers_{last}/")
        np.testing.assert_array_equal(array, there["/".join(["shared", *origin.split("/")[1:]])])
    with pytest.raises(InputError, match="names 2 layers for the query tower, which has 1; name one for each"):
        initial_params(source, before, layers={"query": (0, 1)})
    with pytest.raises(InputError, match=r"no value for .* query/encoder/layers_0/"):
        initial_params(source, before, layers={"query": (7,)})
    with pytest.raises(InputError, match=f"holds shared/encoder/layers_{last}/.*, which this model has no place for"):
        initial_params({"query": source}, before)


def test_what_does_not_fit_is_refused_before_weights_are_read(folders, monkeypatch):
    bert, t5, plain = (str(folders / name) for name in ("bert", "t5", "plain"))
    monkeypatch.setattr(fine_tuning, "_placed_params", lambda *_: pytest.fail("weights were read"))
    both = fresh(bert, bert)
    wide = jax.tree.map(lambda leaf: leaf, both)
    wide["query"]["projection"]["bias"] = np.zeros(25)
    pair = {"query": t5, "doc": bert}
    refusals = [
        (
            bert,
            fresh(bert, bert, initial_temperature=0.05),
            (),
            "no value for 1 parameters, for example shared/temperature/log_scale",
        ),
        (
            plain,
            both,
            (),
            r'no value for 4 parameters, for example doc/projection/bias.*Initialization.init_new = \("doc/projection/.\*",\)',
        ),
        (bert, fresh(plain, plain), (), "bert holds shared/projection/bias, which this model has no place for"),
        (pair, fresh(t5, t5, ("projection",)), (), "shared/projection/kernel is shared, but would start from"),
        (bert, wide, (), r"has the shape \(24,\) for query/projection/bias, but this model \(25,\)"),
        (bert, both, ["shared/.*"], "Initialization.init_new pattern 'shared/.\\*' matches no parameter"),
        ({"docs": bert}, both, (), "the tower 'docs' is unknown"),
        ("/nowhere", both, (), "/nowhere does not exist"),
    ]
    for init_from, params, new, message in refusals:
        with pytest.raises(InputError, match=message):
            initial_params(init_from, params, new=new)


def trained(run_dir, settings):
    arguments = [f"--gin.{name}={value}" for name, value in settings.items()]
    cli.call("train", ["--gin_file=recipes/fine_tune.gin", *arguments, f"--run_dir={run_dir}"])


@pytest.mark.soak
@pytest.mark.short_soak
def test_one_path_fine_tunes_a_model_and_the_result_is_a_model_again(folders, tmp_path):
    settings = {"MODEL": folders / "bert", "beir_pairs.dataset_dir": folders / "data", "Recipe.loss": "@samtone"}
    trained(tmp_path / "run", {**QUIET, **settings})
    original, tuned = any_model.read(folders / "bert"), any_model.read(tmp_path / "run")
    assert (tuned.query.tokenizer.prompt, tuned.query.max_length) == ("query : ", 16)
    encoder = dataclasses.replace(original.model.query.encoder, dropout_rate=0.0)
    tower = dataclasses.replace(original.model.query, encoder=encoder)
    assert (tuned.model, sorted(tuned.params)) == (DualEncoder(tower, tower), ["shared"])
    before, after = by_path(original.params), by_path(tuned.params)
    moved = [np.abs(after[path] - before[path]).max() for path in before]
    assert 0 < max(moved) < 1e-4  # two updates of at most 2e-5
    again = by_path(initial_params(str(tmp_path / "run"), fresh(tmp_path / "run", tmp_path / "run")))
    for path, array in after.items():
        for tower in ("query", "doc"):
            np.testing.assert_array_equal(again[path.replace("shared", tower, 1)], array)


def test_pooling_of_a_tower_is_chosen_and_what_is_assumed_is_said(folders, tmp_path):
    write_encoder(tmp_path / "alone", "bert")
    alone, model = str(tmp_path / "alone"), str(folders / "bert")
    with pytest.warns(UserWarning, match="holds an encoder alone, so these are assumed: mean pooling"):
        assert fine_tuning.pretrained_tower(source=alone).pooling == "mean"
    with warnings.catch_warnings(action="error"):
        assert fine_tuning.pretrained_tower(source=alone, pooling="cls").pooling == "first"
        assert fine_tuning.pretrained_tower(source=model, pooling="cls").pooling == "first"
        assert fine_tuning.pretrained_tower(source=model).pooling == "mean"
    with pytest.raises(InputError, match="pooling is 'last'; a tower has mean or cls"):
        fine_tuning.pretrained_tower(source=alone, pooling="last")


@pytest.mark.parametrize("name", ["cosine", None, "absent"])
def test_a_model_that_scores_by_cosine_and_does_not_normalize_is_scaled(tmp_path, name):
    """The default of sentence-transformers is the cosine; folders from before its version 3 do not say so."""
    write_sentence_transformer(tmp_path / "model", "bert", normalize=False)
    file = tmp_path / "model" / "config_sentence_transformers.json"
    settings = json.loads(file.read_text())
    settings.pop("similarity_fn_name", None)
    file.write_text(json.dumps(settings | ({} if name == "absent" else {"similarity_fn_name": name})))
    source = str(tmp_path / "model")
    for more in ({}, {"pooling": "mean"}):
        with pytest.warns(
            UserWarning, match=r"by cosine( there)?, so its embeddings are scaled to length 1 here; for products set .*dot"
        ):
            assert fine_tuning.pretrained_tower(source=source, **more).normalize
    with warnings.catch_warnings(action="error"):
        assert not fine_tuning.pretrained_tower(source=source, normalize=False).normalize
    file.write_text(json.dumps(settings | {"similarity_fn_name": "dot"}))
    with warnings.catch_warnings(action="error"):
        assert not fine_tuning.pretrained_tower(source=source).normalize


def test_a_tower_without_layers_is_pooled_by_the_mean(folders, tmp_path):
    write_sentence_transformer(tmp_path / "model", "bert", pooling="cls")
    of_layers = lambda layers, **more: fine_tuning.pretrained_tower(source=str(tmp_path / "model"), layers=layers, **more)  # noqa: E731
    assert [of_layers(layers).pooling for layers in ((0,), ())] == ["first", "mean"]  # a first token alone is the same in all texts
    with pytest.raises(InputError, match="pooling is 'cls', but a tower without layers has mean pooling; leave it out"):
        of_layers((), pooling="cls")


def test_recipe_without_a_model_asks_for_one(tmp_path):
    with pytest.raises(InputError, match=r"no pretrained model is named; give a folder or a name of the hub"):
        trained(tmp_path / "run", {})


def test_settings_of_a_model_that_is_not_used_are_refused_when_typed(folders):
    settings = [f"MODEL={folders / 'bert'}", "pretrained_tower.dropout_rate=0.0"]
    recipe = read_recipe(["recipes/fine_tune.gin"], settings)
    assert recipe.model.query.encoder.dropout_rate == 0.0
    with pytest.raises(InputError, match=r"nothing in this recipe reads T5Config\.num_layers"):
        read_recipe(["recipes/fine_tune.gin"], [*settings, "T5Config.num_layers=3"])


def test_a_setting_of_t5_is_refused_where_the_model_is_a_bert(folders):
    with pytest.raises(InputError, match=r"pretrained_tower\.dropout_broadcast is set, but a BertConfig has none"):
        fine_tuning.pretrained_tower(source=str(folders / "bert"), dropout_broadcast=True)


def test_a_model_is_opened_once_for_all_that_a_recipe_asks_of_it_until_its_files_change(folders, tmp_path, monkeypatch):
    folder = shutil.copytree(folders / "plain", tmp_path / "model")
    opened, read = [], any_model.read
    monkeypatch.setattr(any_model, "read", lambda *args, **options: opened.append(1) or read(*args, **options))

    def ask():
        for tower in fine_tuning.TOWERS:
            fine_tuning.pretrained_tower(source=str(folder), tower=tower)
            fine_tuning.tokenizer_of(source=str(folder), tower=tower)

    ask()
    assert len(opened) == 1
    (folder / "config.json").write_text((folder / "config.json").read_text() + "\n")
    ask()
    assert len(opened) == 2


def test_texts_longer_than_the_positions_are_refused_before_anything_is_compiled(folders, tmp_path):
    settings = {"MODEL": folders / "bert", "beir_pairs.dataset_dir": folders / "data", **QUIET, "PairsOptions.max_doc_length": 49}
    with pytest.raises(
        InputError, match="max_doc_length is 49, but the doc tower has positions for 48 tokens; set it to at most 48"
    ):
        trained(tmp_path / "run", settings)
    assert not (tmp_path / "run").exists()


def test_model_without_a_vocabulary_is_to_be_imported_first(folders, tmp_path):
    shutil.copytree(
        folders / "plain",
        tmp_path / "model",
        ignore=shutil.ignore_patterns("tokenizer.json", "modules.json", "config_sentence*.json"),
    )
    with pytest.raises(InputError, match="holds no vocabulary; import it with de-jax import model --tokenizer="):
        fine_tuning.pretrained_tokenizer(source=str(tmp_path / "model"))()


@pytest.mark.soak
def test_training_texts_are_cut_as_the_model_that_the_weights_come_from_cuts_them(folders, tmp_path):
    """Other tokenizer files: without lower case, with words in another order, or with the same content."""
    found = json.loads((folders / "plain" / "tokenizer.json").read_text())
    vocab = dict(found["model"]["vocab"])
    vocab["hello"], vocab["world"] = vocab["world"], vocab["hello"]
    others = {"case": {"normalizer": None}, "order": {"model": {**found["model"], "vocab": vocab}}, "same": {}}
    settings = {"MODEL": folders / "plain", "beir_pairs.dataset_dir": folders / "data", **QUIET}
    for name, changed in others.items():
        shutil.copytree(folders / "plain", tmp_path / name)
        (tmp_path / name / "tokenizer.json").write_text(json.dumps({**found, **changed}))
        start = {**settings, "pretrained_tokenizer.source": tmp_path / name}
        if name == "same":
            trained(tmp_path / "run", start)
            continue
        with pytest.raises(InputError, match="the query tokenizer of the training data makes other tokens of"):
            trained(tmp_path / "run", start)
        with pytest.raises(InputError, match=r"the tokenizer .*tokenizer\.json makes other tokens of"):
            any_model.open_model(folders / "plain", tokenizer=tmp_path / name / "tokenizer.json")
