"""Copies of buckets on this machine: fetched when an address is given, and the outputs of a command, uploaded at its end.

A command uploads the outputs that it completed itself (`outputs.COMPLETED`), the files that complete a folder last. Runs and
negatives have an owner, see `owners`: it alone uploads there, and checkpoints and generations are fetched if its newest entry names
them. In a folder without an owner, a checkpoint or a part of several jobs is fetched if it has its mark.

Checkpoints and parts appear here whole. Of `checkpoints/` the newest is fetched, others and parts if they are asked for.
"""

import contextlib
import fcntl
import json
import os
import re
import shutil
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent import futures
from pathlib import Path
from typing import Any, NamedTuple

from de_jax.buckets import entries
from de_jax.buckets.objects import Object, Objects, Unreachable
from de_jax.files import addresses, folders, outputs
from de_jax.files.outputs import progress_bar

NUM_THREADS, NUM_TRIES = 8, 5
FRESH_SECONDS = 60.0
"""An address that is given again after so long is compared with its bucket again."""
LAST_SECONDS, PAUSE_SECONDS = 600.0, 15.0
"""How long the end of a command tries to upload while the bucket does not answer, and its first pause."""
MARKS = (folders.MANIFEST_FILE, folders.CHECKSUMS_FILE, folders.CHECKPOINT_FILE)
"""What makes a folder complete, in the order of uploads."""
OWNER_FILE = ".owner"
"""In the copy of a folder with an owner: the sessions that this machine owned it in. The owner's process holds its lock."""
_WHOLE = re.compile(r"(?:^|/)(?:(?:checkpoints|best|base)/\d+|[^/]+\.parts/\d+_of_\d+)(?=/)")
_PRIVATE = re.compile(r"(?:^|/)(?:\.owners?(?:/|$)|\.[^/]*\.lock$|\.lock$)")

claimed: dict[Path, Any] = {}
"""The owners of the folders that this process owns or owned."""
_fetched: dict[Path, float] = {}
outputs.COMPLETED = set()


class Known(NamedTuple):
    """A file as it was here and there when both were equal."""

    size: int
    mtime: int  # nanoseconds
    version: str


class Listed(NamedTuple):
    """A file as the bucket lists it."""

    name: str  # of the object
    object: Object


def fetch(path: Path) -> None:
    """Fetches an address for a command, once in `FRESH_SECONDS`."""
    if time.monotonic() - _fetched.get(path, -FRESH_SECONDS) >= FRESH_SECONDS:
        pull(path)
        _fetched[path] = time.monotonic()


def follow(path: Path) -> None:
    """Fetches the files that others wrote since; a warning, once, where the bucket does not answer."""
    try:
        pull(path)
    except Unreachable as error:
        warnings.warn(f"{error} It is tried again.", stacklevel=2)


def pull(path: Path, *, asked: str = "", everything: bool = False, by_owner: bool = False, keeps_own: bool = False) -> None:
    """Downloads new and changed files of an address, and removes files that are gone there and unchanged here.

    Args:
        asked: a checkpoint or a part below it, "checkpoints/40", which is wanted too.
        everything: old checkpoints are wanted too, and all parts of a folder of parts.
        by_owner: for the owner of the folder, whose copy is otherwise left alone while its process lives.
        keeps_own: files that are here stay as they are; else an owner's copy is made equal to the bucket.

    Raises:
        Unreachable: no answer, or the folder changes all the time.
    """
    objects = Objects(str(addresses.address_of(path)))
    with _in_turn(_record_of(path).with_name("fetch.lock")):
        if by_owner and not keeps_own:
            known = remembered(path)
            remove(path, [name for name, found in here(path).items() if known.get(name, ())[:2] != found])
        for _ in range(NUM_TRIES):
            try:
                there = objects.list()
                wholes, plain, held = _listed(path, objects, there, by_owner=by_owner)
            except FileNotFoundError:  # an entry that was replaced meanwhile
                continue
            chosen = _chosen(path, wholes, asked=asked, everything=everything)
            known = remembered(path)
            stale = {folder: files for folder, files in chosen.items() if _is_stale(path, files, known, keeps_own)}
            files = {name: one for name, one in plain.items() if _is_stale(path, {name: one}, known, keeps_own)}
            if not stale and not files:
                alive = {*plain, *(name for files in wholes.values() for name in files)}
                gone = [name for name in known if name not in alive and not name.startswith(held)]
                remove(path, [name for name in gone if _stat(path / name) == known[name][:2]])
                remember(path, dict.fromkeys(gone))
                return
            _download(path, objects, stale, files)
    raise Unreachable(f"{objects.address} changes while it is read; repeat the command once it is written.")


