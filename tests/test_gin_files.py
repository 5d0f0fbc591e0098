"""Faults of gin files are one sentence with the file and the line; code from outside the package needs a flag."""

import pytest

from de_jax import configurables
from de_jax.types import InputError


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"\ninclude 'no.gin'\n", r"own\.gin, line 2: the included file no\.gin does not exist"),
        (b"include '{own}'\n", r"own\.gin includes itself"),
        (b"include '{other}'\n", r"own\.gin includes itself, through own\.gin and other\.gin"),
        (b"a = 1\nb\xff = 2\n", r"own\.gin, line 2: not UTF-8 text"),
        (b"import os\n", r"own\.gin, line 1: imports os, which runs code from outside de_jax; .* add --allow_imports"),
        (b"\nfrom os import path\n", r"own\.gin, line 2: imports os"),
        (b"import json as j\n", r"own\.gin, line 1: imports json"),
        (b"A = 1\nimport \\\n  os\n", r"own\.gin, line 2: imports os"),
        (b"include de_jax\n", r"own\.gin, line 1: "),
        (b"import de_jax.nothing\n", r"own\.gin, line 1: de_jax\.nothing cannot be imported: No module named"),
        (b"A = 1\nB = (3,\n", r"own\.gin, line 3: EOF in multi-line statement"),
        (b"A = 1\nB c\n", r"own\.gin, line 2"),
        (b"A = 1\0\n", r"own\.gin, line 1"),
        (b"A = 1\n\rT5Config.num_layers = 1\n", r"own\.gin, line 2: a carriage return within the line"),
        (b"\nquery/T5Config.num_layers = 'x'\n", r"own\.gin, line 2: query/T5Config\.num_layers is 'x'"),
        (b"T5Config.num_layers = %NONE\n", r"own\.gin, line 1: %NONE stands for nothing; write NONE = and its value"),
        (
            b"A = {'x': 1}\nB = [{'x': {'x': 2}, 'y': 3, 'x': 4}]\n",
            r"own\.gin, line 2: the name 'x' stands twice in one dict",
        ),
        (b"A = %B\nB = %A\n", r"own\.gin, line 1: %B stands for itself|own\.gin, line 1: %A stands for itself"),
        (b"A = {[]: 1}\n", r"own\.gin: the gin settings cannot be used: unhashable"),
    ],
)
def test_a_fault_is_one_sentence(tmp_path, text, message):
    own, other = tmp_path / "own.gin", tmp_path / "other.gin"
    other.write_text(f"include '{own}'\n")
    own.write_bytes(text.replace(b"{own}", str(own).encode()).replace(b"{other}", str(other).encode()))
    with pytest.raises(InputError, match=message) as caught:
        configurables.read([str(own)], [])
    assert "\n" not in str(caught.value)


def test_a_byte_order_mark_and_the_line_ends_of_windows_change_nothing(tmp_path):
    (tmp_path / "own.gin").write_bytes(b"\xef\xbb\xbfA = 1\r\nT5Config.num_layers = %A\r\n")
    found = configurables.read([str(tmp_path / "own.gin")])
    assert {str(setting): str(bound.value) for setting, bound in found.items()} == {"A": "1", "T5Config.num_layers": "%A"}


def test_a_typed_setting_of_a_name_that_a_file_has_too_names_no_file(tmp_path):
    (tmp_path / "own.gin").write_text("T5Config.num_layers = 1\n")
    with pytest.raises(InputError, match=r"^T5Config\.num_layers is 'x'"):
        configurables.read([str(tmp_path / "own.gin")], ["T5Config.num_layers=x"])


def test_a_typed_setting_that_a_nearer_one_hides_is_refused_with_that_one(tmp_path):
    (tmp_path / "own.gin").write_text(
        "include 'recipes/sde.gin'\nbeir_pairs.batch_size = 64\nDualEncoder.shared = ()\nquery/T5Config.num_layers = 1\n"
    )
    (tmp_path / "tiny.gin").write_text("include 'models/t5_1_1_tiny.gin'\n")
    files = [str(tmp_path / "own.gin"), str(tmp_path / "tiny.gin")]
    for typed, nearer in (("PairsOptions.batch_size", "beir_pairs.batch_size"), ("Optimization.num_steps", "train.num_steps")):
        with pytest.raises(InputError, match=rf"^{typed} has no effect, because .*\.gin, line \d+ sets {nearer}; set that instead"):
            configurables.build(files, [f"{typed}=8"])
    configurables.build(files, ["T5Config.num_layers=2"])  # of the document tower
    configurables.build(files, ["PairsOptions.batch_size=8", "train.data=@stored_pairs", "stored_pairs.pairs_dir=x"])


def test_imports_are_allowed_by_a_flag(tmp_path):
    (tmp_path / "own.gin").write_text("import colorsys\nimport de_jax.types\n")
    configurables.read([str(tmp_path / "own.gin")], [], allow_imports=True)
