"""Two real processes, four simulated devices each, train as one process with eight does."""

import json
import signal
import time

import jax
import numpy as np
import pytest
from two_processes import TwoProcesses, assert_close, parameters

from de_jax import cli, command
from de_jax.data.text import beir, vocabulary_training
from de_jax.training.run.run_folder import load_run

SETTINGS = {
    "T5Config.vocab_size": 32,
    "T5Config.model_dim": 16,
    "T5Config.num_layers": 1,
    "T5Config.num_heads": 2,
    "T5Config.head_dim": 8,
    "T5Config.mlp_dim": 16,
    "T5Config.dtype": "float32",
    "T5Config.dropout_rate": 0.0,  # each process packs its own texts into rows, and dropout is drawn for rows
    "TowerConfig.projection_dim": 16,
    "samtone.temperature": 0.05,
    "Optimization.learning_rate": 0.005,
    "linear.end": 0.005,  # a run that is stopped early and one that was meant to be short learn alike
    "Logging.log_every_steps": 1,
    "Logging.save_every_steps": 4,
    "PairsOptions.batch_size": 16,
    "PairsOptions.max_query_length": 8,
    "PairsOptions.max_doc_length": 16,
}
FSDP = {"make_mesh.fsdp": 4}
NEVER = 100_000


@pytest.fixture(scope="session")
def dataset_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("beir") / "toy"
    words = ["apple", "river", "engine", "violin", "castle", "pepper", "comet", "ladder", "meadow", "lantern"]
    rng = np.random.default_rng(0)
    docs = [(f"d{i}", "", " ".join(rng.choice(words, rng.integers(2, 7)))) for i in range(64)]
    queries = [(f"q{i}", " ".join(rng.choice(words, 2))) for i in range(64)]
    qrels = {"train": {f"q{i}": {f"d{i}": 1} for i in range(48)}, "dev": {f"q{i}": {f"d{i}": 1} for i in range(48, 64)}}
    beir.write(folder, docs, queries, qrels)
    vocabulary_training.train_sentencepiece([doc[2] for doc in docs], folder / "spiece.model", vocab_size=30)
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("DE_JAX_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def arguments(dataset_dir, run_dir, num_steps, **changes):
    data = {"beir_pairs.dataset_dir": dataset_dir, "PairsOptions.tokenizer": dataset_dir / "spiece.model"}
    settings = {**SETTINGS, **data, "Optimization.num_steps": num_steps, **{k.replace("__", "."): v for k, v in changes.items()}}
    return ["--gin_file=recipes/samtone_query.gin", f"--run_dir={run_dir}", *(f"--gin.{k}={v}" for k, v in settings.items())]


def curve(run_dir):
    """Losses and dev scores by step."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {(line["step"], name): line[name] for line in lines for name in ("loss", "dev/ndcg@10") if name in line}


def assert_same_run(run_dir, other_dir):
    assert_close(run_dir, other_dir)
    assert curve(run_dir) == pytest.approx(curve(other_dir), abs=1e-4)
    assert load_run(run_dir, "best").step == load_run(other_dir, "best").step


@pytest.mark.soak
def test_two_processes_that_stop_together_on_sigterm_leave_a_run_that_ends_as_that_of_one_does(dataset_dir, tmp_path):
    """They train and evaluate on a mesh that spans both; here one process continues, in the soak both do."""
    options = {**FSDP, "PairsOptions.dev_split": "dev", "Logging.evaluate_every_steps": 3}
    both = TwoProcesses(arguments(dataset_dir, tmp_path / "two", NEVER, **options))
    both.wait_for(tmp_path / "two" / "checkpoints" / "4")
    both.processes[1].send_signal(signal.SIGTERM)
    codes, summary = both.finish()
    assert codes == [command.EXIT_STOPPED] * 2
    assert load_run(tmp_path / "two").step == summary["step"]
    num_steps = 3 * (summary["step"] // 3 + 1)  # the last update is evaluated in any case
    for name in ("two", "one"):
        cli.call("train", arguments(dataset_dir, tmp_path / name, num_steps, **options))
    assert_same_run(tmp_path / "two", tmp_path / "one")


@pytest.mark.soak
@pytest.mark.parametrize(
    "mesh", [{}, {"make_mesh.tensor": 8, "make_mesh.data": 1}, {"make_mesh.fsdp": 8}], ids=["data", "tensor", "fsdp"]
)
def test_two_processes_on_any_mesh_train_as_one_does(dataset_dir, tmp_path, mesh):
    options = {**mesh, "PairsOptions.dev_split": "dev", "Logging.evaluate_every_steps": 3}
    assert TwoProcesses(arguments(dataset_dir, tmp_path / "two", 6, **options)).finish()[0] == [0, 0]
    cli.call("train", arguments(dataset_dir, tmp_path / "one", 6, **options))
    assert_same_run(tmp_path / "two", tmp_path / "one")


@pytest.mark.soak
@pytest.mark.parametrize("victim", [0, 1])
def test_killed_process_ends_the_other_with_a_sentence_and_both_started_again_end_bit_equal(dataset_dir, tmp_path, victim):
    options = {**FSDP, "T5Config.dropout_rate": 0.1}
    whole, killed = (
        [*arguments(dataset_dir, tmp_path / name, 80, **options), "--lost_after_seconds=10"] for name in ("whole", "killed")
    )
    TwoProcesses(whole).finish()
    both = TwoProcesses(killed)
    both.wait_for(tmp_path / "killed" / "checkpoints" / "4")
    both.processes[victim].kill()
    start = time.monotonic()
    _, errors = both.processes[1 - victim].communicate(timeout=120)
    assert time.monotonic() - start < 60
    assert both.processes[1 - victim].returncode == command.EXIT_LOST
    assert errors.strip().splitlines()[-1].startswith("error: another process of this run was lost; start all of them again")
    both.processes[victim].communicate()
    assert 4 <= load_run(tmp_path / "killed").step < 80
    assert TwoProcesses(killed).finish()[0] == [0, 0]
    jax.tree.map(np.testing.assert_array_equal, parameters(tmp_path / "killed"), parameters(tmp_path / "whole"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--num_processes=2", "--process_id=0"], "--coordinator_address missing"),
        (["--coordinator_address=localhost:1"], "--num_processes and --process_id missing"),
    ],
)
def test_half_of_what_joins_processes_is_refused(capsys, flags, message):
    with pytest.raises(SystemExit) as exit_:
        command.run(lambda: cli.call("train", ["--gin_file=recipes/sde.gin", "--run_dir=run", *flags]))
    assert exit_.value.code == command.EXIT_INPUT
    assert message in capsys.readouterr().err