def _listed(
    path: Path, objects: Objects, there: Mapping[str, Object], *, by_owner: bool
) -> tuple[dict[str, dict[str, Listed]], dict[str, Listed], tuple[str, ...]]:
    """The whole folders in the bucket, other files, and the beginnings of names that a living process here owns."""
    newest = entries.numbers(there)
    held = {owned for owned in newest if not (by_owner and not owned) and _is_held(path / owned)}
    own = {owned: entries.read(objects, owned, number).folders for owned, number in newest.items() if owned not in held}
    wholes: dict[str, dict[str, Listed]] = {}
    plain: dict[str, Listed] = {}
    for name, one in there.items():
        owned = max((owned for owned in newest if name.startswith(_below(owned))), key=len, default=None)
        if _PRIVATE.search(name) or owned in held:
            continue
        if owned in own and entries.WHOLE.match(name.removeprefix(_below(owned))):
            continue
        folder = _folder_of(path, name)
        (plain if folder is None else wholes.setdefault(folder, {}))[name] = Listed(name, one)
    for folder, files in list(wholes.items()):
        mark = folders.MANIFEST_FILE if "_of_" in folder.rpartition("/")[2] else folders.CHECKPOINT_FILE
        if f"{folder}/{mark}" not in files:
            del wholes[folder]
            _tell(path / folder)
    for owned, of_owner in own.items():
        for folder, facts in of_owner.items():
            at = {f"{_below(owned)}{folder}/{name}": f"{_below(owned)}{facts['at']}/{name}" for name in facts["files"]}
            if all(there.get(name, (-1,))[0] == size for name, size in zip(at.values(), facts["files"].values(), strict=True)):
                wholes[f"{_below(owned)}{folder}"] = {name: Listed(at[name], there[at[name]]) for name in at}
            else:
                _tell(path / _below(owned) / folder)
    return wholes, plain, tuple(map(_below, held))


def _chosen(
    path: Path, wholes: Mapping[str, Mapping[str, Listed]], *, asked: str, everything: bool
) -> dict[str, Mapping[str, Listed]]:
    """The whole folders that are fetched."""
    steps: dict[Path, int] = {}
    for folder in wholes:
        if (path / folder).name.isdigit():
            steps[(path / folder).parent] = max(steps.get((path / folder).parent, 0), int((path / folder).name))

    def is_wanted(folder: str) -> bool:
        whole, parent = path / folder, (path / folder).parent
        if parent.name.endswith(".parts"):
            return whole.is_dir() or folder == asked or (everything and parent == path)
        is_old = parent.name == "checkpoints" and int(whole.name) < steps[parent]
        return everything or not is_old or folder == asked or whole.is_dir()

    return {folder: files for folder, files in wholes.items() if is_wanted(folder)}


def _is_stale(path: Path, files: Mapping[str, Listed], known: Mapping[str, Known], keeps_own: bool) -> bool:
    """Whether files are to be fetched, a whole folder's together."""
    if not all((path / name).is_file() for name in files):
        return True
    if len(files) > 1 and not any(name in known for name in files):  # a folder that is here already, by way of another address
        keeps_own |= all((path / name).stat().st_size == one.object.size for name, one in files.items())
    return not keeps_own and any(name not in known or known[name].version != one.object.version for name, one in files.items())


