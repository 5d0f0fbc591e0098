"""Pretrained language models: a run goes on where it was killed, and dual encoders and generators start from it."""

import json

import jax
import numpy as np
import pytest
import toy_run
from two_processes import TwoProcesses, assert_close

from de_jax import cli, configurables, trainer
from de_jax.configurables import read_recipe
from de_jax.data.text import beir
from de_jax.data.text.vocabulary_training import train_wordpiece
from de_jax.interop import any_model, generators
from de_jax.training.run.language_model import restored
from de_jax.training.run.run_folder import load_run
from de_jax.types import InputError
from reproduction import pretrain as pretraining
from reproduction.masked_lm import MaskedLanguageModel

SIZES = {
    "pretrain_t5": {"T5Config.vocab_size": 288, "T5Config.model_dim": 16, "T5Config.num_layers": 1, "T5Config.num_heads": 2,
                    "T5Config.head_dim": 8, "T5Config.mlp_dim": 16, "T5Config.dtype": "float32"},
    "pretrain_bert": {"BertConfig.vocab_size": 200, "BertConfig.model_dim": 16, "BertConfig.num_layers": 1,
                      "BertConfig.num_heads": 2, "BertConfig.mlp_dim": 16, "BertConfig.dropout_rate": 0.0,
                      "BertConfig.dtype": "float32"},
}  # fmt: skip
COMMON = {"make_mesh.data": 1, "TextsOptions.batch_size": 8, "TextsOptions.max_length": 24, "linear.warmup_steps": 0,
          "Optimization.learning_rate": 0.02, "Logging.log_every_steps": 2, "Logging.save_every_steps": 2}  # fmt: skip
RECIPES = "reproduction/recipes"
OF_PRETRAINING = {"root": pretraining.Pretraining, "also": pretraining.NAMES}
OTHER_SOURCE = ["Pretraining.data=@span_corruption"]


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = toy_run.write_dataset(tmp_path_factory.mktemp("texts"))
    docs = (text for _, text in beir.iter_docs(folder / "corpus.jsonl.gz"))
    train_wordpiece(docs, folder / "tokenizer.json", vocab_size=200)
    return folder


def pretrain(texts, run_dir, recipe, num_steps, **changes):
    vocabulary = {"pretrain_t5": "spiece.model", "pretrain_bert": "tokenizer.json"}[recipe]
    settings = {**COMMON, **SIZES[recipe], "TextsOptions.texts": (str(texts),),
                "TextsOptions.tokenizer": texts / vocabulary, "Optimization.num_steps": num_steps,
                **{name.replace("__", "."): value for name, value in changes.items()}}  # fmt: skip
    gin = [f"--gin.{name}={value}" for name, value in settings.items()]
    pretraining.main([f"--gin_file={RECIPES}/{recipe}.gin", f"--run_dir={run_dir}", *gin])


@pytest.mark.soak
def test_a_pretrained_bert_is_a_model_to_start_from(texts, tmp_path):
    run_dir = tmp_path / "bert"
    pretrain(texts, run_dir, "pretrain_bert", 4, BertConfig__num_layers=0)  # layers cost seconds to compile, see below
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4]
    assert lines[1]["loss"] < lines[0]["loss"]
    found = any_model.read(run_dir / "encoder")
    assert (found.model.query.pooling, found.model.query.projection_dim, found.query.max_length) == ("first", None, 24)
    kept = restored(run_dir, None, MaskedLanguageModel(found.model.query.encoder))[1]
    jax.tree.map(np.testing.assert_array_equal, found.params["shared"], {part: kept[part] for part in found.params["shared"]})
    settings = [f"MODEL={run_dir / 'encoder'}", "make_mesh.data=1"]
    settings += ["PairsOptions.max_query_length=16", "PairsOptions.max_doc_length=16"]
    recipe = read_recipe(["recipes/fine_tune.gin"], settings)
    trainer.check(recipe, None)


@pytest.mark.soak
def test_two_processes_start_from_a_language_model(texts, tmp_path):
    pretrain(texts, tmp_path / "bert", "pretrain_bert", 2, BertConfig__num_layers=0)
    data = toy_run.write_dataset(tmp_path / "data")
    settings = {
        "MODEL": tmp_path / "bert" / "encoder",
        "beir_pairs.dataset_dir": data,
        "PairsOptions.batch_size": 16,
        "Optimization.num_steps": 2,
    }
    settings |= {
        "Optimization.num_steps": 2,
        "PairsOptions.max_query_length": 16,
        "PairsOptions.max_doc_length": 16,
        "linear.warmup_steps": 0,
    }
    settings["Optimization.learning_rate"] = 2e-6  # AdamW turns a gradient of 0 into an update of the rate, of either sign
    argv = ["--gin_file=recipes/fine_tune.gin", *(f"--gin.{name}={value}" for name, value in settings.items())]
    assert TwoProcesses([*argv, f"--run_dir={tmp_path / 'two'}"]).finish()[0] == [0, 0]
    cli.call("train", [*argv, f"--run_dir={tmp_path / 'one'}"])
    assert_close(tmp_path / "two", tmp_path / "one")


