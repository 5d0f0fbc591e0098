"""Copies of buckets and the outputs of commands, on a bucket in memory; `test_servers.py` has real servers."""

import subprocess
import sys

import fsspec
import pytest

from de_jax import command
from de_jax.buckets import copies, objects
from de_jax.buckets.objects import Objects, Unreachable
from de_jax.data.negatives import generations
from de_jax.files import addresses, folders, outputs
from de_jax.settings import LocalPath, checked
from de_jax.tools import doctor
from de_jax.types import InputError

RUN = "memory://bucket/run"


def write(path, files):
    for name, text in files.items():
        with outputs.atomic_file(path / name) as unfinished:
            unfinished.write_text(text)


def calls(monkeypatch, name):
    """The names that a method of `Objects` is called with, from now on."""
    seen, method = [], getattr(Objects, name)
    monkeypatch.setattr(
        Objects, name, lambda self, first, *given, **named: (seen.append(first), method(self, first, *given, **named))[1]
    )
    return seen


def checkpoint(step, text="weights"):
    return {f"checkpoints/{step}/params": text, f"checkpoints/{step}/{folders.CHECKPOINT_FILE}": "{}"}


def test_addresses_and_paths_stand_for_each_other(bucket, tmp_path):
    path = addresses.path_of("s3://bucket/a/b/")
    assert path == tmp_path / "machine" / "buckets" / "s3" / "bucket" / "a" / "b"
    assert addresses.address_of(path / "c") == "s3://bucket/a/b/c"
    assert addresses.address_of(tmp_path) is None
    assert addresses.named(f"{path}/x is damaged.") == "s3://bucket/a/b/x is damaged."
    found = addresses.replaced("a=gs://b/x,gs://c,y", addresses.path_of)
    assert found == f"a={addresses.path_of('gs://b/x')},{addresses.path_of('gs://c')},y"
    assert addresses.foreign("a=https://host/x") == "https://host/x"
    for wrong in ("gs://", "gs://b//x", "gs://b/../x"):
        with pytest.raises(InputError, match="is no address of a folder or file; write it like gs://bucket/folder"):
            addresses.path_of(wrong)


