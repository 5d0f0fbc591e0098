"""Folders that are complete or absent, that say of which kind they are, and that hold the checksums of their files.

<folder>/checksums.json    the kind, and the size and the SHA-256 of every file; written last

A writer replaces only a folder that this file, or the manifest of an older version, shows to be a former output of its kind.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from de_jax.files import outputs
from de_jax.types import InputError

T = TypeVar("T")

FORMAT = "de_jax checksums 1"
CHECKSUMS_FILE, MANIFEST_FILE = "checksums.json", "manifest.json"
CHECKPOINT_FILE = "_CHECKPOINT_METADATA"
"""Orbax's, of every checkpoint."""
SMALL_BYTES = 16 * 2**20
"""Files up to this size are read for their checksum whenever their folder is opened."""


@contextlib.contextmanager
def atomic_dir(path: str | Path, kind: str | None = None) -> Iterator[Path]:
    """Yields a temporary folder beside `path`; synced and renamed to `path` on success, with its checksums.

    Args:
        path: absent, empty, or a former output of this kind, which is replaced.
        kind: such as "token store"; None for a folder that never replaces another and gets no checksums.

    Raises:
        InputError: `path` holds anything else, at the beginning or at the end; it stays as it is.
    """
    path = Path(path).resolve()  # through a symbolic link, which stays
    require_replaceable(path, kind)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = outputs.temporary(path)
    try:
        with outputs.naming(path):
            unfinished.mkdir()
            yield unfinished
            if kind:
                write_checksums(unfinished, kind)
            for file in sorted(unfinished.rglob("*")):
                outputs.sync(file)
            outputs.sync(unfinished)
            require_replaceable(path, kind)  # hours may have passed
            with _set_aside(path):
                os.replace(unfinished, path)
            outputs.sync(path.parent)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def require_replaceable(path: str | Path, kind: str | None) -> None:
    """Raises `InputError` unless `path` is absent, an empty folder, or a former output of this kind and nothing else.

    A command asks before its work begins, and `atomic_dir` asks again.
    """
    path = Path(path)
    if not path.exists():
        return
    if not path.is_dir():
        raise InputError(f"{path} is a file; choose a folder that is absent or empty.")
    if (foreign := _foreign(path, kind)) is not None:
        reason = f", which is not part of a former {kind}" if kind else ""
        has_mark = kind is None or any((path / name).exists() for name in (CHECKSUMS_FILE, MANIFEST_FILE))
        old = "" if has_mark else f", or remove this one if it is an {kind} by version 0.1.0, which left no mark"
        raise InputError(f"{path} exists already and holds {foreign}{reason}; choose a folder that is absent or empty{old}.")


def build_once(folder: Path, open_folder: Callable[[Path], T], build: Callable[[Path], T]) -> T:
    """Opens a folder of the cache, which is built first if it is absent or damaged.

    Of several processes that ask at once, one builds and the others wait. What is whole is opened without a lock, so that a cache
    may lie where nothing can be written.

    Args:
        folder: its name holds a hash of all that decides its content, so whatever stands there damaged can be replaced.
        open_folder: raises InputError where the folder is not whole.
        build: makes the folder, by `atomic_dir`.
    """
    if folder.is_dir():
        with contextlib.suppress(InputError):
            return open_folder(folder)
    with outputs.in_turn(folder):
        if folder.is_dir():  # another process has built it meanwhile
            with contextlib.suppress(InputError):
                return open_folder(folder)
        # Whoever left these was killed: only the holder of the lock builds this folder, and that is us.
        for abandoned in folder.parent.glob(f".{folder.name}.*.tmp"):
            shutil.rmtree(abandoned)
        with _set_aside(folder):
            return build(folder)


def facts(folder: Path, names: Iterable[str]) -> dict[str, Any]:
    """The size and the checksum of files below a folder, as `write_checksums` keeps them."""
    return {name: fact(folder / name) for name in names}


def fact(path: Path) -> dict[str, Any]:
    """The size and the checksum of a file."""
    return {"bytes": path.stat().st_size, "sha256": outputs.sha256_of(path)}


def write_checksums(folder: Path, kind: str, of_files: dict[str, Any] | None = None) -> None:
    """Writes `checksums.json`.

    Args:
        folder: complete, or under a temporary name.
        kind: of the folder.
        of_files: `facts`; by default of all files below the folder.
    """
    of_files = facts(folder, names(folder)) if of_files is None else of_files
    outputs.write_json(folder / CHECKSUMS_FILE, {"format": FORMAT, "kind": kind, "files": of_files})


def names(folder: Path) -> list[str]:
    """The files below a folder, its checksums aside."""
    found = (str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if not path.is_dir() or path.is_symlink())
    return [name for name in found if name != CHECKSUMS_FILE]


def read_checksums(folder: Path) -> dict[str, Any] | None:
    """What `checksums.json` says; None where there is none, as in the folders of version 0.1.0.

    Raises:
        InputError: it is damaged.
    """
    path = folder / CHECKSUMS_FILE
    if not path.is_file():
        return None
    record = outputs.read_json(path)
    listed = record.get("files") if isinstance(record, dict) else None
    if not isinstance(listed, dict) or record.get("format") != FORMAT or not all(map(_is_fact, listed.values())):
        raise InputError(f"{path} is damaged, or not in the format '{FORMAT}'.")
    return record


