"""Training with mined negatives: a generation is needed, newer ones come into force, and what was in force is repeated exactly."""

import json
import shutil

import jax
import numpy as np
import pytest
from toy_run import arguments

from de_jax import cli
from de_jax.data.negatives import generations, mined_negatives
from de_jax.data.negatives.mined_negatives import Switch
from de_jax.data.negatives.mined_pairs import Mined
from de_jax.data.sources.training_set import text_hashes
from de_jax.files import outputs
from de_jax.mining import mining_run
from de_jax.training.run import run_log
from de_jax.training.run.run_folder import load_run
from de_jax.types import InputError


def mine(dataset_dir, folder, number, shift):
    """Each document's neighbours by number as its negatives."""
    mined = [
        Mined(f"q{i}", f"d{i}", [f"d{(i + shift + n) % 96}" for n in range(1, 5)], [f"q{(i + shift) % 96}"]) for i in range(80)
    ]
    generations.write_lines(folder / "negatives", number, mined, {**text_hashes(dataset_dir), "checkpoint_step": 2 * number})


def settings(dataset_dir, run_dir, loss="dance", **changes):
    options = {
        "Recipe__loss": f"@{loss}",
        "Optimization__num_steps": 24,
        "Logging__evaluate_every_steps": 24,
        "HardNegatives__follow_every_steps": 4,
        "PairsOptions__negatives_dir": "{run_dir}/negatives",
        "PairsOptions__num_neg_docs": 2,
        "PairsOptions__num_neg_queries": 1,
        f"{loss}__temperature": 0.05,
    }
    found = arguments(dataset_dir, run_dir, recipe="recipes/sde.gin", **(options | changes))
    return [one for one in found if not one.startswith("--gin.samtone")]


@pytest.mark.soak
def test_a_newer_generation_comes_into_force_and_a_run_that_repeats_its_switches_ends_bit_equal(dataset_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(mining_run, "LOOK_SECONDS", 60.0)  # else the machine decides at which look it is read
    run_dir, again_dir = tmp_path / "run", tmp_path / "again"
    for folder in (run_dir, again_dir):
        mine(dataset_dir, folder, 1, shift=0)
        mine(dataset_dir, folder, 2, shift=30)
    outputs.append_text(run_dir / "switches.jsonl", '{"step": 0, "generation": 1}\n')  # as if the second had come later
    cli.call("train", settings(dataset_dir, run_dir))
    assert mined_negatives.read_switches(run_dir / "switches.jsonl") == [Switch(0, 1), Switch(12, 2)]
    followed = [line for line in run_log.read_metrics(run_dir / "metrics.jsonl") if "negatives/generation" in line]
    assert [(line["step"], line["negatives/generation"]) for line in followed][1:4] == [(8, 1.0), (12, 2.0), (16, 2.0)]
    assert followed[-1]["negatives/staleness"] == 24 - 4
    shutil.copy(run_dir / "switches.jsonl", again_dir)
    cli.call("train", settings(dataset_dir, again_dir, HardNegatives__follow_every_steps=None))
    jax.tree.map(np.testing.assert_array_equal, load_run(run_dir).params, load_run(again_dir).params)


@pytest.mark.soak
@pytest.mark.short_soak
def test_a_run_whose_miner_never_came_says_so(dataset_dir, tmp_path):
    changes = {"PairsOptions__num_neg_queries": 0, "HardNegatives__follow_every_steps": None, "HardNegatives__miner": "@Miner()"}
    steps = {"Optimization__num_steps": 5, "Logging__evaluate_every_steps": 5}
    with pytest.warns(UserWarning, match="no newer negatives than those of the start came; was de-jax mine running"):
        cli.call("train", settings(dataset_dir, tmp_path, loss="ance", **changes, **steps))


def test_a_run_without_any_generation_says_how_to_make_one_and_leaves_nothing(dataset_dir, tmp_path):
    with pytest.raises(InputError, match="holds no generation of negatives; make one with de-jax mine pairs"):
        cli.call("train", settings(dataset_dir, tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.mark.soak
def test_passages_are_trained_mined_scored_and_evaluated_by_the_best_one(dataset_dir, tmp_path, capsys):
    run_dir = tmp_path / "run"
    changes = {"PairsOptions__max_passages": 3, "PairsOptions__max_doc_length": 12, "PairsOptions__num_neg_queries": 0}
    steps = {"Optimization__num_steps": 5, "Logging__evaluate_every_steps": 5, "HardNegatives__follow_every_steps": None}
    steps |= {"HardNegatives__miner": "@Miner()", "HardNegatives__mine_every_steps": 3, "Miner__last_rank": 20}
    cli.call("train", settings(dataset_dir, run_dir, loss="ance", **changes, **steps))
    capsys.readouterr()
    assert generations.numbers(run_dir / "negatives") == [1, 2]
    scores = {}
    for flags in ([], ["--max_passages=1"]):
        cli.call("evaluate beir", [f"--run_dir={run_dir}", f"--dataset_dir={dataset_dir}", "--split=dev", "--no_bm25", *flags])
        report = json.loads(capsys.readouterr().out)
        scores[report["settings"].get("max_passages")] = report["dense"]["ndcg@10"]
    last = run_log.read_metrics(run_dir / "metrics.jsonl")[-1]
    assert scores[3] == pytest.approx(last["dev/ndcg@10"], abs=1e-4)
    assert scores.keys() == {3, None}
    assert scores[3] != scores[None]
