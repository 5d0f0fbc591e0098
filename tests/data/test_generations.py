"""Generations of mined negatives: whole or not there."""

import contextlib
import errno

import numpy as np
import pytest

from de_jax.data.negatives import generations, mined_pairs
from de_jax.data.negatives.generations import DamagedGeneration
from de_jax.data.negatives.mined_pairs import Mined, MinedPairs
from de_jax.files import outputs
from de_jax.types import PADDING_ID, InputError

MINED = [Mined(f"q{pair}", f"d{pair}", [f"d{pair + 1}", f"d{pair + 2}"], [f"q{pair + 1}"]) for pair in range(4)]


def test_what_is_written_is_read(tmp_path):
    scores = np.array([[3, 2, 1]] * 3 + [[1, 0.5, np.nan]], np.float32)
    written = mined_pairs.of_lines(MINED)._replace(scores=scores)
    folder = generations.write_generation(tmp_path, 3, written, {"step": 7}).folder
    assert {path.name for path in folder.iterdir()} == {"manifest.json", *(f"{name}.npy" for name in MinedPairs._fields)}
    opened = generations.open_generation(tmp_path, 3)
    assert (opened.manifest["step"], opened.manifest["num_pairs"]) == (7, 4)
    found = generations.read(opened)
    for name, array in found._asdict().items():
        assert isinstance(array, np.memmap)
        np.testing.assert_array_equal(array, getattr(written, name))
    assert list(found.lines()) == MINED
    assert generations.numbers(tmp_path) == [3]


def test_rows_of_larger_stores_become_rows_of_the_ids_that_they_name():
    ids = {kind: np.array([f"{kind}{row}".encode() for row in range(9)]) for kind in "qd"}
    pairs, neg_docs, neg_queries = [[5, 8], [2, 8]], [[1, 4], [7, PADDING_ID]], [[PADDING_ID], [0]]
    arrays = (np.array(rows, np.int32) for rows in (pairs, neg_docs, neg_queries))
    found = mined_pairs.of_rows(*arrays, np.zeros((2, 3), np.float32), query_ids=ids["q"], doc_ids=ids["d"])
    assert list(found.lines()) == [Mined("q5", "d8", ["d1", "d4"], []), Mined("q2", "d8", ["d7"], ["q0"])]
    assert (found.query_ids.tolist(), found.doc_ids.tolist()) == ([b"q0", b"q2", b"q5"], [b"d1", b"d4", b"d7", b"d8"])


