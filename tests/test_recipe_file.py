"""recipe.json holds every setting, and a run that continues with other ones says which."""

import dataclasses
import functools
import json

import numpy as np

from de_jax import recipe_file
from de_jax.data.sources.options import PairsOptions
from de_jax.data.sources.table_pairs import table_pairs
from de_jax.data.sources.training_set import beir_pairs
from de_jax.losses.in_batch import in_batch_softmax
from de_jax.mining.miner import Miner
from de_jax.models.dual_encoder import DualEncoder
from de_jax.models.t5 import T5Config
from de_jax.models.tower import TowerConfig
from de_jax.recipe import HardNegatives, Optimization, Recipe

TOWER = TowerConfig(T5Config(vocab_size=32, model_dim=16, num_layers=1, num_heads=2, head_dim=8, mlp_dim=16))


def own_loss(e, *, margin=0.5, options=()):
    return e, margin, options


def recipe(**changes):
    data = functools.partial(beir_pairs, "data/scifact", options=PairsOptions(tokenizer=len, **changes))
    return Recipe(model=DualEncoder(query=TOWER, doc=TOWER), data=data, loss=in_batch_softmax)


def test_functions_classes_and_what_is_bound_are_told():
    told = recipe_file.to_json(dataclasses.replace(recipe(), loss=functools.partial(own_loss, margin=0.25)))
    assert told["loss"] == {"function": f"{own_loss.__module__}.own_loss", "margin": 0.25, "options": []}
    assert told["data"]["dataset_dir"] == "data/scifact"
    assert told["data"]["options"]["tokenizer"]["function"] == "builtins.len"
    assert told["model"]["query"]["encoder"]["num_layers"] == 1
    assert told["optimization"]["schedule"]["warmup_steps"] == 0
    assert (recipe_file.to_json(np.int64(3)), recipe_file.to_json(np.float32(0.5))) == (3, 0.5)
    assert [recipe_file.to_json(value) for value in (float("inf"), -np.inf, np.float32("nan"))] == ["inf", "-inf", "nan"]


def test_rows_stay_out():
    rows = [{"query": "a secret?", "positive": "yes"}] * 3
    told = recipe_file.to_json(
        dataclasses.replace(recipe(), data=functools.partial(table_pairs, rows, options=recipe().data.keywords["options"]))
    )
    assert told["data"]["path"] == {"type": "builtins.list", "num_entries": 3}
    assert "secret" not in str(told)


def test_a_run_says_what_changed(tmp_path):
    recipe_file.keep(recipe(), tmp_path)
    assert recipe_file.changes(recipe(), tmp_path) == []
    other = dataclasses.replace(recipe(batch_size=8), optimization=Optimization(num_steps=7))
    assert recipe_file.changes(other, tmp_path) == ["data.options.batch_size = 8", "optimization.num_steps = 7"]


def test_a_part_that_is_left_out_is_a_change_and_a_setting_that_was_not_known_then_is_none(tmp_path):
    with_parts = dataclasses.replace(
        recipe(),
        negatives=HardNegatives(miner=Miner()),
        optimization=Optimization(learning_rate_factors={"shared/.*": 10.0, "query/.*": 2.0}),
    )
    recipe_file.keep(with_parts, tmp_path)
    fewer = dataclasses.replace(recipe(), optimization=Optimization(learning_rate_factors={"query/.*": 2.0}))
    assert recipe_file.changes(fewer, tmp_path) == [
        "negatives.miner = None",
        "optimization.learning_rate_factors.shared/.* is not set",
    ]
    recipe_file.keep(recipe(), tmp_path / "plain")
    added = recipe_file.changes(with_parts, tmp_path / "plain")
    assert "negatives.miner.type = 'Miner'" in added
    assert not [line for line in added if line.endswith("is not set")]
    told = json.loads((tmp_path / "recipe.json").read_text())
    del told["logging"]["early_stopping_patience"]
    (tmp_path / "recipe.json").write_text(json.dumps(told))
    assert recipe_file.changes(with_parts, tmp_path) == []


def test_any_setting_is_written_and_compared(tmp_path):
    """One without a number in JSON, and one whose name ends as the keys of functions and classes do."""

    def typed(margin, task_type):
        return dataclasses.replace(recipe(), loss=functools.partial(own_loss, margin=margin, options={"task_type": task_type}))

    recipe_file.keep(typed(float("inf"), None), tmp_path)
    assert recipe_file.changes(typed(float("inf"), None), tmp_path) == []
    assert recipe_file.changes(typed(0.5, "a.b"), tmp_path) == ["loss.margin = 0.5", "loss.options.task_type = 'a.b'"]


def test_a_run_of_version_0_1_says_so_too(tmp_path):
    (tmp_path / "config.gin").write_text(
        "train.num_steps = 5\ntrain.frozen = \\\n    ('a',\n     'b')\nsamtone.temperature = 0.05\n"
    )
    gin = "# train\ntrain.num_steps = 7\ntrain.frozen = ('a', 'b')\ntrain.loss = @samtone\n"
    assert recipe_file.changes(recipe(), tmp_path, gin) == ["train.num_steps = 7"]
