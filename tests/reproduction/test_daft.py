"""DAFT as a user runs it: two stages by one command, towers that end aligned, and runs that go on where they were killed."""

import json

import jax
import numpy as np
import pretrained_folders
import pytest
from interop import test_architectures as architectures
from pretrained_folders import WORDS, write_sentence_transformer

from de_jax import cli, trainer
from de_jax.configurables import read_recipe
from de_jax.data.text import beir
from de_jax.training.run.recipe_file import origins
from de_jax.training.run.run_folder import complete_steps, load_run
from de_jax.training.run.run_log import read_metrics
from de_jax.types import InputError
from reproduction import daft, verbs

SMALL = ["--gin.make_mesh.data=1", "--max_query_length=16", "--max_doc_length=16", "--batch_size=8", "--num_calls=3"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("daft")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(pretrained_folders.SIZES, "num_hidden_layers", 1)  # which compiles in half the time
        write_sentence_transformer(root / "model", "bert")
        write_sentence_transformer(root / "with_head", "bert", dense=False)
    write_sentence_transformer(root / "t5", "t5")
    docs = [(f"d{i}", "", f"{WORDS[i % 8]} of texts {WORDS[i // 8]} {WORDS[i % 3]}") for i in range(64)]
    queries = [(f"q{i}", f"{WORDS[i % 8]} {WORDS[i // 8]}") for i in range(64)]
    split = lambda rows: {f"q{i}": {f"d{i}": 1} for i in rows}  # noqa: E731
    beir.write(root / "data", docs, queries, {"train": split(range(40)), "dev": split(range(40, 52)), "test": split(range(52, 64))})
    return root


def recipe_of(folders, **changes):
    settings = {
        "MODEL": folders / "model",
        "QUERY_LAYERS": (0,),
        "make_mesh.data": 1,
        "pretrained_tower.projection_dim": 24,
        "beir_pairs.dataset_dir": folders / "data",
        "PairsOptions.batch_size": 8,
        "PairsOptions.max_query_length": 16,
        "PairsOptions.max_doc_length": 16,
        "Optimization.num_steps": 12,
        "Logging.save_every_steps": 2,
        "Logging.log_every_steps": 2,
        "Logging.keep_checkpoints": 20,
        "linear.warmup_steps": 0,
        "Alignment.every_steps": 2,
        **{name.replace("__", "."): value for name, value in changes.items()},
    }
    return read_recipe(["recipes/daft_stage1.gin"], [f"{name}={value}" for name, value in settings.items()])


def stage1(folders, run_dir, **changes):
    return trainer.train(recipe_of(folders, **changes), run_dir)


@pytest.fixture(scope="module")
def aligned(folders):
    """A run whose towers, of two models, count as aligned at the first look; its settings and its summary."""
    changes = {"QUERY_MODEL": folders / "t5", "Alignment__delta": 1e9}
    return folders / "aligned", changes, stage1(folders, folders / "aligned", **changes)


@pytest.mark.soak
def test_one_command_gives_a_pair_of_towers_and_pictures(folders, tmp_path, capsys):
    command = [f"--model={folders / 'model'}", f"--dataset_dir={folders / 'data'}", f"--out_dir={tmp_path}", *SMALL]
    command += ["--query_layers", "0", "--num_align_steps=4", "--num_steps=3", "--gin1.Alignment.delta=-1e9"]
    verbs.call("train daft", command)
    report = json.loads(capsys.readouterr().out)
    assert list(report["systems"]) == ["model", "0_layers"]
    light = report["systems"]["0_layers"]
    assert list(light["divergence"]) == ["0", "1", "2", "3", "4"]
    assert light["threshold"] == -1e9
    assert 0 <= light["scores"]["ndcg@10"] <= 1
    assert {row["batch_size"] for row in light["latency"]} == {1, 32}
    for picture in ("tradeoff", "alignment", "towers"):
        assert (tmp_path / f"{picture}.png").stat().st_size > 5000
    assert origins(tmp_path / "0_layers" / "tuned") == [str(folders / "model")]
    before, aligned, tuned = (load_run(tmp_path / folder) for folder in ("model", "0_layers/aligned", "0_layers/tuned"))
    assert (aligned.model.query.encoder.num_layers, aligned.model.doc.encoder.num_layers) == (0, 1)
    for part in ("embedder", "encoder"):  # the document tower has not moved by one bit
        jax.tree.map(np.testing.assert_array_equal, aligned.params["doc"][part], before.params["shared"][part])
    moved = [np.any(a != b) for a, b in zip(*(jax.tree.leaves(run.params["doc"]) for run in (aligned, tuned)), strict=True)]
    assert any(moved)
    assert complete_steps(tmp_path / "0_layers" / "tuned" / "best")
    with pytest.raises(InputError, match="--query_layers has 3, but the model has 1 layer; give 0 to 1"):
        verbs.call("train daft", [argument if argument != "0" else "3" for argument in command])


@pytest.mark.soak
@pytest.mark.parametrize("name", ["modernbert", "qwen3 with an untied head"])
def test_rotary_models_are_cut_aligned_and_trained_by_a_curriculum(folders, tmp_path, capsys, name):
    """From a model without a projection: DAFT gives it one, and a curriculum its documents' queries."""
    model, data = tmp_path / "model", folders / "data"
    architectures.torch_model(architectures.ROWS[name]).save_pretrained(model)
    pretrained_folders.write_tokenizer(model, "bert")
    command = [f"--model={model}", f"--dataset_dir={data}", f"--out_dir={tmp_path / 'daft'}", *SMALL, "--query_layers=2"]
    verbs.call(
        "train daft", [*command, "--num_align_steps=2", "--num_steps=2", "--learning_rate=1e-3", "--gin1.Alignment.delta=-1e9"]
    )
    assert list(json.loads(capsys.readouterr().out)["systems"]) == ["model", "2_layers"]
    imported, aligned, tuned = (load_run(tmp_path / "daft" / run) for run in ("model", "2_layers/aligned", "2_layers/tuned"))
    assert (aligned.model.query.encoder.num_layers, aligned.model.query.pooling) == (2, imported.model.query.pooling)
    assert aligned.params["shared"]["projection"]["kernel"].shape == (32, 512)
    for part, params in imported.params["shared"].items():
        jax.tree.map(np.testing.assert_array_equal, aligned.params["doc"][part], params)
    assert np.any(tuned.params["doc"]["embedder"]["embedding"] != imported.params["shared"]["embedder"]["embedding"])
    lines = [{"_id": f"d{i}", "queries": [f"{WORDS[(i + j) % 8]} {WORDS[j]}" for j in range(4)]} for i in range(64)]
    (tmp_path / "queries.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = {"MODEL": model, "NUM_STEPS": 6, "make_mesh.data": 1, "Logging.log_every_steps": 1, "linear.warmup_steps": 0}
    settings |= {"beir_pairs.dataset_dir": data, "PairsOptions.batch_size": 8, "PairsOptions.expansion": tmp_path / "queries.jsonl"}
    gin = [f"--gin.{setting}={value}" for setting, value in settings.items()]
    cli.call("train", ["--gin_file=recipes/curriculum.gin", *gin, f"--run_dir={tmp_path / 'run'}"])
    losses = [line["loss"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in line]
    assert len(losses) == 6
    assert np.isfinite(losses).all()


def test_every_number_of_layers_gives_a_pair_of_its_own(folders, tmp_path, monkeypatch, capsys):
    asked = []

    def untrained(towers, settings, layers, folder, queries):
        asked.append((layers, folder.name))
        return daft._Pair(load_run(towers.out_dir / "model"), [], {})

    monkeypatch.setattr(daft, "_pair", untrained)
    monkeypatch.setattr(daft.daft_report, "stages", lambda folders: {})
    monkeypatch.setattr(daft.daft_report, "draw", lambda *args: None)
    command = [f"--model={folders / 'model'}", f"--dataset_dir={folders / 'data'}", f"--out_dir={tmp_path}", *SMALL]
    verbs.call("train daft", [*command, "--query_layers", "1", "0"])
    assert asked == [((0,), "1_layer"), ((), "0_layers")]
    assert list(json.loads(capsys.readouterr().out)["systems"]) == ["model", "1_layer", "0_layers"]


@pytest.mark.soak
def test_without_alignment_the_same_command_trains_both_towers_at_once_and_gives_the_same_again(folders, tmp_path, capsys):
    command = [f"--model={folders / 'with_head'}", f"--dataset_dir={folders / 'data'}", f"--out_dir={tmp_path}", *SMALL]
    command += ["--query_layers", "0", "--num_align_steps=0", "--num_steps=3"]
    verbs.call("train daft", command)
    light = json.loads(capsys.readouterr().out)["systems"]["0_layers"]
    assert (light["run_dir"], light["divergence"]) == (str(tmp_path / "0_layers" / "at_once"), {})
    run = load_run(light["run_dir"])
    assert (run.model.query.encoder.num_layers, run.model.doc.encoder.num_layers) == (0, 1)
    assert run.model.doc.projection_dim == 24  # its own is kept
    assert sorted(path.name for path in tmp_path.glob("*.png")) == ["towers.png", "tradeoff.png"]
    verbs.call("train daft", command)
    assert json.loads(capsys.readouterr().out)["systems"]["0_layers"]["scores"] == light["scores"]
    with pytest.raises(InputError, match="--gin1 changes nothing beside --num_align_steps=0; leave one of them out"):
        verbs.call("train daft", [*command, "--gin1.Alignment.patience=2"])


def test_a_stage_that_was_told_to_stop_is_not_taken_for_a_whole_one(folders, tmp_path, monkeypatch):
    done = []
    monkeypatch.setattr(trainer, "train_or_stop", lambda recipe, run_dir, _: done.append(run_dir.name) or {"stopped": "SIGTERM"})
    command = [f"--model={folders / 'model'}", f"--dataset_dir={folders / 'data'}", f"--out_dir={tmp_path}", "--query_layers=1"]
    with pytest.raises(SystemExit) as exit_:
        verbs.call("train daft", [*command, *SMALL])
    assert (exit_.value.code, done) == (75, ["aligned"])


def test_query_towers_are_cut_from_another_model_where_one_is_named(folders, tmp_path, monkeypatch):
    begun = {}

    def stop(recipe, run_dir):
        begun[run_dir.name] = recipe
        raise SystemExit(75)

    monkeypatch.setattr(daft, "train", stop)
    command = [f"--model={folders / 'model'}", f"--query_model={folders / 't5'}", f"--dataset_dir={folders / 'data'}"]
    with pytest.raises(SystemExit):
        verbs.call("train daft", [*command, f"--out_dir={tmp_path}", "--query_layers=2", *SMALL])
    recipe = begun["aligned"]
    assert recipe.initialization.init_from == {"query": str(tmp_path / "query_model"), "doc": str(tmp_path / "model")}
    assert recipe.initialization.init_layers == {"query": (0, 1)}
    assert (type(recipe.model.query.encoder).__name__, type(recipe.model.doc.encoder).__name__) == ("T5Config", "BertConfig")


@pytest.mark.soak
def test_an_aligned_run_ends_saves_and_stays_ended(folders, aligned):
    run_dir, changes, summary = aligned
    assert summary["step"] == 2
    assert summary["stopped"].startswith("aligned: kl_divergence")
    assert complete_steps(run_dir / "checkpoints") == [2]
    before = jax.tree.map(np.asarray, load_run(run_dir).params)
    assert stage1(folders, run_dir, **changes)["stopped"] == summary["stopped"]
    jax.tree.map(np.testing.assert_array_equal, load_run(run_dir).params, before)
    assert [line["step"] for line in read_metrics(run_dir / "metrics.jsonl") if "alignment/kl_divergence" in line] == [0, 2]


@pytest.mark.soak
def test_towers_of_two_models_are_aligned_each_with_its_own_tokenizer(aligned):
    run = load_run(aligned[0])
    assert run.query.tokenizer.fingerprint != run.doc.tokenizer.fingerprint
    assert (type(run.model.query.encoder).__name__, type(run.model.doc.encoder).__name__) == ("T5Config", "BertConfig")


def test_a_layer_that_the_model_does_not_have_is_refused(folders, tmp_path):
    with pytest.raises(InputError, match=r"has no value for .* query/encoder/layers_1"):
        stage1(folders, tmp_path, QUERY_LAYERS=(0, 5))


@pytest.mark.soak
@pytest.mark.short_soak
def test_latencies_stand_beside_each_other(aligned, tmp_path, capsys):
    (tmp_path / "queries.txt").write_text("hello world\n\na dense retrieval\n")
    cli.call(
        "compare latency",
        ["--runs", *(f"{name}={aligned[0]}" for name in ("a", "b")), f"--queries={tmp_path / 'queries.txt'}", "--num_calls=4"],
    )
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["latencies"]
    assert [(row["name"], row["batch_size"]) for row in rows] == [("a", 1), ("b", 1), ("a", 32), ("b", 32)]
    for row in rows:
        assert 0 < row["p50"] <= row["p95"] <= row["p99"]
        assert row["p50"] < row["p50_with_tokenizer"]
        assert row["ratio"] == 1.0 or row["name"] == "b"
