"""Owners of folders in a bucket in memory; tests/soak has real servers."""

import functools
import json
import os
import shutil
import tempfile
import time
import types
import warnings
from pathlib import Path

import pytest
from bucket_store import Store
from interleavings import Machine, explore

from de_jax.buckets import copies, entries, objects, owners
from de_jax.buckets.objects import Unreachable
from de_jax.buckets.owners import Owner, TakenOver
from de_jax.files import addresses, folders, outputs
from de_jax.types import InputError

ADDRESS = "memory://bucket/run"


class Inline:
    """An executor without threads."""

    def __init__(self, num_threads):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    map = staticmethod(map)


def write(path, files):
    for name, text in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)


def checkpoint(path, step, by):
    """The smallest checkpoint: its mark alone."""
    write(path, {f"checkpoints/{step}/{folders.CHECKPOINT_FILE}": f"{step} by {by}"})


def steps(path):
    """The checkpoints of a copy, and who wrote them."""
    found = sorted((path / "checkpoints").iterdir(), key=lambda folder: int(folder.name)) if (path / "checkpoints").is_dir() else []
    return {int(folder.name): (folder / folders.CHECKPOINT_FILE).read_text() for folder in found}


def entered(there):
    """All entries in the bucket, oldest first."""
    return [entries.Entry(**json.loads(data)) for name, data in sorted(there.items()) if "/.owners/" in name]


def whole(there):
    """The checkpoints that the newest entry names, and who wrote them; raises where one of them is not whole."""
    found = {}
    for folder, facts in entered(there)[-1].folders.items():
        texts = {name: there[f"bucket/run/{facts['at']}/{name}"].decode() for name in facts["files"]}
        assert {name: len(text) for name, text in texts.items()} == facts["files"]
        found[int(folder.rpartition("/")[2])] = texts[folders.CHECKPOINT_FILE]
    return found


@pytest.fixture
def disks():
    """A folder in memory where there is one: each request of a machine is made on an empty disk."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        yield Path(folder)


@pytest.fixture
def play(monkeypatch, disks):
    """`explore` with machines that are given by their work."""
    for module in (copies, owners):
        monkeypatch.setattr(module, "futures", types.SimpleNamespace(ThreadPoolExecutor=Inline))
    monkeypatch.setattr(outputs, "sync", lambda path: None)
    monkeypatch.setattr(addresses, "SCHEMES", ["memory"])
    monkeypatch.setattr(objects, "RETRY_SECONDS", (0.0, 0.0))
    monkeypatch.setattr(owners, "LEASE_SECONDS", 0.0)

    def restore(name):
        os.environ["DE_JAX_CACHE"] = str(disks / name)
        for state in (copies._fetched, copies.claimed, outputs.COMPLETED):
            state.clear()
        monkeypatch.setattr(owners, "uuid", types.SimpleNamespace(uuid4=lambda: types.SimpleNamespace(hex=f"session of {name}")))

    def work(do, client):
        monkeypatch.setattr(objects, "_client", lambda scheme, process: client)
        return do(addresses.path_of(ADDRESS))

    def played(works, check, *, lossy=None, start=None):
        start = {} if start is None else start
        monkeypatch.setenv("DE_JAX_CACHE", str(disks))
        machines = [Machine(name, functools.partial(work, do), int(name == lossy)) for name, do in works.items()]
        return explore(machines, start, check, disks, restore)

    def alone(name, do):
        """The objects after one machine's work alone."""
        monkeypatch.setenv("DE_JAX_CACHE", str(disks))
        restore(name)
        store = Store()
        work(do, store)
        return store.objects

    played.alone = alone
    return played


def begin(path):
    """A first owner that saved step 10."""
    owner = Owner(path, "training")
    owner.claim()
    checkpoint(path, 10, "first")
    owner.push()


def save(path, there):
    """The first owner, which saves step 20 in the place of step 10."""
    owner = Owner(path, "training")
    owner._entry = entered(there)[-1]
    write(path, {copies.OWNER_FILE: "session of first\n"})
    checkpoint(path, 20, "first")
    owner.push()
    return "saved"


def take_over(path, by):
    """Another machine, which continues with what it finds, and saves 10 steps later."""
    owner = Owner(path, "training")
    copies.pull(path, everything=True, by_owner=True, keeps_own=owner.claim())
    found = steps(path)
    checkpoint(path, max(found, default=0) + 10, by)
    owner.push()
    return found


def read(path):
    copies.pull(path)
    return steps(path)


