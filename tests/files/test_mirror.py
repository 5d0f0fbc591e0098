"""Copies of buckets, on fsspec's bucket in memory; `test_buckets.py` under tests/e2e has real servers."""

import json
import shutil
import threading
import time
import warnings

import fsspec
import pytest

from de_jax.data.negatives import generations
from de_jax.files import buckets, folders, leases, mirror, mirror_names, mirrors
from de_jax.files.mirror import Mirror
from de_jax.settings import LocalPath, checked
from de_jax.tools import doctor
from de_jax.types import InputError

RUN = "memory://bucket/run"


@pytest.fixture
def bucket(monkeypatch, tmp_path):
    """The objects of a bucket in memory, by name; and this machine has an empty cache."""
    monkeypatch.setitem(buckets.CLIENTS, "memory", "fsspec")
    monkeypatch.setattr(buckets, "RETRY_SECONDS", ())
    monkeypatch.setattr(leases, "SETTLE_SECONDS", 0.0)
    fsspec.filesystem("memory").store.clear()
    buckets._client.cache_clear()
    go_to(monkeypatch, tmp_path / "machine")
    yield lambda: {name.removeprefix("/bucket/run/") for name in list(fsspec.filesystem("memory").store)}
    fsspec.filesystem("memory").store.clear()


def go_to(monkeypatch, cache):
    """To another machine, or to another process of one."""
    monkeypatch.setenv("DE_JAX_CACHE", str(cache))
    monkeypatch.setattr(mirrors, "_mirrors", {})


def put(files):
    for name, text in files.items():
        fsspec.filesystem("memory").pipe_file(f"/bucket/run/{name}", text.encode())


def write(path, files):
    for name, text in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)


def checkpoint(path, step, text="weights"):
    """A checkpoint as the trainer leaves it."""
    folder = path / "checkpoints" / str(step)
    write(folder, {"params/a": text, "training/b": "state"})
    folders.write_checksums(folder, "checkpoint")
    write(folder, {folders.CHECKPOINT_FILE: "{}"})


def calls(monkeypatch, name):
    """The names that a method of `Objects` is called with, from now on."""
    seen, method = [], getattr(buckets.Objects, name)
    monkeypatch.setattr(buckets.Objects, name, lambda self, *given: (seen.append(given[0]), method(self, *given))[1])
    return seen


def test_addresses_and_paths_stand_for_each_other(bucket, tmp_path):
    path = buckets.path_of("s3://bucket/a/b/")
    assert path == tmp_path / "machine" / "buckets" / "s3" / "bucket" / "a" / "b"
    assert buckets.address_of(path / "c") == "s3://bucket/a/b/c"
    assert buckets.address_of(tmp_path) is None
    assert buckets.named(f"{path}/x is damaged.") == "s3://bucket/a/b/x is damaged."
    assert (
        buckets.replaced("a=gs://b/x,gs://c,y", buckets.path_of) == f"a={buckets.path_of('gs://b/x')},{buckets.path_of('gs://c')},y"
    )
    assert buckets.foreign("a=https://host/x") == "https://host/x"
    for wrong in ("gs://", "gs://b//x", "gs://b/../x"):
        with pytest.raises(InputError, match="is no address of a folder or file; write it like gs://bucket/folder"):
            buckets.path_of(wrong)


def test_a_second_fetch_downloads_what_changed_alone(bucket, monkeypatch, tmp_path):
    put({"corpus.jsonl": "1", "qrels/test.tsv": "2"})
    got = calls(monkeypatch, "get")
    path = mirrors.local(RUN)
    assert sorted(got) == ["corpus.jsonl", "qrels/test.tsv"]
    assert mirrors.local(RUN) == path
    go_to(monkeypatch, tmp_path / "machine")
    put({"qrels/test.tsv": "3"})
    assert (mirrors.local(RUN) / "qrels/test.tsv").read_text() == "3"
    go_to(monkeypatch, tmp_path / "machine")
    fsspec.filesystem("memory").rm_file("/bucket/run/qrels/test.tsv")
    (path / "corpus.jsonl").unlink()
    assert [file.name for file in mirrors.local(RUN).rglob("*")] == ["corpus.jsonl"]
    assert mirrors.local(f"{RUN}/corpus.jsonl").read_text() == "1"
    assert sorted(got) == ["corpus.jsonl", "corpus.jsonl", "qrels/test.tsv", "qrels/test.tsv"]


