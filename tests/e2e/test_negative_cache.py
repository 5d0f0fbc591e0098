"""The train command with a negative cache: it learns and continues exactly."""

import json
import shutil

import jax
import numpy as np
import pytest
from toy_run import SETTINGS, arguments

from de_jax import cli
from de_jax.training.run.run_folder import load_run

CACHE = {
    "make_mesh__data": 2,
    "HardNegatives__negative_cache": "@NegativeCache()",
    "NegativeCache__capacity": 48,
    "NegativeCache__num_negatives": 4,
    "NegativeCache__refresh_fraction": 0.3,
    "Recipe__loss": "@sampled_softmax",
    "sampled_softmax__temperature": 0.05,
}


def with_cache(dataset_dir, run_dir, **changes):
    unused = [f"--gin.{name}=" for name in SETTINGS if name.startswith("samtone")]
    argv = arguments(dataset_dir, run_dir, "recipes/sde.gin", **{**CACHE, **changes})
    return [argument for argument in argv if not argument.startswith(tuple(unused))]


def logged(run_dir):
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


@pytest.mark.soak
def test_a_run_with_a_cache_learns_and_continues_exactly(dataset_dir, tmp_path):
    argv = with_cache(dataset_dir, tmp_path, Optimization__num_steps=40)
    cli.call("train", argv)
    lines = logged(tmp_path)
    assert lines[-1]["loss"] < 0.9 * lines[0]["loss"]
    assert lines[-1]["cache/filled"] == 1.0
    assert 0 < lines[-1]["cache/staleness"] < 5
    whole = jax.tree.map(np.asarray, load_run(tmp_path).params)
    shutil.rmtree(tmp_path / "checkpoints" / "40")
    cli.call("train", argv)
    assert load_run(tmp_path).step == 40
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, load_run(tmp_path).params), whole)
