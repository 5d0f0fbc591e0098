"""Who owns a folder of a bucket, and which of its checkpoints and generations are whole: a chain of small objects.

<folder>/.owners/000000000012    JSON, see `Entry`

Each entry is created on condition that it is absent, so the server gives each number to one process, and the newest entry counts.
An owner begins with the number after the newest, and writes the next one after each save and every few seconds. If its next number
is taken, it was overtaken. Its first entry stays for ever and the others go once their successor is there, so a number that another
owner began with is taken for every request of an earlier owner, however late that comes.
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from de_jax.buckets.objects import Object, Objects
from de_jax.files import folders
from de_jax.types import InputError

WHOLE = re.compile(r"((?:checkpoints|best|base)/\d+|\d{6})(~\d+)?/")
"""Folders of a run and of its negatives that are complete or absent. "~7": by owner 7, as an earlier one had begun this folder."""
_NAME = re.compile(r"(?:(.*)/)?\.owners/(\d+)")


class Entry(NamedTuple):
    """One entry of the chain."""

    number: int
    claim: int  # the number that its owner began with
    session: str  # of the owner, 32 hex digits
    owner: str  # "process 7 on host"
    folders: Mapping[str, Mapping[str, Any]]  # {"checkpoints/40": {"at": "checkpoints/40", "files": {"params/a": 7}}}, in bytes
    has_ended: bool = False

    @property
    def name(self) -> str:
        """Of the object."""
        return f".owners/{self.number:012d}"

    def to_bytes(self) -> bytes:
        """The object."""
        return json.dumps(self._asdict(), sort_keys=True).encode()


def numbers(names: Iterable[str]) -> dict[str, int]:
    """The folders among these names that have an owner, "" for the outermost, and the numbers of their newest entries."""
    found: dict[str, int] = {}
    for match in filter(None, map(_NAME.fullmatch, names)):
        folder = match[1] or ""
        found[folder] = max(found.get(folder, 0), int(match[2]))
    return found


def read(objects: Objects, folder: str, number: int) -> Entry:
    """An entry. FileNotFoundError where its successor has replaced it."""
    name = f"{folder}/.owners/{number:012d}".removeprefix("/")
    if (data := objects.read(name)) is None:
        raise FileNotFoundError(name)
    try:
        return Entry(**json.loads(data))
    except (ValueError, TypeError):
        raise InputError(f"{objects.address}/{name} is damaged; remove it.") from None


def newest(objects: Objects) -> tuple[Entry | None, dict[str, Object]]:
    """The newest entry of a folder, and the list that it was found in."""
    while True:
        there = objects.list()
        number = numbers(there).get("")
        try:
            return (read(objects, "", number) if number else None), there
        except FileNotFoundError:
            continue


def create(objects: Objects, entry: Entry) -> Entry | None:
    """Writes an entry. If its number is taken, gives the entry there, which may be the same one; None if that was removed."""
    try:
        objects.put(entry.name, entry.to_bytes(), is_new=True)
        return entry
    except FileExistsError:
        try:
            return read(objects, "", entry.number)
        except FileNotFoundError:
            return None


def whole_by_marks(there: Mapping[str, Object]) -> dict[str, dict[str, Any]]:
    """The whole folders of a folder that never had an owner: those with their mark."""
    found: dict[str, dict[str, Any]] = {}
    for name, one in there.items():
        if (match := WHOLE.match(name)) and not match[2]:
            found.setdefault(match[1], {"at": match[1], "files": {}})["files"][name[match.end() :]] = one.size
    return {folder: facts for folder, facts in found.items() if mark_of(folder) in facts["files"]}


def mark_of(folder: str) -> str:
    """The file that makes a whole folder complete."""
    return folders.CHECKPOINT_FILE if re.match("checkpoints|best|base", folder) else folders.MANIFEST_FILE