def test_an_address_that_is_given_again_later_is_compared_again(bucket, monkeypatch):
    put({"metrics.jsonl": "1"})
    path = mirrors.local(RUN)
    put({"metrics.jsonl": "2"})
    assert (mirrors.local(RUN) / "metrics.jsonl").read_text() == "1"
    monkeypatch.setattr(mirrors, "FRESH_SECONDS", 0.0)
    assert (mirrors.local(RUN) / "metrics.jsonl").read_text() == "2"
    mirrors._mirrors[RUN].guards.append(lambda: None)
    put({"metrics.jsonl": "3"})
    assert (mirrors.local(RUN) / "metrics.jsonl").read_text() == "2"
    assert path == mirrors.local(RUN)


def test_what_was_read_alone_is_not_uploaded(bucket, monkeypatch):
    put({"corpus.jsonl": "1"})
    path, sent = mirrors.local(RUN), calls(monkeypatch, "put")
    mirrors.push_all()
    (path / "corpus.jsonl").unlink()
    mirrors.push_all()
    assert (sent, bucket()) == ([], {"corpus.jsonl"})


def test_an_object_that_changes_while_it_is_read_is_read_again(bucket, monkeypatch):
    put({"corpus.jsonl": "old"})
    get = buckets.Objects.get

    def changing(self, name, path):
        get(self, name, path)
        monkeypatch.setattr(buckets.Objects, "get", get)
        put({"corpus.jsonl": "new"})

    monkeypatch.setattr(buckets.Objects, "get", changing)
    assert (mirrors.local(RUN) / "corpus.jsonl").read_text() == "new"


def test_marks_are_uploaded_last_and_removed_first(bucket, monkeypatch):
    path, sent, removed = mirrors.local(RUN), calls(monkeypatch, "put"), calls(monkeypatch, "remove")
    write(path, {"run.json": "{}", "negatives/000001/manifest.json": "{}", "negatives/000001/pairs.npy": "1"})
    write(path, {"embeddings/a.npy": "1", ".train.lock": "", "checkpoints/.x.01234567.tmp/a": "1"})
    checkpoint(path, 10)
    mirrors.push_all()
    marks = [name for name in sent if name.rpartition("/")[2] in mirror_names.MARKS]
    assert marks == ["negatives/000001/manifest.json", "checkpoints/10/checksums.json", "checkpoints/10/_CHECKPOINT_METADATA"]
    assert sent[-3:] == marks
    assert bucket() == {*sent}
    assert not {name for name in sent if name.startswith(("embeddings", "."))}
    checkpoint(path, 20)
    for name in ("checksums.json", folders.CHECKPOINT_FILE, "params/a", "training/b"):
        (path / "checkpoints/10" / name).unlink()
    removed.clear()
    mirrors.push_all()
    assert next(iter(removed[1])) == "checkpoints/10/_CHECKPOINT_METADATA"
    assert not {name for name in bucket() if name.startswith("checkpoints/10/")}


def test_a_checkpoint_is_uploaded_whole_although_the_run_removes_it_meanwhile(bucket, monkeypatch):
    path, put_ = mirrors.local(RUN), buckets.Objects.put
    write(path, {"run.json": "{}"})
    checkpoint(path, 10)
    mirrors.push_all()
    whole = []

    def removing(self, name, file):
        shutil.rmtree(path / "checkpoints", ignore_errors=True)
        checkpoint(path, 30)
        whole.append("checkpoints/10/_CHECKPOINT_METADATA" in bucket())
        return put_(self, name, file)

    shutil.rmtree(path / "checkpoints/10")
    checkpoint(path, 20)
    monkeypatch.setattr(buckets.Objects, "put", removing)
    monkeypatch.setattr(mirror, "NUM_THREADS", 1)
    mirrors.of(path)[0].push()
    assert whole == [True] * 4
    assert {name.split("/")[1] for name in bucket() if name.startswith("checkpoints/")} == {"20"}
    assert "checkpoints/20/_CHECKPOINT_METADATA" in bucket()
    monkeypatch.setattr(buckets.Objects, "put", put_)
    mirrors.push_all()
    assert {name.split("/")[1] for name in bucket() if name.startswith("checkpoints/")} == {"30"}


