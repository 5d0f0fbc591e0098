"""A run on two data sets in turns: it goes on exactly, and its log has the loss of each."""

import collections
import dataclasses
import functools
import itertools

import jax
import numpy as np
import pytest

from de_jax.data.negatives import generations
from de_jax.data.negatives.mined_negatives import Switch, read_switches
from de_jax.data.sources.mixture import mixed_pairs
from de_jax.data.sources.options import PairsOptions
from de_jax.data.sources.training_set import DevSet, TrainingSet, beir_pairs
from de_jax.evaluation import verdict
from de_jax.losses.in_batch import samtone
from de_jax.losses.mined import ance
from de_jax.mine import mine
from de_jax.mining.miner import Miner
from de_jax.models.dual_encoder import DualEncoder
from de_jax.models.t5 import T5Config
from de_jax.models.tower import TowerConfig
from de_jax.recipe import Devices, HardNegatives, Logging, Optimization, Recipe
from de_jax.trainer import check, train, train_or_stop
from de_jax.training.mesh import sharding
from de_jax.training.mesh.sharding import make_mesh
from de_jax.training.run import run_log
from de_jax.training.run.loop import fresh_state
from de_jax.training.run.run_folder import load_run

NUM_STEPS, LOGGED = 9, 4
SIZES = {"vocab_size": 160, "model_dim": 16, "num_layers": 1, "num_heads": 2, "head_dim": 8, "mlp_dim": 16, "dtype": "float32"}


@pytest.fixture(scope="module")
def recipe(dataset_dir):
    options = {"tokenizer": str(dataset_dir / "spiece.model"), "batch_size": 8, "pack": False, "max_query_length": 16}
    long = PairsOptions(**options, max_doc_length=32)
    short = PairsOptions(**options, max_doc_length=16, query_prompt="apple ")
    sources = {
        "long": functools.partial(beir_pairs, str(dataset_dir), options=long),
        "short": functools.partial(beir_pairs, str(dataset_dir), options=short),
    }
    tower = TowerConfig(T5Config(**SIZES, dropout_rate=0.0), projection_dim=16)
    every = {"log_every_steps": LOGGED, "save_every_steps": NUM_STEPS, "evaluate_every_steps": NUM_STEPS}
    return Recipe(
        model=DualEncoder(query=tower, doc=tower, shared=("embedder", "encoder", "projection")),
        data=functools.partial(mixed_pairs, sources, weights={"long": 2.0, "short": 1.0}),
        loss=functools.partial(samtone, temperature=0.05),
        optimization=Optimization(num_steps=NUM_STEPS, learning_rate=0.02),
        logging=Logging(**every),
        devices=Devices(mesh=functools.partial(make_mesh, data=1)),
    )


