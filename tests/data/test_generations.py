"""Generations of mined negatives: whole or not there."""

import errno

import pytest

from de_jax.data import generations
from de_jax.data.generations import Mined
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
    with pytest.raises(InputError, match="000001 is there already; one miner"):
        generations.write_generation(tmp_path, 1, MINED, {})
    with pytest.raises(InputError, match="there are no pairs to write"):
        generations.write_generation(tmp_path, 2, [], {})
    assert generations.numbers(tmp_path) == [1]


def test_a_half_copied_generation_is_passed_over_with_a_warning(tmp_path):
    for number in (1, 2):
        generations.write_generation(tmp_path, number, MINED, {})
    part = tmp_path / "000002" / "part-00000.jsonl"
    part.write_bytes(part.read_bytes()[:-20])
    with pytest.raises(InputError, match=r"part-00000.jsonl is missing, half-copied or damaged"):
        generations.open_generation(tmp_path, 2)


def test_a_broken_line_is_named(tmp_path):
    generation = generations.write_generation(tmp_path, 1, MINED, {})
    part = generation.folder / "part-00000.jsonl"
    part.write_text(part.read_text().replace('"q1"', '"q1'))
    with pytest.raises(InputError, match=r"part-00000.jsonl, line \d: expected an object with query_id, doc_id"):
        list(generations.read_mined(generation))