def check(there, outcomes):
    """Whether the newest entry names whole checkpoints alone, and each machine ended as it must."""
    found = whole(there)
    assert found
    first, second, reader = (outcomes[name].result if name in outcomes else None for name in ("first", "second", "reader"))
    numbers = [(entry.number, entry.session) for entry in entered(there)]
    claims = [number for number, session in numbers if session == "session of second"]
    assert not claims or all(number < claims[0] for number, session in numbers if session == "session of first")
    if first == "saved":
        assert 20 in found or "second" in str(found)
    elif first is not None:
        assert isinstance(first, TakenOver)
        assert claims
    if second is not None:
        assert isinstance(second, dict), second
        assert max(found) == max(second) + 10
        assert found[max(found)] == f"{max(found)} by second"
        if first == "saved":
            assert second == {20: "20 by first"}
    if isinstance(reader, dict):
        saved = {(10, "10 by first"), (20, "20 by first"), (20, "20 by second"), (30, "30 by second")}
        assert reader
        assert reader.items() <= saved
    elif reader is not None:
        assert isinstance(reader, Unreachable), reader


PAIRS = [("first", "second"), ("first", "reader"), ("second", "reader")]
LONG = [pytest.param(("first", "second", "reader"), None, marks=pytest.mark.soak)]
LOSSY = [pytest.param(PAIRS[0], name, marks=pytest.mark.soak) for name in PAIRS[0]]


@pytest.mark.parametrize(("names", "lossy"), [(pair, None) for pair in PAIRS] + LONG + LOSSY)
def test_no_checkpoint_is_lost_or_overwritten_in_any_interleaving_of_a_save_a_takeover_and_a_read(play, names, lossy):
    """`lossy` is a machine of which one answer is lost: that write happens, or not yet, and once more at any later time."""
    start = play.alone("first", begin)
    works = {"first": lambda path: save(path, start), "second": lambda path: take_over(path, "second"), "reader": read}
    assert play({name: works[name] for name in names}, check, start=start, lossy=lossy) > 50


def of_run():
    """A run in the bucket, to be owned by a trainer."""
    return addresses.only_one(addresses.local(ADDRESS) / ".train.lock", "training")


def kill(owner):
    """Ends an owner as kill -9 does: nothing is uploaded, and its locks are free."""
    owner._stop.set()
    owner._has_ended.set()
    for thread in owner._threads:
        thread.join()


@pytest.fixture
def killed(bucket, monkeypatch):
    """A machine whose trainer uploaded step 10, saved step 20, and was killed."""
    with monkeypatch.context() as patch:
        patch.setattr(Owner, "close", lambda self, is_failed=False: kill(self))
        with of_run() as owner:
            write(owner.path, {"run.json": "{}", "metrics.jsonl": "1"})
            checkpoint(owner.path, 10, "first")
            owner.push()
            write(owner.path, {"metrics.jsonl": "1, 2"})
            checkpoint(owner.path, 20, "first")
    bucket.go_to("machine")
    monkeypatch.setattr(owners, "LEASE_SECONDS", 0.0)
    return owner


def test_a_run_continues_on_its_machine_with_what_was_not_uploaded(killed, bucket):
    with of_run() as owner:
        assert steps(owner.path) == {10: "10 by first", 20: "20 by first"}
        assert (owner.path / "metrics.jsonl").read_text() == "1, 2"
    assert whole(bucket.store.objects).keys() == {10, 20}
    assert bucket.store.objects["bucket/run/metrics.jsonl"] == b"1, 2"


def test_a_run_continues_on_another_machine_with_what_was_uploaded(killed, bucket, capsys):
    bucket.go_to("other")
    with of_run() as owner:
        assert steps(owner.path) == {10: "10 by first"}
        assert (owner.path / "metrics.jsonl").read_text() == "1"
        checkpoint(owner.path, 20, "second")
    assert "to see whether process" in capsys.readouterr().err
    bucket.go_to("machine")
    with of_run() as owner:  # the bucket wins, as another machine had the run since
        assert steps(owner.path) == {10: "10 by first", 20: "20 by second"}


def test_a_kill_right_after_the_claim_loses_nothing_of_this_machine(killed, bucket, monkeypatch):
    claim = Owner.claim

    def killed_after(self):
        claim(self)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Owner, "claim", killed_after)
        with pytest.raises(KeyboardInterrupt), of_run():
            pass
    bucket.go_to("machine")
    with of_run() as owner:
        assert steps(owner.path) == {10: "10 by first", 20: "20 by first"}


def test_a_command_uploads_nothing_of_a_run(killed, bucket):
    """Neither the checkpoint that a killed trainer left, nor what a trainer that lives writes."""
    before = dict(bucket.store.objects)
    with outputs.atomic_file(addresses.local(ADDRESS) / "evaluations/result.json") as unfinished:
        unfinished.write_text("{}")
    addresses.upload()
    assert bucket.store.objects == before | {"bucket/run/evaluations/result.json": b"{}"}
    with of_run() as owner:
        checkpoint(owner.path, 30, "first")
        before = dict(bucket.store.objects)
        copies.pull(owner.path)
        addresses.upload()
        assert bucket.store.objects == before
        assert 30 in steps(owner.path)


