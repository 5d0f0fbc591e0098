"""The train command on a small data set: it learns, continues exactly after kill -9, and refuses what it cannot use."""

import functools
import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from toy_run import arguments

from de_jax import command, train
from de_jax.data import beir
from de_jax.data.files import read_json
from de_jax.training import generator_run
from de_jax.training.run import load_run, only_trainer
from de_jax.types import InputError


def parameters(run_dir):
    return jax.tree.map(np.asarray, load_run(run_dir).params)


def test_run_learns_and_describes_itself(finished_run):
    lines = [json.loads(line) for line in (finished_run / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < 0.8 * losses[0]
    assert [line["step"] for line in lines if "dev/ndcg@10" in line] == [10, 20, 30]
    assert list((finished_run / "tensorboard").glob("events.*"))
    assert "samtone.same_tower = 'query'" in (finished_run / "config.gin").read_text()
    run = load_run(finished_run)
    assert (run.step, run.max_query_length, run.max_doc_length) == (30, 16, 32)
    assert sorted(run.params) == ["doc", "query", "shared"]
    assert load_run(finished_run, "best").step in (10, 20, 30)


def test_finished_run_is_left_as_it_is(finished_run, dataset_dir, capsys):
    before = parameters(finished_run)
    train.main(arguments(dataset_dir, finished_run))
    assert json.loads(capsys.readouterr().out)["step"] == 30
    jax.tree.map(np.testing.assert_array_equal, parameters(finished_run), before)


def start(dataset_dir, run_dir):
    """The command in a process of its own, on as many devices as the tests have."""
    return subprocess.Popen(
        [sys.executable, "-m", "de_jax.train", *arguments(dataset_dir, run_dir)],
        env={**os.environ, "JAX_NUM_CPU_DEVICES": "8", "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def wait_for(path, process):
    deadline = time.monotonic() + 240
    while not path.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)


def test_run_that_is_killed_and_then_terminated_saves_and_ends_bit_equal(finished_run, dataset_dir, tmp_path):
    """SIGTERM saves and exits with a code of its own. `test_kills` draws the moments at random."""
    run_dir = tmp_path / "run"
    process = start(dataset_dir, run_dir)
    wait_for(run_dir / "checkpoints" / "5", process)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    process = start(dataset_dir, run_dir)
    wait_for(run_dir / "checkpoints" / "15", process)
    process.terminate()
    out, _ = process.communicate()
    assert process.returncode == command.EXIT_STOPPED
    summary = json.loads(out)
    assert summary["stopped"] == "SIGTERM"
    assert load_run(run_dir).step == summary["step"] < 30
    train.main(arguments(dataset_dir, run_dir))
    jax.tree.map(np.testing.assert_array_equal, parameters(run_dir), parameters(finished_run))
    kept = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in kept if "loss" in line] == list(range(5, 31, 5))


def test_second_stage_starts_from_the_first_and_traces_the_steps_it_was_asked_to(finished_run, dataset_dir, tmp_path):
    run_dir = tmp_path / "stage2"
    recipe = "recipes/sde.gin"
    changes = {
        "train__init_from": finished_run,
        "train__num_steps": 3,
        "train__learning_rate": 1e-9,
        "train__profile_steps": "(2, 2)",
    }
    settings = [a for a in arguments(dataset_dir, run_dir, recipe, **changes) if "samtone" not in a]
    train.main([*settings, '--gin.DualEncoder.shared=("projection",)'])
    for a, b in zip(jax.tree.leaves(parameters(run_dir)), jax.tree.leaves(parameters(finished_run)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    assert list((run_dir / "profile").rglob("*.xplane.pb"))


def refused(capsys, argv):
    with pytest.raises(SystemExit) as exit_:
        command.run(functools.partial(train.main, argv))
    assert exit_.value.code == 2
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert message.startswith("error: ")
    return message


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"beir_pairs__dataset_dir": "/nowhere"}, "/nowhere"),
        ({"beir_pairs__tokenizer": "/nowhere/spiece.model"}, "/nowhere/spiece.model"),
        ({"beir_pairs__split": "tune"}, "train"),
        ({"beir_pairs__batch_size": 88}, "batch_size 88 is more than the 80 training pairs"),
        ({"beir_pairs__batch_size": 12}, "batch_size 12 is not divisible by the 8 devices"),
        ({"T5Config__vocab_size": 64}, "the query tokenizer has 160 entries"),
        ({"train__nun_steps": 3}, "nun_steps"),
        ({"pair__alpha": 0.1}, "nothing in this recipe reads pair.alpha"),
        ({"make_mesh__data": 9}, "asks for 9 devices, but there are 8"),
        ({"train__init_from": "/nowhere"}, "/nowhere is no folder; give a run"),
        ({"beir_pairs__max_doc_length": 1}, "leaves no room"),
    ],
)
def test_what_cannot_be_used_is_refused_before_anything_is_written(capsys, dataset_dir, tmp_path, changes, expected):
    run_dir = tmp_path / "run"
    assert expected in refused(capsys, arguments(dataset_dir, run_dir, **changes))
    assert not (run_dir / "checkpoints").exists() or not any((run_dir / "checkpoints").iterdir())


