"""Several miners of one run as threads that take turns: in any order, killed between any two steps, beside a trainer."""

import os
import random
import re
import shutil
import sys
import threading
import time
from types import SimpleNamespace

import fsspec
import jax
import numpy as np
import pytest

from de_jax import mine
from de_jax.data.batches.pair_batches import TrainingPairs
from de_jax.data.negatives import generations
from de_jax.data.negatives.mined_negatives import MinedNegatives
from de_jax.data.stores import corpus
from de_jax.data.text import tokenizing, vocabulary_training
from de_jax.data.text.sides import Side
from de_jax.files import buckets, folders, leases, mirror, mirrors
from de_jax.mining import mining_run, shared_checkpoint
from de_jax.mining.miner import Miner
from de_jax.retrieval import encode, parts
from de_jax.retrieval.parts import Part
from de_jax.training.mesh import distributed
from de_jax.training.run.run_folder import MINING_DIR, Run, complete_steps
from de_jax.types import InputError

PAIRS = np.array([[query, query] for query in range(6)], np.int32)
LAST_STEP, TEXTS_PER_SHARD = 40, 4
MINER = Miner(num_neg_docs=3, last_rank=8)


class Killed(BaseException):
    pass


class Turns:
    """Threads of which one runs at a time; at each step another may go on, or this one may die."""

    def __init__(self, seed, kills):
        self.rng, self.kills = random.Random(seed), kills
        self._current, self._changed = None, threading.Condition()
        self.arrive = lambda name: None

    def step(self, *, is_safe_to_pause=True):
        """A place between two steps of a miner."""
        name = threading.current_thread().name
        if name == "MainThread":
            return
        self.risk(0.08)
        if is_safe_to_pause:
            self._give(None)
            self._await(name)
            self.arrive(name)

    def risk(self, share):
        """A place where a miner may die."""
        if self.kills and self.rng.random() < share:
            self.kills -= 1
            raise Killed

    def run(self, workers, between):
        """Runs functions by name until all have ended; a killed one is started again. `between` is called before each turn."""
        alive, errors = {}, []

        def live(name):
            self._await(name)
            try:
                workers[name]()
            except Killed:
                pass
            except BaseException as error:
                errors.append(error)
                kept.discard(name)
            else:
                kept.discard(name)
            self._give(None)

        kept = set(workers)
        while kept:
            between()
            name = self.rng.choice(sorted(kept))
            if name not in alive or not alive[name].is_alive():
                alive[name] = threading.Thread(target=live, args=[name], name=name, daemon=True)
                alive[name].start()
            self._give(name)
            self._await(None)
        if errors:
            raise errors[0]

    def _give(self, name):
        with self._changed:
            self._current = name
            self._changed.notify_all()

    def _await(self, name):
        with self._changed:
            assert self._changed.wait_for(lambda: self._current == name, timeout=60)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stores")
    rng = np.random.default_rng(0)
    words = ["apple", "river", "engine", "violin", "castle", "pepper", "comet", "ladder"]
    sides = {kind: [(f"{kind}{i}", " ".join(rng.choice(words, 4))) for i in range(size)] for kind, size in (("q", 6), ("d", 22))}
    vocabulary_training.train_sentencepiece((text for _, text in sides["d"]), folder / "spiece.model", vocab_size=27)
    tokenizer = tokenizing.load_tokenizer(folder / "spiece.model")
    stores = [corpus.build_token_store(sides[kind], tokenizer, folder / kind, progress=False) for kind in "qd"]
    return TrainingPairs("toy", *stores, PAIRS, {"docs": "d", "queries": "q"}), Side(tokenizer, 16)


@pytest.fixture
def without_a_model(monkeypatch, texts):
    """A checkpoint is one table of vectors; a text's embedding is their sum over its tokens."""
    model = SimpleNamespace(check_length=lambda tower, length: None, as_function=lambda: "a table", dtype="float64")

    def load_run(run_dir, step, dtype=None):
        found = max(complete_steps(run_dir / MINING_DIR), default=None) if step == MINING_DIR else step
        try:
            table = np.load(run_dir / (MINING_DIR if step == MINING_DIR else "checkpoints") / str(found) / "params" / "table.npy")
        except FileNotFoundError:
            raise InputError("there is no such checkpoint") from None
        return Run(run_dir, found, model, {"shared": {"table": table}}, texts[1], texts[1])

    def encode_fn(run, tower):
        def encode_rows(tokens, lengths):
            ends = np.cumsum(lengths, axis=1)
            sums = np.cumsum(run.params["shared"]["table"][tokens], axis=1, dtype=np.float64)
            sums = np.concatenate([np.zeros_like(sums[:, :1]), sums], axis=1)
            rows = np.arange(len(tokens))[:, None]
            return (sums[rows, ends] - sums[rows, ends - lengths]).astype(np.float32)

        return encode_rows

    monkeypatch.setattr(mine, "load_run", load_run)
    monkeypatch.setattr(encode, "encode_fn", encode_fn)
    return load_run