@pytest.fixture(scope="module")
def run_dir(recipe, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("mixture") / "run"
    train(recipe, run_dir)
    return run_dir


def lines_of(run_dir):
    lines = run_log.read_metrics(run_dir / run_log.METRICS_FILE)
    return [{name: value for name, value in line.items() if "per_second" not in name} for line in lines]


@pytest.mark.soak
def test_log_has_the_loss_of_each_source_as_its_batches_give_it(recipe, run_dir):
    abstract, mesh = check(recipe, None)
    shardings = sharding.state_shardings(abstract, mesh, None)
    like = sharding.with_shardings(abstract, shardings)
    state = fresh_state(recipe.init, lambda params: params, like)
    step_fn = sharding.compiled_step(recipe.train_step(like.params), shardings, mesh)  # in the cache, by the run
    data, losses = recipe.data(), []
    for batch in sharding.placed(itertools.islice(data.batches(0), NUM_STEPS), mesh):
        state, metrics = step_fn(state, batch)
        losses.append(float(metrics["loss"]))
    lines = lines_of(run_dir)
    assert [line["step"] for line in lines] == [4, 8, 9]
    for line in lines:
        of_line = range((line["step"] - 1) // LOGGED * LOGGED, line["step"])
        by_source = collections.defaultdict(list)
        for step in of_line:
            by_source[data.source_of(step)].append(losses[step])
        expected = {f"loss/{name}": np.mean(own) for name, own in by_source.items()}
        assert {name: value for name, value in line.items() if "/" in name} == pytest.approx(expected, abs=1e-6)
        assert line["loss"] == pytest.approx(np.mean([losses[step] for step in of_line]), abs=1e-6)


@pytest.mark.soak
def test_the_run_says_what_its_sources_were(recipe, run_dir):
    assert [source.keywords["options"].max_doc_length for source in recipe.sources] == [32, 16]
    assert recipe.options.max_doc_length == 32
    again = Recipe.load(run_dir)
    assert list(again.data.keywords["sources"]) == ["long", "short"]
    assert [source.keywords["options"].max_doc_length for source in again.sources] == [32, 16]


def test_the_dev_score_of_a_mixture_is_the_mean_of_its_sources(monkeypatch, tmp_path):
    found = {"a": {"ndcg@10": 0.2, "mrr@10": 0.5}, "c": {"ndcg@10": 0.6, "mrr@10": 0.7}}
    monkeypatch.setattr(verdict, "rank_dev", lambda run, dev: run == f"run of {dev.qrels}")
    monkeypatch.setattr(verdict.metrics, "score_results", lambda is_its_own, qrels: {"q": found[qrels]} if is_its_own else {})
    sets = {name: DevSet(None, None, None, None, qrels=name) for name in "ac"}
    part = TrainingSet(batches=None, batch_size=1, query=None, doc=None, dev=None)
    mixture = part._replace(sources={"a": part._replace(dev=sets["a"]), "b": part, "c": part._replace(dev=sets["c"])})
    run_at = {name: lambda params, name=name: f"run of {name}" for name in "abc"}
    scores = verdict.DevScores(mixture, run_at, tmp_path)({})
    own = {f"{name}/{measure}": value for name, one in found.items() for measure, value in one.items()}
    assert scores == pytest.approx({"ndcg@10": 0.4, "mrr@10": 0.6, **own})
    assert verdict.DevScores(part._replace(dev=sets["c"]), {"": run_at["c"]}, tmp_path)({}) == found["c"]


@pytest.mark.soak
def test_a_run_that_was_stopped_goes_on_as_if_nothing_had_been(recipe, run_dir, tmp_path, stop_at):
    stop_at(LOGGED)
    assert train_or_stop(recipe, tmp_path / "run")["step"] == LOGGED + 1
    stop_at(None)
    train(recipe, tmp_path / "run")
    assert lines_of(tmp_path / "run") == lines_of(run_dir)
    jax.tree.map(np.testing.assert_array_equal, load_run(tmp_path / "run").params, load_run(run_dir).params)


@pytest.mark.soak
def test_each_source_is_mined_among_its_own_texts_by_the_run_and_beside_it(recipe, tmp_path, stop_at):
    sources = dict(recipe.data.args[0])
    for name, source in sources.items():
        options = source.keywords["options"]
        negatives = {"negatives_dir": "{run_dir}/negatives/{source}", "num_neg_docs": 1, "dev_split": "dev"}
        sources[name] = functools.partial(source, options=dataclasses.replace(options, **negatives))
    mining = dataclasses.replace(
        recipe,
        data=functools.partial(mixed_pairs, sources),
        loss=functools.partial(ance, temperature=0.05),
        negatives=HardNegatives(miner=Miner(num_neg_docs=4, last_rank=20), mine_every_steps=4),
    )
    train(mining, tmp_path / "run")
    for name in sources:
        numbers = generations.numbers(tmp_path / "run" / "negatives" / name)
        made = [generations.read_manifest(tmp_path / "run" / "negatives" / name, number)["checkpoint_step"] for number in numbers]
        assert made == [0, 4, 8]
        assert read_switches(tmp_path / "run" / f"switches_{name}.jsonl")[0] == Switch(0, 1)
    lines = lines_of(tmp_path / "run")
    assert {f"negatives/{name}/generation" for name in sources} <= {name for line in lines for name in line}
    dev = next(line for line in lines if "dev/ndcg@10" in line)
    assert dev["dev/ndcg@10"] == pytest.approx((dev["dev/long/ndcg@10"] + dev["dev/short/ndcg@10"]) / 2, abs=1e-6)
    beside = dataclasses.replace(mining, negatives=HardNegatives(miner=mining.negatives.miner))
    found = list(mine(beside, tmp_path / "run", once=True))
    assert [generation.manifest["checkpoint_step"] for generation in found] == [NUM_STEPS, NUM_STEPS]
    assert [generation.folder.parent.name for generation in found] == list(sources)
    stop_at(LOGGED)  # a run that was stopped takes up each source's negatives where it left them
    train_or_stop(mining, tmp_path / "again")
    stop_at(None)
    train(mining, tmp_path / "again")
    jax.tree.map(np.testing.assert_array_equal, load_run(tmp_path / "again").params, load_run(tmp_path / "run").params)
