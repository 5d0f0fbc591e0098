"""Generations of mined negatives: whole or not there."""

import contextlib
import errno

import pytest

from de_jax.files import outputs
from de_jax.mining import generations
from de_jax.mining.generations import DamagedGeneration, Mined
from de_jax.types import InputError

MINED = [Mined(f"q{pair}", f"d{pair}", [f"d{pair + 1}", f"d{pair + 2}"], [f"q{pair + 1}"]) for pair in range(4)]


def test_what_is_written_is_read_part_by_part(tmp_path):
    written = generations.write_generation(tmp_path, 3, MINED, {"step": 7}, lines_per_part=3)
    assert sorted(path.name for path in written.folder.iterdir()) == ["manifest.json", "part-00000.jsonl", "part-00001.jsonl"]
    opened = generations.open_generation(tmp_path, 3)
    assert opened.manifest["step"] == 7
    assert opened.manifest["num_pairs"] == 4
    assert list(generations.read_mined(opened)) == MINED
    assert generations.numbers(tmp_path) == [3]


def test_a_generation_is_not_there_until_it_is_whole(tmp_path):
    def failing():
        yield from MINED
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        generations.write_generation(tmp_path, 1, failing(), {}, lines_per_part=1)
    assert generations.numbers(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_two_miners_in_one_folder_and_nothing_mined_are_refused(tmp_path):
    generations.write_generation(tmp_path, 1, MINED, {})
    with pytest.raises(InputError, match="000001 exists already; one miner"):
        generations.write_generation(tmp_path, 1, MINED, {})
    with pytest.raises(InputError, match="there are no pairs to write"):
        generations.write_generation(tmp_path, 2, [], {})
    assert generations.numbers(tmp_path) == [1]


def test_a_half_copied_generation_is_passed_over_with_a_warning(tmp_path):
    for number in (1, 2):
        generations.write_generation(tmp_path, number, MINED, {})
    part = tmp_path / "000002" / "part-00000.jsonl"
    part.write_bytes(part.read_bytes()[:-20])
    with pytest.raises(InputError, match=r"part-00000.jsonl has another SHA-256 than in manifest.json; copy"):
        generations.open_generation(tmp_path, 2)


@pytest.mark.parametrize(
    ("was", "becomes"),
    [
        ('"q1", "doc_id"', '"q1, "doc_id"'),
        ('"query_id": "q1"', '"query_id": 1'),
        ('"query_id": "q1"', '"query": "q1"'),
        ('["d2", "d3"]', '"d2"'),
        ('["d2", "d3"]', '["d2", 3]'),
        ('["d2", "d3"]', '["d2", ""]'),
        ('["d2", "d3"]', '["d2", "\\uD83D"]'),
        ('["d2", "d3"]', '["d2", "d3\\u0000"]'),
        ('["q2"]', "null"),
        ('["q2"]', "[" * 100_000),
    ],
)
def test_a_line_that_no_miner_writes_is_named(tmp_path, was, becomes):
    generation = generations.write_generation(tmp_path, 1, MINED, {})
    part = generation.folder / "part-00000.jsonl"
    assert part.read_text().count(was) == 1
    part.write_text(part.read_text().replace(was, becomes))
    with pytest.raises(DamagedGeneration, match=r"part-00000.jsonl, line 2: expected an object with query_id, doc_id"):
        list(generations.read_mined(generation))


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
    folder = generations.write_generation(tmp_path, 1, MINED, {}).folder
    outputs.write_json(folder / "manifest.json", outputs.read_json(folder / "manifest.json") | {name: value})
    with pytest.raises(DamagedGeneration, match=rf"manifest\.json: ({name}.* is .*, expected|not valid JSON)"):
        generations.open_generation(tmp_path, 1)


def test_a_manifest_with_nan_is_refused(tmp_path):
    folder = generations.write_generation(tmp_path, 1, MINED, {}).folder
    (folder / "manifest.json").write_text(
        (folder / "manifest.json").read_text().replace("{", '{"statistics": {"overlap": NaN},', 1)
    )
    with pytest.raises(DamagedGeneration, match=r"manifest\.json: not valid JSON \(NaN"):
        generations.open_generation(tmp_path, 1)


def test_fewer_pairs_than_the_manifest_says_are_refused(tmp_path):
    generation = generations.write_generation(tmp_path, 1, MINED, {})
    part = generation.folder / "part-00000.jsonl"
    part.write_text("".join(part.read_text().splitlines(keepends=True)[:3]))
    with pytest.raises(DamagedGeneration, match="000001 holds 3 pairs, but its manifest says 4"):
        list(generations.read_mined(generation))
    part.unlink()
    with pytest.raises(DamagedGeneration, match=r"part-00000\.jsonl"):
        list(generations.read_mined(generation))


def test_a_folder_stands_for_its_newest_whole_generation(tmp_path):
    with pytest.raises(
        InputError, match="is not a generation of negatives and contains no generation; make one with de-jax mine_negatives"
    ):
        generations.open_newest(tmp_path)
    for number in (1, 2, 3):
        generations.write_generation(tmp_path, number, MINED, {})
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
    generations.write_generation(tmp_path, 1, MINED, {})
    (tmp_path / "000002").mkdir()  # half-copied or half-removed
    assert generations.numbers(tmp_path) == [1]
    assert generations.next_number(tmp_path) == 3
    assert generations.next_number(tmp_path / "absent") == 1