def test_another_machine_gets_the_newest_whole_checkpoint_and_others_when_asked(bucket, monkeypatch, tmp_path):
    path = mirrors.local(RUN)
    for step in (10, 20, 30):
        checkpoint(path, step)
    mirrors.push_all()
    fsspec.filesystem("memory").rm_file("/bucket/run/checkpoints/30/training/b")
    go_to(monkeypatch, tmp_path / "other")
    with pytest.warns(UserWarning, match="checkpoints/30 is half uploaded, so it is left out"):
        path = mirrors.local(RUN)
    assert [folder.name for folder in (path / "checkpoints").iterdir()] == ["20"]
    for step in (10, 30):
        mirrors.bring(path / "checkpoints" / str(step))
    assert sorted(folder.name for folder in (path / "checkpoints").iterdir()) == ["10", "20"]
    assert next(folders.damages(path / "checkpoints" / "10"), None) is None


def test_what_a_killed_removal_left_of_a_checkpoint_goes_with_the_next_upload(bucket, monkeypatch, tmp_path):
    path = mirrors.local(RUN)
    checkpoint(path, 10)
    mirrors.push_all()
    put({"best/5/params/a": "weights", "checkpoints/5/params/a": "weights"})  # marks are removed first
    go_to(monkeypatch, tmp_path / "other")
    with pytest.warns(UserWarning, match="is half uploaded, so it is left out"):
        checkpoint(mirrors.local(RUN), 20)
    mirrors.push_all()
    assert {name.partition("/params")[0] for name in bucket() if "params" in name} == {"checkpoints/10", "checkpoints/20"}


def test_parts_of_jobs_are_uploaded_whole_fetched_when_asked_and_removed_everywhere(bucket, monkeypatch, tmp_path):
    path, sent = mirrors.local(RUN), calls(monkeypatch, "put")
    write(path, {"run.json": "{}", "embeddings/x/whole/a.npy": "1", "embeddings/x/whole.parts/0_of_2/progress.json": "{}"})
    mirrors.push_all()
    assert sent == ["run.json"]
    write(path, {"embeddings/x/whole.parts/0_of_2/a.npy": "1", "embeddings/x/whole.parts/0_of_2/manifest.json": "{}"})
    (path / "embeddings/x/whole.parts/0_of_2/progress.json").unlink()
    mirrors.push_all()
    assert sent[1:] == [f"embeddings/x/whole.parts/0_of_2/{name}" for name in ("a.npy", "manifest.json")]
    put({"embeddings/x/whole.parts/1_of_2/a.npy": "half"})
    go_to(monkeypatch, tmp_path / "other")
    others = mirrors.local(RUN) / "embeddings/x/whole.parts"
    assert not others.exists()
    mirrors.refresh(others, with_parts=True)
    assert [folder.name for folder in others.iterdir()] == ["0_of_2"]
    mirrors.clear(others, lambda name: False)
    assert bucket() == {"run.json"}
    go_to(monkeypatch, tmp_path / "machine")
    assert not (mirrors.local(RUN) / "embeddings/x/whole.parts/0_of_2").exists()
    assert (path / "embeddings/x/whole/a.npy").exists()


def test_a_part_that_another_job_removed_is_not_uploaded_again(bucket):
    path = mirrors.local(RUN)
    write(path, {"a.parts/0_of_2/a.npy": "1", "a.parts/0_of_2/manifest.json": "{}"})
    mirrors.push_all()
    for name in list(bucket()):
        fsspec.filesystem("memory").rm_file(f"/bucket/run/{name}")
    write(path, {"another": "1"})
    mirrors.push_all()
    assert bucket() == {"another"}


