"""A recipe written in Python trains as the same recipe does that gin files describe, and says in its folder what it was."""

import functools

import jax
import numpy as np
import toy_run

import de_jax
from de_jax.data.sources.options import PairsOptions
from de_jax.data.sources.training_set import beir_pairs
from de_jax.models.dual_encoder import DualEncoder
from de_jax.models.t5 import T5Config
from de_jax.models.tower import TowerConfig
from de_jax.recipe import Devices, Logging, Optimization
from de_jax.training.mesh.sharding import make_mesh
from de_jax.training.run.run_folder import load_run, read_recipe_file, read_settings


def toy_recipe(dataset_dir):
    """What `toy_run.arguments` describe."""
    encoder = T5Config(vocab_size=160, model_dim=16, num_layers=1, num_heads=2, head_dim=8, mlp_dim=16, dtype="float32")
    tower = TowerConfig(encoder, projection_dim=16)
    options = PairsOptions(
        tokenizer=str(dataset_dir / "spiece.model"), batch_size=16, max_query_length=16, max_doc_length=32, dev_split="dev"
    )
    every = {name.removeprefix("train."): value for name, value in toy_run.SETTINGS.items() if name.endswith("_every_steps")}
    return de_jax.Recipe(
        model=DualEncoder(query=tower, doc=tower, shared=("projection",)),
        data=functools.partial(beir_pairs, str(dataset_dir), options=options),
        loss=functools.partial(de_jax.losses.samtone, same_tower="query", temperature=0.05),
        optimization=Optimization(num_steps=toy_run.SETTINGS["train.num_steps"], learning_rate=0.02),
        logging=Logging(**every),
        devices=Devices(mesh=functools.partial(make_mesh, data=1)),
    )


def test_it_trains_the_same_parameters_and_describes_itself(dataset_dir, finished_run, tmp_path):
    recipe = toy_recipe(dataset_dir)
    de_jax.train(recipe, tmp_path / "run")
    jax.tree.map(np.testing.assert_array_equal, de_jax.load(tmp_path / "run").run.params, load_run(finished_run).params)
    assert not (tmp_path / "run" / "config.gin").exists()
    told = read_recipe_file(tmp_path / "run")
    assert told["loss"]["function"] == "de_jax.losses.in_batch.samtone"
    assert (told["loss"]["same_tower"], told["loss"]["mask_duplicates"]) == ("query", True)
    assert told["data"]["dataset_dir"] == str(dataset_dir)
    assert told["data"]["options"]["batch_size"] == 16
    assert told["optimization"]["optimizer"]["function"] == "de_jax.training.optim.optimizer.adafactor"
    assert told == read_recipe_file(finished_run)
    settings = read_settings(tmp_path / "run")
    assert (settings["samtone.temperature"], settings["train.loss"]) == ("0.05", "@samtone")