def broken(dataset_dir, folder, change):
    shutil.copytree(dataset_dir, folder)
    change(folder)
    return folder


def rewrite_corpus(change):
    def apply(folder):
        path = beir.find_file(folder, "corpus")
        lines = (gzip.open if path.suffix == ".gz" else open)(path, "rt").read().splitlines()
        path.unlink()
        (folder / "corpus.jsonl").write_text("\n".join(change(lines)) + "\n")

    return apply


def truncate(folder):
    path = beir.find_file(folder, "corpus")
    data = gzip.compress(path.read_bytes()) if path.suffix != ".gz" else path.read_bytes()
    path.unlink()
    (folder / "corpus.jsonl.gz").write_bytes(data[: len(data) // 2])


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (truncate, "corpus.jsonl.gz"),
        (rewrite_corpus(lambda lines: [*lines[:4], '{"_id": "d4", "te', *lines[5:]]), "corpus.jsonl, line 5"),
        (rewrite_corpus(lambda lines: [*lines, lines[0]]), "d0"),
        (rewrite_corpus(lambda lines: lines[:40]), "40"),
        (rewrite_corpus(lambda lines: ['{"_id": "d0", "text": ""}', *lines[1:]]), "corpus.jsonl, line 1"),
        (lambda folder: (folder / "qrels" / "train.tsv").write_text("query-id\tcorpus-id\tscore\nq0\td0\n"), "train.tsv, line 2"),
    ],
    ids=["truncated", "malformed", "duplicate id", "unknown ids", "empty text", "qrels without score"],
)
def test_broken_data_is_refused_with_file_and_line(capsys, dataset_dir, tmp_path, change, expected):
    folder = broken(dataset_dir, tmp_path / "broken", change)
    message = refused(capsys, arguments(folder, tmp_path / "run"))
    assert expected in message
    assert not (tmp_path / "run").exists()


def test_run_folder_of_another_model_is_refused(capsys, dataset_dir, finished_run):
    message = refused(capsys, arguments(dataset_dir, finished_run, T5Config__mlp_dim=24))
    assert "model/doc/encoder/mlp_dim = 16, but this recipe has 24" in message
    assert read_json(finished_run / "run.json")["model"]["doc"]["encoder"]["mlp_dim"] == 16


def test_unknown_step_names_those_there_are(finished_run):
    with pytest.raises(InputError, match=r"does not have checkpoint 7; complete checkpoints there: .*30"):
        load_run(finished_run, 7)


def test_inspect_run_shows_settings_curves_and_what_is_shared(finished_run, tmp_path, capsys):
    from de_jax.tools import inspect_run

    inspect_run.main([f"--run_dir={finished_run}", f"--out_dir={tmp_path / 'report'}"])
    shown = json.loads(capsys.readouterr().out)
    assert shown["settings"]["samtone.same_tower"] == "'query'"
    assert shown["num_parameters"]["total"] == sum(leaf.size for leaf in jax.tree.leaves(parameters(finished_run)))
    assert shown["num_parameters"]["query/embedder"] == shown["num_parameters"]["doc/embedder"] == 160 * 16
    assert (tmp_path / "report" / "curves.png").read_bytes().startswith(b"\x89PNG")
    table = (tmp_path / "report" / "parameters.txt").read_text()
    assert [line.split()[-3:] for line in table.splitlines() if "projection/kernel" in line] == [["both", "towers", "replicated"]]


def test_a_second_trainer_of_one_run_is_refused_before_it_writes(capsys, dataset_dir, tmp_path):
    run_dir = tmp_path / "run"
    (run_dir / "nested").mkdir(parents=True)
    (run_dir / ".train.lock").write_text("process 1 on a machine that lost its power")
    argv = arguments(dataset_dir, run_dir)
    with only_trainer(run_dir):
        message = refused(capsys, argv)
        assert re.fullmatch(r"error: process \d+ on \S+ is training in .*/run already; stop it first\.", message)
        train.main([*argv, "--dry_run"])
        with pytest.raises(InputError, match="is training in"):
            generator_run.train_generator(
                generator_run.GeneratorRun(run_dir, *[None] * 6), iter, generator_run.Plan(num_steps=1, batch_size=8)
            )
    assert [path.name for path in run_dir.iterdir()] == ["nested"]
    with only_trainer(tmp_path / "new"):
        pass
    assert not (tmp_path / "new").exists()
