"""MS MARCO's files as they are distributed, plain or .gz.

passages    collection.tsv, queries.<split>.tsv, qrels.<split>.tsv
documents   msmarco-docs.tsv, msmarco-doc<split>-queries.tsv, msmarco-doc<split>-qrels.tsv
"""

from pathlib import Path
from typing import NamedTuple

from de_jax.types import InputError

_PATTERNS = {"passages": ("collection.tsv", "queries.*.tsv", "qrels.*.tsv"),
             "documents": ("msmarco-docs.tsv", "msmarco-doc*-queries.tsv", "msmarco-doc*-qrels.tsv")}  # fmt: skip
KINDS = tuple(_PATTERNS)


class Files(NamedTuple):
    """Where the texts are, and queries and judgements by split."""

    docs: Path
    queries: dict[str, Path]
    qrels: dict[str, Path]


def find_files(dataset_dir: str | Path, kind: str) -> Files:
    """The files of one kind, "passages" or "documents"."""
    if kind not in _PATTERNS:
        raise InputError(f"the kind of MS MARCO is '{kind}'; it is one of {', '.join(_PATTERNS)}.")
    docs, queries, qrels = (_find(Path(dataset_dir), pattern) for pattern in _PATTERNS[kind])
    return Files(next(iter(docs.values())), queries, qrels)


def of_split(paths: dict[str, Path], split: str) -> Path:
    """The file of a split; InputError, which names those there are, where it has none."""
    if split not in paths:
        raise InputError(f"{next(iter(paths.values())).parent} has no split '{split}'; it has {', '.join(paths)}.")
    return paths[split]


def _find(folder: Path, pattern: str) -> dict[str, Path]:
    """Files by the part of their name that matches `*`; a plain file is preferred to its .gz."""
    before, _, after = pattern.partition("*")
    found = {}
    for path in sorted([*folder.glob(f"{pattern}.gz"), *folder.glob(pattern)], key=lambda path: path.suffix == ".tsv"):
        found[path.name.removesuffix(".gz").removeprefix(before).removesuffix(after)] = path
    if not found:
        raise InputError(f"{folder} holds no {pattern}, plain or .gz.")
    return dict(sorted(found.items()))