def test_a_path_of_this_machine_imports_nothing_of_buckets(tmp_path):
    program = f"""
import sys
from de_jax import command
from de_jax.files import addresses, outputs
with addresses.only_one({str(tmp_path / ".lock")!r}, "x") as owner, addresses.written({str(tmp_path)!r}) as path:
    outputs.write_json(path / "a.json", 1)
assert owner is None
assert outputs.COMPLETED is None
assert not [name for name in sys.modules if name.startswith("de_jax.buckets") or name in ("fsspec", "s3fs", "gcsfs")]
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_second_fetch_downloads_what_changed_alone(bucket, monkeypatch):
    bucket.put({"corpus.jsonl": "1", "qrels/test.tsv": "2"})
    got = calls(monkeypatch, "get")
    path = addresses.local(RUN)
    assert sorted(got) == ["corpus.jsonl", "qrels/test.tsv"]
    assert addresses.local(RUN) == path
    bucket.go_to("machine")
    bucket.put({"qrels/test.tsv": "3"})
    assert (addresses.local(RUN) / "qrels/test.tsv").read_text() == "3"
    bucket.go_to("machine")
    bucket.store.apply("remove", "bucket/run/qrels/test.tsv")
    (path / "corpus.jsonl").unlink()
    assert [file.name for file in addresses.local(RUN).rglob("*")] == ["corpus.jsonl"]
    assert addresses.local(f"{RUN}/corpus.jsonl").read_text() == "1"
    assert sorted(got) == ["corpus.jsonl", "corpus.jsonl", "qrels/test.tsv", "qrels/test.tsv"]


def test_an_address_that_is_given_again_later_is_compared_again(bucket, monkeypatch):
    bucket.put({"metrics.jsonl": "1"})
    path = addresses.local(RUN)
    bucket.put({"metrics.jsonl": "2"})
    assert (addresses.local(RUN) / "metrics.jsonl").read_text() == "1"
    monkeypatch.setattr(copies, "FRESH_SECONDS", 0.0)
    assert (addresses.local(RUN) / "metrics.jsonl").read_text() == "2"
    assert path == addresses.local(RUN)


def test_what_was_read_alone_is_not_uploaded(bucket, monkeypatch):
    bucket.put({"corpus.jsonl": "1"})
    path, sent = addresses.local(RUN), calls(monkeypatch, "put")
    addresses.upload()
    (path / "corpus.jsonl").unlink()
    addresses.upload()
    assert (sent, bucket.names()) == ([], {"corpus.jsonl"})


def test_an_object_that_changes_while_it_is_read_is_read_again(bucket, monkeypatch):
    bucket.put({"corpus.jsonl": "old"})
    get = Objects.get

    def changing(self, name, path):
        get(self, name, path)
        monkeypatch.setattr(Objects, "get", get)
        bucket.put({"corpus.jsonl": "new"})

    monkeypatch.setattr(Objects, "get", changing)
    assert (addresses.local(RUN) / "corpus.jsonl").read_text() == "new"


def test_the_marks_of_an_output_are_uploaded_last_and_removed_first(bucket, monkeypatch):
    out = addresses.local(f"{RUN}/out")
    sent, removed = calls(monkeypatch, "put"), []
    monkeypatch.setattr(bucket.store, "gate", lambda operation, name: operation == "remove" and removed.append(name))

    def save(files):
        with folders.atomic_dir(out, "index") as unfinished:
            for name in files:
                (unfinished / name).write_text("1")

    save(["b.npy", "a.npy", "manifest.json"])
    addresses.upload()
    assert sent[-2:] == ["manifest.json", "checksums.json"]
    assert bucket.names() == {f"out/{name}" for name in ("a.npy", "b.npy", "manifest.json", "checksums.json")}
    save(["c.npy", "manifest.json"])
    addresses.upload()
    names = [name.rpartition("/")[2] for name in removed]
    assert names == ["checksums.json", "manifest.json", "a.npy", "b.npy"]
    assert bucket.names() == {f"out/{name}" for name in ("c.npy", "manifest.json", "checksums.json")}


def test_a_folder_that_an_earlier_process_began_is_uploaded_whole_with_its_manifest(bucket):
    out = addresses.local(f"{RUN}/out")
    out.mkdir(parents=True)
    (out / "part-1").write_text("of a killed process")
    write(out, {"manifest.json": "{}"})
    addresses.upload()
    assert bucket.names() == {"out/part-1", "out/manifest.json"}


def test_what_another_process_left_in_a_copy_is_not_uploaded(bucket):
    bucket.put({"run.json": "{}"})
    path = addresses.local(RUN)
    for name, text in checkpoint(10).items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)
    write(path, {"evaluations/a/result.json": "{}", "embeddings/docs/x.npy": "1"})
    addresses.upload()
    assert bucket.names() == {"run.json", "evaluations/a/result.json"}


def test_another_machine_gets_the_newest_whole_checkpoint_and_others_when_asked(bucket):
    bucket.put(checkpoint(10) | checkpoint(20) | checkpoint(30))
    bucket.store.apply("remove", f"bucket/run/checkpoints/30/{folders.CHECKPOINT_FILE}")
    with pytest.warns(UserWarning, match="checkpoints/30 is half uploaded, so it is left out"):
        path = addresses.local(RUN)
    assert [folder.name for folder in (path / "checkpoints").iterdir()] == ["20"]
    for step in (10, 30):
        with pytest.warns(UserWarning, match="checkpoints/30 is half uploaded"):
            copies.pull(path, asked=f"checkpoints/{step}")
    assert sorted(folder.name for folder in (path / "checkpoints").iterdir()) == ["10", "20"]


def test_parts_of_jobs_are_fetched_when_asked_and_removed_everywhere(bucket, monkeypatch):
    whole = addresses.local(RUN) / "embeddings/x/whole"
    parts = whole.with_name("whole.parts")
    write(parts / "0_of_2", {"a.npy": "1", "manifest.json": "{}"})
    write(whole.parents[2], {"run.json": "{}"})
    addresses.upload()
    assert bucket.names() == {"run.json", *(f"embeddings/x/whole.parts/0_of_2/{name}" for name in ("a.npy", "manifest.json"))}
    bucket.put({"embeddings/x/whole.parts/1_of_2/a.npy": "half"})
    bucket.go_to("other")
    with pytest.warns(UserWarning, match="1_of_2 is half uploaded"):
        others = addresses.local(RUN) / "embeddings/x/whole.parts"
    assert not others.exists()
    with pytest.warns(UserWarning, match="1_of_2 is half uploaded"):
        copies.pull(others, asked="0_of_2")
    assert [folder.name for folder in others.iterdir()] == ["0_of_2"]
    copies.remove_below(others, copies.re.compile(r"\d+_of_\d+"))
    assert bucket.names() == {"run.json"}


def test_a_generation_without_one_of_its_files_is_refused(bucket):
    path = addresses.local(RUN)
    generations.write_lines(path / "negatives", 1, [generations.Mined("q", "d", ["e"], [])], {"docs": "1", "queries": "2"})
    addresses.upload()
    bucket.store.apply("remove", "bucket/run/negatives/000001/neg_docs.npy")
    bucket.go_to("other")
    with pytest.raises(generations.DamagedGeneration, match=r"neg_docs\.npy"):
        generations.open_generation(addresses.local(RUN) / "negatives", 1)


def test_settings_get_the_copy_and_keep_the_address(bucket):
    bucket.put({"corpus.jsonl": "1"})

    @checked
    def opened(dataset_dir: LocalPath = "", tables: tuple[LocalPath, ...] = (), cache: str = ""):
        return dataset_dir, tables, cache

    path = str(addresses.path_of(RUN))
    assert opened(dataset_dir=RUN, tables=("a", RUN), cache=RUN) == (path, ("a", path), RUN)
    assert (addresses.path_of(RUN) / "corpus.jsonl").is_file()


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
    with pytest.raises(InputError, match=sentence), objects._explained(address, is_object=False):
        raise error


def test_a_client_that_is_missing_is_named(monkeypatch):
    objects._client.cache_clear()

    def missing(*given, **options):
        raise ImportError("Please install gcsfs") from ModuleNotFoundError(name="gcsfs")

    monkeypatch.setattr(fsspec, "filesystem", missing)
    with pytest.raises(InputError, match=r"gs:// needs the package gcsfs; run pip install 'de-jax-retrieval\[buckets\]'"):
        Objects("gs://bucket/x").list()


def test_the_record_survives_damage(bucket, monkeypatch, tmp_path):
    bucket.put({"corpus.jsonl": "1"})
    got = calls(monkeypatch, "get")
    path = addresses.local(RUN)
    for file in (tmp_path / "machine").rglob("files.json"):
        file.write_text('{"corpus.jsonl": 3}')
    copies.pull(path)
    assert got == ["corpus.jsonl"] * 2


def test_a_command_that_cannot_upload_says_so_and_behind_its_own_error_warns(bucket, monkeypatch):
    monkeypatch.setattr(copies, "LAST_SECONDS", 0.0)
    path = addresses.local(RUN)

    def refusing(operation, name):
        if operation == "put":
            raise ConnectionError("refused")

    monkeypatch.setattr(bucket.store, "gate", refusing)
    write(path, {"result.json": "{}"})
    with pytest.warns(UserWarning, match="cannot be reached"):
        addresses.upload(is_failed=True)
    with pytest.raises(Unreachable, match="not everything was uploaded: memory://bucket/run cannot be reached"):
        addresses.upload()
    monkeypatch.setattr(bucket.store, "gate", lambda operation, name: None)
    addresses.upload()
    assert bucket.names() == {"result.json"}


def test_a_command_refuses_an_address_of_another_kind():
    parser = command.Parser()
    parser.add_argument("--run_dir")
    with pytest.raises(InputError, match="--run_dir is https://host; it must be a path, or an address gs:// or s3://"):
        parser.parse_args(["--run_dir=https://host"])


def test_doctor_tries_a_bucket(bucket, monkeypatch):
    bucket.put({"run.json": "{}"})
    problems = []
    assert list(doctor._bucket(RUN, problems)) == [f"{RUN}: 1 objects", "an object was written, read and deleted"]
    assert bucket.names() == {"run.json"}
    put = Objects.put
    monkeypatch.setattr(Objects, "put", lambda self, name, content, is_new=False: put(self, name, content))
    list(doctor._bucket(RUN, problems))
    monkeypatch.setattr(Objects, "put", lambda *given, **named: None)
    list(doctor._bucket(RUN, problems))
    assert list(doctor._bucket("https://host", problems)) == []
    assert problems == [
        f"{RUN} overwrites an object that must be new, so a run may have two owners; use another bucket.",
        f"{RUN} loses an object that was written there; use another bucket.",
        f"{RUN} overwrites an object that must be new, so a run may have two owners; use another bucket.",
        "--bucket is https://host; it must be an address gs:// or s3://.",
    ]
