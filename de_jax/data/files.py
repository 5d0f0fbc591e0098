"""Files that are either complete or absent: every output appears by a rename, after its bytes are on the disk."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import socket
import uuid
import warnings
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any, TextIO, TypeVar

import numpy as np

from de_jax.data.reading import read_json as read_json
from de_jax.types import InputError

T = TypeVar("T")


@contextlib.contextmanager
def atomic_file(path: str | Path) -> Iterator[Path]:
    """Yields a temporary path beside `path`; synced and renamed to `path` on success, removed on failure."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary(path)
    try:
        with naming(path):
            yield temporary
            _sync(temporary)
            os.replace(temporary, path)
            _sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_dir(path: str | Path) -> Iterator[Path]:
    """Yields a temporary folder beside `path`; synced and renamed to `path` on success, replacing what stood there."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary(path)
    try:
        with naming(path):
            temporary.mkdir()
            yield temporary
            for file in sorted(temporary.rglob("*")):
                _sync(file)
            _sync(temporary)
            if path.exists():
                shutil.rmtree(path)
            os.replace(temporary, path)
            _sync(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def is_leftover(path: Path) -> bool:
    """Whether a process that was killed between the creation and the rename of an output left this."""
    return path.name.startswith(".") and path.name.endswith(".tmp")


def remove_leftovers(folder: str | Path) -> None:
    """Removes what killed processes left in a folder; for its only writer."""
    folder = Path(folder)
    for path in folder.iterdir() if folder.is_dir() else ():
        if is_leftover(path):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def append_text(path: str | Path, text: str) -> None:
    """Appends text durably; on failure the file is as it was."""
    path = Path(path)
    with naming(path), open(path, "ab", buffering=0) as file:
        size = file.tell()
        try:
            write_all(file, memoryview(text.encode()))
            os.fsync(file.fileno())
        except BaseException:
            file.truncate(size)
            raise


def write_all(file: FileIO, data: memoryview) -> None:
    """Writes all of it to an unbuffered file; a nearly full disk takes a part before it refuses."""
    data = data.cast("B")
    while data:
        data = data[file.write(data) :]


def save_array(path: str | Path, array: np.ndarray) -> None:
    """Writes a .npy file. Unlike `np.save`, an error says what the system said, a full disk for example."""
    array = np.ascontiguousarray(array)
    with open(path, "wb") as file:
        np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
        file.write(array.reshape(-1).view(np.uint8).data)


def check_writable(folder: str | Path) -> None:
    """Makes the folder if it is absent and writes to it on trial; OSError where that cannot be, before any work is lost."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with naming(folder):
        probe = _temporary(folder / "probe")
        try:
            probe.touch()
        finally:
            probe.unlink(missing_ok=True)


def write_json(path: str | Path, value: Any) -> None:
    """Writes `value` as indented JSON, atomically."""
    with atomic_file(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def build_once(folder: Path, open_folder: Callable[[Path], T], build: Callable[[Path], T]) -> T:
    """Opens a folder of the cache, which is built first if it is absent or damaged.

    Of several processes that ask at once, one builds and the others wait. What is whole is opened without a lock, so that a cache
    may lie where nothing can be written.

    Args:
        folder: its name says all that decides its content, so what stands there damaged can be replaced.
        open_folder: raises InputError where the folder is not whole.
        build: makes the folder, by `atomic_dir`.
    """
    if folder.is_dir():
        with contextlib.suppress(InputError):
            return open_folder(folder)
    with in_turn(folder):
        if folder.is_dir():  # another process has built it meanwhile
            with contextlib.suppress(InputError):
                return open_folder(folder)
        # Whoever left these was killed: only the holder of the lock builds this folder, and that is us.
        for abandoned in folder.parent.glob(f".{folder.name}.*.tmp"):
            shutil.rmtree(abandoned)
        return build(folder)


@contextlib.contextmanager
def in_turn(folder: Path) -> Iterator[None]:
    """Holds a folder for one process at a time; others say that they wait. The system frees the lock when its holder dies.

    The lock is a file beside the folder, and gone once nobody holds it.
    """
    path = folder.with_name(f".{folder.name}.lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with open(path, "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                warnings.warn(f"another process is writing {folder}; this one waits for it.", stacklevel=3)
                fcntl.flock(file, fcntl.LOCK_EX)
            if not _is_same(file, path):  # the holder for whom this one waited has removed it
                continue
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


def _is_same(file: TextIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def only_one(path: str | Path, what: str) -> Iterator[None]:
    """Holds the lock of a file for one process at a time; the system frees it when its holder dies.

    Raises:
        InputError: another process holds it; says which, as it left word in the file, and `what` it is doing.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with naming(path), open(path, "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise InputError(f"{file.read().strip() or 'another process'} is {what} already; stop it first.") from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield


def cache_dir() -> Path:
    """Where things that can be made again are kept: `$DE_JAX_CACHE`, or `~/.cache/de_jax`."""
    return Path(os.environ.get("DE_JAX_CACHE") or Path.home() / ".cache" / "de_jax")


def sha256_of(path: str | Path) -> str:
    """The hex SHA-256 of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """An OSError without a file name, or with a temporary one, gets that of the output, for the sentence that the user reads."""
    try:
        yield
    except OSError as error:
        if error.filename is None or is_leftover(Path(os.fspath(error.filename))):
            error.filename = str(path)
        raise


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
