"""Folders: complete or absent, replaced only by their own kind of writer."""

import os
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from letters import Letters

from de_jax.data import corpus, files, folders, generations, pair_writer
from de_jax.data.generations import Mined
from de_jax.interop import t5x
from de_jax.models.dual_encoder import DualEncoder
from de_jax.models.t5 import T5Config
from de_jax.models.tower import TowerConfig
from de_jax.retrieval import index_files
from de_jax.training.run import write_run
from de_jax.types import InputError

ROOT = Path(folders.__file__).parents[2]
TOWER = TowerConfig(T5Config(vocab_size=30, model_dim=4, num_layers=1, num_heads=1, head_dim=4, mlp_dim=4), projection_dim=2)
MODEL = DualEncoder(TOWER, TOWER)


def write_token_store(folder, tokenizer):
    corpus.build_token_store([("a", "bc"), ("b", "d")], Letters(), folder, progress=False)


def write_pair_store(folder, tokenizer):
    chunk = {"query_id": ["q"], "query": tokenizer.encode(["the fox"]), "doc_id": ["d"], "doc": tokenizer.encode(["a dog"])}
    source = pair_writer.PairSource("pairs", 1.0, lambda: iter([chunk]), {"query": None, "doc": None})
    pair_writer.write(folder, [source], [], {"query": tokenizer, "doc": tokenizer}, made_from="test")


def write_index(folder, tokenizer):
    index_files.write(folder, lambda path: path.write_bytes(b"vectors"), ["a"], {})


def write_t5x(folder, tokenizer):
    t5x.write(folder, MODEL, jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), MODEL.shapes()), 1)


def write_generation(folder, tokenizer):
    generations.write_generation(folder.parent, int(folder.name), [Mined("q", "d", [], [])], {})


def import_run(folder, tokenizer):
    write_run(folder, {}, model=MODEL)


REPLACING = (write_token_store, write_pair_store, write_index)
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
    with pytest.raises(InputError, match=r"000001 (exists already and holds manifest.json|is there already)"):
        write(folder, tokenizer)
    assert content(tmp_path).keys() == {Path("000001/thesis.txt"), Path("000001/manifest.json")}
    (tmp_path / "2").write_text("precious")
    with pytest.raises(InputError, match=r"is a file|is there already"):
        write(tmp_path / "2" if write is not write_generation else folder, tokenizer)


@pytest.mark.parametrize("write", REPLACING)
def test_a_former_output_is_replaced_unless_something_was_added(tmp_path, tokenizer, write):
    folder = tmp_path / "out"
    write(folder, tokenizer)
    first = content(folder)
    write(folder, tokenizer)
    assert content(folder) == first
    (folder / folders.CHECKSUMS_FILE).unlink()  # as version 0.1.0 wrote it
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
    monkeypatch.setattr(files, "temporary", lambda path: path.with_name(next(names)))
    monkeypatch.setattr(os, "replace", lambda source, to: 1 // 0 if source.name == "new" else replace(source, to))
    with pytest.raises(ZeroDivisionError), folders.atomic_dir(tmp_path / "out", "test"):
        monkeypatch.setattr(files, "write_json", lambda path, value: None)  # which goes by a rename too
    assert content(tmp_path).keys() == {Path("out/old"), Path("out/checksums.json")}


def test_a_folder_that_somebody_fills_while_the_work_is_done_stays(tmp_path):
    with pytest.raises(InputError, match=r"holds thesis\.txt"), folders.atomic_dir(tmp_path / "out", "test"):
        write_thesis(tmp_path / "out")
    assert content(tmp_path).keys() == {Path("out/thesis.txt")}


@pytest.mark.timeout(60)
def test_a_cache_that_is_whole_is_opened_without_its_lock(tmp_path):
    folder = tmp_path / "folder"

    def build(folder):
        folder.mkdir()
        return "built"

    assert folders.build_once(folder, lambda folder: "opened", build) == "built"
    with files.in_turn(folder):
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


def test_few_places_remove_folders():
    """Each of them was looked at: temporary names, unfinished checkpoints, and the embeddings of a miner's older checkpoints."""
    callers = set()
    for path in (path for name in ("de_jax", "tools", "tasks", "benchmarks") for path in (ROOT / name).rglob("*.py")):
        if re.search(r"\brmtree|\brmdir|\bremovedirs", path.read_text()):
            callers.add(path.name)
    assert callers == {"folders.py", "files.py", "checkpoint.py", "mining_run.py"}
