"""The card of an exported run says what the run's folder says, in front matter that the hub's own package reads."""

import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny_run

import de_jax
from de_jax import cli
from de_jax.evaluation.task import Policy, beir_tasks, evaluate
from de_jax.files.outputs import write_json
from de_jax.interop.export import FORMATS
from de_jax.reports import model_card
from de_jax.training.run import loop, recipe_file
from de_jax.training.run.run_folder import load_run, write_run
from de_jax.types import InputError


@pytest.fixture(scope="module")
def dataset_dir(tmp_path_factory):
    return tiny_run.write_dataset(tmp_path_factory.mktemp("data") / "tiny")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory, dataset_dir):
    """A run with a recipe, and scores of its last checkpoint alone."""
    folder = tiny_run.write_run(tmp_path_factory.mktemp("runs"))
    recipe = {
        "data": {
            "function": "de_jax.data.sources.training_set.beir_pairs",
            "dataset_dir": str(dataset_dir),
            "split": "train",
            "options": {"type": "x.PairsOptions", "batch_size": 16, "tokenizer": "/home/someone/spiece.model"},
        },
        "loss": {"function": "de_jax.losses.in_batch.samtone", "temperature": 0.05, "same_tower": "query"},
        "optimization": {"type": "x.Optimization", "optimizer": {"function": "x.adafactor"}, "learning_rate": 0.02},
        "initialization": {"type": "x.Initialization", "seed": 3, "init_from": "/home/someone/models/e5-base"},
    }
    (folder / "recipe.json").write_text(json.dumps(recipe))
    loop.keep_environment(folder, 0, None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DE_JAX_CACHE", str(tmp_path_factory.mktemp("cache")))
        (task,) = beir_tasks(dataset_dir, "test")
        evaluate(task, Policy(measures=("nDCG@10", "RR(rel=2)@10")), load_run(folder, 7))
    return folder


def loaded(folder):
    """The card as the hub's package reads it, which refuses front matter that it does not know."""
    from huggingface_hub import ModelCard

    return ModelCard.load(folder / "README.md")


def test_the_front_matter_is_what_the_hub_reads(run_dir, tmp_path):
    model_card.export(load_run(run_dir, 7), tmp_path / "sde", "sentence_transformers", license="apache-2.0")
    data = loaded(tmp_path / "sde").data
    assert (data.library_name, data.pipeline_tag) == ("sentence-transformers", "sentence-similarity")
    assert (data.license, data.base_model) == ("apache-2.0", None)
    assert {"sentence-transformers", "de_jax", "loss:samtone"} <= set(data.tags)
    assert data.metrics == ["ndcg_at_10", "mrr_rel_2_at_10"]
    (kept,) = (run_dir / "evaluations").glob("*/result.json")
    scores = json.loads(kept.read_text())["dense"]
    assert {result.metric_name: result.metric_value for result in data.eval_results} == {
        name: round(value, 4) for name, value in scores.items()
    }
    assert {(result.dataset_name, result.dataset_split) for result in data.eval_results} == {("tiny", "test")}


def test_scores_of_other_prompts_are_left_out_and_those_of_fewer_dimensions_are_named(run_dir, tmp_path):
    copy = shutil.copytree(run_dir, tmp_path / "run")
    (kept,) = (copy / "evaluations").glob("*/result.json")
    report = json.loads(kept.read_text())
    for name, changed in (
        ("prompt", {"query_prompt": "whale "}),
        ("passages", {"max_passages": 3}),
        ("short", {"embedding_dim": 4}),
    ):
        folder = copy / "evaluations" / f"tiny-{name}"
        folder.mkdir()
        (folder / "result.json").write_text(json.dumps(report | {"settings": report["settings"] | changed}))
    model_card.export(load_run(copy, 7), tmp_path / "card", "sentence_transformers")
    card = loaded(tmp_path / "card")
    assert len(card.data.eval_results) == len(report["dense"])
    assert card.text.count("| tiny test |") == card.text.count("| tiny test, embedding_dim 4 |") == len(report["dense"])


def test_scores_stand_once_and_those_by_other_settings_are_named(run_dir, tmp_path):
    copy = shutil.copytree(run_dir, tmp_path / "run")
    (kept,) = (copy / "evaluations").glob("*/result.json")
    report = json.loads(kept.read_text())
    alone = {name: value for name, value in report.items() if name not in ("bm25", "fusion")}
    changed = alone | {"dense": dict.fromkeys(report["dense"], 0.125)}
    usual = {name: value for name, value in report["settings"].items() if name not in ("k1", "b")}
    for name, settings, one in (
        ("0", {}, alone),
        ("kept", {"identical_ids": "kept"}, changed),
        ("skip", {"skip_empty": True}, changed),
    ):
        folder = copy / "evaluations" / f"tiny-{name}"
        folder.mkdir()
        (folder / "result.json").write_text(json.dumps(one | {"settings": usual | settings}))
    model_card.export(load_run(copy, 7), tmp_path / "card", "sentence_transformers")
    card = loaded(tmp_path / "card")
    values = sorted(result.metric_value for result in card.data.eval_results)
    assert values == sorted(round(value, 4) for value in report["dense"].values())
    for name in ("", ", identical_ids kept", ", skip_empty True"):
        assert card.text.count(f"| tiny test{name} |") == len(report["dense"])
    assert f"{report['bm25']['ndcg@10']:.4f}" in card.text, "of the same scores, those beside BM25's"


def test_other_scores_by_the_same_settings_are_all_listed():
    report = {"dataset": "tiny", "num_docs": 1, "num_queries": 1, "settings": {}, "dense": {"mrr@10": 0.5}}
    other = report | {"dense": {"mrr@10": 0.75}}  # of mended judgements, for example
    searched = [report | {"settings": {"index": "IVF4,Flat", "nprobe": nprobe}} for nprobe in (1, 4)]
    rows = model_card._score_rows([report, other, report, *searched])
    assert [(found["dense"]["mrr@10"], changed) for found, changed, _ in rows] == [
        (0.5, []),
        (0.75, []),
        *((0.5, [f"nprobe {nprobe}", "index IVF4,Flat"]) for nprobe in (1, 4)),
    ]


def test_ids_that_a_command_always_keeps_are_no_change(run_dir):
    report = {"dataset": "tiny", "num_docs": 1, "num_queries": 1, "settings": {"identical_ids": "kept"}, "dense": {"mrr@10": 0.5}}
    assert model_card._score_rows([report]) == [(report, [], "mrr@10")]


def test_the_text_says_data_loss_recipe_scores_and_commands_and_no_folder_of_this_machine(run_dir, tmp_path, dataset_dir):
    sides = {"queries": {"trained_on": 1}, "documents": {"trained_on": 1234}}
    write_json(run_dir / "data_report.json", {"sources": {"": {"name": "tiny", "pairs": 1, **sides}}})
    model_card.export(load_run(run_dir, 7), tmp_path / "sde", "safetensors", base_model="intfloat/e5-base")
    card = loaded(tmp_path / "sde")
    assert card.data.base_model == "intfloat/e5-base"
    assert card.data.library_name == "de_jax"
    assert card.data.license is None
    assert "| tiny | beir_pairs | 1 pairs, 1 queries, 1,234 documents |" in card.text
    assert '`de_jax.losses.in_batch.samtone` with `temperature = 0.05`, `same_tower = "query"`.' in card.text
    assert "| learning rate | `0.02` |" in card.text
    assert "| optimizer | `adafactor` |" in card.text
    assert f"| trained with | {model_card.trained_with(loop.environments(run_dir))} |" in card.text
    report = json.loads(next((run_dir / "evaluations").glob("*/result.json")).read_text())
    low, high = report["intervals"]["dense"]["ndcg@10"]
    assert f"| tiny test | 2 | 10 | ndcg@10 | {report['dense']['ndcg@10']:.4f} [{low:.4f}, {high:.4f}] |" in card.text
    assert f"de-jax export model --run_dir=runs/{run_dir.name} --step=7 --format=safetensors --out_dir=sde" in card.text
    spaced = load_run(shutil.copytree(run_dir, tmp_path / "my run"), 7)
    assert "--run_dir='runs/my run' --step=7 --format=onnx --out_dir='my model'" in model_card.model_card(
        spaced, "onnx", name="my model"
    )
    assert f"de-jax train --recipe=recipe.json --run_dir=runs/{run_dir.name}  # the recipe above" in card.text
    assert '"tokenizer": "spiece.model"' in card.text
    assert "/home/" not in card.text
    assert str(dataset_dir.parent) not in card.text


def test_scores_of_another_checkpoint_are_not_its_scores(run_dir, tmp_path):
    model_card.export(load_run(run_dir, 3), tmp_path / "sde", "t5x")
    card = loaded(tmp_path / "sde")
    assert card.data.eval_results is None
    assert "## Scores" not in card.text
    assert "e5-base" in card.text  # the folder that it started from, by its name


@pytest.mark.parametrize("format", sorted(FORMATS.keys() - {"peft"}))
def test_every_format_has_a_card_whose_code_is_for_it(run_dir, tmp_path, format):
    model_card.export(load_run(run_dir, 7), tmp_path / "sde", format)
    text = loaded(tmp_path / "sde").text
    assert ("SentenceTransformer" in text) == (format in ("sentence_transformers", "onnx"))
    assert ("from encoder import Encoder" in text) == (format == "serving")
    assert ("de_jax.load" in text) == (format != "serving")


@pytest.mark.parametrize(
    ("format", "package"), [("sentence_transformers",) * 2, ("serving", "flatbuffers"), ("safetensors", None), ("t5x", None)]
)
def test_the_code_of_a_card_reads_the_export_again_with_both_towers(run_dir, tmp_path, monkeypatch, format, package):
    if package:
        pytest.importorskip(package)
    run = load_run(run_dir, 7)
    model_card.export(run, tmp_path / "sde", format)
    text = loaded(tmp_path / "sde").text
    run.query.tokenizer.save(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "sde"))
    monkeypatch.delitem(sys.modules, "encoder", raising=False)
    for code in re.findall(r"```bash\nde-jax import model (.*?)\n```", text):
        cli.call("import model", shlex.split(code))
    codes = re.findall(r"```python\n(.*?)\n```", text, re.S)
    for code in codes:
        model = de_jax.load(run_dir, step=7, dtype="auto" if "de_jax" in code else "float32")
        queries, docs = model.encode_query(["how high is mont blanc"]), model.encode_document(["Mont Blanc is 4,806 metres high."])
        exec(code, found := {})
        np.testing.assert_allclose(found["queries"], queries, atol=1e-5)
        np.testing.assert_allclose(found["documents"], docs, atol=1e-5)
        np.testing.assert_allclose(np.asarray(found["scores"]), model.similarity(queries, docs), atol=1e-5)
    assert codes