def _download(path: Path, objects: Objects, wholes: Mapping[str, Mapping[str, Listed]], plain: Mapping[str, Listed]) -> None:
    """Fetches files; a whole folder appears by a rename, others each by its own, marks last. Files that are gone are left out."""
    every = [one.object.size for files in (*wholes.values(), plain) for one in files.values()]
    with (
        progress_bar(total=sum(every), desc=f"fetch {objects.address}", unit="B", unit_scale=True, delay=2, leave=False) as bar,
        futures.ThreadPoolExecutor(NUM_THREADS) as threads,
    ):

        def receive(target: Path, one: Listed) -> bool:
            outputs.make_folder(target.parent)
            unfinished = outputs.temporary(target)
            try:
                objects.get(one.name, unfinished)
                os.replace(unfinished, target)
            except FileNotFoundError:
                return False
            finally:
                unfinished.unlink(missing_ok=True)
            bar.update(one.object.size)
            return True

        def keep(files: Mapping[str, Listed]) -> None:
            remember(path, {name: Known(*_stat(path / name), one.object.version) for name, one in files.items()})

        for folder, files in wholes.items():
            unfinished = outputs.temporary(path / folder)
            try:
                targets = [unfinished / Path(name).relative_to(folder) for name in files]
                if all(threads.map(receive, targets, files.values())):
                    remove(path, [f"{folder}/"])
                    os.replace(unfinished, path / folder)
                    keep(files)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
        for names in in_order(plain):
            arrived = threads.map(receive, [path / name for name in names], [plain[name] for name in names])
            keep({name: plain[name] for name, has_arrived in zip(names, arrived, strict=True) if has_arrived})


def upload(*, is_failed: bool = False) -> None:
    """Uploads the outputs that this process completed; see `insist`."""

    def send() -> None:
        for path in sorted(outputs.COMPLETED or ()):
            if path.exists() and addresses.address_of(path) and not _stays(path):
                _send(path)
            outputs.COMPLETED.discard(path)  # type: ignore[union-attr]

    insist(send, is_failed=is_failed)


def insist(send: Callable[[], None], *, is_failed: bool) -> None:
    """Repeats an upload for `LAST_SECONDS` while the bucket does not answer; behind an error it tries once, and warns."""
    deadline, pause = time.monotonic() + LAST_SECONDS, PAUSE_SECONDS
    while True:
        try:
            return send()
        except Unreachable as error:
            told = f"not everything was uploaded: {error}"
            if is_failed:
                return warnings.warn(told, stacklevel=2)
            if time.monotonic() + pause > deadline:
                raise Unreachable(told) from None
            warnings.warn(f"{error} It is tried again for {LAST_SECONDS:.0f} s.", stacklevel=2)
            time.sleep(pause)
            pause *= 2


def _send(path: Path) -> None:
    """Uploads an output: a folder, a file that completes its folder, or another file."""
    is_folder = path.is_dir() or path.name in MARKS
    base = path if path.is_dir() else path.parent
    objects = Objects(str(addresses.address_of(base)))
    found = {name: size for name, size in here(base, everything=True).items() if is_folder or name == path.name}
    there = objects.list() if is_folder else {}
    objects.remove([name for names in reversed(in_order(there)[1:]) for name in names])  # the marks of the former output
    with futures.ThreadPoolExecutor(NUM_THREADS) as threads:
        for names in in_order(found):
            list(threads.map(lambda name: objects.put(name, base / name), names))
    if path.is_dir():
        objects.remove(sorted(name for name in there if name not in found and not _PRIVATE.search(name)))
    listed = objects.list()
    remember(base, {name: Known(*found[name], listed[name].version) for name in found if name in listed})


def remove_below(folder: Path, names: re.Pattern[str]) -> None:
    """Removes the entries of a folder with such names in the bucket, marks first."""
    objects = Objects(str(addresses.address_of(folder)))
    gone = [name for name in objects.list() if names.fullmatch(name.split("/")[0])]
    objects.remove(name for group in reversed(in_order(gone)) for name in group)


def in_order(names: Iterable[str]) -> list[list[str]]:
    """Files in groups, each to be complete before the next: first all files without a mark, then each kind of mark."""
    groups: list[list[str]] = [[] for _ in range(len(MARKS) + 1)]
    for name in sorted(names):
        last = name.rpartition("/")[2]
        groups[MARKS.index(last) + 1 if last in MARKS else 0].append(name)
    return groups


def here(path: Path, *, everything: bool = False) -> dict[str, tuple[int, int]]:
    """The files here that belong in the bucket, with size and time, with `everything` also files that no owner uploads."""
    found: dict[str, tuple[int, int]] = {}
    for parent, inner, names in os.walk(path):
        below = Path(parent)
        inner[:] = [name for name in inner if not _is_temporary(name) and (everything or not _is_apart(below / name))]
        for name in names:
            relative = str((below / name).relative_to(path))
            if not _is_temporary(name) and not _PRIVATE.search(relative):
                with contextlib.suppress(FileNotFoundError):  # removed at this moment
                    found[relative] = _stat(below / name)
    return found


