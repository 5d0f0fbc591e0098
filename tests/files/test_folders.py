"""Folders: complete or absent, replaced only by their own kind of writer."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from written_folders import (
    import_run,
    write_embeddings,
    write_expansion,
    write_generation,
    write_index,
    write_pair_store,
    write_t5x,
    write_token_store,
    write_vector_index,
)

from de_jax import cli
from de_jax.data.sources import pair_store
from de_jax.data.stores import corpus
from de_jax.files import folders, outputs
from de_jax.retrieval.embedding_files import open_embeddings
from de_jax.types import InputError

ROOT = Path(folders.__file__).parents[2]
REPLACING = (write_token_store, write_pair_store, write_index, write_vector_index)
WRITERS = (*REPLACING, write_t5x, write_generation, import_run)


def write_thesis(folder):
    folder.mkdir()
    (folder / "thesis.txt").write_text("precious")


def content(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("write", WRITERS)
def test_a_folder_of_somebody_else_stays_as_it_is(tmp_path, tokenizer, write):
    folder = tmp_path / "000001"
    write_thesis(folder)
    (folder / "manifest.json").write_text("{}")
    with pytest.raises(InputError, match="000001 exists already"):
        write(folder, tokenizer)
    assert content(tmp_path).keys() == {Path("000001/thesis.txt"), Path("000001/manifest.json")}
    (tmp_path / "2").write_text("precious")
    with pytest.raises(InputError, match=r"is a file|exists already"):
        write(tmp_path / "2" if write is not write_generation else folder, tokenizer)


@pytest.mark.parametrize("write", REPLACING)
def test_a_former_output_is_replaced_unless_something_was_added(tmp_path, tokenizer, write):
    folder = tmp_path / "out"
    write(folder, tokenizer)
    first = content(folder)
    write(folder, tokenizer)
    assert content(folder) == first
    (folder / "notes").mkdir()
    (folder / "notes" / "mine.txt").write_text("precious")
    with pytest.raises(InputError, match=r"out exists already and holds notes/mine.txt, which is not part of a former"):
        write(folder, tokenizer)
    assert list(tmp_path.iterdir()) == [folder]
    assert (folder / "notes" / "mine.txt").read_text() == "precious"


def test_an_output_of_another_kind_is_not_replaced(tmp_path, tokenizer):
    write_token_store(tmp_path / "out", tokenizer)
    with pytest.raises(InputError, match="is not part of a former faiss index"):
        write_index(tmp_path / "out", tokenizer)


def test_what_stood_there_comes_back_when_the_new_folder_cannot_take_its_place(tmp_path, monkeypatch):
    with folders.atomic_dir(tmp_path / "out", "test") as folder:
        (folder / "old").touch()
    replace, names = os.replace, iter(("new", "aside"))
    monkeypatch.setattr(outputs, "temporary", lambda path: path.with_name(next(names)))
    monkeypatch.setattr(os, "replace", lambda source, to: 1 // 0 if source.name == "new" else replace(source, to))
    with pytest.raises(ZeroDivisionError), folders.atomic_dir(tmp_path / "out", "test"):
        monkeypatch.setattr(outputs, "write_json", lambda path, value: None)  # which goes by a rename too
    assert content(tmp_path).keys() == {Path("out/old"), Path("out/checksums.json")}


def test_a_folder_that_somebody_fills_while_the_work_is_done_stays(tmp_path):
    with pytest.raises(InputError, match=r"holds thesis\.txt"), folders.atomic_dir(tmp_path / "out", "test"):
        write_thesis(tmp_path / "out")
    assert content(tmp_path).keys() == {Path("out/thesis.txt")}


@pytest.mark.parametrize(
    ("write", "open_folder"),
    [
        (write_token_store, corpus.open_token_store),
        (write_pair_store, pair_store.open_pair_store),
        (write_embeddings, open_embeddings),
    ],
)
def test_a_flipped_bit_is_found_when_a_folder_is_opened_and_by_verify_where_files_are_large(
    tmp_path, tokenizer, monkeypatch, capsys, write, open_folder
):
    folder, draw = tmp_path / "folder", np.random.default_rng(0)
    write(folder, tokenizer)
    cli.call("verify", [str(tmp_path)])
    for name in folders.names(folder):
        before = (folder / name).read_bytes()
        bits = np.frombuffer(before, np.uint8).copy()
        bits[draw.integers(len(bits))] ^= 1 << draw.integers(8)
        (folder / name).write_bytes(bits.tobytes())
        with pytest.raises(InputError, match=re.escape(str(folder / name) if name != "manifest.json" else str(folder))):
            open_folder(folder)
        with pytest.raises(InputError, match=f"{name} has another SHA-256 than in checksums.json; files below .* damaged: 1"):
            cli.call("verify", [str(folder)])
        (folder / name).write_bytes(before)
    array = next(name for name in folders.names(folder) if name in ("tokens.npy", "pairs.npy", "embeddings.npy"))
    before = (folder / array).read_bytes()
    (folder / array).write_bytes(before[:-4] + bytes([before[-4] ^ 1]) + before[-3:])  # another token, pair or number
    monkeypatch.setattr(folders, "SMALL_BYTES", 8)
    open_folder(folder)
    capsys.readouterr()
    with pytest.raises(InputError, match=array):
        cli.call("verify", [str(folder)])
    assert [array in one for one in json.loads(capsys.readouterr().out)["damaged"]] == [True]
    (folder / folders.CHECKSUMS_FILE).unlink()
    open_folder(folder)
    with pytest.raises(InputError, match=r"has a checksums\.json"):
        cli.call("verify", [str(folder)])


def test_verify_reads_checksums_of_manifests_and_names_folders_without_any(tmp_path, tokenizer, capsys):
    write_generation(tmp_path / "negatives" / "000001", tokenizer)
    write_expansion(tmp_path / "expansion", tokenizer)
    write_pair_store(tmp_path / "pairs", tokenizer)
    write_token_store(tmp_path / "old", tokenizer)
    (tmp_path / "old" / folders.CHECKSUMS_FILE).unlink()
    (tmp_path / "checkpoints" / "3").mkdir(parents=True)
    (tmp_path / "checkpoints" / "3" / folders.CHECKPOINT_FILE).write_text("{}")
    (tmp_path / "manifest.json").write_text('{"name": "somebody else\'s"}')
    cli.call("verify", [str(tmp_path)])
    out, err = capsys.readouterr()
    unchecked = [str(tmp_path / "checkpoints" / "3"), str(tmp_path / "old")]
    assert json.loads(out) == {"folder": str(tmp_path), "num_folders": 5, "damaged": [], "unchecked": unchecked}
    assert [line.partition(": ")[0] for line in err.splitlines()] == unchecked
    parts = {name: next((tmp_path / name).rglob(pattern)) for name, pattern in PARTS_OF_MANIFESTS.items()}
    for name, part in parts.items():
        before = part.read_bytes()
        part.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
        with pytest.raises(InputError, match=rf"{part.name} has another SHA-256 than in manifest\.json; .*: 1,"):
            cli.call("verify", [str(tmp_path / name)])
        part.write_bytes(before)


PARTS_OF_MANIFESTS = {"negatives": "neg_docs.npy", "expansion": "part-*.jsonl.gz"}


def test_verify_passes_over_what_is_not_finished(tmp_path, tokenizer):
    write_token_store(tmp_path / "store", tokenizer)
    for name in (".store.0123abcd.tmp", "3.orbax-checkpoint-tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / folders.CHECKSUMS_FILE).write_text("{")
    cli.call("verify", [str(tmp_path)])
    (tmp_path / "store" / folders.CHECKSUMS_FILE).write_text("{")
    with pytest.raises(InputError, match=r"store/checksums.json, line 1: not valid JSON"):
        cli.call("verify", [str(tmp_path)])
    with pytest.raises(InputError, match="does not exist"):
        cli.call("verify", [str(tmp_path / "nowhere")])


@pytest.mark.timeout(60)
def test_a_cache_that_is_whole_is_opened_without_its_lock(tmp_path):
    folder = tmp_path / "folder"

    def build(folder):
        folder.mkdir()
        return "built"

    assert folders.build_once(folder, lambda folder: "opened", build) == "built"
    with outputs.in_turn(folder):
        assert folders.build_once(folder, lambda folder: "opened", build) == "opened"


def test_a_damaged_folder_of_the_cache_is_built_again_or_stays_where_that_fails(tmp_path, tokenizer):
    def build(folder):
        write_token_store(folder, tokenizer)
        return corpus.open_token_store(folder)

    folders.build_once(tmp_path / "store", corpus.open_token_store, build)
    (tmp_path / "store" / "manifest.json").write_text("{")
    with pytest.raises(ZeroDivisionError):
        folders.build_once(tmp_path / "store", corpus.open_token_store, lambda folder: 1 // 0)
    assert (tmp_path / "store" / "manifest.json").read_text() == "{"
    assert folders.build_once(tmp_path / "store", corpus.open_token_store, build).num_texts == 2
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


@pytest.mark.parametrize("was_there", [False, True])
def test_a_folder_of_the_cache_that_cannot_be_opened_once_it_is_built_does_not_stay(was_there, tmp_path):
    def refuse(folder):
        raise InputError("it cannot be opened")

    def build(folder):
        with folders.atomic_dir(folder) as unfinished:
            (unfinished / "new").touch()
        refuse(folder)

    if was_there:
        (tmp_path / "store").mkdir()
        (tmp_path / "store" / "old").touch()
    for _ in range(2):
        with pytest.raises(InputError, match="it cannot be opened"):
            folders.build_once(tmp_path / "store", refuse, build)
        assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == ["store", "store/old"] * was_there


def test_few_places_remove_folders():
    """Each of them was looked at: temporary names, unfinished checkpoints, the embeddings of a miner's older checkpoints, the
    copy of a checkpoint that machines mine with, and parts that became one file or were never finished."""
    callers = set()
    for path in (
        path for name in ("de_jax", "tools", "tasks", "benchmarks", "experiments") for path in (ROOT / name).rglob("*.py")
    ):
        if re.search(r"\brmtree|\brmdir|\bremovedirs|(?<!\.)\b(folders\.)?clear\(", path.read_text()):
            callers.add(path.name)
    own = {"checkpoint.py", "mining_run.py", "mine.py", "copies.py", "owners.py"}
    joined = {"parts.py", "teacher.py", "faiss_filling.py"}
    assert callers == {"folders.py", "outputs.py"} | own | joined


KILLED = """
import os, signal, sys
from pathlib import Path
from de_jax.files import folders, outputs
path = Path(sys.argv[1])
with folders.atomic_dir(path / "store"), outputs.atomic_file(path / "report.json") as file:
    file.touch()
    print(*sorted(one.name for one in path.iterdir()), sep="\\n", flush=True)
    if sys.argv[2] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.stdin.read()
