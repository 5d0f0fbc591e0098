"""A run that mines its own negatives, and one whose negatives another process mines from its checkpoints."""

import json
import shutil
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from toy_run import NO_DROPOUT, arguments

from de_jax import cli, engine, mine, trainer
from de_jax.configurables import read_recipe
from de_jax.data.negatives import generations, mined_negatives
from de_jax.data.negatives.mined_negatives import Switch
from de_jax.data.negatives.mined_pairs import Mined
from de_jax.data.sources.options import Share
from de_jax.data.sources.training_set import text_hashes
from de_jax.data.text import beir
from de_jax.files import outputs
from de_jax.mining import mining_run
from de_jax.training.run import run_log
from de_jax.training.run.run_folder import load_run
from de_jax.types import InputError

COLOCATED = {
    **NO_DROPOUT,
    "Recipe__loss": "@dance",
    "HardNegatives__miner": "@Miner()",
    "HardNegatives__mine_every_steps": 8,
    "Optimization__num_steps": 24,
    "Logging__save_every_steps": 8,
    "Logging__evaluate_every_steps": 24,
    "PairsOptions__negatives_dir": "{run_dir}/negatives",
    "PairsOptions__num_neg_docs": 2,
    "PairsOptions__num_neg_queries": 1,
    "Miner__num_neg_queries": 4,
    "Miner__last_rank": 20,
    "dance__temperature": 0.05,
}
BESIDE = {**COLOCATED, "HardNegatives__mine_every_steps": None, "HardNegatives__follow_every_steps": 1}


def settings(dataset_dir, run_dir, options, **changes):
    found = arguments(dataset_dir, run_dir, recipe="recipes/sde.gin", **(options | changes))
    return [one for one in found if not one.startswith("--gin.samtone")]


def recipe_of(arguments):
    return read_recipe(["recipes/sde.gin"], [one.removeprefix("--gin.") for one in arguments if one.startswith("--gin.")])


