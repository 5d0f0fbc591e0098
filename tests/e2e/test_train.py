"""The train command on a small data set: it learns, continues exactly where it was stopped, and refuses what it cannot use."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import os
import re
import shutil
import signal

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import toy_run
from toy_run import arguments

import de_jax
from de_jax import cli, command
from de_jax.data.sources.options import Share
from de_jax.data.sources.training_set import TrainingSet
from de_jax.doc2query import generator_run
from de_jax.recipe import Logging, Optimization, Recipe
from de_jax.reports import model_card
from de_jax.settings import bound
from de_jax.training.mesh import distributed
from de_jax.training.mesh.distributed import StopOnSignal
from de_jax.training.run import loop, recipe_file
from de_jax.training.run.checkpoint import Checkpoints, end_of
from de_jax.training.run.run_folder import load_run, only_trainer
from de_jax.types import InputError


def parameters(run_dir):
    return jax.tree.map(np.asarray, load_run(run_dir).params)


def test_run_learns_and_describes_itself(finished_run):
    lines = [json.loads(line) for line in (finished_run / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < 0.8 * losses[0]
    assert [line["step"] for line in lines if "dev/ndcg@10" in line] == [10, 20]
    assert list((finished_run / "tensorboard").glob("events.*"))
    assert bound(Recipe.load(finished_run).loss, "same_tower") == "query"
    run = load_run(finished_run)
    assert (run.step, run.query.max_length, run.doc.max_length) == (20, 16, 32)
    assert sorted(run.params) == ["doc", "query", "shared"]
    assert load_run(finished_run, "best").step in (10, 20)


def test_the_recipe_of_a_run_is_trained_again_and_another_seed_is_of_all(finished_run, tmp_path, capsys):
    arguments = [f"--recipe={finished_run}", "--dry_run"]
    cli.call("train", arguments)
    assert json.loads(capsys.readouterr().out)["num_parameters"] > 0
    with pytest.raises(InputError, match="name the recipe once"):
        cli.call("train", [*arguments, "--gin_file=recipes/sde.gin"])
    recipe = Recipe.load(finished_run)
    orders = []
    for seed in (0, 1, 2, 2):
        start = dataclasses.replace(recipe.initialization, seed=seed)
        seeded = recipe_file.with_seeds(dataclasses.replace(recipe, initialization=start))
        orders.append(next(seeded.data(share=Share()).batches(0)).query_id.tolist())
    assert orders[0] != orders[1] != orders[2] == orders[3]


def test_finished_run_is_left_as_it_is(finished_run, dataset_dir, capsys):
    before = parameters(finished_run)
    cli.call("train", arguments(dataset_dir, finished_run))
    assert json.loads(capsys.readouterr().out)["step"] == 20
    jax.tree.map(np.testing.assert_array_equal, parameters(finished_run), before)


def test_ctrl_c_saves_and_ends_bit_equal_and_twice_stops_at_once(finished_run, dataset_dir, tmp_path, capsys, stop_at, request):
    request.addfinalizer(functools.partial(signal.signal, signal.SIGINT, signal.getsignal(signal.SIGINT)))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that runs this in the background has it ignored
    argv = arguments(dataset_dir, tmp_path)
    stop_at(5, signal.SIGINT)
    with pytest.raises(SystemExit) as exit_:
        command.run(lambda: cli.call("train", argv))
    assert exit_.value.code == command.EXIT_INTERRUPTED
    assert "interrupted; the same command continues." in capsys.readouterr().err
    assert load_run(tmp_path).step == 6
    seen = []

    def twice():
        with StopOnSignal().interruptible():
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
                seen.append("goes on")

    with pytest.raises(KeyboardInterrupt):
        twice()
    assert seen == ["goes on"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    cli.call("train", argv)
    jax.tree.map(np.testing.assert_array_equal, parameters(tmp_path), parameters(finished_run))


@pytest.mark.soak
@pytest.mark.short_soak
@pytest.mark.parametrize("number", distributed.SIGNALS)
def test_run_that_is_terminated_saves_and_ends_bit_equal(finished_run, dataset_dir, tmp_path, capsys, stop_at, number):
    """SIGTERM saves and exits with a code of its own. `test_kills` kills outright, at random moments."""
    argv = arguments(dataset_dir, tmp_path)
    signal.signal(number, signal.SIG_DFL)  # nohup hides one of them
    stop_at(5, number)
    with pytest.raises(SystemExit) as exit_:
        command.run(lambda: cli.call("train", argv))
    assert exit_.value.code == command.EXIT_STOPPED
    summary = json.loads(capsys.readouterr().out)
    assert (summary["stopped"], summary["step"]) == ("SIGTERM", 6)
    assert load_run(tmp_path).step == 6
    cli.call("train", argv)
    jax.tree.map(np.testing.assert_array_equal, parameters(tmp_path), parameters(finished_run))
    kept = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in kept if "loss" in line] == [5, 10, 15, 20]


@pytest.mark.soak
def test_a_run_whose_dev_score_no_longer_rises_ends_and_stays_ended(dataset_dir, tmp_path, capsys, stop_at):
    def trained(patience):
        changes = {
            "Logging__early_stopping_patience": patience,
            "Logging__evaluate_every_steps": 2,
            "Optimization__learning_rate": 1e-30,
        }
        cli.call("train", arguments(dataset_dir, tmp_path, **changes))
        summary = json.loads(capsys.readouterr().out)
        assert summary["epochs"] == summary["step"] / 5  # 80 pairs, 16 in a batch
        return summary["step"], summary["stopped"]

    stop_at(5)
    with pytest.raises(SystemExit):
        trained(3)
    capsys.readouterr()
    assert load_run(tmp_path).step == 6
    step, why = trained(3)
    assert step == 8
    assert why.startswith("3 evaluations on dev in a row were no better than the best, ")
    assert trained(3) == (step, why)
    assert load_run(tmp_path, "best").step == 2
    assert end_of(tmp_path / "checkpoints", 8) == why  # a miner beside the run ends too
    assert end_of(tmp_path / "checkpoints", 6) is None
    assert trained(4)[0] == 10


@pytest.mark.soak
def test_second_stage_starts_from_the_first_and_traces_the_steps_it_was_asked_to(finished_run, dataset_dir, tmp_path):
    run_dir = tmp_path / "stage2"
    recipe = "recipes/sde.gin"
    changes = {
        "Initialization__init_from": finished_run,
        "Optimization__num_steps": 3,
        "Optimization__learning_rate": 1e-9,
        "Logging__profile_steps": "(2, 2)",
    }
    settings = [a for a in arguments(dataset_dir, run_dir, recipe, **changes) if "samtone" not in a]
    cli.call("train", [*settings, '--gin.DualEncoder.shared=("projection",)'])
    for a, b in zip(jax.tree.leaves(parameters(run_dir)), jax.tree.leaves(parameters(finished_run)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    assert list((run_dir / "profile").rglob("*.xplane.pb"))


def refused(capsys, argv):
    with pytest.raises(SystemExit) as exit_:
        command.run(functools.partial(cli.call, "train", argv))
    assert exit_.value.code == 2
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert message.startswith("error: ")
    return message


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"train__nun_steps": 3}, "nun_steps"),
        ({"make_mesh__data": 9}, "asks for 9 devices, but there are 8"),
        ({"Initialization__init_from": "/nowhere"}, "/nowhere does not exist; give a run"),
        ({"T5Config__vocab_size": 64}, "the query tokenizer has 160 entries"),
    ],
    ids=["setting", "devices", "source of parameters", "data"],
)
def test_what_cannot_be_used_is_one_sentence_before_anything_is_written(capsys, dataset_dir, tmp_path, changes, expected):
    """One of each kind; `test_dry_run` has all that shows without data, and `test_training_set` what the data are refused for."""
    assert expected in refused(capsys, arguments(dataset_dir, tmp_path / "run", **changes))
    assert not (tmp_path / "run").exists()


def test_a_run_that_continues_on_other_data_says_so(dataset_dir, tmp_path):
    data = shutil.copytree(dataset_dir, tmp_path / "data")
    options = {**toy_run.NO_DROPOUT, "Optimization__num_steps": 2, "Logging__save_every_steps": 2}
    cli.call("train", arguments(data, tmp_path / "run", **options))
    before = json.loads((tmp_path / "run" / "data.json").read_text())
    qrels = next((data / "qrels").glob("train.tsv*"))
    lines = qrels.read_text().splitlines(keepends=True)
    qrels.write_text("".join(lines[:-1]))
    with pytest.warns(UserWarning, match="run continues on other data than it had: its best score and what follows from it are of"):
        cli.call("train", arguments(data, tmp_path / "run", **options | {"Optimization__num_steps": 3}))
    assert json.loads((tmp_path / "run" / "data.json").read_text()).keys() == before.keys() == {""}


def test_a_damaged_tokenizer_of_a_run_is_refused(finished_run, tmp_path):
    copied = toy_run.with_another_tokenizer(finished_run, tmp_path / "run")
    with pytest.raises(InputError, match=toy_run.DAMAGED_TOKENIZER):
        load_run(copied)


def test_unknown_step_names_those_there_are(finished_run):
    with pytest.raises(InputError, match=r"does not have checkpoint 7; complete checkpoints there: .*20"):
        load_run(finished_run, 7)


def test_inspect_run_shows_settings_curves_and_what_is_shared(finished_run, tmp_path, capsys):

    cli.call("analyse run", [f"--run_dir={finished_run}", f"--out_dir={tmp_path / 'report'}"])
    shown = json.loads(capsys.readouterr().out)
    assert shown["recipe"]["loss"]["same_tower"] == "query"
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
        cli.call("train", [*argv, "--dry_run"])
        with pytest.raises(InputError, match="is training in"):
            generator_run.train_generator(
                generator_run.GeneratorRun(run_dir, *[None] * 6),
                TrainingSet(iter, 8, None, None, None),
                optimization=Optimization(),
                logging=Logging(),
            )
    assert [path.name for path in run_dir.iterdir()] == ["nested"]
    with only_trainer(tmp_path / "new"):
        pass
    assert not (tmp_path / "new").exists()


@pytest.mark.soak
def test_training_on_another_thread_is_not_stopped_by_signals_and_ends(finished_run, dataset_dir, tmp_path):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(cli.call, "train", arguments(dataset_dir, tmp_path)).result()
    jax.tree.map(np.testing.assert_array_equal, parameters(tmp_path), parameters(finished_run))


def test_a_run_that_has_ended_is_left_as_it_is_by_a_recipe_with_other_settings(finished_run, dataset_dir, tmp_path, capsys):
    run_dir = shutil.copytree(finished_run, tmp_path / "run")
    before = {name: (run_dir / name).read_bytes() for name in ("recipe.json", "run.json", "data.json")}
    cli.call("train", [*arguments(dataset_dir, run_dir), "--gin.Optimization.learning_rate=0.5"])
    assert "trained; for optimization.learning_rate = 0.5, take another run_dir.\n" in capsys.readouterr().err
    assert {name: (run_dir / name).read_bytes() for name in before} == before


def test_a_run_reports_what_its_data_became(finished_run):
    report = json.loads((finished_run / "data_report.json").read_text())
    one = report["sources"][""]
    assert one["pairs"] >= one["queries"]["trained_on"] > 0
    assert one["documents"]["cut_at"] == 32


def test_a_run_says_what_it_was_trained_with_and_that_it_continues_elsewhere(finished_run, dataset_dir, tmp_path, monkeypatch):
    run_dir = shutil.copytree(finished_run, tmp_path / "run")
    (first,) = loop.environments(run_dir)
    assert first == {"from_step": 0, **loop.environment()}
    with contextlib.closing(Checkpoints(run_dir / "checkpoints")) as checkpoints:
        assert checkpoints.beside(20)["environment"] == loop.environment()
    other = {**loop.environment(), "jax": "0.0.1"}
    monkeypatch.setattr(loop, "environment", lambda: other)
    with pytest.warns(UserWarning, match=rf"continues elsewhere \(jax {re.escape(first['jax'])} is now 0\.0\.1\), so its bits may"):
        cli.call("train", [*arguments(dataset_dir, run_dir), "--gin.Optimization.num_steps=22"])
    assert loop.environments(run_dir) == [first, {"from_step": 20, **other}]
    assert loop.environments(run_dir, 19) == [first]
    assert model_card.trained_with([first]).startswith(f"de_jax {de_jax.__version__}, Python ")


def test_a_run_may_continue_with_other_frozen_parameters(finished_run, dataset_dir, tmp_path):
    run_dir = shutil.copytree(finished_run, tmp_path / "run")
    with pytest.warns(UserWarning, match=r"at .*/20: the optimizer's state of 13 parameters is kept, it is new for 0,"):
        cli.call("train", [*arguments(dataset_dir, run_dir), "--gin.Optimization.frozen=('doc/.*',)"])


@pytest.mark.soak
@pytest.mark.short_soak
def test_a_run_continues_with_other_frozen_parameters_also_after_a_fault_before_its_next_checkpoint(
    finished_run, dataset_dir, tmp_path, monkeypatch
):
    changed = ["--gin.Optimization.frozen=('doc/.*',)", "--gin.Optimization.num_steps=22"]
    folders = [shutil.copytree(finished_run, tmp_path / name) for name in ("whole", "killed")]
    argv = [[*arguments(dataset_dir, folder), *changed] for folder in folders]
    cli.call("train", argv[0])

    def dies(*args, **settings):
        raise RuntimeError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(loop, "fit", dies)
        with pytest.raises(RuntimeError, match="killed"):
            cli.call("train", argv[1])
    assert Recipe.load(folders[1]).optimization.frozen == ("doc/.*",)
    cli.call("train", argv[1])
    jax.tree.map(np.testing.assert_array_equal, *map(training_state, folders))
    jax.tree.map(np.testing.assert_array_equal, *(parameters(folder)["doc"] for folder in (finished_run, folders[0])))


def training_state(run_dir):
    """All arrays of the newest checkpoint beside the parameters."""
    newest = max((run_dir / "checkpoints").iterdir(), key=lambda path: int(path.name))
    return parameters(run_dir), jax.tree.map(np.asarray, ocp.PyTreeCheckpointer().restore(newest / "training"))


@pytest.mark.parametrize("setting", ["Optimization.alternate=('query/.*', 'doc/.*')", "Optimization.optimizer=adamw"])
def test_a_run_cannot_continue_with_what_its_optimizers_state_is_not_of(finished_run, dataset_dir, tmp_path, setting):
    run_dir = shutil.copytree(finished_run, tmp_path / "run")
    name = setting.partition("=")[0]
    with pytest.raises(InputError, match=rf"run cannot continue with {name}.*Take another run_dir, with Initialization\.init_from"):
        cli.call("train", [*arguments(dataset_dir, run_dir), f"--gin.{setting}", "--gin.Optimization.num_steps=22"])


def test_a_training_that_is_refused_leaves_the_recipe_of_the_run_as_it_is(finished_run, dataset_dir, tmp_path):
    run_dir = shutil.copytree(finished_run, tmp_path / "run")
    before = {name: (run_dir / name).read_bytes() for name in ("recipe.json", "run.json")}
    with pytest.raises(InputError, match=r"the run is at step 20 already, past Optimization\.num_steps = 2; raise it"):
        cli.call("train", [*arguments(dataset_dir, run_dir), "--gin.Optimization.num_steps=2"])
    assert {name: (run_dir / name).read_bytes() for name in before} == before
