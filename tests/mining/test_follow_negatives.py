"""The hooks of a run that follows a miner, or mines itself: nothing that happens to a generation's folder stops them."""

import shutil
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from de_jax.data.batches.pair_batches import TrainingPairs
from de_jax.data.negatives import generations, mined_pairs
from de_jax.data.negatives.mined_negatives import MinedNegatives, Switch
from de_jax.data.negatives.mined_pairs import Mined
from de_jax.data.stores.corpus import TokenStore
from de_jax.mining import mining_run
from de_jax.mining.miner import Embedded, Miner
from de_jax.mining.mining_run import FollowNegatives, MineNegatives
from de_jax.training.mesh import distributed
from de_jax.training.run.run_folder import Run
from de_jax.types import TrainState

PAIRS = np.array([[0, 0], [1, 1]], np.int32)
MODEL = SimpleNamespace(dtype="float32")
STATE = TrainState(np.zeros(()), {}, (), np.zeros(()))


class Store(TokenStore):
    """Ids alone; the text x7 is in row 7."""

    num_texts = 0

    def __init__(self):
        pass

    def rows_of(self, ids):
        return np.array([int(text_id[1:]) for text_id in ids], np.int64)


def write(folder, number, **facts):
    mined = [Mined(f"q{row}", f"d{row}", [f"d{10 * number + row}"], []) for row in (0, 1)]
    return generations.write_lines(folder, number, mined, facts).folder


@pytest.fixture
def mined(tmp_path):
    write(tmp_path, 1, checkpoint_step=0)
    run = MinedNegatives(tmp_path, None, TrainingPairs("toy", Store(), Store(), PAIRS, {}), num_drawn={"neg_docs": 1})
    run.begin()
    return run


def logged(mined, steps, between=lambda step: None):
    """What a look at each of the steps logs; `between` looks may change the folder."""
    lines = []
    hook = FollowNegatives(
        mined, every_steps=1, run_dir=mined.negatives_dir, sinks=[lambda step, facts: lines.append((step, facts))]
    )
    for step in steps:
        between(step)
        assert hook(step, STATE, {}) is None
        mined.at(step + 8)  # batches are made ahead
    return dict(lines)


def test_a_generation_that_goes_before_its_first_log_is_logged_as_it_was_accepted(tmp_path, mined):
    def between(step):
        if step == 1:
            write(tmp_path, 2, checkpoint_step=1, statistics={"overlap_bm25": 0.25})
        if step == 2:
            (tmp_path / "000002" / "manifest.json").write_text("{")
        if step == 5:
            shutil.rmtree(tmp_path / "000002")

    lines = logged(mined, range(1, 12), between)
    assert mined.switches == [Switch(0, 1), Switch(9, 2)]
    assert lines[8] == {"negatives/generation": 1.0, "negatives/staleness": 8.0}
    assert lines[9] == {"negatives/generation": 2.0, "negatives/staleness": 8.0, "negatives/overlap_bm25": 0.25}


def test_generations_that_come_at_every_look_and_go_at_once_all_come_into_force(tmp_path, mined):
    def between(step):
        write(tmp_path, step + 1, checkpoint_step=step)
        shutil.rmtree(tmp_path / f"{step:06d}")

    lines = logged(mined, range(1, 20), between)
    assert mined.switches == [Switch(0, 1), *(Switch(step + 8, step + 1) for step in range(1, 20))]
    assert [lines[step]["negatives/generation"] for step in range(1, 20)] == [1.0] * 8 + [float(n) for n in range(2, 13)]


def test_a_run_that_mines_by_itself_repeats_its_switches_whatever_it_had_mined_before_a_kill(tmp_path, mined):
    for number, step in enumerate((0, 2, 5, 9), start=1):
        if number > 1:
            write(tmp_path, number, checkpoint_step=step)
    logged(mined, range(1, 12))
    assert mined.switches == [Switch(0, 1), Switch(10, 2), Switch(13, 3), Switch(17, 4)]


