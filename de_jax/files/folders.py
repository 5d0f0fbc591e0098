"""Folders that are complete or absent, name their kind, and hold the checksums of their files.

<folder>/manifest.json     the kind, its version, and the facts for its readers
         checksums.json    the kind, and the size and the SHA-256 of every file; written last

A writer replaces only a folder that this file shows to be a former output of its kind.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from de_jax.files import outputs, reading
from de_jax.files.reading import Check
from de_jax.types import InputError

T = TypeVar("T")

FORMAT = "de_jax checksums 1"
CHECKSUMS_FILE, MANIFEST_FILE = "checksums.json", "manifest.json"
CHECKPOINT_FILE = "_CHECKPOINT_METADATA"
"""Orbax's, of every checkpoint."""
SMALL_BYTES = 16 * 2**20
"""Files up to this size are read for their checksum whenever their folder is opened."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """Writes, opens and refuses the folders of one kind. A manifest holds the kind and the version; a writer writes it last.

    >>> import tempfile
    >>> WORDS = Kind("words", dict, make="write them", mend="write them again")
    >>> with tempfile.TemporaryDirectory() as parent:
    ...     with WORDS.writing(Path(parent) / "words") as folder:
    ...         manifest = WORDS.write_manifest(folder, {"num_words": 1})
    ...     WORDS.open(Path(parent) / "words")
    {'format': 'de_jax words 1', 'num_words': 1}
    """

    name: str
    entries: Check  # checks the manifest, its format aside
    make: str  # what to do where a folder is of another kind
    mend: str = "copy it again, or make it again"  # or is damaged
    otherwise: str = "choose another folder or delete this one"  # or was begun with other inputs
    file: str = MANIFEST_FILE  # the name of the manifest
    version: int = 1
    is_bare: bool = False  # the manifest's format is the version alone, as in the descriptions of models

    @property
    def format(self) -> str | int:
        """Kind and version in the manifest: "de_jax token store 1"."""
        return self.version if self.is_bare else f"de_jax {self.name} {self.version}"

    def writing(self, folder: str | Path) -> contextlib.AbstractContextManager[Path]:
        """A temporary folder that becomes `folder` once it is written, see `atomic_dir`; it replaces only its own kind."""
        return atomic_dir(folder, self.name)

    def write_manifest(self, folder: Path, entries: Mapping[str, Any]) -> dict[str, Any]:
        """Completes a folder; gives the manifest."""
        manifest = {"format": self.format, **entries}
        outputs.write_json(folder / self.file, manifest)
        return manifest

    def complete(self, folder: Path, entries: Mapping[str, Any], of_files: Iterable[str]) -> None:
        """Completes a folder that grew in place: the checksums of these files, then the manifest."""
        with outputs.atomic_file(folder / self.file) as manifest:
            outputs.write_json(manifest, {"format": self.format, **entries})
            own = {self.file: facts(manifest.parent, [manifest.name])[manifest.name]}
            write_checksums(folder, self.name, {**facts(folder, of_files), **own})

    def check(self, entries: Mapping[str, Any]) -> None:
        """Whether a manifest of these entries can be read: raises `InputError` before anything is written."""
        try:
            self.entries(json.loads(json.dumps(entries)))
        except (TypeError, ValueError) as error:
            raise InputError(f"this {self.name} cannot be described in a file, and so not be opened again: {error}.") from None

    def is_in(self, folder: Path) -> bool:
        """Whether a folder has the manifest, damaged or not."""
        return os.path.isfile(folder / self.file)

    def read_manifest(self, folder: str | Path) -> dict[str, Any]:
        """The manifest, its other files unseen."""
        path = Path(folder) / self.file
        if not self.is_in(path.parent):
            reading.require_folder(folder, self.make)
            raise InputError(f"{folder} holds no complete {self.name} (no {self.file}); {self.make}.")
        said = outputs.read_json(path)
        version = said.get("format", "absent") if isinstance(said, dict) else self.format
        try:
            if type(version) is not type(self.format) or version != self.format:
                raise ValueError(f"format is {version!r}, expected {self.format!r}")
            return self.entries(said)  # type: ignore[no-any-return]
        except InputError as error:
            raise InputError(f"{path}: {error}") from None
        except ValueError as error:
            is_other = kind_said(said) not in (self.name, None)
            raise InputError(f"{path}: {error}; {'give another folder' if is_other else self.mend}.") from None

    def open(self, folder: str | Path, *, is_thorough: bool = False) -> dict[str, Any]:
        """The manifest of a folder whose files are as they were written, by `check_files`."""
        manifest = self.read_manifest(folder)
        check_files(Path(folder), mend=self.mend, is_thorough=is_thorough)
        return manifest

    def require_same(self, folder: Path, there: Any, here: Mapping[str, Any]) -> None:
        """Whether a folder may be continued: `InputError` names the first thing that it was begun with and that differs here.

        `there` is JSON that the folder holds, in which anything may be that `here` does not name.
        """
        if found := _difference(*(json.loads(json.dumps(one, sort_keys=True)) for one in (there, here))):
            path, before, now = found
            raise InputError(f"{folder} was begun with {path} {before!r}, not {now!r}; {self.otherwise}.")


@contextlib.contextmanager
def atomic_dir(path: str | Path, kind: str | None = None) -> Iterator[Path]:
    """Yields a temporary folder beside `path`; synced and renamed to `path` on success, with its checksums.

    Args:
        path: absent, empty, or a former output of this kind, which is replaced.
        kind: such as "token store"; None for a folder that never replaces another and gets no checksums.
    """
    given = outputs.require_local(path)
    path = given.resolve()  # through a symbolic link, which stays
    require_replaceable(path, kind)
    outputs.make_folder(path.parent)
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
            outputs.completed(given)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def require_replaceable(path: str | Path, kind: str | None) -> None:
    """Raises `InputError` unless `path` is absent, an empty folder, or a former output of this kind and nothing else.

    A command asks before its work begins, and `atomic_dir` asks again.
    """
    path = outputs.require_local(path)
    if not path.exists():
        return
    if not path.is_dir():
        raise InputError(f"{path} is a file; choose a folder that is absent or empty.")
    there = sorted(one.name for one in path.iterdir() if not (outputs.is_leftover(one) or outputs.is_lock(one)))
    foreign = there[0] if there else None
    with contextlib.suppress(InputError):  # a damaged description describes nothing
        if there and kind is not None and (record := read_checksums(path)) and record.get("kind") == kind:
            foreign = next((name for name in names(path) if name not in record["files"]), None)
    if foreign is not None:
        reason = f", which is not part of a former {kind}" if kind else ""
        raise InputError(f"{path} exists already and holds {foreign}{reason}; choose a folder that is absent or empty.")


def clear(folder: Path, kept: Callable[[str], bool]) -> None:
    """Removes the entries of a folder that are not kept, by their names, and then the folder if it is empty."""
    for path in list(folder.iterdir()) if folder.is_dir() else ():
        if not kept(path.name):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    with contextlib.suppress(OSError):
        folder.rmdir()


def build_once(folder: Path, open_folder: Callable[[Path], T], build: Callable[[Path], T]) -> T:
    """Opens a folder of the cache; builds it first if it is absent or damaged.

    If several processes ask at once, one builds and the others wait. A whole folder is opened without a lock, so a cache may be on
    a read-only disk.

    Args:
        folder: its name holds a hash of everything that decides its content, so a damaged folder can be replaced.
        open_folder: raises InputError if the folder is damaged.
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
            try:
                return build(folder)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)  # it may be there, but cannot be opened
                raise