def test_an_owner_that_lives_refuses_another_one_which_uploads_nothing(bucket, monkeypatch):
    monkeypatch.setattr(owners, "LOOK_SECONDS", 0.01)
    with of_run() as owner:
        write(owner.path, {"run.json": "{}"})
        owner.push()
        bucket.go_to("other")
        write(addresses.local(ADDRESS), {"run.json": "of the other one"})
        beats = iter(range(3))
        monkeypatch.setattr(
            bucket.store, "gate", lambda operation, name: operation == "list" and next(beats, None) == 1 and owner.commit()
        )
        with pytest.raises(InputError, match=r"process \d+ on .* is training already; stop it first"), of_run():
            pass
        addresses.upload()
        assert bucket.store.objects["bucket/run/run.json"] == b"{}"
        bucket.go_to("machine")


def overtaken(bucket):
    """An owner whose run another machine has taken over, and ended."""
    first = Owner(addresses.local(ADDRESS), "training")
    first.claim()
    checkpoint(first.path, 10, "first")
    first.push()
    bucket.go_to("other")
    with of_run() as second:
        checkpoint(second.path, 20, "second")
    bucket.go_to("machine")
    return first


@pytest.mark.parametrize("is_late", [False, True])
def test_an_overtaken_owner_changes_nothing_and_learns_it(bucket, monkeypatch, is_late):
    """Also where its list was made before, so that only the entry's condition is left."""
    monkeypatch.setattr(owners, "LEASE_SECONDS", 0.0)
    first = overtaken(bucket)
    before = dict(bucket.store.objects)
    with pytest.raises(TakenOver, match="is training now, as this process was silent; stop one of them"):
        first.commit()  # as a heartbeat that hung does
    checkpoint(first.path, 20, "first")
    checkpoint(first.path, 30, "first")
    if is_late:
        monkeypatch.setattr(first, "_list", first._objects.list)
    with pytest.raises(TakenOver):
        first.push()
    assert {name: bucket.store.objects[name] for name in before} == before
    assert whole(bucket.store.objects) == {10: "10 by first", 20: "20 by second"}
    for thread in first._threads:
        thread.start()
    with pytest.raises(TakenOver):
        first.close()
    assert whole(bucket.store.objects) == {10: "10 by first", 20: "20 by second"}


def test_a_damaged_entry_is_nobodys(killed, bucket):
    newest = max(name for name in bucket.store.objects if "/.owners/" in name)
    bucket.store.apply("put", newest, b"")
    with pytest.raises(InputError, match=r"\.owners/\d+ is damaged; remove it"), of_run():
        pass


def test_a_folder_that_an_overtaken_owner_began_is_left_alone(killed, bucket):
    bucket.go_to("other")
    bucket.put({"checkpoints/20/other": "half of the first one's"})
    with of_run() as owner:
        assert steps(owner.path) == {10: "10 by first"}
        checkpoint(owner.path, 20, "second")
    claim = entered(bucket.store.objects)[-1].claim
    assert "checkpoints/20/other" not in bucket.names()  # once it is of no use
    assert f"checkpoints/20~{claim}/{folders.CHECKPOINT_FILE}" in bucket.names()
    bucket.go_to("third")
    assert steps(addresses.local(ADDRESS)) == {20: "20 by second"}


def test_old_checkpoints_go_once_a_newer_one_is_named(bucket, monkeypatch):
    removed = []
    with of_run() as owner:
        checkpoint(owner.path, 10, "first")
        owner.push()
        shutil.rmtree(owner.path / "checkpoints/10")
        checkpoint(owner.path, 20, "first")

        def gate(operation, name):
            if operation == "remove" and "/checkpoints/" in name:
                removed.append((name, whole(bucket.store.objects)))

        monkeypatch.setattr(bucket.store, "gate", gate)
        owner.push()
    assert removed == [(f"bucket/run/checkpoints/10/{folders.CHECKPOINT_FILE}", {20: "20 by first"})]
    assert {name for name in bucket.names() if "checkpoints" in name} == {f"checkpoints/20/{folders.CHECKPOINT_FILE}"}


def test_a_checkpoint_is_uploaded_whole_although_the_run_removes_it_meanwhile(bucket, monkeypatch):
    with of_run() as owner:
        checkpoint(owner.path, 10, "first")

        def removing(operation, name):
            if operation == "put" and name.endswith(folders.CHECKPOINT_FILE):
                shutil.rmtree(owner.path / "checkpoints/10", ignore_errors=True)

        monkeypatch.setattr(bucket.store, "gate", removing)
        owner.push()
        assert whole(bucket.store.objects) == {10: "10 by first"}


