"""YAML is read as strictly as JSON: what is wrong is one sentence with the file, and the line or the keys."""

import pytest

from de_jax.settings import Record, list_of, nullable, some_text
from de_jax.types import InputError
from reproduction.yaml_files import read_yaml

ROWS = Record({"rows": list_of(Record({"name": some_text, "score": nullable(float)}))})


def _read(tmp_path, content):
    (tmp_path / "table.yaml").write_bytes(content.encode() if isinstance(content, str) else content)
    return read_yaml(tmp_path / "table.yaml", ROWS)


def test_plain_values_are_read(tmp_path):
    found = _read(tmp_path, "rows:  # as printed\n  - {name: a, score: .5}\n  - name: 'no'\n    score: null\nother: [1, {b: c}]\n")
    assert found == {"rows": [{"name": "a", "score": 0.5}, {"name": "no", "score": None}], "other": [1, {"b": "c"}]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("rows:\n  - {name: a, name: b}\n", r"table\.yaml, line 2: not valid YAML \(the key 'name' is there twice\)"),
        ("rows: [\n", r"line 2: not valid YAML"),
        ("a: &a [1]\nrows: *a\n", r"line 2: not valid YAML \(an alias; write its value out\)"),
        ("rows: !!python/name:os.system\n", r"line 1: not valid YAML"),
        ("rows: " + "[" * 100 + "]" * 100, "line 1: not valid YAML .more than 64 levels deep"),
        ("rows: 2026-13-45\n", r"table\.yaml: not valid YAML"),
        ("rows: !!timestamp x\n", r"table\.yaml: not valid YAML"),
        ("rows: !!bool x\n", r"table\.yaml: not valid YAML"),
        ('rows: !!int ""\n', r"table\.yaml: not valid YAML"),
        ("? [a]\n: 1\n", r"line 1: not valid YAML"),
        (b"rows: \xff\n", r"table\.yaml is not UTF-8 text"),
        ("rows: [{name: no, score: 1}]\n", "rows/0/name is False, expected a string"),
        ("rows: [{name: a, score: .nan}]\n", "rows/0/score is nan, expected a finite number; correct the file"),
        ("", "found None, expected an object"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, content, message):
    with pytest.raises(InputError, match=message):
        _read(tmp_path, content)