def test_garbage_is_passed_over_with_one_warning_and_the_next_whole_generation_is_taken(tmp_path, mined):
    def between(step):
        if step == 1:
            (write(tmp_path, 2) / "manifest.json").write_text('{"format": "de_jax negatives 1", "parts": 3}')
        if step == 3:
            write(tmp_path, 3)

    with warnings.catch_warnings(record=True) as warned:
        logged(mined, range(1, 6), between)
    assert mined.switches == [Switch(0, 1), Switch(11, 3)]
    assert ["generation 2 of the negatives is skipped" in str(warning.message) for warning in warned] == [True]


def test_a_generation_that_one_process_does_not_see_comes_into_force_in_none(tmp_path, mined, monkeypatch):
    write(tmp_path, 2)
    with monkeypatch.context() as patched:
        patched.setattr(distributed, "all_agree", lambda decision: False)
        logged(mined, [1])
    assert mined.switches == [Switch(0, 1)]
    logged(mined, [2])
    assert mined.switches == [Switch(0, 1), Switch(10, 2)]


def test_training_goes_on_while_a_generation_is_read(tmp_path, mined, monkeypatch):
    is_free, read = threading.Event(), generations.open_generation
    monkeypatch.setattr(generations, "open_generation", lambda *args: is_free.wait(60) and read(*args))
    hook = FollowNegatives(mined, every_steps=2, run_dir=None)
    write(tmp_path, 2)
    for step in range(1, 7):
        hook(step, STATE, {})
    assert mined.switches == [Switch(0, 1)]
    is_free.set()
    mined.newer()
    for step in (7, 8):
        hook(step, STATE, {})
    assert mined.switches == [Switch(0, 1), Switch(16, 2)]


@pytest.mark.parametrize("damaged", ["manifest.json", "neg_docs.npy"])
def test_a_run_that_mines_itself_passes_over_garbage_and_mines_a_step_again_whose_generation_is_damaged(
    tmp_path, mined, monkeypatch, damaged
):
    steps = []
    monkeypatch.setattr(mining_run, "mine_generation", lambda run, *args, **options: steps.append(run.step))
    write(tmp_path, 2, checkpoint_step=8)
    (write(tmp_path, 3, checkpoint_step=16) / damaged).write_text("garbage")
    hook = MineNegatives(lambda step, params: Run(tmp_path, step, MODEL, *[None] * 3), mined, Miner(), every_steps=8, num_steps=32)
    with warnings.catch_warnings(record=True) as warned:
        for step in range(1, 33):
            hook(step, STATE, {})
    assert steps == [16, 24]
    assert ["generation 3 of the negatives is skipped" in str(warning.message) for warning in warned] == [True]


def test_mining_compares_with_the_newest_whole_generation_and_writes_beyond_every_folder(tmp_path, mined, monkeypatch):
    (write(tmp_path, 2) / "neg_docs.npy").write_text("")
    (tmp_path / "000003").mkdir()
    compared = []

    def mine(embedded, texts, miner, *, previous, **options):
        compared.append(previous)
        return mined_pairs.of_lines([Mined("q0", "d0", ["d5"], [])]), {}

    monkeypatch.setattr(mining_run, "mine", mine)
    kept = []

    def embed(run, texts, *, keep_as, **options):
        kept.append(keep_as)
        return Embedded(8, *[None] * 4, {})

    monkeypatch.setattr(mining_run, "embed", embed)
    run = Run(tmp_path, 8, MODEL, *[None] * 3)
    with pytest.warns(UserWarning, match="generation 2 of the negatives is skipped"):
        generation = mining_run.mine_generation(run, mined, Miner(), source="a")
    monkeypatch.setattr(mining_run.distributed, "is_alone", lambda: False)
    mining_run.mine_generation(run, mined, Miner())
    assert kept == ["mining_a", None]  # a process that mines alone goes on where it was killed
    np.testing.assert_array_equal(compared[0], [[10], [11]])
    assert (generation.number, generations.numbers(tmp_path)) == (4, [1, 2, 4, 5])


