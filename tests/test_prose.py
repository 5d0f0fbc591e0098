"""Documents, docstrings and the strings of the code are free of expressions that are hard to read; see `prose.BANNED`."""

from pathlib import Path

import prose
import pytest

ROOT = Path(__file__).resolve().parents[1]
GUIDES = [path for path in sorted((ROOT / "docs").rglob("*.md")) if path.parent.name != "results"]  # which quote data
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *GUIDES, ROOT / "CHANGELOG.md"]
CODE = [
    path
    for name in ("de_jax", "tools", "tasks", "benchmarks", "experiments", "reproduction")
    for path in sorted((ROOT / name).rglob("*.py"))
]


@pytest.mark.parametrize("paths", [PAGES, CODE], ids=["pages", "code"])
def test_prose_is_plain(paths):
    assert [line for path in paths for line in prose.problems(path)] == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("A pair\nof nobody.", ["2: 'nobody'"]),
        ("# Who is masked\n\nThe list is\nnone; `is none` is code.", ["1: '# Who is masked'", "3: 'is none'"]),
        ("```\nnobody\n```\nDevices that are not\nthere.", ["4: 'are not there'"]),
        ("Short of memory? Use chunks. Large corpus? `--index` helps. Fast? Yes.", []),
        ("Short of memory? Large corpus? Chunks help.", ["1: '? Large corpus?'"]),
        ("A limit is None. Pairs that share a query are masked. What is a loss?", ["1: 'What is'"]),
    ],
)
def test_the_check_objects(text, found, tmp_path, capsys):
    path = tmp_path / "page.md"
    path.write_text(text, encoding="utf-8")
    assert prose.main([str(path)]) == bool(found)
    assert [line.removeprefix(f"{path}:").split("; use ")[0] for line in capsys.readouterr().out.splitlines()] == found


def test_strings_of_code_are_read_and_names_are_not(tmp_path):
    path = tmp_path / "code.py"
    path.write_text('nobody = 1  # nobody\n\n\ndef f():\n    """One.\n\n    Of which two.\n    """\n', encoding="utf-8")
    assert [line.split(":")[1] for line in prose.problems(path)] == ["7"]
