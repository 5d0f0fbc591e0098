"""The record of the copies of buckets' files: their size and time here, and the version there, when both were equal.

$DE_JAX_CACHE/buckets/.records/<scheme>/<bucket>/<folder>/files.json    of the files of one folder

Addresses may lie in each other, so a file has one record, whichever address it was fetched by.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from de_jax.files import buckets, outputs
from de_jax.files.reading import parse_json

FILE = "files.json"


class Here(NamedTuple):
    """A file on this machine."""

    size: int
    mtime: int  # nanoseconds


class Known(NamedTuple):
    """A file as it was here and there when both were equal."""

    size: int
    mtime: int
    version: str  # "" while it is sent: the bucket may have it or not

    @property
    def here(self) -> Here:
        return Here(self.size, self.mtime)


def stat(path: Path) -> Here:
    """A file now."""
    found = path.stat()
    return Here(found.st_size, found.st_mtime_ns)


def read(path: Path) -> dict[str, Known]:
    """All that is known below the copy of an address, by the names there; "" where it is a file."""
    folder = _folder_of(path)
    own = _entries(folder.parent / FILE)
    known = {"": own[path.name]} if path.name in own else {}
    for file in folder.rglob(FILE) if folder.is_dir() else ():
        below = file.parent.relative_to(folder)
        known.update({str(below / name): entry for name, entry in _entries(file).items()})
    return known


def update(path: Path, changes: Mapping[str, Known | None]) -> None:
    """Keeps what changed; None for a file that is gone."""
    by_folder: dict[Path, dict[str, Known | None]] = {}
    for name, entry in changes.items():
        file = _folder_of(path / name)
        by_folder.setdefault(file.parent, {})[file.name] = entry
    for folder, own in by_folder.items():
        outputs.make_folder(folder)
        with in_turn(folder / ".lock"):
            before = _entries(folder / FILE)
            after = {name: entry for name, entry in {**before, **own}.items() if entry is not None}
            if after != before:
                with outputs.atomic_file(folder / FILE) as unfinished:
                    unfinished.write_text(json.dumps(after), encoding="utf-8")


@contextlib.contextmanager
def in_turn(path: Path) -> Iterator[None]:
    """Holds a file for one process and one thread at a time; it stays."""
    outputs.make_folder(path.parent)
    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def beside(path: Path, suffix: str) -> Path:
    """A file for another record of a copy, such as a lock."""
    folder = _folder_of(path)
    return folder.with_name(f".{folder.name}{suffix}")


def _folder_of(path: Path) -> Path:
    return buckets.root() / ".records" / path.relative_to(buckets.root())


def _entries(file: Path) -> dict[str, Known]:
    try:
        return {name: Known(*entry) for name, entry in parse_json(file.read_text(encoding="utf-8")).items()}
    except (OSError, ValueError, TypeError, AttributeError):  # absent or damaged: its files are fetched again
        return {}