def test_a_generation_by_another_run_does_not_stand_for_the_same_update_of_this_one(tmp_path, mined, monkeypatch):
    """A warm-up's for example; both folders may be moved together, or be named in another way."""
    monkeypatch.setattr(mining_run, "mine", lambda *args, **options: (mined_pairs.of_lines([Mined("q0", "d0", ["d5"], [])]), {}))
    monkeypatch.setattr(mining_run, "embed", lambda *args, **options: Embedded(8, *[None] * 4, {}))
    run_dir, mined.negatives_dir = tmp_path / "run", tmp_path / "run" / "negatives"
    mining_run.mine_generation(Run(tmp_path / "warm_up", 8, MODEL, *[None] * 3), mined, Miner())
    steps = []
    hook = MineNegatives(lambda step, params: Run(run_dir, step, MODEL, *[None] * 3), mined, Miner(), every_steps=8, num_steps=32)
    with monkeypatch.context() as patch:
        patch.setattr(mining_run, "mine_generation", lambda run, *args, **options: steps.append(run.step))
        hook(8, STATE, {})
    assert steps == [8]
    assert mining_run.mined_steps(mined, run_dir) == set()
    mining_run.mine_generation(Run(run_dir, 8, MODEL, *[None] * 3), mined, Miner())
    monkeypatch.chdir(tmp_path)
    assert mining_run.mined_steps(mined, Path("run")) == {8}
    (tmp_path / "link").symlink_to(tmp_path, target_is_directory=True)
    assert mining_run.mined_steps(mined, tmp_path / "link" / "run") == {8}
    run_dir.rename(tmp_path / "moved")
    mined.negatives_dir = tmp_path / "moved" / "negatives"
    assert mining_run.mined_steps(mined, tmp_path / "moved") == {8}


def test_mining_keeps_the_embeddings_that_evaluations_made(tmp_path, mined, monkeypatch):
    embeddings = tmp_path / "run" / "embeddings"
    for name in ("data/step_3-a", "data/step_7-b", "mining/step_3-a", "mining_other/step_3-a"):
        (embeddings / name).mkdir(parents=True)
    monkeypatch.setattr(mining_run, "mine", lambda *args, **options: (mined_pairs.of_lines([Mined("q0", "d0", ["d5"], [])]), {}))
    of_evaluation = Embedded(7, *[None] * 3, embeddings / "data" / "step_7-b", {})
    monkeypatch.setattr(mining_run, "embed", lambda *args, **options: of_evaluation)
    mining_run.mine_generation(Run(tmp_path / "run", 7, MODEL, *[None] * 3), mined, Miner())
    assert sorted(str(path.relative_to(embeddings)) for path in embeddings.glob("*/step_*")) == [
        "data/step_3-a",
        "data/step_7-b",
        "mining_other/step_3-a",
    ]


def test_a_miner_whose_earlier_generations_were_removed_goes_on_beyond_the_runs_switches(tmp_path, mined):
    write(tmp_path, 2)
    logged(mined, [1])
    for number in (1, 2):
        shutil.rmtree(tmp_path / f"{number:06d}")
    assert mined.next_number() == 3
    write(tmp_path, mined.next_number())
    logged(mined, [10])
    assert mined.switches[-1] == Switch(18, 3)


def test_a_generation_by_another_runs_checkpoint_has_no_age_here(tmp_path, mined):
    write(tmp_path, 2, checkpoint_step=5000, **mining_run.by_run(tmp_path / "other", tmp_path))
    lines = logged(mined, range(1, 12))
    assert lines[8]["negatives/staleness"] == 8.0
    assert lines[9] == {"negatives/generation": 2.0}