@pytest.mark.soak
@pytest.mark.parametrize("recipe", ["pretrain_bert", "pretrain_t5"])
def test_a_run_that_was_stopped_goes_on_to_the_same_bits(texts, tmp_path, recipe):
    for num_steps in (3, 6):
        pretrain(texts, tmp_path / "cut", recipe, num_steps, linear__end=0.02)
    pretrain(texts, tmp_path / "whole", recipe, 6, linear__end=0.02)
    params = [load_run(tmp_path / name / "encoder").params for name in ("whole", "cut")]
    jax.tree.map(np.testing.assert_array_equal, *params)
    losses = [[json.loads(line)["loss"] for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()][-1:]
              for name in ("whole", "cut")]  # fmt: skip
    assert losses[0] == losses[1]


@pytest.mark.soak
@pytest.mark.parametrize(("recipe", "pooling"), [("pretrain_t5", "mean"), ("pretrain_bert", "first")])
def test_dual_encoders_are_trained_from_a_pretrained_encoder(texts, tmp_path, recipe, pooling):
    pretrain(texts, tmp_path / "model", recipe, 2)
    if recipe == "pretrain_t5":
        run = generators.read(tmp_path / "model")
        assert (run.step, run.max_doc_length) == (2, 24)
    found = any_model.read(tmp_path / "model" / "encoder")
    assert found.model.query.pooling == pooling
    settings = [
        f"MODEL={tmp_path / 'model' / 'encoder'}",
        "make_mesh.data=1",
        "linear.warmup_steps=0",
        "pretrained_tower.projection_dim=8",
    ]
    settings += ['Initialization.init_new=("shared/projection/.*",)', f"beir_pairs.dataset_dir={texts}", "Optimization.num_steps=1"]
    settings += ["PairsOptions.batch_size=8", "PairsOptions.max_query_length=16", "PairsOptions.max_doc_length=16"]
    recipe = read_recipe(["recipes/fine_tune.gin"], settings)
    start = trainer.first_params(recipe)["shared"]
    jax.tree.map(np.testing.assert_array_equal, start["encoder"], found.params["shared"]["encoder"])
    assert trainer.train(recipe, tmp_path / "tuned")["step"] == 1


def test_pretraining_recipes_are_whole_and_know_what_they_learn_from(texts, capsys):
    for name, sizes in SIZES.items():
        settings = [f"{setting}={value}" for setting, value in sizes.items()]
        built = configurables.build([f"{RECIPES}/{name}.gin"], settings, **OF_PRETRAINING)
        assert isinstance(built, pretraining.Pretraining)
        with pytest.raises(
            InputError, match=r"Pretraining\.model is @(Generator|MaskedLanguageModel)\(\), but recipes have no setting"
        ):
            read_recipe([f"{RECIPES}/{name}.gin"], settings)
    with pytest.raises(InputError, match="span_corruption, from which a MaskedLanguageModel cannot learn; take masked_tokens"):
        configurables.build([f"{RECIPES}/pretrain_bert.gin"], OTHER_SOURCE, **OF_PRETRAINING)
    with pytest.raises(InputError, match=r"nothing in this recipe reads samtone\.temperature"):
        configurables.build([f"{RECIPES}/pretrain_bert.gin"], ["samtone.temperature=0.1"], **OF_PRETRAINING)
    pretraining.main([f"--gin_file={RECIPES}/pretrain_bert.gin", "--dry_run"])
    table, layer = 8000 * 256 + 512 * 256 + 2 * 256 + 2 * 256, 4 * 256 * 257 + 2 * 256 * 1024 + 1024 + 256 + 4 * 256
    assert json.loads(capsys.readouterr().out) == {"num_parameters": table + 4 * layer + 256 * 257 + 2 * 256 + 8000}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"BertConfig__vocab_size": 20}, r"token ids up to \d+, but the embedding table has 20 rows; set BertConfig\.vocab_size"),
        ({"BertConfig__max_positions": 20}, "max_length is 24, but the encoder has positions for 20 tokens"),
        ({"make_mesh__data": 3}, "batch_size 8 is not divisible by the 3 devices"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_before_anything_is_written(texts, tmp_path, changes, sentence):
    with pytest.raises(InputError, match=sentence):
        pretrain(texts, tmp_path / "run", "pretrain_bert", 2, **changes)
    assert not (tmp_path / "run" / "checkpoints").exists()
