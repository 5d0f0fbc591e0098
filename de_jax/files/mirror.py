"""A copy of a bucket's folder on this machine: fetched when an address is given, read and written as any folder, and uploaded.

A bucket has no rename, so the files that make a folder complete (`MARKS`) are uploaded last, once the list of the bucket shows all
others, and removed first. Locks, temporary files and a run's own `embeddings/`, which can be made again, stay on this machine.

Some folders are complete or absent on both sides: checkpoints, and the parts of several jobs (`<folder>.parts/0_of_4`). They are
uploaded once they have their mark, fetched only with it, and appear and vanish whole. So many machines may write to one bucket,
each its own such folders. Parts are fetched only where they are asked for.

Where both sides changed, the bucket wins, unless this machine was the last to hold the folder's lease (`leases`).
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent import futures
from pathlib import Path

from de_jax.files import buckets, folders, mirror_record, outputs
from de_jax.files.buckets import Object, Objects, Sent, Unreachable
from de_jax.files.mirror_names import (
    CHECKPOINT_FOLDERS,
    MARKS,
    PARTS,
    RUN_FILE,
    UNFINISHED,
    Names,
    is_lock,
    is_mark,
    is_temporary,
    joined,
    last_first,
    step_of,
)
from de_jax.files.mirror_record import Here, Known
from de_jax.files.outputs import progress_bar
from de_jax.files.reading import parse_json
from de_jax.types import InputError

NUM_THREADS = 8
NUM_TRIES = 3
"""Uploads, until the bucket lists them; downloads, until nothing changes meanwhile."""


class Mirror:
    """The copy of one address.

    Attributes:
        address: of the bucket's folder, or of a file.
        path: of the copy; absent where there is nothing in the bucket.
        guards: each raises `InputError` where this process may not write there any more; asked before each group
            of uploads.
        keep: checkpoints that stay in the bucket; None leaves all.
        fetched: when it was compared last, on the monotonic clock.
    """

    def __init__(self, address: str) -> None:
        self.address, self.path = address.rstrip("/"), buckets.path_of(address)
        self.guards: list[Callable[[], None]] = []
        self.keep: int | None = None
        self.fetched = -math.inf
        self._objects, self._names = Objects(self.address), Names(self.path)
        self._unfinished: set[str] = set()
        self._told: set[str] = set()

    def fetch(self, below: str = "", *, is_start: bool = True, drops_own: bool = False, with_parts: bool = False) -> None:
        """Downloads new and changed files, and removes files that are gone in the bucket. Files that were changed here stay.

        Args:
            below: a sub-folder, "negatives/".
            is_start: False within a session: a file that was removed here since is not fetched again, and of the files that are
                gone there only checkpoints and parts are removed.
            drops_own: everything here that the bucket does not have is removed first.
            with_parts: the parts of other jobs too.
        """
        with self._alone():
            known, there = mirror_record.read(self.path), self._list()
            known = {name: entry for name, entry in known.items() if name.startswith(below)}
            lost = [
                name
                for name, entry in known.items()
                if entry.version and name not in there and self._is_as(name, entry) and (is_start or self._names.whole_of(name))
            ]
            if drops_own:
                own = [name for name in self._here(below) if name not in known or not self._is_as(name, known[name])]
                own += [name for name, entry in known.items() if not entry.version]
                self._forget(own, known)
            wanted = self._wanted(there, tells=is_start, with_parts=with_parts)
            wanted = {name: found for name, found in wanted.items() if name.startswith(below)}
            followed = {self._names.whole_of(name) for name in wanted}
            self._forget([name for name in lost if self._names.whole_of(name) in followed], known)
            if is_start:  # else a copy that was deleted to free the disk would look like one to delete in the bucket
                left_out = [name for name in known if name not in wanted and not (self.path / name).is_file()]
                mirror_record.update(self.path, dict.fromkeys(left_out))
            self._download({name: found for name, found in wanted.items() if self._is_stale(name, found, known, is_start)})
            self._forget([name for name in lost if name in known], known)  # only now, so that a checkpoint is here at all times
            self.fetched = time.monotonic()

    def bring(self, name: str) -> None:
        """Downloads a checkpoint or a part that `fetch` left out, if the bucket has it whole: "checkpoints/40"."""
        with self._alone():
            there = self._list()
            parts = {part: found for part, found in there.items() if part.startswith(f"{name}/")}
            if parts and not (self.path / name).exists() and self._is_whole(name, there):
                self._download(parts)

    def clear(self, below: str, kept: Callable[[str], bool]) -> None:
        """Removes the entries of a folder, here and there, also the remains of a killed upload or removal.

        Args:
            below: the folder.
            kept: whether an entry of the folder, by its name, stays.
        """
        with self._alone():
            self._check_guards()
            start = f"{below}/" if below else ""
            removed = lambda name: name.startswith(start) and not kept(name.removeprefix(start).split("/")[0])  # noqa: E731
            self._objects.remove(sorted(filter(removed, self._list()), key=last_first))
            folders.clear(self.path / below, kept)
            mirror_record.update(self.path, {name: None for name in mirror_record.read(self.path) if removed(name)})

    def push(self, *, is_last: bool = False) -> None:
        """Uploads new and changed files, and removes files there that were removed here.

        Args:
            is_last: also files that the bucket took before and lost.

        Raises:
            InputError: the bucket does not take a file, or does not list it afterwards.
        """
        with self._alone():
            known, here, names = mirror_record.read(self.path), self._here(), self._names
            changed = [name for name, found in here.items() if name not in known or known[name] != (*found, known[name].version)]
            changed += [name for name in here if name in known and not known[name].version and name not in changed]
            if is_last and (changed or self.guards):
                there = self._list()
                changed += [name for name in here if name not in there and name not in changed and not names.is_of_jobs(name)]
            gone = [name for name in known if name not in here and not names.stays_here(name)] if changed or self.guards else []
            if not changed and not gone:
                return
            if RUN_FILE in gone:
                raise InputError(f"{self.path}, the copy of {self.address}, was removed while it was in use; repeat the command.")
            self._check_guards()
            made = {joined(name.rpartition("/")[0], UNFINISHED) for name in changed if is_mark(name) and not names.whole_of(name)}
            for name in made:
                self._objects.write(name, b"")
            self._objects.remove(name for name in sorted(changed, key=last_first) if is_mark(name) and name in known)
            mirror_record.update(self.path, {name: Known(*here[name], "") for name in changed})
            before = {name: known[name].version for name in changed if name in known}
            with self._held(changed):
                for group in self._names.in_order(changed):
                    self._check_guards()  # again, as this process may have slept for long
                    self._upload(group, here, before)
            if made:
                self._objects.remove(made)
            self._objects.remove(sorted(gone, key=last_first))  # only now, so that the bucket always has a whole checkpoint
            mirror_record.update(self.path, dict.fromkeys(gone))
            if any(map(self._names.checkpoint_of, changed)):
                self._tidy(here)

    def _check_guards(self) -> None:
        for guard in self.guards:
            guard()

    def _upload(self, names: Iterable[str], here: Mapping[str, Here], before: Mapping[str, str]) -> None:
        """Sends files in any order, until the bucket lists all of them.

        Args:
            names: of the files.
            here: all files here.
            before: the versions that the bucket had.
        """

        def has_arrived(name: str, sent: Sent, there: Mapping[str, Object]) -> bool:
            if name not in there or there[name].size != sent.size:
                return False
            version = there[name].version
            return version != before.get(name) or sent.md5 is None or version.strip('"') == sent.md5

        left = sorted(names)
        for _ in range(NUM_TRIES):
            with futures.ThreadPoolExecutor(NUM_THREADS) as threads:
                sent = dict(zip(left, threads.map(self._send, left), strict=True))
            there = self._list()
            arrived = [name for name, one in sent.items() if one and has_arrived(name, one, there)]
            mirror_record.update(self.path, {name: Known(*here[name], there[name].version) for name in arrived})
            left = [name for name, one in sent.items() if name not in arrived and one]
            if not left:
                return
        raise Unreachable(
            f"{self.address} took {left[0]!r} and does not list it; check the bucket, then repeat the command to continue."
        )

    def _send(self, name: str) -> Sent | None:
        """Uploads a file; None for a file that was removed meanwhile."""
        held = self._sent_from / name
        try:
            return self._objects.put(name, held if held.is_file() else self.path / name)
        except FileNotFoundError:
            return None

    @property
    def _sent_from(self) -> Path:
        return mirror_record.beside(self.path, ".sent")

    @contextlib.contextmanager
    def _held(self, names: Iterable[str]) -> Iterator[None]:
        """Keeps the files of checkpoints for the time of their upload, which may be longer than the run keeps them."""
        shutil.rmtree(self._sent_from, ignore_errors=True)  # of a killed upload
        for name in filter(self._names.checkpoint_of, names):
            outputs.make_folder((self._sent_from / name).parent)
            with contextlib.suppress(OSError):  # the file is gone, or the disk has no links
                os.link(self.path / name, self._sent_from / name)
        try:
            yield
        finally:
            shutil.rmtree(self._sent_from, ignore_errors=True)

    def _tidy(self, here: Mapping[str, Here]) -> None:
        """Removes what killed uploads and removals left of checkpoints, and checkpoints beyond the newest `keep`."""
        there, checkpoint_of = self._list(), self._names.checkpoint_of
        own = {folder for folder in map(checkpoint_of, here) if folder}
        left = {folder for folder in map(checkpoint_of, there) if folder and f"{folder}/{folders.CHECKPOINT_FILE}" not in there}
        extra = [name for name in there if checkpoint_of(name) in own and name not in here]
        extra += [name for name in there if checkpoint_of(name) in left - own]
        of_run = {folder for folder in map(checkpoint_of, there) if folder and self._names.parent(folder) == CHECKPOINT_FOLDERS[0]}
        oldest_first = sorted(of_run, key=step_of)
        old = set(oldest_first[: -self.keep]) - own if self.keep else set()
        extra += [name for name in there if checkpoint_of(name) in old]
        self._objects.remove(sorted(extra, key=last_first))

    def _list(self) -> dict[str, Object]:
        everything = self._objects.list()
        begun = {name.removesuffix(UNFINISHED) for name in everything if name.rpartition("/")[2] == UNFINISHED}
        self._unfinished = {folder for folder in begun if not any(f"{folder}{mark}" in everything for mark in MARKS)}
        return {name: one for name, one in everything.items() if not is_lock(name)}

    def _here(self, below: str = "") -> dict[str, Here]:
        """The files here that belong in the bucket."""
        found: dict[str, Here] = {}
        if self.path.is_file():
            return {"": mirror_record.stat(self.path)}
        for parent, inner, names in os.walk(self.path):
            inner[:] = [name for name in inner if not is_temporary(name)]
            if Path(parent).name.endswith(PARTS):
                inner[:] = [name for name in inner if (Path(parent) / name / folders.MANIFEST_FILE).is_file()]
            for name in names:
                path = Path(parent) / name
                relative = str(path.relative_to(self.path))
                is_own = relative.startswith(below) and not is_temporary(name) and not self._names.stays_here(relative)
                with contextlib.suppress(FileNotFoundError):  # removed at this moment
                    if is_own:
                        found[relative] = mirror_record.stat(path)
        return found

    def _wanted(self, there: Mapping[str, Object], *, tells: bool, with_parts: bool) -> dict[str, Object]:
        """The files that are fetched: all but folders that are half uploaded, and of those not here parts and old checkpoints."""
        wholes = {folder for folder in map(self._names.whole_of, there) if folder}
        left_out: set[str] = set()
        newest: set[Path] = set()
        for folder in sorted(wholes, key=step_of, reverse=True):
            parent = (self.path / folder).parent
            is_old = parent.name == CHECKPOINT_FOLDERS[0] and parent in newest
            is_asked = (self.path / folder).is_dir() or (with_parts if self._names.is_part(folder) else not is_old)
            if is_asked and self._is_whole(folder, there, tells=tells):
                newest.add(parent)
            else:
                left_out.add(folder)
        for folder in self._unfinished if tells else ():
            self._tell(folder.rstrip("/"))
        left = {name: found for name, found in there.items() if self._names.whole_of(name) not in left_out}
        return {name: found for name, found in left.items() if not name.startswith(tuple(self._unfinished))}

    def _is_whole(self, folder: str, there: Mapping[str, Object], *, tells: bool = True) -> bool:
        """Whether a checkpoint or a part was uploaded to its end; says once where it was not."""
        sums = f"{folder}/{folders.CHECKSUMS_FILE}"
        is_whole = f"{folder}/{self._names.mark_of(folder)}" in there
        if is_whole and sums in there:
            try:
                files = parse_json((self._objects.read(sums) or b"").decode())["files"]
                sizes = {f"{folder}/{name}": fact["bytes"] for name, fact in files.items()}
            except (ValueError, TypeError, KeyError, AttributeError):
                is_whole = False
            else:
                is_whole = all(name in there and there[name].size == size for name, size in sizes.items())
        if tells and not is_whole:
            self._tell(folder)
        return is_whole

    def _tell(self, folder: str) -> None:
        """Says once that a folder is half uploaded, unless it is this machine that sends it."""
        if folder not in self._told and not (self.path / folder).is_dir():
            self._told.add(folder)
            warnings.warn(f"{joined(self.address, folder)} is half uploaded, so it is left out.", stacklevel=2)

    def _is_stale(self, name: str, found: Object, known: Mapping[str, Known], is_start: bool) -> bool:
        """Whether a file is to be fetched."""
        entry, is_here = known.get(name), (self.path / name).is_file()
        if self._names.stays_here(name):
            return False
        if entry is None:  # a whole folder that is here and not known is being made
            folder = self._names.whole_of(name)
            return is_start or folder is None or not (self.path / folder).is_dir()
        if is_here and not entry.version:  # it was being sent when this machine stopped
            return False
        return entry.version != found.version or (is_start and not is_here)

    def _download(self, wanted: Mapping[str, Object]) -> None:
        """Fetches files; a checkpoint or a part appears by a rename, the marks of other folders come last."""
        of_checkpoints: dict[str, list[str]] = {}
        for name in wanted:
            if (folder := self._names.whole_of(name)) and not (self.path / folder).exists():
                of_checkpoints.setdefault(folder, []).append(name)
        apart = {name for names in of_checkpoints.values() for name in names}
        num_bytes = sum(found.size for found in wanted.values())
        with progress_bar(total=num_bytes, desc=f"fetch {self.address}", unit="B", unit_scale=True, delay=2, leave=False) as bar:
            for group in self._names.in_order([name for name in wanted if name not in apart]):
                paths = {name: self.path / name for name in group}
                mirror_record.update(self.path, self._receive(paths, wanted, bar.update))
            for folder, names in of_checkpoints.items():
                unfinished = outputs.temporary(self.path / folder)
                try:
                    paths = {name: unfinished / Path(name).relative_to(folder) for name in names}
                    received = self._receive(paths, wanted, bar.update)
                    if len(received) == len(paths):  # else it is being removed there
                        os.replace(unfinished, self.path / folder)
                        mirror_record.update(self.path, received)
                finally:
                    shutil.rmtree(unfinished, ignore_errors=True)

    def _receive(
        self, paths: Mapping[str, Path], wanted: Mapping[str, Object], progress: Callable[[int], object]
    ) -> dict[str, Known]:
        """Fetches each object to its path, again where it changed meanwhile; leaves out objects that were removed meanwhile."""
        found: dict[str, Known] = {}
        left, versions = dict(paths), {name: wanted[name] for name in paths}

        def receive(name: str) -> bool:
            try:
                with outputs.atomic_file(left[name]) as unfinished:
                    self._objects.get(name, unfinished)
                    progress(unfinished.stat().st_size)
            except FileNotFoundError:  # gone since it was listed
                return False
            return True

        for _ in range(NUM_TRIES):
            if not left:
                return found
            with futures.ThreadPoolExecutor(NUM_THREADS) as threads:
                received = dict(zip(left, threads.map(receive, left), strict=True))
            there = self._list()
            for name in list(left):
                if name not in there:
                    left.pop(name).unlink(missing_ok=True)
                elif received[name] and there[name] == versions[name] and left[name].stat().st_size == there[name].size:
                    found[name] = Known(*mirror_record.stat(left.pop(name)), there[name].version)
                versions[name] = there.get(name, versions[name])
        if left:
            raise Unreachable(f"{self.address} changes {min(left)!r} while it is read; repeat the command once it is written.")
        return found

    def _is_as(self, name: str, entry: Known) -> bool:
        """Whether a file is as it was fetched or sent, or absent."""
        path = self.path / name
        return not path.is_file() or mirror_record.stat(path) == entry.here

    def _forget(self, names: Iterable[str], known: dict[str, Known]) -> None:
        """Removes files here, and the folders that were theirs alone; of a checkpoint or a part the whole at once."""
        for name in names:
            folder, path = self._names.whole_of(name), self.path / name
            if folder and (self.path / folder).is_dir():
                aside = outputs.temporary(self.path / folder)
                os.replace(self.path / folder, aside)
                shutil.rmtree(aside)
            path.unlink(missing_ok=True)
            known.pop(name, None)
            with contextlib.suppress(OSError):
                for parent in path.parents:
                    if parent == self.path or not parent.is_relative_to(self.path):
                        break
                    parent.rmdir()
        mirror_record.update(self.path, dict.fromkeys(names))

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """One process and one thread of this machine at a time compares both sides; all of them know the same record."""
        with mirror_record.in_turn(mirror_record.beside(self.path, ".lock")):
            yield
