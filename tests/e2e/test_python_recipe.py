"""A recipe written in Python trains as the same recipe does that gin files describe, and says in its folder what it was."""

import dataclasses
import functools
import sys
import types

import jax
import numpy as np
import pytest
import toy_run

import de_jax
from de_jax import command, trainer
from de_jax.data.sources.options import PairsOptions
from de_jax.data.sources.training_set import beir_pairs
from de_jax.models.dual_encoder import DualEncoder
from de_jax.models.t5 import T5Config
from de_jax.models.tower import TowerConfig
from de_jax.recipe import Devices, Logging, Optimization, Recipe
from de_jax.training.mesh.sharding import make_mesh
from de_jax.training.run import recipe_file, wandb_log
from de_jax.training.run.recipe_file import read_recipe_file
from de_jax.training.run.run_folder import load_run
from de_jax.training.run.run_log import METRICS_FILE, read_metrics
from de_jax.types import InputError


def toy_recipe(dataset_dir):
    """What `toy_run.arguments` describe."""
    encoder = T5Config(vocab_size=160, model_dim=16, num_layers=1, num_heads=2, head_dim=8, mlp_dim=16, dtype="float32")
    tower = TowerConfig(encoder, projection_dim=16)
    options = PairsOptions(
        tokenizer=str(dataset_dir / "spiece.model"), batch_size=16, max_query_length=16, max_doc_length=32, dev_split="dev"
    )
    every = {name.removeprefix("Logging."): value for name, value in toy_run.SETTINGS.items() if name.endswith("_every_steps")}
    return de_jax.Recipe(
        model=DualEncoder(query=tower, doc=tower, shared=("projection",)),
        data=functools.partial(beir_pairs, str(dataset_dir), options=options),
        loss=functools.partial(de_jax.losses.samtone, same_tower="query", temperature=0.05),
        optimization=Optimization(num_steps=toy_run.SETTINGS["Optimization.num_steps"], learning_rate=0.02),
        logging=Logging(**every),
        devices=Devices(mesh=functools.partial(make_mesh, data=1)),
    )


def test_sigterm_ends_a_python_script_as_it_ends_the_command(dataset_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "train_or_stop", lambda recipe, run_dir, on_log: {"run_dir": run_dir, "stopped": "SIGTERM"})
    with pytest.raises(SystemExit) as exit_:
        trainer.train(toy_recipe(dataset_dir), tmp_path / "run")
    assert exit_.value.code == command.EXIT_STOPPED


@pytest.mark.soak
@pytest.mark.short_soak
def test_it_trains_the_same_parameters_and_describes_itself(dataset_dir, finished_run, tmp_path):
    """After a function that gets the log has ended the training, too."""
    recipe, lines = toy_recipe(dataset_dir), []

    def log(step, numbers):
        lines.append((step, numbers))
        if len(lines) == 2:
            raise InterruptedError("enough")

    with pytest.raises(InterruptedError, match="enough"):
        de_jax.train(recipe, tmp_path / "run", on_log=log)
    de_jax.train(recipe, tmp_path / "run", on_log=log)
    logged = read_metrics(tmp_path / "run" / METRICS_FILE)
    assert logged[-len(lines[2:]) :] == [pytest.approx({"step": step, **numbers}, rel=1e-7) for step, numbers in lines[2:]]
    jax.tree.map(np.testing.assert_array_equal, de_jax.load(tmp_path / "run").run.params, load_run(finished_run).params)
    told = read_recipe_file(tmp_path / "run")
    assert told["loss"]["function"] == "de_jax.losses.in_batch.samtone"
    assert (told["loss"]["same_tower"], told["loss"]["mask_duplicates"]) == ("query", True)
    assert told["data"]["dataset_dir"] == str(dataset_dir)
    assert told["data"]["options"]["batch_size"] == 16
    assert told["optimization"]["optimizer"]["function"] == "de_jax.training.optim.optimizer.adafactor"
    assert told == read_recipe_file(finished_run)
    assert told == recipe_file.to_json(recipe_file.with_seeds(Recipe.load(tmp_path / "run")))


@pytest.mark.soak
def test_a_run_is_logged_to_wandb_once_over_its_sessions(dataset_dir, tmp_path, monkeypatch):
    runs = []

    def init(**options):
        lines = []
        runs.append((options, lines))

        return types.SimpleNamespace(
            log=lambda scalars, *, step: lines.append((step, scalars)), finish=lambda *, exit_code: lines.append(exit_code)
        )

    settings = types.SimpleNamespace(settings=types.SimpleNamespace(mode="offline"))
    fake = types.SimpleNamespace(setup=lambda: settings, init=init, Settings=dict)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    recipe = toy_recipe(dataset_dir)
    data = functools.partial(recipe.data, options=dataclasses.replace(recipe.options, dev_split=None))
    logging = Logging(log_every_steps=1, save_every_steps=1, wandb="retrieval")
    tower = dataclasses.replace(recipe.model.doc, encoder=dataclasses.replace(recipe.model.doc.encoder, dropout_rate=0.0))
    recipe = dataclasses.replace(
        recipe,
        model=DualEncoder(query=tower, doc=tower),
        data=data,
        optimization=dataclasses.replace(recipe.optimization, num_steps=4),
        logging=logging,
    )

    def stop(step, numbers):
        if step == 2:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        de_jax.train(recipe, tmp_path / "run", on_log=stop)
    de_jax.train(recipe, tmp_path / "run")
    (first, lines), (second, more) = runs
    assert first["id"] == second["id"]
    assert first["config"]["optimization"]["num_steps"] == 4
    assert first["settings"]["finish_timeout"] == wandb_log.FINISH_SECONDS
    assert (lines.pop(), more.pop()) == (1, 0)  # their exit codes
    written = read_metrics(tmp_path / "run" / METRICS_FILE)
    taken = dict([*lines, *more])
    assert [*taken] == [line.pop("step") for line in written] == [1, 2, 3, 4]
    assert [{name: float(f"{value:.8g}") for name, value in scalars.items()} for scalars in taken.values()] == written


def test_a_missing_package_is_refused_before_anything_is_read(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    recipe = toy_recipe(tmp_path / "no_such_data")
    with pytest.raises(InputError, match=r"Logging\.wandb needs the package wandb"):
        de_jax.train(dataclasses.replace(recipe, logging=Logging(wandb="retrieval")), tmp_path / "run")
