"""Faults of gin files are one sentence with the file and the line; code from outside the package needs a flag."""

import pytest

from de_jax import gin_settings
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
    ],
)
def test_a_fault_is_one_sentence(tmp_path, text, message):
    own, other = tmp_path / "own.gin", tmp_path / "other.gin"
    other.write_text(f"include '{own}'\n")
    own.write_bytes(text.replace(b"{own}", str(own).encode()).replace(b"{other}", str(other).encode()))
    with pytest.raises(InputError, match=message) as caught:
        gin_settings.read([str(own)], [])
    assert "\n" not in str(caught.value)


def test_imports_are_allowed_by_a_flag(tmp_path):
    (tmp_path / "own.gin").write_text("import colorsys\nimport de_jax.types\n")
    gin_settings.read([str(tmp_path / "own.gin")], [], allow_imports=True)
