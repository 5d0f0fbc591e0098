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


MEMBER = re.compile(r"^::: (de_jax[\w.]*)$(?:\n    options: .*\bmembers: \[([\w, ]*)\])?", re.MULTILINE)
IMPORT = re.compile(r"^ *from (de_jax[\w.]*) import (.*)$", re.MULTILINE)
OPEN = {"de_jax", "de_jax.data", "de_jax.losses"}
"""Modules all of whose names are public; `__all__` and their docstrings list them."""


def private_in(text, public):
    """Names of this library that a document imports although no reference page has them."""
    imported = [(module, name.split(" as ")[0].strip()) for module, names in IMPORT.findall(text) for name in names.split(",")]
    return [f"{module}.{name}" for module, name in imported if module not in OPEN and f"{module}.{name}" not in public]


def test_python_of_documents_imports_public_names_alone():
    pages = [page.read_text(encoding="utf-8") for page in (ROOT / "docs/reference").glob("*.md")]
    listed = [found for page in pages for found in MEMBER.findall(page)]
    public = {name for name, _ in listed} | {f"{name}.{one.strip()}" for name, members in listed for one in members.split(",")}
    public |= {"de_jax.tasks.mined", "de_jax.tasks.msmarco"}  # modules that their page describes
    assert len(public) > 50
    assert {path.name: private_in(path.read_text(encoding="utf-8"), public) for path in DOCUMENTS} == {
        path.name: [] for path in DOCUMENTS
    }
    assert private_in("from de_jax.types import Batch, secret\nfrom de_jax import load\n", public) == ["de_jax.types.secret"]