def test_a_run_without_adapters_has_none_for_peft(run_dir, tmp_path):
    with pytest.raises(InputError, match="run has no adapters; export it in another format"):
        model_card.export(load_run(run_dir, 7), tmp_path / "sde", "peft")
    assert "AutoPeftModelForFeatureExtraction" in model_card.model_card(load_run(run_dir, 7), "peft", name="sde")


def test_a_run_of_an_imported_model_names_it(run_dir, tmp_path):
    run = load_run(run_dir, 7)
    described = {"model": run.model, "query": run.query, "doc": run.doc}
    write_run(tmp_path / "imported", run.params, **described, origin=["intfloat/e5-base"])
    assert recipe_file.origins(tmp_path / "imported") == ["intfloat/e5-base"]
    assert ", written by de_jax." in model_card.model_card(load_run(tmp_path / "imported"), "safetensors", name="imported")
    write_run(tmp_path / "tuned", run.params, **described)
    (tmp_path / "tuned" / "recipe.json").write_text(json.dumps({"initialization": {"init_from": str(tmp_path / "imported")}}))
    assert recipe_file.origins(tmp_path / "tuned") == ["intfloat/e5-base"]
    text = model_card.model_card(load_run(tmp_path / "tuned"), "safetensors", name="tuned")
    assert "| started from | `intfloat/e5-base` |" in text
    assert ", trained with de_jax." in text
    assert "base_model" not in text  # nothing shows that the hub has a model of that name