@pytest.fixture(scope="module")
def colocated(dataset_dir, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("runs") / "colocated"
    cli.call("train", settings(dataset_dir, run_dir, COLOCATED))
    return run_dir


def steps_and_generations(run_dir):
    folder = run_dir / "negatives"
    return {number: generations.read_manifest(folder, number)["checkpoint_step"] for number in generations.numbers(folder)}


def assert_equal_params(run_dir, other_dir):
    jax.tree.map(np.testing.assert_array_equal, load_run(run_dir).params, load_run(other_dir).params)


@pytest.mark.soak
@pytest.mark.short_soak
def test_a_colocated_run_mines_first_and_then_at_its_own_period(colocated):
    assert steps_and_generations(colocated) == {1: 0, 2: 8, 3: 16}
    (kept,) = (colocated / "embeddings" / mining_run.KEPT_AS).iterdir()
    assert kept.name.startswith("step_16-")
    assert mined_negatives.read_switches(colocated / "switches.jsonl") == [Switch(0, 1), Switch(16, 2), Switch(24, 3)]
    lines = [line for line in run_log.read_metrics(colocated / "metrics.jsonl") if "negatives/generation" in line]
    assert [(line["step"], line["negatives/generation"]) for line in lines] == [(8, 1.0), (16, 2.0), (24, 3.0)]
    assert {"negatives/staleness", "negatives/overlap_previous", "negatives/previous_in_top_100"} <= lines[-1].keys()


@pytest.mark.soak
@pytest.mark.parametrize(("stop_before", "save_every_steps"), [("mine", 8), ("write", 8), ("record", 8), ("record", 24)])
def test_a_colocated_run_that_dies_while_it_mines_or_switches_ends_bit_equal(
    dataset_dir, colocated, tmp_path, monkeypatch, stop_before, save_every_steps
):
    """Dies at update 16: before anything is mined, before the generation is renamed, and with the generation but no switch.

    Where nothing was saved yet, the run finds two generations of updates that it has still to come to.
    """

    class Killed(BaseException):
        pass

    def killed(*args, **options):
        raise Killed

    run_dir = tmp_path / "run"
    argv = settings(dataset_dir, run_dir, COLOCATED, Logging__save_every_steps=save_every_steps)
    with monkeypatch.context() as patched:
        if stop_before == "record":
            record = mined_negatives.MinedNegatives.record
            patched.setattr(
                mined_negatives.MinedNegatives,
                "record",
                lambda self, switch: killed() if switch.step == 24 else record(self, switch),
            )
        else:
            module, name = {"mine": (mining_run, "embed"), "write": (outputs, "write_json")}[stop_before]
            original = getattr(module, name)

            def at_16(*args, **options):
                is_due = (run_dir / "negatives" / "000002").exists() and not (run_dir / "negatives" / "000003").exists()
                is_ours = stop_before == "mine" or "000003" in str(args[0])
                return killed() if is_due and is_ours else original(*args, **options)

            patched.setattr(module, name, at_16)
        with pytest.raises(Killed):
            cli.call("train", argv)
    cli.call("train", argv)
    assert steps_and_generations(run_dir) == steps_and_generations(colocated)
    assert mined_negatives.read_switches(run_dir / "switches.jsonl") == mined_negatives.read_switches(colocated / "switches.jsonl")
    assert_equal_params(run_dir, colocated)


@pytest.mark.soak
def test_a_miner_beside_a_run_mines_its_newest_checkpoint_and_says_what_it_mined(
    dataset_dir, tmp_path, capsys, stop_at, monkeypatch
):
    monkeypatch.setattr(mining_run, "LOOK_SECONDS", 60.0)  # else the machine decides at which look it is read
    run_dir = tmp_path / "run"
    argv = settings(dataset_dir, run_dir, BESIDE)
    stop_at(5)
    with pytest.raises(SystemExit):
        cli.call("train", argv)
    assert steps_and_generations(run_dir) == {1: 0}
    capsys.readouterr()
    cli.call("mine", [*argv, "--once"])
    report = json.loads(capsys.readouterr().out)
    assert report["checkpoint_step"] == 6
    assert {"overlap_previous", "previous_in_top_100", "dev/ndcg@10"} <= report["statistics"].keys()
    assert steps_and_generations(run_dir) == {1: 0, 2: 6}
    assert len(list((run_dir / "embeddings" / mining_run.KEPT_AS).iterdir())) == 1
    cli.call("train", argv)  # goes on with what was mined meanwhile
    assert mined_negatives.read_switches(run_dir / "switches.jsonl") == [Switch(0, 1), Switch(15, 2)]
    cli.call("mine", argv)  # complete: nothing is left to mine for
    assert capsys.readouterr().out.count("checkpoint_step") == 0


@pytest.fixture
def beside(dataset_dir, colocated, tmp_path, monkeypatch):
    """A run of 24 steps that is to go on to 100, and its recipe; nothing is embedded to mine a generation."""

    def mine_generation(run, mined, miner, **options):
        facts = {**mined.texts.hashes, "checkpoint_step": run.step}
        return generations.write_lines(mined.negatives_dir, mined.next_number(), [Mined("q0", "d0", ["d1"], [])], facts)

    monkeypatch.setattr(mine, "mine_generation", mine_generation)
    run_dir = tmp_path / "run"
    shutil.copytree(colocated, run_dir)
    return run_dir, recipe_of(settings(dataset_dir, run_dir, BESIDE, Optimization__num_steps=100))


@pytest.mark.soak
@pytest.mark.parametrize("removed", [".", "params"], ids=["wholly", "by half"])
@pytest.mark.short_soak
def test_a_checkpoint_that_disappears_under_the_miner_is_passed_over(beside, monkeypatch, removed):
    run_dir, recipe = beside
    shutil.rmtree(run_dir / "best")  # it may hold the same step
    load = mine.load_run

    def removed_meanwhile(folder, step, **options):
        if step == 24:
            shutil.rmtree(run_dir / "checkpoints" / "24" / removed)
            shutil.copytree(run_dir / "checkpoints" / "16", run_dir / "checkpoints" / "32")
        return load(folder, step, **options)

    monkeypatch.setattr(mine, "load_run", removed_meanwhile)
    with pytest.warns(UserWarning, match=r"nothing was mined by step 24 \(.*checkpoints.*\); a newer checkpoint is taken"):
        generation = next(mine.mine(recipe, run_dir, poll_seconds=0.01))
    assert generation.manifest["checkpoint_step"] == 32


@pytest.mark.soak
@pytest.mark.short_soak
def test_a_full_disk_costs_the_miner_one_generation(beside, monkeypatch):
    run_dir, recipe = beside
    write = generations.write_generation

    def full_at_first(*args, **options):
        monkeypatch.setattr(generations, "write_generation", write)
        shutil.copytree(run_dir / "checkpoints" / "24", run_dir / "checkpoints" / "32")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(generations, "write_generation", full_at_first)
    with pytest.warns(UserWarning, match="nothing was mined by step 24: No space left on device; the next one is tried"):
        generation = next(mine.mine(recipe, run_dir, poll_seconds=0.01))
    assert (generation.number, generation.manifest["checkpoint_step"]) == (4, 32)


@pytest.mark.soak
@pytest.mark.parametrize("text", ["garbage", '{"format": "de_jax negatives 1", "parts": {"a": "b"}, "checkpoint_step": "8"}'])
@pytest.mark.short_soak
def test_a_manifest_of_garbage_costs_the_miner_a_warning(dataset_dir, beside, text):
    run_dir, recipe = beside
    (run_dir / "negatives" / "000002" / "manifest.json").write_text(text)
    (run_dir / "negatives" / "000004").mkdir()
    warm_up = [Mined("q0", "d0", ["d1"], [])]  # of a run that is further than this one
    generations.write_lines(run_dir / "negatives", 5, warm_up, {**text_hashes(dataset_dir), "checkpoint_step": 1000})
    with pytest.warns(UserWarning, match="generation 2 of the negatives is skipped: .*000002/manifest.json"):
        generation = next(mine.mine(recipe, run_dir, poll_seconds=0.01))
    assert (generation.number, generation.manifest["checkpoint_step"]) == (6, 24)


def opened(recipe, run_dir):
    return recipe.data(share=Share(run_dir=str(run_dir)))


@pytest.mark.soak
@pytest.mark.short_soak
def test_machines_that_mine_together_by_a_checkpoint_that_the_trainer_removes_mine_what_one_mines(
    dataset_dir, colocated, tmp_path, monkeypatch, capsys
):
    run_dir, other_dir = (shutil.copytree(colocated, tmp_path / name) for name in ("one", "other"))
    seen = []

    def in_turn(module, flags, num_shards):
        """As `engine.run`, in this process."""
        own = [flag for flag in flags if not flag.startswith(("--engine", "--num_shards"))]
        shutil.rmtree(other_dir / "checkpoints" / "24")
        for number in range(num_shards):
            cli.call("mine", [*own, f"--shard={number}/{num_shards}"])
            seen.append(json.loads(capsys.readouterr().out))
        cli.call("mine", own)
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    monkeypatch.setattr(engine, "run", in_turn)
    flags = [*settings(dataset_dir, run_dir, BESIDE), "--texts_per_shard=32", "--once"]
    cli.call("mine", flags)
    capsys.readouterr()
    cli.call("mine", [*settings(dataset_dir, other_dir, BESIDE), *flags[-2:], "--engine=ray", "--num_shards=3"])
    assert json.loads(capsys.readouterr().out)["checkpoint_step"] == 24
    assert seen == [{"shard": f"{number}/3"} for number in range(3)]
    one, many = (generations.open_newest(folder / "negatives").folder for folder in (run_dir, other_dir))
    for path in one.glob("*.npy"):
        assert path.read_bytes() == (many / path.name).read_bytes()
    assert not (other_dir / "mining").exists()


@pytest.mark.soak
@pytest.mark.short_soak
def test_two_miners_of_one_folder_are_refused(dataset_dir, beside):
    run_dir, recipe = beside
    first = mine.mine(recipe, run_dir, poll_seconds=0.01)
    next(first)
    with pytest.raises(InputError, match=r"process \d+ on .* is mining into .*negatives already; stop it first"):
        next(mine.mine(recipe, run_dir, poll_seconds=0.01))
    colocated = recipe_of(settings(dataset_dir, run_dir, COLOCATED, Optimization__num_steps=32))
    with pytest.raises(InputError, match="is mining into"):
        trainer.train(colocated, run_dir)
    first.close()


@pytest.mark.soak
@pytest.mark.short_soak
def test_a_corpus_that_changed_is_refused_by_both_with_the_reason(dataset_dir, tmp_path, colocated):
    run_dir, changed_dir = tmp_path / "run", tmp_path / "changed"
    shutil.copytree(colocated, run_dir)
    shutil.copytree(dataset_dir, changed_dir)
    corpus = changed_dir / "corpus.jsonl.gz"
    texts = list(beir.iter_docs(corpus))
    corpus.unlink()
    (changed_dir / "corpus.jsonl").write_text(
        "".join(json.dumps({"_id": i, "title": "", "text": t + " x"}) + "\n" for i, t in texts)
    )
    recipe = recipe_of(settings(changed_dir, run_dir, BESIDE, Optimization__num_steps=32))
    for command in (lambda: next(mine.mine(recipe, run_dir, once=True)), opened(recipe, run_dir).mined.begin):
        with pytest.raises(InputError, match="was mined from other docs than the training data has; mine again"):
            command()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"HardNegatives__miner": None}, "the recipe mines nothing; set HardNegatives.miner"),
        ({"HardNegatives__mine_every_steps": 4}, "the run mines by itself every HardNegatives.mine_every_steps updates"),
        ({"PairsOptions__negatives_dir": ""}, "no folder is set for the generations; set PairsOptions.negatives_dir"),
        ({"Miner__index": "IVF,no"}, "IVF,no"),
    ],
)
def test_what_cannot_be_mined_beside_a_run_is_refused(dataset_dir, tmp_path, changes, sentence):
    given = settings(dataset_dir, tmp_path / "run", BESIDE, **changes)
    if "HardNegatives__miner" in changes:
        given = [one for one in given if not one.startswith("--gin.Miner")]
    with pytest.raises(InputError, match=sentence):
        next(mine.mine(recipe_of(given), tmp_path / "run"))


