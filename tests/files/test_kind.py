"""Folders of another kind or version, without their manifest, or with a wrong or damaged one are refused in one sentence."""

import json
import re
import shutil

import pytest
from written_folders import (
    describe_generator,
    describe_run,
    write_embeddings,
    write_expansion,
    write_generation,
    write_guide,
    write_index,
    write_model,
    write_pair_store,
    write_ranked_queries,
    write_teacher_scores,
    write_token_store,
    write_vector_index,
)

from de_jax.data.batches.teacher_scores import GUIDE, TEACHER_SCORES, file_of
from de_jax.data.expansion import curriculum
from de_jax.data.expansion.generated_queries import EXPANSION, read_expansion
from de_jax.data.negatives import generations
from de_jax.data.sources.pair_store import PAIR_STORE, open_pair_store
from de_jax.data.stores.corpus import open_token_store
from de_jax.data.stores.store_writer import TOKEN_STORE
from de_jax.doc2query.generator_run import GENERATOR_RUN, load_generator
from de_jax.files import folders, outputs
from de_jax.files.folders import Kind
from de_jax.interop import safetensors_model
from de_jax.retrieval.embedding_files import EMBEDDINGS, open_embeddings
from de_jax.retrieval.faiss_index import SAVED_INDEX
from de_jax.retrieval.vector_index import VECTOR_INDEX, VectorIndex
from de_jax.settings import Maybe
from de_jax.training.run.run_folder import RUN, load_run
from de_jax.types import InputError

KINDS = [
    (TOKEN_STORE, write_token_store, open_token_store),
    (PAIR_STORE, write_pair_store, open_pair_store),
    (EMBEDDINGS, write_embeddings, open_embeddings),
    (SAVED_INDEX, write_index, SAVED_INDEX.open),
    (VECTOR_INDEX, write_vector_index, VectorIndex.load),
    (generations.NEGATIVES, write_generation, generations.open_newest),
    (EXPANSION, write_expansion, read_expansion),
    (TEACHER_SCORES, write_teacher_scores, file_of),
    (GUIDE, write_guide, GUIDE.open),
    (curriculum.RANKED_QUERIES, write_ranked_queries, curriculum._open),
]
DESCRIPTIONS = [
    (RUN, describe_run, load_run),
    (GENERATOR_RUN, describe_generator, load_generator),
    (safetensors_model.MODEL_FOLDER, write_model, safetensors_model.read),
]


def refused(folder, open_folder, *parts):
    """The sentence about a folder, which has these parts in their order."""
    with pytest.raises(InputError) as caught:
        open_folder(folder)
    sentence = str(caught.value)
    assert re.search(".*".join(map(re.escape, parts)), sentence), sentence
    assert sentence.endswith(".")
    assert not re.search(r"\n|\. ", sentence)


@pytest.mark.parametrize(("kind", "write", "open_folder"), [*KINDS, *DESCRIPTIONS], ids=lambda value: getattr(value, "name", ""))
def test_a_manifest_of_another_kind_or_with_missing_or_wrong_entries_is_refused_by_its_name(
    tmp_path, tokenizer, kind, write, open_folder
):
    folder = tmp_path / "000001"
    write(folder, tokenizer)
    file = folder / kind.file
    said = json.loads(file.read_text())
    if kind.file == folders.MANIFEST_FILE:
        open_folder(folder)
    later = 2 if kind.is_bare else f"de_jax {kind.name} {kind.version + 1}"
    for other, mend in (("de_jax thesis 1", "give another folder"), (later, kind.mend), (True, kind.mend)):
        file.write_text(json.dumps(said | {"format": other}))
        refused(folder, open_folder, f"{file}: format is {other!r}, expected {kind.format!r}; {mend}.")
    for name, check in kind.entries.fields.items():
        file.write_text(json.dumps(said | {name: [None]}))
        refused(folder, open_folder, f"{file}: {name}", " is ", "expected ", f"; {kind.mend}.")
        if not isinstance(check, Maybe):
            file.write_text(json.dumps({key: value for key, value in said.items() if key != name}))
            refused(folder, open_folder, f"{file}: {name} is absent, expected a value; {kind.mend}.")
    file.write_text("[]")
    refused(folder, open_folder, f"{file}: found [], expected an object; {kind.mend}.")
    file.unlink()
    refused(folder, open_folder, f"{folder} holds no complete {kind.name} (no {kind.file}); {kind.make}.")


@pytest.mark.parametrize(("kind", "write", "open_folder"), KINDS, ids=lambda value: getattr(value, "name", ""))
def test_a_file_that_changed_is_refused_by_its_name(tmp_path, tokenizer, kind, write, open_folder):
    folder = tmp_path / "000001"
    write(folder, tokenizer)
    guarded = [name for name in folders.names(folder) if name != "plan.json"]
    for name in guarded if (folder / folders.CHECKSUMS_FILE).exists() else [name for name in guarded if name != kind.file]:
        file = folder / name
        before = file.read_bytes()
        file.write_bytes(before[:-1] + bytes([before[-1] ^ 1]) if name != kind.file else before + b" ")
        refused(folder, open_folder, str(file), f"; {kind.mend}." if file.parent == folder else "; ")
        file.unlink()
        refused(folder, open_folder, str(file if name != kind.file else folder))
        file.write_bytes(before)
    open_folder(folder)


@pytest.mark.parametrize(("kind", "write", "open_folder"), KINDS, ids=lambda value: getattr(value, "name", ""))
def test_an_entry_that_this_version_does_not_know_is_left_as_it_is(tmp_path, tokenizer, kind, write, open_folder):
    folder = tmp_path / "000001"
    write(folder, tokenizer)
    for checksums in folder.rglob(folders.CHECKSUMS_FILE):
        checksums.unlink()
    outputs.write_json(folder / kind.file, outputs.read_json(folder / kind.file) | {"from_the_future": [1]})
    open_folder(folder)
    assert kind.open(folder)["from_the_future"] == [1]


def test_a_folder_that_was_begun_with_something_else_is_refused_by_the_first_difference(tmp_path):
    kind = Kind("words", dict, make="write them", otherwise="take another folder")
    there = {"seed": 1, "model": {"sizes": [2, 3], "name": "a"}, "num_done": 5}
    kind.require_same(tmp_path, there, {"model": {"name": "a", "sizes": (2, 3)}, "seed": 1})
    for here, sentence in (
        ({"seed": 2, "model": {"name": "b", "sizes": (2, 4)}}, "model/name 'a', not 'b'"),
        ({"seed": 1, "model": {"name": "a", "sizes": (2, 4)}}, "model/sizes [2, 3], not [2, 4]"),
        ({"depth": 3, "seed": 1}, "depth None, not 3"),
    ):
        with pytest.raises(InputError) as caught:
            kind.require_same(tmp_path, there, here)
        assert str(caught.value) == f"{tmp_path} was begun with {sentence}; take another folder."


@pytest.mark.parametrize("write", [write_embeddings, write_expansion])
def test_what_grows_part_by_part_leaves_files_and_folders_of_somebody_else(tmp_path, tokenizer, write):
    (tmp_path / "file").write_text("precious")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.txt").write_text("precious")
    for name in ("file", "folder"):
        with pytest.raises(InputError, match=f"{name} (is a file|exists already)"):
            write(tmp_path / name, tokenizer)
    assert (tmp_path / "file").read_text() == (tmp_path / "folder" / "thesis.txt").read_text() == "precious"
    shutil.rmtree(tmp_path / "folder")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / ".ids.json.0123abcd.tmp").touch()  # what a killed run left
    write(tmp_path / "folder", tokenizer)