def save(run_dir, step):
    """A checkpoint as a trainer saves it, which keeps only the newest two."""
    folder = run_dir / "checkpoints" / f".{step}"
    (folder / "params").mkdir(parents=True)
    np.save(folder / "params" / "table.npy", np.random.default_rng(step).integers(-9, 9, (28, 4)).astype(np.float32))
    (folder / folders.CHECKPOINT_FILE).write_text("{}")
    folder.rename(folder.with_name(str(step)))
    for old in complete_steps(run_dir / "checkpoints")[:-1]:
        shutil.rmtree(run_dir / "checkpoints" / str(old))


def mining_of(run_dir, texts):
    mined = MinedNegatives(run_dir / "negatives", None, texts[0], num_drawn={})
    data = SimpleNamespace(all_mined={"": mined}, parts={"": SimpleNamespace(dev=None)}, query=texts[1], doc=texts[1])
    return mine._Mining(run_dir, data, MINER, TEXTS_PER_SHARD, 0.0, None)


def arrays(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*.npy")}


def mined_alone(run_dir, step, texts, load_run):
    """The arrays that a single miner mines by a checkpoint."""
    save(run_dir, step)
    run = load_run(run_dir, step)
    mined = MinedNegatives(run_dir / "negatives", None, texts[0], num_drawn={})
    return arrays(mining_run.mine_generation(run, mined, MINER, texts_per_shard=TEXTS_PER_SHARD).folder)


@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 40))])
def test_miners_in_any_order_and_killed_anywhere_mine_what_one_mines(tmp_path, texts, without_a_model, monkeypatch, seed):
    turns, run_dir, total = Turns(seed, kills=seed), tmp_path / "run", 2 + seed % 2
    add_steps(monkeypatch, turns)
    save(run_dir, 0)

    def train():
        mined = len(generations.numbers(run_dir / "negatives"))
        if (step := due(turns, run_dir, mined)) is not None:
            save(run_dir, step)

    def miner(number):
        return lambda: list(mine._mine_parts(mining_of(run_dir, texts), Part(number, total), LAST_STEP))

    turns.run({str(number): miner(number) for number in range(total)}, train)
    assert_as_mined_alone(run_dir, tmp_path, texts, without_a_model)


def due(turns, run_dir, num_mined):
    """The step that the trainer saves at this moment; mostly None."""
    newest = shared_checkpoint.newest_step(run_dir)
    is_due = newest + 10 < LAST_STEP or num_mined >= 2
    return newest + 10 if newest < LAST_STEP and is_due and turns.rng.random() < 0.05 else None


def assert_as_mined_alone(run_dir, folder, texts, load_run):
    """Each checkpoint was mined with once at most, in order, and gave what a single miner mines by it."""
    negatives_dir = run_dir / "negatives"
    numbers = generations.numbers(negatives_dir)
    steps = [generations.read_manifest(negatives_dir, number)["checkpoint_step"] for number in numbers]
    assert numbers == list(range(1, len(numbers) + 1))
    assert len(steps) >= 2
    assert steps == sorted(set(steps))
    for number, step in zip(numbers, steps, strict=True):  # this thread takes no turns
        alone = mined_alone(folder / f"alone_{step}", step, texts, load_run)
        assert arrays(generations.generation_dir(negatives_dir, number)) == alone
    assert all(step > steps[-1] for step in complete_steps(run_dir / MINING_DIR))  # of a generation that the run did not wait for


