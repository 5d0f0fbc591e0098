"""What the documents name is there: files, folders, and programs to run."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = (
    "de_jax",
    "tools",
    "tasks",
    "tests",
    "benchmarks",
    "experiments",
    "reproduction",
    "results",
    "demos",
    "docs",
    "gin_configs",
)
WRITTEN_BY_A_COMMAND = {"encoder.py"}
PATH = re.compile(rf"`((?:{'|'.join(FOLDERS)})/[\w./]*|[\w/]+\.py)`")
PROGRAM = re.compile(r"python -m ((?:de_jax|tools|benchmarks|experiments|reproduction)(?:\.\w+)+)")
DOCUMENTS = [ROOT / "CONTRIBUTING.md", ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def absent_from(text):
    """Paths in backticks and modules after `python -m` that this repository lacks; a path may begin at the root or in a package."""
    there = [f"/{path.relative_to(ROOT)}" for folder in FOLDERS for path in (ROOT / folder, *(ROOT / folder).rglob("*"))]
    paths = [path for path in PATH.findall(text) if path not in WRITTEN_BY_A_COMMAND]
    paths += [f"{name.replace('.', '/')}.py" for name in PROGRAM.findall(text)]
    return [path for path in paths if not any(one.endswith(f"/{path.rstrip('/')}") for one in there)]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_what_a_document_names_is_there(document):
    assert absent_from(document.read_text(encoding="utf-8")) == []


def test_the_check_objects():
    assert absent_from("`training/run/fit.py`, `de_jax/mining/`, `fit.py`, `runs/a`, python -m experiments.fine_tune") == []
    wrong = ["training/fit.py", "tests/absent/", "absent.py", "benchmarks/fine_tune.py"]
    assert absent_from("`training/fit.py`, `tests/absent/`, `absent.py`, python -m benchmarks.fine_tune") == wrong