def test_a_model_that_the_hub_has_is_its_base_model(run_dir, tmp_path, monkeypatch):
    import huggingface_hub

    run = load_run(run_dir, 7)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")  # experiments have a folder all-MiniLM-L6-v2 in the repository's root, a model of its own
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda name, file: f"/cache/{name}/{file}")
    for given, name in (("intfloat/e5-base", "intfloat/e5-base"), ("all-MiniLM-L6-v2", "sentence-transformers/all-MiniLM-L6-v2")):
        folder = tmp_path / given.replace("/", "_")
        write_run(folder, run.params, model=run.model, query=run.query, doc=run.doc, origin=[given])
        text = model_card.model_card(load_run(folder), "safetensors", name="x")
        assert f"\nbase_model: {name}\n" in text
        assert f"| started from | `{name}` |" in text


def test_a_licence_or_a_base_model_that_is_none_is_refused_before_anything_is_written(run_dir, tmp_path):
    run = load_run(run_dir, 7)
    for flags, sentence in (
        ({"license": "Apache 2"}, "the licence is 'Apache 2'; give its identifier"),
        ({"base_model": "e5 base"}, "the base model is 'e5 base'; give its name"),
    ):
        with pytest.raises(InputError, match=sentence):
            model_card.export(run, tmp_path / "sde", "safetensors", **flags)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_evaluation_costs_a_warning(run_dir, tmp_path):
    run = load_run(run_dir, 7)
    write_run(tmp_path / "run", run.params, model=run.model, query=run.query, doc=run.doc)
    (tmp_path / "run" / "evaluations" / "tiny-0").mkdir(parents=True)
    (tmp_path / "run" / "evaluations" / "tiny-0" / "result.json").write_text("{")
    with pytest.warns(UserWarning, match=r"result\.json.*Its scores are left out"):
        text = model_card.model_card(load_run(tmp_path / "run"), "safetensors", name="x")
    assert "## Scores" not in text


def test_recipes_are_written_as_the_card_reads_them():
    """`recipe_file` names functions and groups as this test's recipe does."""
    from functools import partial

    from de_jax.data.sources.options import PairsOptions
    from de_jax.data.sources.training_set import beir_pairs

    told = recipe_file.to_json(partial(beir_pairs, "data/scifact", options=PairsOptions(batch_size=8)))
    table = {"function": "x.table_pairs", "path": ["/home/someone/a.csv", "my-org/b"], "dev_path": "c.csv"}
    source, _ = model_card._sources({"function": "x.mixed_pairs", "sources": [told, table]})
    rows = model_card._data({"sources": [told, table]}, Path("absent.json")).splitlines()[2:]
    assert rows == ["| data/scifact | beir_pairs | not counted |", "| a.csv, my-org/b | table_pairs | not counted |"]
    assert (source["function"], source["dataset_dir"]) == ("de_jax.data.sources.training_set.beir_pairs", "data/scifact")
    assert source["options"]["batch_size"] == 8
