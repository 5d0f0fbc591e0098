"""What users and machines do to whole commands: one sentence, a non-zero exit, nothing lost, and the same command continues."""

import contextlib
import json
import os
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from toy_run import NO_DROPOUT, arguments

from de_jax import cli, command
from de_jax.data.stores.corpus import open_token_store
from de_jax.retrieval.embedding_files import open_embeddings
from de_jax.training.run import loop, run_log
from de_jax.training.run.run_folder import load_run
from reproduction import verbs

NO_SPACE = ("No space left on device", "File too large")


def refused(capsys, verb, argv, call=cli.call):
    """The sentence that a command ends with."""
    with pytest.raises(SystemExit) as exit_:
        command.run(lambda: call(verb, argv))
    assert exit_.value.code == command.EXIT_INPUT
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert message.startswith("error: ")
    return message


def parameters(run_dir):
    return jax.tree.map(np.asarray, load_run(run_dir).params)


def assert_same_run(run_dir, expected_dir):
    jax.tree.map(np.testing.assert_array_equal, parameters(run_dir), parameters(expected_dir))
    curves = [
        [{name: value for name, value in line.items() if name != "pairs_per_second"} for line in run_log.read_metrics(folder)]
        for folder in (run_dir / run_log.METRICS_FILE, expected_dir / run_log.METRICS_FILE)
    ]
    assert curves[0] == curves[1]


def wait_for(path):
    deadline = time.monotonic() + 60
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)


def at_step(monkeypatch, step, do):
    """Does something when the log writes the line of this step."""

    def sink(*_):
        return contextlib.nullcontext(lambda now, scalars: do() if now == step and "loss" in scalars else None)

    monkeypatch.setattr(run_log, "progress_sink", sink)


@pytest.mark.soak
@pytest.mark.parametrize("num_bytes", [0, 9000])
def test_full_disk_while_a_checkpoint_is_written(capsys, monkeypatch, small_disk, dataset_dir, finished_run, num_bytes):
    run_dir = small_disk.folder / "run"
    argv = arguments(dataset_dir, run_dir, Logging__save_every_steps=5)

    def fill():
        wait_for(run_dir / "checkpoints" / "5")
        small_disk.leave(num_bytes)

    with monkeypatch.context() as patch:
        at_step(patch, 10, fill)
        message = refused(capsys, "train", argv)
    assert any(words in message for words in NO_SPACE), message
    assert str(run_dir) in message
    small_disk.free()
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["5"]
    assert not [name for name in small_disk.files() if "tmp" in name]
    command.run(lambda: cli.call("train", argv))
    assert_same_run(run_dir, finished_run)


@pytest.mark.parametrize("sink", [run_log.jsonl_sink, run_log.tensorboard_sink])
def test_full_disk_while_a_line_is_logged(small_disk, sink):
    write, steps = sink(small_disk.folder, 0), iter(range(1, 10000))
    write(next(steps), {"loss": 1.0})
    small_disk.leave(1)
    with pytest.raises(OSError, match="|".join(NO_SPACE)) as caught:  # noqa: PT012
        for step in steps:
            write(step, {"loss": 1.0})
    assert str(caught.value.filename).startswith(str(small_disk.folder))
    if sink is run_log.jsonl_sink:
        path = small_disk.folder / run_log.METRICS_FILE
        assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == list(range(1, step))
        small_disk.free()
        write(step, {"loss": 1.0})
        assert len(run_log.read_metrics(path)) == step


def test_a_run_whose_folder_is_moved_ends_before_it_writes_into_another(capsys, monkeypatch, dataset_dir, tmp_path):
    run_dir = tmp_path / "run"

    def move():
        run_dir.rename(tmp_path / "moved")
        run_dir.mkdir()
        (run_dir / "recipe.json").touch()  # of a job that starts again

    at_step(monkeypatch, 5, move)
    assert "was moved, removed or replaced during the work there" in refused(capsys, "train", arguments(dataset_dir, run_dir))
    assert [path.name for path in run_dir.iterdir()] == ["recipe.json"]


def test_full_disk_while_tokenizing(capsys, small_disk, dataset_dir):
    argv = [f"--dataset_dir={dataset_dir}", f"--tokenizer={dataset_dir}/spiece.model", f"--out_dir={small_disk.folder}/stores"]
    small_disk.leave(4000)
    message = refused(capsys, "encode tokens", argv, verbs.call)
    assert any(words in message for words in NO_SPACE), message
    assert f"{small_disk.folder}/stores/" in message
    assert ".tmp" not in message
    assert not [name for name in small_disk.files() if ".tmp" in name or "corpus" in name]  # the queries may have found room
    small_disk.free()
    command.run(lambda: verbs.call("encode tokens", argv))
    made = json.loads(capsys.readouterr().out)
    assert open_token_store(made["docs"]["store_dir"]).num_texts == 96