def damages(folder: Path, *, below: Sequence[str] = ("",), largest: int | None = None) -> Iterator[str]:
    """Says of each file of a folder that is not as it was written how it is damaged; the middle of a sentence.

    Args:
        folder: any; one without checksums, as version 0.1.0 wrote them, has no damage that could be seen.
        below: sub-folders that are looked at, such as "params/"; by default all files.
        largest: bytes; of larger files only the size is compared.
    """
    try:
        record = read_checksums(folder) or {"files": {}}
    except InputError as error:
        yield str(error).removesuffix(".")
        return
    for name, written in record["files"].items():
        path = folder / name
        if not name.startswith(tuple(below)):
            continue
        if not path.is_file() or path.stat().st_size != written["bytes"]:
            yield f"{path} is missing or not {written['bytes']} bytes long"
        elif (largest is None or written["bytes"] <= largest) and outputs.sha256_of(path) != written["sha256"]:
            yield f"{path} has another SHA-256 than in {CHECKSUMS_FILE}"


def find_outputs(folder: Path) -> list[Path]:
    """The outputs of this library at and below a folder, the outermost where one holds others."""
    marks = (CHECKSUMS_FILE, MANIFEST_FILE, CHECKPOINT_FILE)
    marked = {path.parent for name in marks for path in folder.rglob(name) if not _is_unfinished(path.relative_to(folder))}
    outermost: list[Path] = []
    for child in sorted(marked):
        is_within = bool(outermost) and child.is_relative_to(outermost[-1])
        is_marked = (child / CHECKSUMS_FILE).exists() or (child / CHECKPOINT_FILE).exists() or _has_own_manifest(child)
        if is_marked and not is_within:
            outermost.append(child)
    return outermost


def manifest_damages(folder: Path) -> list[str] | None:
    """As `damages`, by the SHA-256 of files in the manifest; None where it has none, as in most folders of version 0.1.0."""
    path = folder / MANIFEST_FILE
    try:
        manifest = outputs.read_json(path) if path.is_file() else {}
    except InputError as error:
        return [str(error).removesuffix(".")]
    sums = next((sums for key in ("parts", "sha256") if isinstance(sums := manifest.get(key), dict)), None)
    if sums is None:
        return None
    of_files = {folder / name: sha256 for name, sha256 in sums.items()}
    wrong = [path for path, sha256 in of_files.items() if not path.is_file() or outputs.sha256_of(path) != sha256]
    return [f"{path} is missing or has another SHA-256 than in {MANIFEST_FILE}" for path in wrong]


def check_small(folder: Path) -> None:
    """Compares the sizes of a folder's files, and the checksums of those up to `SMALL_BYTES`; `de-jax verify` reads all.

    Raises:
        InputError: a file is damaged; names it.
    """
    if damage := next(damages(folder, largest=SMALL_BYTES), None):
        raise InputError(f"{folder} is damaged ({damage}); copy it again, or remove it and make it again.")


def _is_fact(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("bytes"), int) and isinstance(value.get("sha256"), str)


def _has_own_manifest(folder: Path) -> bool:
    """Whether the manifest is this library's; a damaged one may be."""
    try:
        manifest = outputs.read_json(folder / MANIFEST_FILE)
    except InputError:
        return True
    return isinstance(manifest, dict) and str(manifest.get("format")).startswith("de_jax ")


def _is_unfinished(path: Path) -> bool:
    """Whether this is in a folder that appears under its own name later."""
    return any(outputs.is_leftover(Path(part)) or part.endswith(".orbax-checkpoint-tmp") for part in path.parts)


def _foreign(folder: Path, kind: str | None) -> str | None:
    """The first file of a folder that is not part of a former output of this kind; None where there is no such file."""
    if not (there := sorted(path.name for path in folder.iterdir())):
        return None
    with contextlib.suppress(InputError):  # a damaged description describes nothing
        if kind is not None and _kind_of(folder) == kind:
            record = read_checksums(folder)
            return next((name for name in names(folder) if record and name not in record["files"]), None)
    return there[0]


def _kind_of(folder: Path) -> str | None:
    """The kind that a folder says it is; before there were checksums, its manifest's format said so."""
    if record := read_checksums(folder):
        return str(record.get("kind"))
    if not (folder / MANIFEST_FILE).is_file():
        return None
    manifest = outputs.read_json(folder / MANIFEST_FILE)
    said = re.fullmatch(r"de_jax (.+) \d+", str(manifest.get("format"))) if isinstance(manifest, dict) else None
    return said[1] if said else None


@contextlib.contextmanager
def _set_aside(path: Path) -> Iterator[None]:
    """Renames a folder, if it is there, for the time of the block; removed afterwards, or put back where the block failed."""
    aside = outputs.temporary(path)
    if not path.exists():
        yield
        return
    os.replace(path, aside)
    try:
        yield
    except BaseException:
        os.replace(aside, path)
        raise
    shutil.rmtree(aside)
