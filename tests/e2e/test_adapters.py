"""A run that trains adapters, through the commands: stopped and continued, evaluated, mined with, and taken to other libraries."""

import contextlib
import functools
import json
import os
import signal

import jax
import numpy as np
import pretrained_folders
import pytest
import toy_run
from pretrained_folders import TEXTS, WORDS, write_sentence_transformer

import de_jax
from de_jax import cli, command, planner
from de_jax.interop import any_model, hub
from de_jax.training.optim import paths
from de_jax.training.run import run_log
from de_jax.training.run.run_folder import load_run

pytestmark = pytest.mark.soak

SIZES = {"PairsOptions.batch_size": 16, "PairsOptions.max_query_length": 16, "PairsOptions.max_doc_length": 16, "make_mesh.data": 1}
STEPS = {"Optimization.num_steps": 6, "Logging.log_every_steps": 1, "Logging.save_every_steps": 6, "linear.warmup_steps": 0}
TOWERS = {
    "one model": {"Lora.pattern": "'.*/layers_1/.*/kernel'", "Optimization.learning_rate_factors": {".*/mlp/.*": 0.5}},
    "two towers": {
        "DualEncoder.shared": "()",
        "Lora.pattern": "'query/.*/attention/.*/kernel'",
        "Optimization.frozen": "('doc/.*',)",
    },
}


@pytest.mark.parametrize("name", TOWERS)
def test_a_run_of_adapters_is_a_run_to_every_command(dataset_dir, tmp_path, monkeypatch, capsys, name):
    # Queries that differ only in unknown words are equal, and one batch holds no two of them.
    monkeypatch.setattr(pretrained_folders, "WORDS", (*WORDS, *toy_run.TOPICS, *map(str, range(96))))
    write_sentence_transformer(tmp_path / "base", "bert")
    settings = {"MODEL": tmp_path / "base", "beir_pairs.dataset_dir": dataset_dir, **SIZES, **STEPS, **TOWERS[name]}
    settings |= {
        "Lora.rank": 3,
        "Optimization.learning_rate": 0.01,
        "pretrained_tower.scan_layers": True,
        "PairsOptions.dev_split": "'dev'",
    }
    recipe = ["--gin_file=recipes/lora.gin", *(f"--gin.{key}={value}" for key, value in settings.items())]
    cli.call("train", [*recipe, f"--run_dir={tmp_path / 'whole'}"])
    stop = lambda step, scalars: os.kill(os.getpid(), signal.SIGTERM) if step == 3 and "loss" in scalars else None  # noqa: E731
    with monkeypatch.context() as patched:
        patched.setattr(run_log, "progress_sink", lambda *_: contextlib.nullcontext(stop))
        with pytest.raises(SystemExit):
            command.run(lambda: cli.call("train", [*recipe, f"--run_dir={tmp_path / 'run'}"]))
    assert load_run(tmp_path / "run").step < 6
    cli.call("train", [*recipe, f"--run_dir={tmp_path / 'run'}"])
    run_dir, run = tmp_path / "run", load_run(tmp_path / "run")
    jax.tree.map(np.testing.assert_array_equal, run.params, load_run(tmp_path / "whole").params)
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["num_trained_parameters"] < 0.2 * told["num_parameters"]
    before = paths.by_path(any_model.read(tmp_path / "base").params)
    moved = {path for path, leaf in paths.by_path(run.params).items() if not np.array_equal(leaf, before[_of_one(path)])}
    place = "/layers_1/" if name == "one model" else "/attention/"
    assert {_of_one(path) for path in moved} == {path for path in before if place in path and path.endswith("/kernel")}
    assert all(path.startswith("query/") for path in moved) == (name == "two towers")

    cli.call("evaluate beir", [f"--run_dir={run_dir}", f"--dataset_dir={dataset_dir}", "--split=dev"])
    cli.call("mine pairs", [f"--run_dir={run_dir}", f"--dataset_dir={dataset_dir}", "--num_neg_docs=2", "--last_rank=20"])
    cli.call("analyse run", [f"--run_dir={run_dir}"])
    cli.call("verify", [str(run_dir)])
    cli.call("export model", [f"--run_dir={run_dir}", "--format=sentence_transformers", f"--out_dir={tmp_path / 'st'}"])
    cli.call("export model", [f"--run_dir={run_dir}", "--format=peft", f"--out_dir={tmp_path / 'peft'}"])
    assert hub.exported_files(tmp_path / "peft")
    ours = load(run_dir).encode_query(TEXTS)
    np.testing.assert_allclose(load(tmp_path / "st").encode_query(TEXTS), ours, atol=1e-5)
    np.testing.assert_allclose(by_sentence_transformers(tmp_path / "st").encode_query(TEXTS), ours, atol=1e-5)
    folder = tmp_path / "peft" if name == "one model" else tmp_path / "peft" / "query"
    np.testing.assert_allclose(load(folder).encode_query(TEXTS), ours, atol=1e-5)
    theirs = by_sentence_transformers(tmp_path / "base")
    theirs.load_adapter(str(folder))
    np.testing.assert_allclose(theirs.encode(TEXTS), ours, atol=1e-5)
    cli.call("import model", [f"--from={folder}", f"--run_dir={tmp_path / 'again'}"])
    np.testing.assert_allclose(load(tmp_path / "again").encode_query(TEXTS), ours, atol=1e-5)
    capsys.readouterr()
    monkeypatch.setattr(planner, "_gib", int)  # a toy has too few bytes for that unit
    cli.call("plan", [*recipe, "--topology=cpu:8", "--gin.Lora.base_dtype='bfloat16'"])
    plan = json.loads(capsys.readouterr().out)
    assert plan["num_trained_parameters"] == told["num_trained_parameters"]
    assert plan["checkpoint_gib"] < plan["state_gib"]


# A processor with bfloat16 units would compute in it, which is less exact than the other libraries.
load = functools.partial(de_jax.load, dtype="float32")


def by_sentence_transformers(folder):
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder), device="cpu")


def _of_one(path):
    return f"shared/{path.partition('/')[2]}"
