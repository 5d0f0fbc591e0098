"""Runs that learn from a teacher's scores, and one that a guide masks; a folder of pairs that turns out to have no scores."""

import functools

import numpy as np
import pytest
import tiny_run
import toy_run

from de_jax import cli, trainer
from de_jax.data.negatives import generations
from de_jax.data.negatives.mined_pairs import Mined
from de_jax.data.sources import pair_store, pair_writer
from de_jax.data.sources.options import PairsOptions
from de_jax.data.sources.training_set import text_hashes, training_set
from de_jax.data.text.tokenizing import load_tokenizer
from de_jax.losses.distillation import margin_mse, relevance_weighted
from de_jax.models.dual_encoder import DualEncoder
from de_jax.models.t5 import T5Config
from de_jax.models.tower import TowerConfig
from de_jax.recipe import Recipe
from de_jax.training.run import run_log
from de_jax.types import InputError


@pytest.mark.soak
def test_a_run_learns_from_the_scores_of_its_mined_negatives(dataset_dir, tmp_path):
    mined = [Mined(f"q{i}", f"d{i}", [f"d{(i + more) % 96}" for more in (8, 16, 24)], []) for i in range(80)]
    generations.write_lines(tmp_path / "negatives", 1, mined, text_hashes(dataset_dir))
    known = [(line.query_id, doc) for line in mined for doc in (line.doc_id, *line.neg_doc_ids[:2])]
    (tmp_path / "scores.tsv").write_text("".join(f"{query}\t{doc}\t{1 if query[1:] == doc[1:] else 0}\n" for query, doc in known))
    settings = {
        "Recipe__loss": "@combined",
        "combined__losses": "(@in_batch_softmax, @kl_distillation)",
        "in_batch_softmax__temperature": 0.05,
        "kl_distillation__temperature": 0.05,
        "PairsOptions__negatives_dir": tmp_path / "negatives",
        "PairsOptions__num_neg_docs": 3,
        "PairsOptions__teacher_scores": tmp_path / "scores.tsv",
        "PairsOptions__dev_split": None,
        "T5Config__num_layers": 0,
        "Optimization__num_steps": 4,
        "Logging__log_every_steps": 1,
    }
    arguments = toy_run.arguments(dataset_dir, tmp_path / "run", "recipes/sde.gin", **settings, **toy_run.NO_DROPOUT)
    cli.call("train", [argument for argument in arguments if "samtone" not in argument])
    lines = [line for line in run_log.read_metrics(tmp_path / "run" / run_log.METRICS_FILE) if "loss" in line]
    assert len(lines) == 4
    for line in lines:
        np.testing.assert_allclose(line["kl_distillation/teacher_known"], 0.75)  # the third negative was not scored
        np.testing.assert_allclose(line["loss"], line["in_batch_softmax/loss"] + line["kl_distillation/loss"], rtol=1e-5)


@pytest.mark.soak
def test_a_run_has_its_false_negatives_masked_by_a_guide(dataset_dir, tmp_path):
    """By a guide that knows nothing, some negatives of a row are as close as its document, and most are left."""
    run = tiny_run.write_run(tmp_path)
    cli.call("encode guide", ["--dataset_dir", str(dataset_dir), "--model", str(run), "--out_dir", str(tmp_path / "guide")])
    settings = {
        "Recipe__loss": "@guided",
        "guided__loss": "@in_batch_softmax",
        "in_batch_softmax__temperature": 0.05,
        "in_batch_softmax__block_size": 4,
        "PairsOptions__guide_dir": tmp_path / "guide",
        "PairsOptions__dev_split": None,
        "T5Config__num_layers": 0,
        "Optimization__num_steps": 4,
        "Logging__log_every_steps": 1,
    }
    arguments = toy_run.arguments(dataset_dir, tmp_path / "guided", "recipes/sde.gin", **settings, **toy_run.NO_DROPOUT)
    cli.call("train", [argument for argument in arguments if "samtone" not in argument])
    lines = [line for line in run_log.read_metrics(tmp_path / "guided" / run_log.METRICS_FILE) if "loss" in line]
    assert len(lines) == 4
    for line in lines:
        assert np.isfinite(line["loss"])
        assert 0 < line["loss_of_chance"] < np.log(16) - 1e-3  # of 15 others


@pytest.fixture(scope="module")
def pairs_dir(dataset_dir, tmp_path_factory):
    """A folder of pairs with negatives and without scores."""
    folder, tokenizer = tmp_path_factory.mktemp("pairs") / "store", load_tokenizer(dataset_dir / "spiece.model")
    texts = tokenizer.encode([f"apple {i}" for i in range(8)])
    ids = {"query_id": [f"q{i}" for i in range(8)], "doc_id": [f"d{i}" for i in range(8)]}
    chunk = {**ids, "query": texts, "doc": texts, "neg_doc_ids": [[f"d{(i + 1) % 8}"] for i in range(8)]}
    source = pair_writer.PairSource("pairs", 1.0, lambda: iter([chunk]), {"query": None, "doc": None})
    pair_writer.write(folder, [source], [], {"query": tokenizer, "doc": tokenizer}, made_from="test")
    return folder


def test_scores_that_a_folder_of_pairs_turns_out_to_lack_are_missed_before_the_run_is_there(pairs_dir, tmp_path):
    encoder = T5Config(vocab_size=160, model_dim=8, num_layers=0, num_heads=1, head_dim=8, mlp_dim=8, dtype="float32")
    tower = TowerConfig(encoder, projection_dim=8)
    data = functools.partial(pair_store.stored_pairs, str(pairs_dir), options=PairsOptions(batch_size=8, num_neg_docs=1))
    for loss in (margin_mse, relevance_weighted):
        recipe = Recipe(model=DualEncoder(query=tower, doc=tower), data=data, loss=loss)
        with pytest.raises(InputError, match=f"{loss.__name__} needs a teacher's scores, but batches come without"):
            trainer.train(recipe, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_scores_that_come_with_the_pairs_are_in_the_batches(pairs_dir):
    store = pair_store.open_pair_store(pairs_dir)
    table = np.arange(16, dtype=np.float32).reshape(8, 2)
    pairs = store._replace(scores=table)
    options = PairsOptions(batch_size=4)
    data = training_set(pairs, options, pair_store.Share())
    assert data.texts_of_a_pair == {"max_passages": 1, "num_neg_docs": 1, "has_scores": True, "has_guide": False}
    batch = next(data.batches(0))
    np.testing.assert_array_equal(batch.scores, table[batch.query_id])
    without = training_set(pairs._replace(neg_docs=None), options, pair_store.Share())
    np.testing.assert_array_equal(next(without.batches(0)).scores, table[next(without.batches(0)).query_id, :1])
