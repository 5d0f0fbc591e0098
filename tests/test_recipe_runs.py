"""A run of every recipe is taken by everything that takes a run: search, scores, mining, embeddings, exports, demo, training."""

import json
from pathlib import Path

import numpy as np
import pytest
import toy_run
from pretrained_folders import write_sentence_transformer

import de_jax
from de_jax import cli, trainer
from de_jax.configurables import read_recipe
from de_jax.data.sources.training_set import opened_tokenizers
from de_jax.data.text.tokenizing import Side
from de_jax.demo.side_by_side import SideBySide, open_corpus
from de_jax.training.run.run_folder import write_run

ROOT = Path(__file__).parent.parent / "gin_configs"
RECIPES = sorted(path.stem for path in ROOT.glob("recipes/*.gin"))
COVERING = ("ance_maxp",)
"""A recipe whose runs are least like others: documents as passages."""
NEEDED = {
    "curriculum": ["PairsOptions.expansion=queries"],
    "curriculum_mined": ["PairsOptions.expansion=queries"],
    "mixture": ["first/beir_pairs.dataset_dir=a", "second/beir_pairs.dataset_dir=b"],
}
TEXTS = ["apple 1", "river 2 engine"]
LENGTHS = {"PairsOptions.max_query_length": 16, "PairsOptions.max_doc_length": 24}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A data set, and a model to start from."""
    data, model = (tmp_path_factory.mktemp("made") / name for name in ("data", "model"))
    write_sentence_transformer(model, "bert")
    return toy_run.write_dataset(data), model


def recipe_of(name, made):
    data, model = made
    text = (ROOT / f"recipes/{name}.gin").read_text()
    if "--gin.MODEL=" in text:
        files, small = [f"recipes/{name}.gin"], {"MODEL": model}
    else:
        files = [f"recipes/{name}.gin", "models/t5_1_1_tiny.gin"]
        small = {key: value for key, value in toy_run.SETTINGS.items() if key.startswith(("T5Config", "TowerConfig"))}
        small["Initialization.init_from"] = None
        small["seqio_pairs.tokenizer" if "seqio" in name else "PairsOptions.tokenizer"] = data / "spiece.model"
    return read_recipe(files, [f"{key}={value}" for key, value in {**small, **LENGTHS}.items()] + NEEDED.get(name, []))


def build(name, made, run_dir):
    """The run that a recipe begins with, without its data."""
    recipe = recipe_of(name, made)
    query, doc = opened_tokenizers(recipe.options)
    sides = Side(query, recipe.options.max_query_length), Side(doc, recipe.options.max_doc_length, recipe.options.max_passages)
    params = trainer.first_params(recipe)
    write_run(run_dir, params, model=recipe.model, query=sides[0], doc=sides[1])
    return recipe


def check_everything_takes(run_dir, data, tmp_path, capsys):
    def printed(verb, **flags):
        cli.call(verb, [f"--{name}={value}" if value is not True else f"--{name}" for name, value in flags.items()])
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    of_run = {"run_dir": run_dir, "dataset_dir": data}
    best = printed("search", **of_run, query=TEXTS[0], k=3)["results"]
    assert 0 < printed("evaluate beir", **of_run, split="dev", no_bm25=True)["dense"]["ndcg@10"] <= 1
    assert printed("mine pairs", **of_run, split="dev", num_neg_docs=2, last_rank=50)["num_pairs"] == 16
    assert printed("encode corpus", **of_run, out_dir=tmp_path / "embeddings")["num_docs"] == 96

    model = de_jax.load(run_dir)
    ours = model.encode_query(TEXTS), model.encode_document(TEXTS)
    for format in ("sentence_transformers", "safetensors"):
        printed("export model", run_dir=run_dir, format=format, out_dir=tmp_path / format)
        there = de_jax.load(tmp_path / format)
        assert there.run.model.shared == model.run.model.shared
        np.testing.assert_allclose(there.encode_query(TEXTS), ours[0], atol=1e-5)
        docs = there.encode_document(TEXTS)
        is_cut = ours[1].ndim > docs.ndim  # a text of one passage; other libraries embed one
        np.testing.assert_allclose(docs, ours[1][:, 0] if is_cut else ours[1], atol=1e-5)
    columns = SideBySide(open_corpus(data), {"model": model}).search(TEXTS[0], 3)
    assert [hit.doc_id for hit in columns[1].hits] == [hit["id"] for hit in best]

    next_one = read_recipe(["recipes/table_mined.gin"], [f"MODEL={run_dir}", "table_pairs.path=qa.csv"])
    trainer.check(next_one, None)
    assert next_one.model.shared == model.run.model.shared
    lengths = next_one.options.max_query_length, next_one.options.max_doc_length, next_one.options.max_passages
    assert lengths == (model.run.query.max_length, model.run.doc.max_length, model.run.doc.max_passages)


OTHERS = [pytest.param(name, marks=pytest.mark.soak) for name in RECIPES if name not in COVERING]


@pytest.mark.parametrize("name", [*COVERING, *OTHERS])
def test_a_run_of_a_recipe_is_taken_everywhere(name, made, tmp_path, capsys):
    build(name, made, tmp_path / "run")
    check_everything_takes(tmp_path / "run", made[0], tmp_path, capsys)