def test_a_folder_whose_upload_was_killed_is_not_fetched_by_other_machines(bucket, monkeypatch, tmp_path):
    path, put_ = mirrors.local(RUN), buckets.Objects.put

    def dying(self, name, file):
        if name == "out/manifest.json":
            raise KeyboardInterrupt
        return put_(self, name, file)

    write(path, {"out/embeddings.npy": "1", "out/manifest.json": "{}", "read.me": "1"})
    monkeypatch.setattr(buckets.Objects, "put", dying)
    with pytest.raises(KeyboardInterrupt):
        mirrors.push_all()
    monkeypatch.setattr(buckets.Objects, "put", put_)
    go_to(monkeypatch, tmp_path / "other")
    with pytest.warns(UserWarning, match="memory://bucket/run/out is half uploaded, so it is left out"):
        other = mirrors.local(RUN)
    assert [file.name for file in other.iterdir()] == ["read.me"]
    write(other, {"out/embeddings.npy": "2", "out/manifest.json": "{}"})
    mirrors.push_all()
    assert bucket() == {"out/embeddings.npy", "out/manifest.json", "read.me"}
    assert fsspec.filesystem("memory").cat_file("/bucket/run/out/embeddings.npy") == b"2"


def test_a_generation_without_one_of_its_files_is_refused(bucket, monkeypatch, tmp_path):
    path = mirrors.local(RUN)
    generations.write_lines(path / "negatives", 1, [generations.Mined("q", "d", ["e"], [])], {"docs": "1", "queries": "2"})
    mirrors.push_all()
    fsspec.filesystem("memory").rm_file("/bucket/run/negatives/000001/neg_docs.npy")
    go_to(monkeypatch, tmp_path / "other")
    with pytest.raises(generations.DamagedGeneration, match=r"neg_docs\.npy"):
        generations.open_generation(mirrors.local(RUN) / "negatives", 1)


def test_a_lost_write_is_sent_again_and_its_mark_waits(bucket, monkeypatch):
    path, put_ = mirrors.local(RUN), buckets.Objects.put
    checkpoint(path, 10)
    lost = []

    def losing(self, name, file):
        if name.endswith("params/a") and len(lost) < num_losses:
            lost.append(name)
            assert name.replace("params/a", folders.CHECKPOINT_FILE) not in bucket()
            return buckets.Sent(file.stat().st_size, "0")
        return put_(self, name, file)

    monkeypatch.setattr(buckets.Objects, "put", losing)
    num_losses = 1
    mirrors.push_all()
    assert len(bucket()) == 4
    num_losses = 2  # an object that is written again, in another content of the same size
    checkpoint(path, 10, "another")
    mirrors.push_all()
    assert fsspec.filesystem("memory").cat_file("/bucket/run/checkpoints/10/params/a") == b"another"
    checkpoint(path, 20)
    num_losses = 1000
    with pytest.raises(InputError, match=r"took 'checkpoints/20/params/a' and does not list it"):
        mirrors.push_all(seconds=0)
    assert "checkpoints/20/_CHECKPOINT_METADATA" not in bucket()


def test_an_upload_that_was_killed_continues_on_its_machine_and_is_seen_nowhere_else(bucket, monkeypatch, tmp_path):
    put_ = buckets.Objects.put

    def dying(self, name, file):
        if name.endswith("training/b"):
            raise KeyboardInterrupt
        return put_(self, name, file)

    with mirrors.only_one(mirrors.local(RUN) / ".train.lock", "training"):
        path = mirrors.local(RUN)
        write(path, {"run.json": "{}", "metrics.jsonl": "1"})
        mirrors.push_all()
    lease = leases.Lease(path / ".train.lock", "training")
    lease.take()
    write(path, {"metrics.jsonl": "1, 2"})
    checkpoint(path, 10)
    monkeypatch.setattr(buckets.Objects, "put", dying)
    with pytest.raises(KeyboardInterrupt):
        mirrors.push_all()
    monkeypatch.setattr(buckets.Objects, "put", put_)
    monkeypatch.setattr(leases, "LEASE_SECONDS", 0.0)
    lease._stop.set()
    go_to(monkeypatch, tmp_path / "machine")
    with mirrors.only_one(mirrors.local(RUN) / ".train.lock", "training"):
        assert (path / "metrics.jsonl").read_text() == "1, 2"
        assert (path / "checkpoints/10").is_dir()
    assert "checkpoints/10/_CHECKPOINT_METADATA" in bucket()
    assert ".train.lock" not in bucket()


