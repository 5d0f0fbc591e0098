"""A recipe written in Python trains as the same recipe does that gin files describe, and says in its folder what it was."""

import dataclasses
import functools
import sys
import threading
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
    monkeypatch.setattr(trainer, "train_or_stop", lambda recipe, run_dir: {"run_dir": run_dir, "stopped": "SIGTERM"})
    with pytest.raises(SystemExit) as exit_:
        trainer.train(toy_recipe(dataset_dir), tmp_path / "run")
    assert exit_.value.code == command.EXIT_STOPPED


@pytest.mark.soak
@pytest.mark.short_soak
def test_it_trains_the_same_parameters_and_describes_itself(dataset_dir, finished_run, tmp_path):
    recipe = toy_recipe(dataset_dir)
    de_jax.train(recipe, tmp_path / "run")
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
def test_a_run_is_logged_to_wandb_once_over_its_sessions_and_never_waits_for_it(dataset_dir, tmp_path, monkeypatch):
    """A service that hangs from the first line on takes the lines when it wakes; the run is done long before."""
    is_awake, runs = threading.Event(), []

    def init(**options):
        lines = []
        runs.append((options, lines))

        def log(scalars, *, step):
            is_awake.wait(60)
            lines.append((step, scalars))

        return types.SimpleNamespace(log=log, finish=lambda *, exit_code: lines.append(exit_code))

    settings = types.SimpleNamespace(settings=types.SimpleNamespace(mode="offline"))
    fake = types.SimpleNamespace(setup=lambda: settings, init=init, Settings=dict)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr(wandb_log, "FINISH_SECONDS", 0.1)
    recipe = toy_recipe(dataset_dir)
    data = functools.partial(recipe.data, options=dataclasses.replace(recipe.options, dev_split=None))
    logging = Logging(log_every_steps=2, save_every_steps=4, wandb="retrieval")
    tower = dataclasses.replace(recipe.model.doc, encoder=dataclasses.replace(recipe.model.doc.encoder, dropout_rate=0.0))
    recipe = dataclasses.replace(
        recipe,
        model=DualEncoder(query=tower, doc=tower),
        data=data,
        optimization=dataclasses.replace(recipe.optimization, num_steps=4),
        logging=logging,
    )
    with pytest.warns(UserWarning, match="W&B has not taken the last lines"):
        de_jax.train(recipe, tmp_path / "run")
    assert runs[0][1] == []
    is_awake.set()
    for thread in [one for one in threading.enumerate() if one.name == "wandb"]:
        thread.join()
    de_jax.train(recipe, tmp_path / "run")  # continues after the last update
    (first, lines), (second, more) = runs
    assert first["id"] == second["id"]
    assert first["config"]["optimization"]["num_steps"] == 4
    assert (lines.pop(), more) == (0, [0])
    written = read_metrics(tmp_path / "run" / METRICS_FILE)
    assert [step for step, _ in lines] == [line.pop("step") for line in written] == [2, 4]
    assert [{name: float(f"{value:.8g}") for name, value in scalars.items()} for _, scalars in lines] == written


def test_a_missing_package_is_refused_before_anything_is_read(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    recipe = toy_recipe(tmp_path / "no_such_data")
    with pytest.raises(InputError, match=r"Logging\.wandb needs the package wandb"):
        de_jax.train(dataclasses.replace(recipe, logging=Logging(wandb="retrieval")), tmp_path / "run")