def test_a_write_that_the_bucket_loses_is_repeated_and_the_checkpoint_waits(bucket, monkeypatch):
    put, lost = objects.Objects.put, []

    def losing(self, name, content, is_new=False):
        if "checkpoints/20" in name and len(lost) < num_losses:
            lost.append(name)
            return content.stat().st_size
        return put(self, name, content, is_new=is_new)

    monkeypatch.setattr(objects.Objects, "put", losing)
    with of_run() as owner:
        num_losses = 1
        checkpoint(owner.path, 10, "first")
        owner.push()
        checkpoint(owner.path, 20, "first")
        num_losses = 1000
        with pytest.raises(Unreachable, match=r"took 'checkpoints/20/.*' and does not list it"):
            owner.push()
        assert whole(bucket.store.objects) == {10: "10 by first"}
        num_losses = 0
    assert whole(bucket.store.objects).keys() == {10, 20}


def test_a_run_without_an_owner_is_adopted_as_it_lies(bucket):
    """Such as a run of an earlier version, with its lease."""
    mark = folders.CHECKPOINT_FILE
    bucket.put({"run.json": "{}", ".train.lock": "", f"checkpoints/10/{mark}": "10 by first"})
    with of_run() as owner:
        assert steps(owner.path) == {10: "10 by first"}
    assert whole(bucket.store.objects) == {10: "10 by first"}


def test_a_miner_and_a_trainer_own_folders_in_each_other(bucket):
    generation = {"manifest.json": "{}", "neg_docs.npy": "1"}
    with of_run() as trainer:
        checkpoint(trainer.path, 10, "first")
        trainer.push()
        bucket.go_to("miner")
        negatives = addresses.local(ADDRESS) / "negatives"
        with addresses.only_one(negatives / ".miner.lock", "mining"):
            write(negatives / "000001", generation)
            (negatives / "000002").mkdir()
            (negatives / "000002/neg_docs.npy").write_text("of a generation that is being written")
            assert steps(negatives.parent) == {10: "10 by first"}
        assert {name for name in bucket.names() if "negatives" in name} == {f"negatives/000001/{name}" for name in generation}
        bucket.go_to("machine")
        trainer.follow(trainer.path / "negatives")
        copies.follow(trainer.path / "negatives")
        assert sorted(file.name for file in (trainer.path / "negatives").rglob("*.*")) == sorted(generation)
        before = set(bucket.store.objects)
        trainer.push()
        assert set(bucket.store.objects) == before


def test_a_copy_that_was_deleted_to_free_the_disk_is_no_deletion(bucket):
    with of_run() as owner:
        for step in (10, 20):
            checkpoint(owner.path, step, "first")
    there = {name: data for name, data in bucket.store.objects.items() if "/.owners/" not in name}
    shutil.rmtree(owner.path)
    bucket.go_to("machine")
    with of_run() as owner:
        assert steps(owner.path).keys() == {10, 20}
        shutil.rmtree(owner.path)
        with pytest.raises(InputError, match="was removed while it was in use; repeat the command"):
            owner.push()
        owner.path.mkdir()
        (owner.path / copies.OWNER_FILE).touch()
        for step in (10, 20):
            checkpoint(owner.path, step, "first")
    assert {name: data for name, data in bucket.store.objects.items() if "/.owners/" not in name} == there


def test_threads_upload_follow_and_warn_once_of_a_bucket_that_is_gone(bucket, monkeypatch):
    monkeypatch.setattr(owners, "SYNC_SECONDS", 0.01)
    monkeypatch.setattr(owners, "BEAT_SECONDS", 0.01)
    bucket.put({"negatives/000001/pairs.npy": "1"})
    path = addresses.local(ADDRESS)
    shutil.rmtree(path / "negatives")
    faults = []

    def failing(operation, name):
        if 0 < len(faults) < 5:
            faults.append(1)
            raise ConnectionError("x")

    monkeypatch.setattr(bucket.store, "gate", failing)
    with warnings.catch_warnings(record=True) as told, of_run() as owner:
        warnings.simplefilter("always")
        faults.append(1)
        owner.follow(path / "negatives")
        checkpoint(path, 10, "first")
        number = owner._entry.number
        while (
            not whole(dict(bucket.store.objects))
            or not (path / "negatives/000001/pairs.npy").exists()
            or owner._entry.number < number + 3
        ):
            owner.check()
            time.sleep(0.01)
    assert len([one for one in told if "The run continues; it is tried again until its end." in str(one.message)]) <= 1
    assert len(faults) == 5
