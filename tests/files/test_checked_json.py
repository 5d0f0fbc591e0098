"""Descriptions of JSON: a value that does not fit is named by its file and its keys."""

import json
from typing import Literal, NamedTuple

import pytest

from de_jax.files import reading
from de_jax.files.folders import Kind
from de_jax.settings import (
    Maybe,
    Mismatch,
    Record,
    Share,
    Size,
    file_name,
    list_of,
    map_of,
    nullable,
    of_class,
    relative,
    some_text,
)
from de_jax.types import InputError


class Sizes(NamedTuple):
    kind: Literal["wide", "narrow"]
    layers: int
    rate: float = 0.1
    name: str | None = None
    parts: tuple[str, ...] = ()


STORE = Record(
    {
        "format": Literal[1],
        "counts": map_of(Size),
        "files": list_of(file_name, least=1),
        "sizes": of_class(Sizes),
        "scale": Maybe(Share, 0.5),
        "note": Maybe(nullable(some_text)),
        "dev": Maybe(bool),
    }
)
VALUE = {"format": 1, "counts": {"a": 2}, "files": ["a.npy"], "sizes": {"kind": "wide", "layers": 2}, "made_by": [None]}


def _read(tmp_path, value):
    (tmp_path / "store.json").write_text(json.dumps(value))
    return reading.read_json(tmp_path / "store.json", STORE, mend="build it again")


def test_what_fits_is_given_with_its_defaults_and_its_other_keys(tmp_path):
    assert _read(tmp_path, VALUE) == {**VALUE, "scale": 0.5}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": True}, "format is True, expected 1"),
        ({"format": 1.0}, "format is 1.0, expected 1"),
        ({"counts": []}, r"counts is \[\], expected an object"),
        ({"counts": {"a": 0}}, "counts/a is 0, expected at least 1"),
        ({"counts": {"a": 1e30}}, r"counts/a is 1e\+30, expected a whole number"),
        ({"counts": {"a": 10**30}}, "counts/a is 10{20,}.* expected at most"),
        ({"files": []}, "files is .*, expected a list of 1 or more"),
        ({"files": ["a.npy", "../b.npy"]}, r"files/1 is '\.\./b\.npy', expected the name of a file in the same folder"),
        ({"files": ["/etc/passwd"]}, "files/0 is"),
        ({"files": ["b/a.npy"]}, "files/0 is"),
        ({"sizes": {"kind": "wide"}}, "sizes/layers is absent, expected a value"),
        ({"sizes": {"kind": "broad", "layers": 2}}, "sizes/kind is 'broad', expected 'wide' or 'narrow'"),
        ({"sizes": {"kind": "wide", "layers": 2, "depth": 3}}, "sizes is 'depth', expected a key out of kind, layers"),
        ({"sizes": {"kind": "wide", "layers": 2, "parts": [1]}}, "sizes/parts/0 is 1, expected a string"),
        ({"scale": 2}, "scale is 2, expected at most 1"),
        ({"scale": 1e999}, "not valid JSON"),
        ({"note": ""}, "note is '', expected a string that is not empty"),
        ({"dev": 0}, "dev is 0, expected True or False"),
        ({"dev": [[[[[[[[[[1]]]]]]]]]]}, "dev is .*, expected True or False"),
        ({"dev": "x" * 1000}, "^.{0,400}$"),
    ],
)
def test_what_does_not_fit_is_named_by_its_keys(tmp_path, change, message):
    with pytest.raises(InputError, match=message) as caught:
        _read(tmp_path, VALUE | change)
    assert str(tmp_path / "store.json") in str(caught.value)


def test_a_value_of_another_kind_is_refused(tmp_path):
    for value in (None, 1, [], "text"):
        with pytest.raises(InputError, match=r"store\.json: found .*, expected an object; build it again\.$"):
            _read(tmp_path, value)


def test_a_check_may_raise_a_sentence_of_its_own(tmp_path):
    def refuse(value):
        raise InputError("no encoder is called X; register it.")

    (tmp_path / "store.json").write_text('{"format": "de_jax store 1"}')
    with pytest.raises(InputError, match=r"^no encoder is called X; register it\.$"):
        reading.read_json(tmp_path / "store.json", refuse)
    with pytest.raises(InputError, match=r"store\.json: no encoder is called X; register it\.$"):
        Kind("store", refuse, make="write it", file="store.json").read_manifest(tmp_path)


def test_records_name_their_line(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"id": "a"}\n\n{"id": 1}\n')
    records = reading.read_records(tmp_path / "a.jsonl", Record({"id": some_text}))
    assert next(records) == (1, {"id": "a"})
    with pytest.raises(InputError, match=r"a\.jsonl, line 3: id is 1, expected a string\.$"):
        next(records)


def test_a_name_stays_inside_its_folder():
    assert [relative(name) for name in ("1_Pooling", "")] == ["1_Pooling", ""]
    for name in ("..", "a/../../b", "/etc", "a\0b"):
        with pytest.raises(Mismatch):
            relative(name)