def test_a_machine_that_was_overtaken_drops_what_it_did_not_upload(bucket, monkeypatch, tmp_path):
    lock = mirrors.local(RUN) / ".train.lock"
    checkpoint(lock.parent, 10)
    write(lock.parent, {"metrics.jsonl": "old"})
    put({"metrics.jsonl": "new"})
    with mirrors.only_one(lock, "training"):
        assert (lock.parent / "metrics.jsonl").read_text() == "new"
        assert not list((lock.parent / "checkpoints").iterdir())


def test_an_address_has_one_trainer_until_its_lease_expires(bucket, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(leases, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(leases, "BEAT_SECONDS", 0.02)
    monkeypatch.setattr(leases, "LEASE_SECONDS", 30.0)
    first = leases.Lease(buckets.path_of(RUN) / ".train.lock", f"training in {RUN}")
    assert not first.take()
    go_to(monkeypatch, tmp_path / "other")
    second = leases.Lease(buckets.path_of(RUN) / ".train.lock", f"training in {RUN}")
    with pytest.raises(InputError, match=r"process \d+ on .* is training in memory://bucket/run already; stop it first"):
        second.take()
    assert "waiting up to 30 s, to see whether process" in capsys.readouterr().err
    first._stop.set()
    first._thread.join()  # as if its network were gone
    monkeypatch.setattr(leases, "LEASE_SECONDS", 0.1)
    assert not second.take()
    with pytest.raises(mirrors.TakenOver, match="is training in memory://bucket/run now, as this process was silent"):
        first.check()
    first.release(is_all_sent=True)
    second.check()
    second.release(is_all_sent=True)
    assert bucket() == set()


def test_a_trainer_that_was_overtaken_learns_it_also_after_the_other_one_ended(bucket, monkeypatch, tmp_path):
    monkeypatch.setattr(leases, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(leases, "LEASE_SECONDS", 0.1)
    first = leases.Lease(buckets.path_of(RUN) / ".train.lock", f"training in {RUN}")
    first.take()
    first._stop.set()
    first._thread.join()  # as if its machine were suspended
    go_to(monkeypatch, tmp_path / "other")
    second = leases.Lease(buckets.path_of(RUN) / ".train.lock", f"training in {RUN}")
    second.take()
    second.release(is_all_sent=True)
    with pytest.raises(mirrors.TakenOver, match="another process was training in memory://bucket/run, as this process was silent"):
        first.check()
    first._stop.clear()
    monkeypatch.setattr(leases, "BEAT_SECONDS", 0.0)
    timer = threading.Timer(1.0, first._stop.set)
    timer.start()
    first._keep()
    timer.cancel()
    assert bucket() == set()


def test_a_lease_that_its_holder_frees_is_not_lost_meanwhile(bucket, monkeypatch):
    lease = leases.Lease(buckets.path_of(RUN) / ".train.lock", f"training in {RUN}")
    lease.take()
    remove, checked = buckets.Objects.remove, []

    def removed(self, names):
        remove(self, names)
        lease.check()  # by an upload in another thread
        checked.append(names)

    monkeypatch.setattr(buckets.Objects, "remove", removed)
    lease.release(is_all_sent=True)
    assert checked
    assert bucket() == set()


def test_a_thread_uploads_and_follows_and_tells_once_of_a_bucket_that_is_gone(bucket, monkeypatch, tmp_path):
    monkeypatch.setattr(mirrors, "SYNC_SECONDS", 0.01)
    path, list_ = mirrors.local(RUN), buckets.Objects.list
    faults = []

    def failing(self):
        if len(faults) < 3:
            faults.append(1)
            raise buckets.Unreachable("memory://bucket/run cannot be reached (x); check the network.")
        return list_(self)

    put({"negatives/000001/pairs.npy": "1"})  # the bucket in memory is not for threads
    checkpoint(path, 10)
    monkeypatch.setattr(buckets.Objects, "list", failing)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with mirrors.kept_equal(path) as sync:
            sync.follow(path / "negatives")
            while "checkpoints/10/_CHECKPOINT_METADATA" not in bucket() or not (path / "negatives/000001/pairs.npy").exists():
                sync.check()
                time.sleep(0.01)
    assert [str(one.message) for one in told if "cannot be reached" in str(one.message)] == [
        "memory://bucket/run cannot be reached (x); check the network. The run continues; it is tried again until its end."
    ]


def test_settings_get_the_copy_and_keep_the_address(bucket, monkeypatch):
    put({"corpus.jsonl": "1"})

    @checked
    def opened(dataset_dir: LocalPath = "", tables: tuple[LocalPath, ...] = (), cache: str = ""):
        return dataset_dir, tables, cache

    path = str(buckets.path_of(RUN))
    assert opened(dataset_dir=RUN, tables=("a", RUN), cache=RUN) == (path, ("a", path), RUN)
    assert (buckets.path_of(RUN) / "corpus.jsonl").is_file()


class ForbiddenError(Exception):
    code = 403


class NoCredentialsError(Exception):
    pass


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (ForbiddenError("no"), r"gs://b/x refuses these credentials \(no\); give the account the right to list"),
        (PermissionError("Access Denied"), r"s3://b/x refuses these credentials \(Access Denied\); .* AWS_ACCESS_KEY_ID"),
        (NoCredentialsError("none"), r"there are no usable credentials for s3://b/x \(none\); set them by aws configure"),
        (FileNotFoundError("x"), "the bucket s3://b does not exist; create it, or correct the address"),
        (ConnectionError("refused"), r"s3://b/x cannot be reached \(ConnectionError: refused\); check the network"),
    ],
)
def test_a_fault_of_a_bucket_is_a_sentence_with_a_remedy(error, sentence):
    address = "gs://b/x" if "gs://" in sentence else "s3://b/x"
    with pytest.raises(InputError, match=sentence), buckets._explained(address, is_object=False):
        raise error


def test_a_client_that_is_missing_is_named(monkeypatch):
    buckets._client.cache_clear()

    def missing(*given, **options):
        raise ImportError

    monkeypatch.setattr(fsspec, "filesystem", missing)
    with pytest.raises(InputError, match=r"gs:// needs the package gcsfs, which is not installed; pip install 'de_jax\[buckets\]'"):
        buckets.Objects("gs://bucket/x").list()


def test_a_copy_that_was_deleted_to_free_the_disk_is_no_deletion(bucket, monkeypatch, tmp_path):
    path = mirrors.local(RUN)
    write(path, {"run.json": "{}"})
    for step in (10, 20):
        checkpoint(path, step)
    mirrors.push_all()
    there = bucket()
    for file in sorted((path / "checkpoints/10").rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    (path / "checkpoints/10").rmdir()
    go_to(monkeypatch, tmp_path / "machine")
    write(mirrors.local(RUN), {"evaluations/result.json": "{}"})
    mirrors.push_all()
    assert bucket() == there | {"evaluations/result.json"}


def test_the_record_survives_damage(bucket, monkeypatch, tmp_path):
    put({"corpus.jsonl": "1"})
    got = calls(monkeypatch, "get")
    Mirror(RUN).fetch()
    for file in (tmp_path / "machine").rglob("files.json"):
        file.write_text(json.dumps({"corpus.jsonl": 3}))
    Mirror(RUN).fetch()
    assert got == ["corpus.jsonl"] * 2


def test_doctor_tries_a_bucket(bucket, monkeypatch):
    put({"run.json": "{}"})
    problems = []
    assert list(doctor._bucket(RUN, problems)) == [f"{RUN}: 1 objects", "an object was written, read and deleted"]
    assert bucket() == {"run.json"}
    monkeypatch.setattr(buckets.Objects, "create", lambda *given: True)
    assert "two writers of a new object are not told apart" in list(doctor._bucket(RUN, problems))[-1]
    assert list(doctor._bucket("https://host", problems)) == []
    assert problems == [
        f"{RUN} loses an object that was written there; use another bucket.",
        "--bucket is https://host; it must be an address gs:// or s3://.",
    ]