@pytest.mark.soak
def test_full_disk_while_encoding(capsys, small_disk, dataset_dir, finished_run):
    out_dir = small_disk.folder / "embeddings"
    argv = [f"--run_dir={finished_run}", f"--dataset_dir={dataset_dir}", f"--out_dir={out_dir}"]
    small_disk.leave(5000)  # 96 documents of 16 floats are 6 kB
    message = refused(capsys, "encode corpus", argv)
    assert any(words in message for words in NO_SPACE), message
    assert str(out_dir) in message
    assert not (out_dir / "manifest.json").exists()
    small_disk.free()
    command.run(lambda: cli.call("encode corpus", argv))
    whole = finished_run.parent / "whole_embeddings"
    command.run(lambda: cli.call("encode corpus", [*argv[:2], f"--out_dir={whole}"]))
    assert open_embeddings(out_dir)[1].shape == (96, 16)
    assert {path.name: path.read_bytes() for path in out_dir.iterdir()} == {p.name: p.read_bytes() for p in whole.iterdir()}


@pytest.mark.soak
def test_full_disk_while_results_are_written(capsys, small_disk, dataset_dir, finished_run):
    small_disk.leave(0)
    argv = [f"--run_dir={finished_run}", f"--out_dir={small_disk.folder}/report"]
    message = refused(capsys, "analyse run", argv)
    assert any(words in message for words in NO_SPACE), message
    assert str(small_disk.folder) in message
    assert small_disk.files() == {}
    small_disk.free()
    cli.call("analyse run", argv)
    assert (small_disk.folder / "report" / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.soak
@pytest.mark.short_soak
def test_checkpoint_folder_that_is_half_copied_is_refused_and_left_alone(capsys, dataset_dir, finished_run, tmp_path):
    run_dir = tmp_path / "copy"
    subprocess.run(["cp", "-r", str(finished_run), str(run_dir)], check=True)
    newest = run_dir / "checkpoints" / "20"
    for file in sorted((newest / "training").rglob("*")):
        if file.is_file() and "d" in file.parent.name:
            file.unlink()
    message = refused(capsys, "train", arguments(dataset_dir, run_dir, Optimization__num_steps=25))
    assert f"the checkpoint {newest} is damaged or half-copied" in message
    assert "delete that folder to continue from an older one" in message
    assert newest.is_dir()


@pytest.mark.soak
def test_loss_that_is_not_finite_names_the_step_and_its_pairs(capsys, dataset_dir, tmp_path):
    run_dir = tmp_path / "run"
    changes = {
        "Optimization__learning_rate": 1e30,
        "Optimization__clip_norm": None,
        "adamw__weight_decay": 0.0,
        "Optimization__optimizer": "@adamw",
    }
    argv = arguments(dataset_dir, run_dir, **changes)
    message = refused(capsys, "train", argv)
    assert "step 2 is not a finite number" in message
    assert "(query 'q" in message
    assert "document 'd" in message
    assert "no checkpoint is there yet" in message
    assert list((run_dir / "checkpoints").iterdir()) == []
    assert refused(capsys, "train", argv) == message


def test_out_of_memory_is_a_sentence_with_the_settings_to_change(capsys, monkeypatch, dataset_dir, tmp_path):
    def no_room(state, batch):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 12884901888 bytes.")

    monkeypatch.setattr(loop, "fit", lambda step_fn, state, batches, **options: no_room(state, None))
    message = refused(capsys, "train", arguments(dataset_dir, tmp_path / "run", **NO_DROPOUT))
    assert "(Out of memory allocating 12884901888 bytes), a step takes 0.00" in message
    for setting in ("PairsOptions.batch_size (now 16)", "num_chunks (now 1)", "T5Config.remat (now none)", "block_size (now None)"):
        assert setting in message
    assert "the mesh is data=1" in message


@pytest.mark.soak
def test_memory_that_really_runs_out_is_told_so(dataset_dir, tmp_path):
    """One layer's activations would take 445 GiB; the process gets 6 GiB of addresses."""
    wide = {"T5Config__mlp_dim": 1 << 18, "PairsOptions__max_doc_length": 4000, "PairsOptions__length_multiple": 4000}
    wide["PairsOptions__pack"] = False  # a row of 4000 tokens has room for all documents of a batch
    limit = "import resource; resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))"
    program = f"{limit}\nimport sys\nfrom de_jax import cli\nsys.argv.insert(1, 'train')\ncli.main()"
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments(dataset_dir, tmp_path / "run", **wide)],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == command.EXIT_INPUT, done.stderr[-2000:]
    message = done.stderr.strip().splitlines()[-1]
    assert message.startswith("error: the device ran out of memory (Out of memory allocating ")
    assert "GiB of it by the compiler's count: lower PairsOptions.batch_size (now 16)" in message
