"""The train command with a negative cache: it learns, continues exactly, and refuses what does not go with one."""

import functools
import json
import shutil

import jax
import numpy as np
import pytest
from toy_run import SETTINGS, arguments

from de_jax import command, train
from de_jax.training.run import load_run
from de_jax.types import InputError

CACHE = {
    "train__negative_cache": "@NegativeCache()",
    "NegativeCache__capacity": 48,
    "NegativeCache__num_negatives": 4,
    "NegativeCache__refresh_fraction": 0.3,
    "train__loss": "@sampled_softmax",
    "sampled_softmax__temperature": 0.05,
}


def with_cache(dataset_dir, run_dir, **changes):
    unused = [f"--gin.{name}=" for name in SETTINGS if name.startswith("samtone")]
    argv = arguments(dataset_dir, run_dir, "recipes/sde.gin", **{**CACHE, **changes})
    return [argument for argument in argv if not argument.startswith(tuple(unused))]


def logged(run_dir):
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


def test_a_run_with_a_cache_learns_and_continues_exactly(dataset_dir, tmp_path):
    argv = with_cache(dataset_dir, tmp_path, train__save_every_steps=15)
    train.main(argv)
    lines = logged(tmp_path)
    assert lines[-1]["loss"] < 0.9 * lines[0]["loss"]
    assert lines[-1]["cache/filled"] == 1.0
    assert 0 < lines[-1]["cache/staleness"] < 5
    whole = jax.tree.map(np.asarray, load_run(tmp_path).params)
    shutil.rmtree(tmp_path / "checkpoints" / "30")
    train.main(argv)
    assert load_run(tmp_path).step == 30
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, load_run(tmp_path).params), whole)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"NegativeCache__capacity": 8}, "capacity 8 is less than the 16 documents of a batch"),
        ({"NegativeCache__capacity": 50}, "capacity 50 is not divisible by the 8 devices"),
        ({"NegativeCache__num_negatives": 49}, "num_negatives is 49 of a capacity of 48"),
        ({"beir_pairs__max_passages": 2}, "documents of one passage; set max_passages to 1"),
        ({"beir_pairs__negatives_dir": "some"}, "both give documents as negatives"),
    ],
)
def test_what_does_not_go_with_a_cache_is_one_sentence(changes, expected, dataset_dir, tmp_path, capsys):
    with pytest.raises(SystemExit) as exit_:
        command.run(functools.partial(train.main, with_cache(dataset_dir, tmp_path / "run", **changes)))
    assert exit_.value.code == 2
    assert expected in capsys.readouterr().err.strip().splitlines()[-1]


def test_a_loss_that_draws_from_a_cache_asks_for_one(dataset_dir, tmp_path):
    argv = [one for one in with_cache(dataset_dir, tmp_path / "run") if "egative" not in one]
    with pytest.raises(InputError, match=r"set train\.negative_cache = @NegativeCache\(\)"):
        train.main(argv)