def test_a_generation_is_not_there_until_it_is_whole(tmp_path, monkeypatch):
    save = outputs.save_array

    def full(path, array):
        if path.name == "neg_queries.npy":
            raise OSError(errno.ENOSPC, "No space left on device")
        save(path, array)

    monkeypatch.setattr(outputs, "save_array", full)
    with pytest.raises(OSError, match="No space"):
        generations.write_lines(tmp_path, 1, MINED, {})
    assert generations.numbers(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_two_miners_in_one_folder_and_nothing_mined_are_refused(tmp_path):
    generations.write_lines(tmp_path, 1, MINED, {})
    with pytest.raises(InputError, match="000001 exists already; one miner"):
        generations.write_lines(tmp_path, 1, MINED, {})
    with pytest.raises(InputError, match="there are no pairs to write"):
        generations.write_lines(tmp_path, 2, [], {})
    assert generations.numbers(tmp_path) == [1]


def test_a_half_copied_generation_is_passed_over_with_a_warning(tmp_path):
    for number in (1, 2):
        generations.write_lines(tmp_path, number, MINED, {})
    part = tmp_path / "000002" / "neg_docs.npy"
    part.write_bytes(part.read_bytes()[:-20])
    with pytest.raises(InputError, match=r"neg_docs.npy has another SHA-256 than in manifest.json; copy"):
        generations.open_generation(tmp_path, 2)


@pytest.mark.parametrize(
    ("name", "array", "sentence"),
    [
        ("pairs", np.zeros((4, 3), np.int32), r"pairs\.npy holds int32 of shape \(4, 3\), not int32 of shape \(4, 2\)"),
        ("pairs", np.zeros((3, 2), np.int32), r"pairs\.npy holds int32 of shape \(3, 2\)"),
        ("pairs", np.full((4, 2), PADDING_ID, np.int32), r"pairs\.npy is damaged: it refers to a text that it does not hold"),
        ("neg_docs", np.full((4, 2), 6, np.int32), r"neg_docs\.npy is damaged: it refers to a text that it does not hold"),
        ("neg_queries", np.full((4, 1), -2, np.int32), r"neg_queries\.npy is damaged"),
        ("doc_ids", np.zeros(9, np.int64), r"doc_ids\.npy holds int64"),
        ("scores", np.zeros((4, 3), np.float64), r"scores\.npy holds float64"),
    ],
)
def test_arrays_that_no_miner_writes_are_named(tmp_path, name, array, sentence):
    written = mined_pairs.of_lines(MINED)._replace(**{name: array})
    generation = generations.write_generation(tmp_path, 1, written, {})
    assert generation.manifest["num_pairs"] == len(written.pairs)
    with pytest.raises(DamagedGeneration, match=f"{sentence}.*; copy the generation again"):
        generations.read(generation._replace(manifest={**generation.manifest, "num_pairs": 4}))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_pairs", "4"),
        ("num_pairs", None),
        ("parts", []),
        ("parts", {}),
        ("parts", {"../000002/part-00000.jsonl": "0"}),
        ("checkpoint_step", "8"),
        ("checkpoint_step", None),
        ("checkpoint_step", 8.5),
        ("checkpoint_step", True),
        ("checkpoint_step", 10**30),
        ("statistics", [0.5]),
        ("statistics", {"overlap_bm25": "0.5"}),
        ("statistics", {"overlap_bm25": None}),
        ("statistics", {"overlap_bm25": float("nan")}),
        ("statistics", {"overlap_bm25": 10**400}),
    ],
)
def test_a_manifest_that_says_what_no_miner_says_is_refused(tmp_path, name, value):
    folder = generations.write_lines(tmp_path, 1, MINED, {}).folder
    outputs.write_json(folder / "manifest.json", outputs.read_json(folder / "manifest.json") | {name: value})
    with pytest.raises(DamagedGeneration, match=rf"manifest\.json: ({name}.* is .*, expected|not valid JSON)"):
        generations.open_generation(tmp_path, 1)


def test_a_manifest_with_nan_is_refused(tmp_path):
    folder = generations.write_lines(tmp_path, 1, MINED, {}).folder
    (folder / "manifest.json").write_text(
        (folder / "manifest.json").read_text().replace("{", '{"statistics": {"overlap": NaN},', 1)
    )
    with pytest.raises(DamagedGeneration, match=r"manifest\.json: not valid JSON \(NaN"):
        generations.open_generation(tmp_path, 1)


def test_a_folder_stands_for_its_newest_whole_generation(tmp_path):
    with pytest.raises(
        InputError, match="is not a generation of negatives and contains no generation; make one with de-jax mine pairs"
    ):
        generations.open_newest(tmp_path)
    for number in (1, 2, 3):
        generations.write_lines(tmp_path, number, MINED, {})
    (tmp_path / "000003" / "manifest.json").write_text("{")
    for found in (tmp_path, tmp_path / "000002"):
        with pytest.warns(UserWarning, match="generation 3 .* skipped") if found == tmp_path else contextlib.nullcontext():
            assert generations.open_newest(found).number == 2
    for damaged in ("000003", "000004"):
        (tmp_path / damaged).mkdir(exist_ok=True)
        with pytest.raises(InputError, match=f"{damaged}( holds no complete negatives|/manifest.json)"):
            generations.open_newest(tmp_path / damaged)


def test_names_that_are_no_generations_are_passed_over_and_every_folders_number_is_taken(tmp_path):
    for name in ("7", "²", "000²", "0000008", "notes", ".000009.x.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text("{}")
    generations.write_lines(tmp_path, 1, MINED, {})
    (tmp_path / "000002").mkdir()  # half-copied or half-removed
    assert generations.numbers(tmp_path) == [1]
    assert generations.next_number(tmp_path) == 3
    assert generations.next_number(tmp_path / "absent") == 1