def test_mined_queries_for_documents_of_several_passages_are_refused(dataset_dir, tmp_path):
    recipe = recipe_of(settings(dataset_dir, tmp_path / "run", COLOCATED, PairsOptions__max_passages=2))
    with pytest.raises(InputError, match="mined queries are for documents of one passage"):
        trainer.check(recipe, tmp_path / "run")


def test_a_slow_miner_takes_the_newest_checkpoint_and_skips_those_before(tmp_path, monkeypatch):
    monkeypatch.setattr(mine._Mining, "mined_until", lambda mining: 5)

    def saved(*steps):
        for step in steps:
            (tmp_path / "checkpoints" / str(step)).mkdir(parents=True)

    saved(5, 10)
    steps = mine._new_steps(mine._Mining(tmp_path, SimpleNamespace(all_mined={}), None, -1, 0.01), 30)
    assert next(steps) == 10
    saved(15, 20, 25)
    assert next(steps) == 25
    saved(30)
    assert list(steps) == []


def test_mining_once_needs_a_checkpoint(dataset_dir, tmp_path):
    recipe = recipe_of(settings(dataset_dir, tmp_path / "run", BESIDE))
    with pytest.raises(InputError, match="has no checkpoint to mine with"):
        next(mine.mine(recipe, tmp_path / "run", once=True))