def add_steps(monkeypatch, turns):
    """Lets miners pause and die in all places where that matters."""

    def with_steps(module, name, *, after=False, **options):
        original = getattr(module, name)

        def stepped(*args, **kwargs):
            turns.step(**options)
            found = original(*args, **kwargs)
            if after:
                turns.step(**options)
            return found

        monkeypatch.setattr(module, name, stepped)

    monkeypatch.setattr(time, "sleep", lambda seconds: turns.step())
    with_steps(shared_checkpoint, "take")
    with_steps(mine, "load_run")
    with_steps(encode, "encode", is_safe_to_pause=False)  # from here on within a lock
    with_steps(parts, "write_ranking", after=True)
    for module, name in ((parts, "join"), (parts, "remove"), (generations, "write_generation"), (shared_checkpoint, "_link")):
        with_steps(module, name, after=True, is_safe_to_pause=False)


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 20))])
def test_miners_with_copies_of_a_bucket_mine_what_one_mines_though_killed_while_they_upload(
    tmp_path, texts, without_a_model, monkeypatch, seed
):
    """Each miner is a machine of its own, and so is the trainer."""
    address = "memory://bucket/run"
    turns, total = Turns(seed, kills=0), 2 + seed % 2
    add_steps(monkeypatch, turns)
    monkeypatch.setitem(buckets.CLIENTS, "memory", "fsspec")
    monkeypatch.setattr(mirror, "NUM_THREADS", 1)
    monkeypatch.setattr(mirrors, "LAST_SECONDS", 0.0)
    no_silence = {"monotonic": time.monotonic, "time": lambda: 0.0}
    clock = SimpleNamespace(**no_silence, sleep=lambda seconds: turns.step() if seconds else None)
    monkeypatch.setattr(leases, "time", clock)
    for name, value in {"LEASE_SECONDS": 0.0, "SETTLE_SECONDS": 0.0, "LOOK_SECONDS": 1.0}.items():
        monkeypatch.setattr(leases, name, value)
    fsspec.filesystem("memory").store.clear()
    release, opened = leases.Lease.release, {}

    def killed_or_released(self, *, is_all_sent):
        if isinstance(sys.exc_info()[1], Killed):
            self._stop.set()
        else:
            release(self, is_all_sent=is_all_sent)

    monkeypatch.setattr(leases.Lease, "release", killed_or_released)
    for name in ("put", "remove"):
        method = getattr(buckets.Objects, name)
        monkeypatch.setattr(buckets.Objects, name, lambda self, *given, method=method: (turns.risk(0.02), method(self, *given))[1])

    def go_to(machine):
        os.environ["DE_JAX_CACHE"] = str(tmp_path / machine)
        mirrors._mirrors = opened.setdefault(machine, {})

    def synced(run_dir):
        """As the thread of `kept_equal` does at times."""
        if turns.rng.random() < 0.5:
            mirrors.push_all(seconds=0)
            mirrors.refresh(run_dir)

    def miner(number):
        def live():
            opened[str(number)] = {}
            go_to(str(number))
            run_dir = mirrors.local(address)
            turns.arrive = lambda name: (go_to(name), synced(buckets.path_of(address)))
            list(mine._mine_parts(mining_of(run_dir, texts), Part(number, total), LAST_STEP))
            mirrors.push_all()

        return live

    def train():
        go_to("trainer")
        mirrors.refresh(run_dir / "negatives")
        if (step := due(turns, run_dir, len(generations.numbers(run_dir / "negatives")))) is not None:
            save(run_dir, step)
            kills, turns.kills = turns.kills, 0
            mirrors.push_all()
            turns.kills = kills

    monkeypatch.setenv("DE_JAX_CACHE", str(tmp_path / "trainer"))
    monkeypatch.setattr(mirrors, "_mirrors", {})
    go_to("trainer")
    run_dir = mirrors.local(address)
    (run_dir / "embeddings").mkdir(parents=True)
    (run_dir / "run.json").write_text("{}")
    save(run_dir, 0)
    mirrors.push_all()
    turns.kills = 2 * seed
    turns.run({str(number): miner(number) for number in range(total)}, train)
    go_to("reader")
    turns.kills = 0
    assert_as_mined_alone(mirrors.local(address), tmp_path, texts, without_a_model)


@pytest.fixture
def run_dir(tmp_path, without_a_model):
    save(tmp_path / "run", 10)
    return tmp_path / "run"


def test_a_part_that_never_comes_is_told_with_its_number(run_dir, texts, monkeypatch, capsys):
    def sleep(seconds):
        save(run_dir, LAST_STEP)  # so that the run is complete

    monkeypatch.setattr(time, "sleep", sleep)
    assert not list(mine._mine_parts(mining_of(run_dir, texts), Part(2, 3), LAST_STEP))
    assert re.search(r"step 10: waiting since \S+ \S+ for part 0/3, 1/3", capsys.readouterr().err)