"""


def test_an_output_leaves_nothing_of_killed_processes_beside_it_and_all_of_live_ones(tmp_path):
    def begin(how):
        command = [sys.executable, "-c", KILLED, str(tmp_path), how]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    killed = begin("killed")
    assert killed.wait() == -signal.SIGKILL
    live = begin("live")
    left = {path.name for path in tmp_path.iterdir()}
    theirs = {live.stdout.readline().strip() for _ in range(2)}
    assert len(left | theirs) >= 2
    with folders.atomic_dir(tmp_path / "store"), outputs.atomic_file(tmp_path / "report.json") as file:
        file.touch()
    assert {path.name for path in tmp_path.iterdir()} == {"store", "report.json", *theirs}
    live.kill()
    live.wait()
    (tmp_path / "store").rmdir()
    with folders.atomic_dir(tmp_path / "store"), outputs.atomic_file(tmp_path / "report.json") as file:
        file.touch()
    assert {path.name for path in tmp_path.iterdir()} == {"store", "report.json"}


def test_a_folder_with_the_locks_of_killed_processes_alone_is_taken(tmp_path):
    (tmp_path / "out").mkdir()
    for name in (".queries.lock", ".docs.0123abcd.tmp"):
        (tmp_path / "out" / name).write_text("process 1 on a")
    folders.require_replaceable(tmp_path / "out", None)
    (tmp_path / "out" / "queries.lock").write_text("mine")
    with pytest.raises(InputError, match=r"holds queries\.lock; choose a folder that is absent or empty"):
        folders.require_replaceable(tmp_path / "out", None)