def key_of(*parts: str) -> str:
    """16 hex digits that tell these texts from others, for the name of a folder of the cache."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def facts(folder: Path, names: Iterable[str]) -> dict[str, Any]:
    """The size and the checksum of files below a folder, as `write_checksums` keeps them."""
    paths = {name: folder / name for name in names}
    return {name: {"bytes": path.stat().st_size, "sha256": reading.sha256_of(path)} for name, path in paths.items()}


def write_checksums(folder: Path, kind: str, of_files: dict[str, Any] | None = None) -> None:
    """Writes `checksums.json`."""
    of_files = facts(folder, names(folder)) if of_files is None else of_files
    outputs.write_json(folder / CHECKSUMS_FILE, {"format": FORMAT, "kind": kind, "files": of_files})


def names(folder: Path) -> list[str]:
    """The files below a folder, its checksums aside."""
    found = (str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if not path.is_dir() or path.is_symlink())
    return [name for name in found if name != CHECKSUMS_FILE]


def read_checksums(folder: Path) -> dict[str, Any] | None:
    """The content of `checksums.json`; None if it is missing. InputError: it is damaged."""
    path = folder / CHECKSUMS_FILE
    if not path.is_file():
        return None
    record = outputs.read_json(path)
    listed = record.get("files") if isinstance(record, dict) else None
    if not isinstance(listed, dict) or record.get("format") != FORMAT or not all(map(_is_fact, listed.values())):
        raise InputError(f"{path} is damaged, or not in the format '{FORMAT}'.")
    return record


def damages(folder: Path, *, below: Sequence[str] = ("",), largest: int | None = None) -> Iterator[str]:
    """Says of each file of a folder that is not as it was written how it is damaged; a part of a sentence.

    Args:
        folder: any; one without checksums has no damage that could be seen.
        below: sub-folders that are looked at, such as "params/"; by default all files.
        largest: bytes; of larger files only the size is compared, if it is known.
    """
    try:
        kept_in, of_files = kept(folder)
    except InputError as error:
        yield str(error).removesuffix(".")
        return
    for name, written in of_files.items():
        path, num_bytes = folder / name, written.get("bytes")
        if not name.startswith(tuple(below)):
            continue
        if not path.is_file() or num_bytes not in (None, path.stat().st_size):
            yield f"{path} is missing" + ("" if num_bytes is None else f" or not {num_bytes} bytes long")
        elif (largest is None or num_bytes is None or num_bytes <= largest) and reading.sha256_of(path) != written["sha256"]:
            yield f"{path} has another SHA-256 than in {kept_in}"


def check_files(folder: Path, *, mend: str, is_thorough: bool = False) -> None:
    """Compares files with their recorded sizes and checksums; those beyond `SMALL_BYTES` by size, unless `is_thorough`."""
    if damage := next(damages(folder, largest=None if is_thorough else SMALL_BYTES), None):
        raise InputError(f"{damage}; {mend}.")


def kept(folder: Path) -> tuple[str, dict[str, dict[str, Any]]]:
    """The recorded SHA-256 and mostly size of a folder's files, by name, and the file that holds the record; none for no record."""
    if record := read_checksums(folder):
        return CHECKSUMS_FILE, record["files"]
    manifest = outputs.read_json(folder / MANIFEST_FILE) if (folder / MANIFEST_FILE).is_file() else None
    parts = manifest.get("parts") if isinstance(manifest, dict) else None  # a generation of negatives
    return MANIFEST_FILE, {name: {"sha256": sha256} for name, sha256 in (parts if isinstance(parts, dict) else {}).items()}


def _is_fact(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("bytes"), int) and isinstance(value.get("sha256"), str)


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


def kind_said(manifest: Any) -> str | None:
    """The kind of folder by its manifest; None if it is no manifest of this library."""
    said = re.fullmatch(r"de_jax (.+) \d+", str(manifest.get("format"))) if isinstance(manifest, dict) else None
    return said[1] if said else None


def _difference(there: Any, here: Any, path: str = "") -> tuple[str, Any, Any] | None:
    """Where two JSON values differ first, and the two values there."""
    if isinstance(there, dict) and isinstance(here, dict):
        below = (_difference(there.get(key), value, f"{path}/{key}" if path else key) for key, value in here.items())
        return next((found for found in below if found), None)
    return (path, there, here) if there != here else None