def test_the_shared_checkpoint_stays_until_it_is_mined_with_and_then_gives_way_to_the_newest(run_dir, texts):
    mining = mining_of(run_dir, texts)
    assert not list(mine._mine_parts(mining, Part(0, 2), None))
    save(run_dir, 20)
    save(run_dir, 30)
    (generation,) = mine._mine_parts(mining, Part(1, 2), None)
    assert generation.manifest["checkpoint_step"] == 10
    assert (generation.manifest["num_jobs"], complete_steps(run_dir / MINING_DIR)) == (2, [])
    assert [shared_checkpoint.take(run_dir, mining.mined_until) for _ in range(2)] == [30, 30]
    shutil.rmtree(run_dir / MINING_DIR / "30")  # removed by hand
    save(run_dir, 40)
    assert shared_checkpoint.take(run_dir, mining.mined_until) == 40
    assert shared_checkpoint.take(run_dir, lambda: 40) is None
    assert complete_steps(run_dir / MINING_DIR) == [40]
    save(run_dir, 50)
    assert shared_checkpoint.take(run_dir, lambda: 40) == 50
    assert complete_steps(run_dir / MINING_DIR) == [50]


def test_a_checkpoint_that_is_removed_while_it_is_shared_is_not_shared(run_dir, monkeypatch):
    link = shared_checkpoint._link

    def removed_meanwhile(source, path):
        link(source, path)
        shutil.rmtree(run_dir / "checkpoints" / "10")

    monkeypatch.setattr(shared_checkpoint, "_link", removed_meanwhile)
    assert shared_checkpoint.take(run_dir, lambda: -1) is None
    assert not list((run_dir / MINING_DIR).iterdir())


def test_where_a_file_system_has_no_links_the_checkpoint_is_copied(run_dir, monkeypatch):
    def refused(source, path):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    assert shared_checkpoint.take(run_dir, lambda: -1) == 10
    table = "10/params/table.npy"
    assert (run_dir / MINING_DIR / table).read_bytes() == (run_dir / "checkpoints" / table).read_bytes()


def test_a_damaged_shared_checkpoint_is_refused(run_dir, texts, monkeypatch):
    shared_checkpoint.take(run_dir, lambda: -1)
    (run_dir / MINING_DIR / "10" / "params" / "table.npy").unlink()
    with pytest.raises(InputError, match="there is no such checkpoint"):
        list(mine._mine_parts(mining_of(run_dir, texts), Part(0, 2), LAST_STEP))


def test_a_full_disk_costs_a_part_a_second_try(run_dir, texts, monkeypatch):
    write = parts.write_ranking

    def full_at_first(*args):
        monkeypatch.setattr(parts, "write_ranking", write)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(parts, "write_ranking", full_at_first)
    with pytest.warns(UserWarning, match="the part 0/1 of step 10 was not mined: No space left on device; it is tried again"):
        assert next(mine._mine_parts(mining_of(run_dir, texts), Part(0, 1), LAST_STEP)).number == 1


SLURM = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "host[0-2]", "SLURM_NTASKS": "3", "SLURM_PROCID": "1", "SLURM_LOCALID": "0"}


def test_a_process_learns_its_number_from_the_cluster_without_joining(monkeypatch):
    with pytest.raises(InputError, match="no TPU pod, SLURM, Kubernetes or MPI says which process this is"):
        distributed.place()
    set_devices = []
    monkeypatch.setattr(jax.config, "update", lambda name, value: set_devices.append((name, value)))
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    assert distributed.place() == (1, 3)
    assert set_devices == [("jax_cuda_visible_devices", "0"), ("jax_rocm_visible_devices", "0")]


def test_a_host_of_a_slice_is_told_to_stand_alone(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    with pytest.raises(InputError, match="one of 4 of a TPU slice; set TPU_PROCESS_BOUNDS=1,1,1"):
        distributed.check_alone()


@pytest.mark.parametrize("is_early", [True, False])
def test_a_miner_ends_with_its_run_before_the_last_update_too(run_dir, texts, monkeypatch, is_early):
    save(run_dir, 20)
    monkeypatch.setattr(mine, "end_of", lambda folder, step: "no better" if is_early and step == 20 else None)
    mining = mining_of(run_dir, texts)
    assert mining.is_over(100) is is_early
    if is_early:
        assert list(mine._mine_parts(mining, Part(0, 2), 100)) == []
    assert next(mine._new_steps(mining, 100), None) == (None if is_early else 20)
    assert not mining._replace(first_seen=20).is_over(100)  # the run may be about to go on