def remove(path: Path, names: Iterable[str]) -> None:
    """Removes files here, of a checkpoint or a part the whole at once, and the folders that were theirs alone."""
    for name in names:
        folder, file = _folder_of(path, name), path / name
        if folder and (path / folder).is_dir():
            aside = outputs.temporary(path / folder)
            os.replace(path / folder, aside)
            shutil.rmtree(aside)
        elif file.is_dir():
            shutil.rmtree(file)
        file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            for parent in file.parents:
                if parent == path or not parent.is_relative_to(path):
                    break
                parent.rmdir()


def remembered(path: Path) -> dict[str, Known]:
    """The record of the files below a path, by their names below it; "" for itself."""
    own = path.relative_to(addresses.root())
    start = "/".join(own.parts[2:])
    every = _read_record(_record_of(path))
    return {
        name.removeprefix(start).removeprefix("/"): known
        for name, known in every.items()
        if known and (name == start or not start or name.startswith(f"{start}/"))
    }


def remember(path: Path, changes: Mapping[str, Known | None]) -> None:
    """Keeps what changed; None for a file that is gone."""
    if not changes:
        return
    record, own = _record_of(path), path.relative_to(addresses.root())
    with _in_turn(record.with_name("record.lock")):
        every = _read_record(record)
        every.update({str(Path(*own.parts[2:], name)): known for name, known in changes.items()})
        with outputs.atomic_file(record) as unfinished:
            unfinished.write_text(json.dumps({name: known for name, known in every.items() if known is not None}))


def _read_record(file: Path) -> dict[str, Known | None]:
    try:
        return {name: Known(*one) for name, one in json.loads(file.read_bytes()).items()}
    except (OSError, ValueError, TypeError, AttributeError):  # absent or damaged: its files are fetched again
        return {}


def _record_of(path: Path) -> Path:
    """The record of the copies of a bucket."""
    return addresses.root() / ".records" / Path(*path.relative_to(addresses.root()).parts[:2]) / "files.json"


@contextlib.contextmanager
def _in_turn(file: Path) -> Iterator[None]:
    """Holds a file for one process and one thread at a time; it stays."""
    outputs.make_folder(file.parent)
    with open(file, "a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def _is_held(folder: Path) -> bool:
    """Whether a living process of this machine owns a folder."""
    try:
        with open(folder / OWNER_FILE) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _stays(path: Path) -> bool:
    """Whether an output is its owner's to upload, or this machine's alone: embeddings in a run can be made again."""
    if any(path.is_relative_to(folder) for folder in claimed):
        return True
    return not any(part.endswith(".parts") for part in path.parts) and any(map(_is_cache, (path, *path.parents)))


def _is_cache(folder: Path) -> bool:
    return folder.name == "embeddings" and (folder.parent / "run.json").is_file()


def _is_apart(folder: Path) -> bool:
    return folder.name.endswith(".parts") or _is_cache(folder) or (folder / OWNER_FILE).is_file()


def _is_temporary(name: str) -> bool:
    return outputs.is_leftover(Path(name)) or name.endswith(".orbax-checkpoint-tmp")


def _folder_of(path: Path, name: str) -> str | None:
    """The checkpoint or part that a file belongs to: "checkpoints/40" of "checkpoints/40/params/d/1"."""
    before = f"{path.name}/"  # the copy may be of one folder of checkpoints or parts
    found = _WHOLE.search(f"{before}{name}")
    return name[: found.end() - len(before)] if found and found.end() > len(before) else None


def _tell(folder: Path) -> None:
    if not folder.is_dir():
        warnings.warn(f"{addresses.address_of(folder)} is half uploaded, so it is left out.", stacklevel=2)


def _below(folder: str) -> str:
    return f"{folder}/" if folder else ""


def _stat(path: Path) -> tuple[int, int]:
    """Size and time of a file; -1 for none."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return -1, -1
    return found.st_size, found.st_mtime_ns
