"""recipe.json holds every setting, and a run that continues with other ones says which."""

import dataclasses
import functools
import json

import numpy as np
import pytest

from de_jax.data.expansion.curriculum import Curriculum
from de_jax.data.sources.mixture import mixed_pairs
from de_jax.data.sources.options import PairsOptions
from de_jax.data.sources.pair_store import stored_pairs, table_pairs
from de_jax.data.sources.training_set import beir_pairs
from de_jax.losses.combination import combined
from de_jax.losses.in_batch import in_batch_softmax, samtone
from de_jax.mining.miner import Miner
from de_jax.models.dual_encoder import DualEncoder
from de_jax.models.t5 import T5Config
from de_jax.models.tower import TowerConfig
from de_jax.recipe import HardNegatives, Initialization, Optimization, Recipe
from de_jax.settings import bound
from de_jax.training.run import recipe_file
from de_jax.types import InputError

TOWER = TowerConfig(T5Config(vocab_size=32, model_dim=16, num_layers=1, num_heads=2, head_dim=8, mlp_dim=16))


def own_loss(e, *, margin=0.5, options=()):
    return e, margin, options


def recipe(**changes):
    data = functools.partial(beir_pairs, "data/scifact", options=PairsOptions(**{"tokenizer": len, **changes}))
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
        "optimization.learning_rate_factors.shared/.* is not set",
        "negatives.miner = None",
    ]
    recipe_file.keep(recipe(), tmp_path / "plain")
    added = recipe_file.changes(with_parts, tmp_path / "plain")
    assert "negatives.miner = Miner" in added
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


def test_a_saved_recipe_is_the_same_again(tmp_path):
    tuned = dataclasses.replace(
        recipe(tokenizer="spiece.model", curriculum=Curriculum(k=3), expansion="queries", batch_size=8),
        loss=functools.partial(combined, losses=(in_batch_softmax, functools.partial(samtone, temperature=0.2))),
        negatives=HardNegatives(miner=Miner(last_rank=100, num_neg_docs=3)),
        optimization=Optimization(num_steps=7, clip_norm=None, learning_rate_factors={"query/.*": 2.0}, frozen=("doc/.*",)),
    )
    tuned.save(tmp_path)
    again = Recipe.load(tmp_path)
    assert recipe_file.to_json(again) == recipe_file.to_json(tuned)
    assert (again.model, again.optimization, again.negatives) == (tuned.model, tuned.optimization, tuned.negatives)
    tuned.save(tmp_path / "other.json")
    assert (tmp_path / "other.json").read_bytes() == (tmp_path / "recipe.json").read_bytes()


def test_what_a_file_does_not_hold_is_given_beside_it(tmp_path):
    rows = functools.partial(table_pairs, [{"query": "a", "doc": "b"}] * 3, options=PairsOptions(tokenizer="spiece.model"))
    dataclasses.replace(recipe(), data=rows).save(tmp_path)
    with pytest.raises(InputError, match=r"recipe\.data\.path was 3 entries, which a file does not hold; give data=\.\.\. beside"):
        Recipe.load(tmp_path)
    assert Recipe.load(tmp_path, data=rows).data is rows
    recipe().save(tmp_path)
    with pytest.raises(InputError, match="code from outside de_jax"):
        Recipe.load(tmp_path)
    with pytest.raises(InputError, match=r"recipe\.json does not exist; give the folder of a run"):
        Recipe.load(tmp_path / "nothing" / "recipe.json")
    (tmp_path / "recipe.json").write_text('{"type": "de_jax.types.InputError", "0": "x"}')
    with pytest.raises(InputError, match=r"was an object of de_jax\.types.InputError"):
        Recipe.load(tmp_path)


def seeds(recipe):
    miner, curriculum = recipe.negatives.miner, recipe.options.curriculum
    return [bound(source, "options").seed for source in recipe.sources], miner.seed, curriculum and curriculum.seed


def test_one_seed_decides_those_that_are_not_set(tmp_path):
    options = PairsOptions(tokenizer="spiece.model", curriculum=Curriculum(), expansion="queries")
    sources = {"a": functools.partial(beir_pairs, "a", options=options), "b": stored_pairs, "c": functools.partial(stored_pairs)}
    sources["d"] = functools.partial(beir_pairs, "d", options=dataclasses.replace(options, seed=5))
    mixture = dataclasses.replace(
        recipe(),
        data=functools.partial(mixed_pairs, sources),
        initialization=Initialization(seed=3),
        negatives=HardNegatives(miner=Miner()),
    )
    seeded = recipe_file.with_seeds(mixture, tmp_path)
    assert seeds(seeded) == ([3, 3, 3, 5], 3, 3)
    recipe_file.keep(seeded, tmp_path)
    again = Recipe.load(tmp_path)
    assert seeds(dataclasses.replace(again, initialization=Initialization(seed=4)))[0][:1] == [None]
    assert seeds(recipe_file.with_seeds(dataclasses.replace(again, initialization=Initialization(seed=4)))) == ([4, 4, 4, 5], 4, 4)


def test_a_run_of_before_goes_on_with_the_seeds_it_had(tmp_path):
    """Each seed was 0 by default, whatever `Initialization.seed` was."""
    now = dataclasses.replace(recipe(tokenizer="spiece.model"), initialization=Initialization(seed=3))
    told = recipe_file.to_json(now)
    told["data"]["options"]["seed"] = 0
    (tmp_path / "recipe.json").write_text(json.dumps(told))
    assert recipe_file.with_seeds(now, tmp_path).options.seed == 0
    assert Recipe.load(tmp_path).options.seed == 0
