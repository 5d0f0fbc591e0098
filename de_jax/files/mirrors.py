"""The mirrors of this process: the path of an address, and a thread that keeps a run equal to its bucket.

An address is fetched once in a command. At the end of a command everything that changed is uploaded (`push_all`); training and
mining upload all the time (`kept_equal`).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from de_jax.files import buckets, folders, outputs
from de_jax.files.buckets import Unreachable
from de_jax.files.mirror import Mirror
from de_jax.files.mirror_names import RUN_FILE
from de_jax.types import InputError

FRESH_SECONDS = 60.0
"""An address that is given again after so long is compared with its bucket again."""
SYNC_SECONDS = 15.0
"""Between two looks of the thread of `kept_equal`; logs that grew are uploaded whole."""
LAST_SECONDS = 600.0
"""How long the end of a command tries to upload while the bucket does not answer."""


class TakenOver(InputError):
    """Another process took a run over while this one could not say that it is alive."""


_mirrors: dict[str, Mirror] = {}
_lock = threading.Lock()


def local(address: str | Path) -> Path:
    """The path to use for a path of this machine or an address, which is fetched.

    Raises:
        InputError: no path, as `Objects`, or an address of another kind.
    """
    if not isinstance(address, str | os.PathLike) or not os.fspath(address):
        raise InputError(f"the path is {address!r:.60}; name a folder by a str or a Path.")
    text = os.fspath(address)
    if "://" in text and buckets.is_bucket(text):
        return _opened(text).path
    return outputs.require_local(address)


@contextlib.contextmanager
def written(path: str | Path) -> Iterator[Path]:
    """The path to write to for a path or an address; files written for an address are uploaded after the block."""
    found = local(path)
    yield found
    if of(found):
        push_all()


def localized(path: str) -> str:
    """A path, or that of the copy of a bucket's address."""
    return buckets.localized(path, local)


def of(path: str | Path) -> tuple[Mirror, str] | None:
    """The mirror that a path lies in, and its name there; None for a path outside."""
    path = Path(path)
    with _lock:
        holding = [mirror for mirror in _mirrors.values() if path.is_relative_to(mirror.path)]
    if not holding:
        return None
    mirror = max(holding, key=lambda one: len(one.path.parts))
    name = str(path.relative_to(mirror.path))
    return mirror, "" if name == "." else name


def bring(path: Path) -> None:
    """Fetches a checkpoint or a part that is not here, where the path is in a mirror."""
    if (found := of(path)) and not path.exists():
        found[0].bring(found[1])


def refresh(path: Path, *, with_parts: bool = False) -> None:
    """Fetches the files that others wrote to a folder since, where it is the copy of an address; see `Mirror.fetch`."""
    if found := of(path):
        mirror, name = found
        mirror.fetch(f"{name}/" if name else "", is_start=False, with_parts=with_parts)
    elif address := buckets.address_of(path):
        _opened(address)


def clear(folder: Path, kept: Callable[[str], bool]) -> None:
    """Removes the entries of a folder that are not kept, by their names; in a mirror also those in the bucket."""
    if found := of(folder):
        found[0].clear(found[1], kept)
    else:
        folders.clear(folder, kept)


@contextlib.contextmanager
def only_one(path: str | Path, what: str) -> Iterator[None]:
    """As `outputs.only_one`, on all machines. In a mirror, everything beside the file is fetched again once it is held.

    Raises:
        InputError: another process holds it; says which, and `what` it is doing.
    """
    path = Path(path)
    with outputs.only_one(path, what):
        if (found := of(path.parent)) is None:
            yield
            return
        from de_jax.files import leases  # most folders are in no bucket

        mirror, name = found
        with leases.leased(mirror, leases.Lease(path, buckets.named(what))) as was_ours:
            mirror.fetch(f"{name}/" if name else "", drops_own=not was_ours)
            yield


def _opened(address: str) -> Mirror:
    address = address.rstrip("/")
    with _lock:
        mirror = _mirrors.get(address) or Mirror(address)
    is_new = time.monotonic() - mirror.fetched < FRESH_SECONDS
    if not is_new and not mirror.guards:  # a run that is held is fetched by its thread
        mirror.fetch()
    with _lock:
        return _mirrors.setdefault(address, mirror)


def push_all(seconds: float | None = None) -> None:
    """Uploads what this process wrote to its mirrors; retries for so long, by default `LAST_SECONDS`.

    Raises:
        InputError: a bucket does not take it; `Unreachable` where it does not answer.
    """
    seconds = LAST_SECONDS if seconds is None else seconds
    deadline, pause = time.monotonic() + seconds, SYNC_SECONDS
    for mirror in _last_run_last():
        while True:
            try:
                mirror.push(is_last=True)
                break
            except Unreachable as error:
                if time.monotonic() + pause > deadline:
                    raise Unreachable(f"not everything was uploaded: {error}") from None
                warnings.warn(f"{error} It is tried again for {seconds:.0f} s.", stacklevel=2)
                time.sleep(pause)
                pause *= 2


def _last_run_last() -> list[Mirror]:
    """All mirrors; those of runs last, as a checkpoint needs the negatives that it was trained with."""
    with _lock:
        return sorted(_mirrors.values(), key=lambda mirror: (mirror.path / RUN_FILE).is_file())


class Sync:
    """A thread that uploads the files of a run, and fetches those of others; see `kept_equal`."""

    def __init__(self) -> None:
        self._followed: set[Path] = set()
        self._stop = threading.Event()
        self._error: Exception | None = None
        self._is_told = False
        self._thread = threading.Thread(target=self._run, name="buckets", daemon=True)
        self._thread.start()

    def follow(self, *paths: Path) -> None:
        """Fetches the files that others write to folders, if they are in a mirror."""
        self._followed.update(path for path in paths if of(path))

    def check(self) -> None:
        """Raises `TakenOver` where another process has the run now, or the fault that ended the thread."""
        if self._error:
            raise self._error

    def close(self) -> None:
        """Ends the thread; the last upload is `push_all`'s."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(SYNC_SECONDS):
            try:
                self._compare()
                self._is_told = False
            except Exception as error:
                if isinstance(error, TakenOver) or not isinstance(error, InputError | OSError):
                    self._error = error
                    return
                if not self._is_told:
                    self._is_told = True
                    warnings.warn(f"{error} The run continues; it is tried again until its end.", stacklevel=2)

    def _compare(self) -> None:
        for mirror in _last_run_last():
            mirror.push()
        for path in list(self._followed):
            refresh(path)


@contextlib.contextmanager
def kept_equal(path: Path, *, keep: int | None = None) -> Iterator[Sync | None]:
    """While the block runs, a thread keeps the mirror that a run lies in equal to its bucket; at the end all is uploaded.

    Args:
        path: of the run; elsewhere than in a mirror nothing happens.
        keep: checkpoints that stay in the bucket.
    """
    if (found := of(path)) is None:
        yield None
        return
    found[0].keep = keep
    sync = Sync()
    try:
        yield sync
    except BaseException:
        sync.close()
        push_rest()
        raise
    sync.close()
    sync.check()
    push_all()


def push_rest() -> None:
    """As `push_all`, once, behind an error that must not be hidden by another one."""
    try:
        push_all(seconds=0)
    except InputError as error:
        warnings.warn(str(error), stacklevel=2)
