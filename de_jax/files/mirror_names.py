"""The names of files, as a mirror reads them: marks that complete a folder, checkpoints and parts, and files that stay here."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from de_jax.files import folders, outputs

MARKS = (folders.MANIFEST_FILE, folders.CHECKSUMS_FILE, folders.CHECKPOINT_FILE)
"""What makes a folder complete, in the order of uploads."""
CHECKPOINT_FOLDERS = ("checkpoints", "best", "base")
"""Of a run and by its trainer: their sub-folders are complete or absent, and of the first only the newest is fetched unasked."""
PARTS = ".parts"
"""The end of the name of a folder with parts of several jobs, each complete or absent; the command that joins them removes them."""
RUN_FILE, CACHE_OF_A_RUN = "run.json", "embeddings/"
UNFINISHED = ".unfinished.lock"
"""In the bucket, in a folder with a mark while it is uploaded: the remains of a killed upload are not fetched."""


class Names(NamedTuple):
    """The names below one copy."""

    path: Path  # of the copy

    def whole_of(self, name: str) -> str | None:
        """The checkpoint or part that a file belongs to: "checkpoints/40" of "checkpoints/40/params/d/1"."""
        names = (self.path.name, *name.split("/"))  # the copy may be of one folder of parts
        for place in range(1, len(names) - 1):
            parent, own = names[place - 1 : place + 1]
            if parent.endswith(PARTS) or (own.isdigit() and parent in CHECKPOINT_FOLDERS):
                return "/".join(names[1 : place + 1])
        return None

    def checkpoint_of(self, name: str) -> str | None:
        """The trainer's checkpoint that a file belongs to."""
        folder = self.whole_of(name)
        return folder if folder and self.parent(folder) in CHECKPOINT_FOLDERS else None

    def is_of_jobs(self, name: str) -> bool:
        """Whether a file belongs to a folder that another job may remove."""
        folder = self.whole_of(name)
        return folder is not None and self.parent(folder) not in CHECKPOINT_FOLDERS

    def is_part(self, folder: str) -> bool:
        """Whether a folder is a part of one of several jobs."""
        return self.parent(folder).endswith(PARTS)

    def mark_of(self, folder: str) -> str:
        """The file that makes a checkpoint or a part complete."""
        return folders.MANIFEST_FILE if self.is_part(folder) else folders.CHECKPOINT_FILE

    def parent(self, folder: str) -> str:
        """The name of the folder above."""
        return (self.path / folder).parent.name

    def stays_here(self, name: str) -> bool:
        """Whether a file is this machine's alone."""
        of_cache = name.startswith(CACHE_OF_A_RUN) and self.whole_of(name) is None
        return is_lock(name) or (of_cache and (self.path / RUN_FILE).is_file())

    def in_order(self, names: Iterable[str]) -> list[list[str]]:
        """Files in groups, each to be complete before the next: marks come last, and those of checkpoints last of all."""
        groups: dict[tuple[bool, int], list[str]] = {}
        for name in names:
            last = name.rpartition("/")[2]
            place = MARKS.index(last) + 1 if last in MARKS else 0
            groups.setdefault((place > 0 and self.checkpoint_of(name) is not None, place), []).append(name)
        return [groups[key] for key in sorted(groups)]


def step_of(folder: str) -> int:
    """The step of a checkpoint; 0 of a part."""
    last = folder.rpartition("/")[2]
    return int(last) if last.isdigit() else 0


def joined(folder: str, name: str) -> str:
    """The name of a file in a folder; "" is the copy itself."""
    return f"{folder}/{name}" if folder and name else folder or name


def is_mark(name: str) -> bool:
    """Whether a file makes its folder complete."""
    return name.rpartition("/")[2] in MARKS


def last_first(name: str) -> tuple[int, str]:
    """Sorts files for their removal, as marks go first."""
    last = name.rpartition("/")[2]
    return (-MARKS.index(last) if last in MARKS else 1, name)


def is_lock(name: str) -> bool:
    """Whether a file is a lock or a lease."""
    return re.fullmatch(r"\..*\.lock|\.lock", name.rpartition("/")[2]) is not None


def is_temporary(name: str) -> bool:
    """Whether a file or folder is on its way to its name."""
    return outputs.is_leftover(Path(name)) or name.endswith(".orbax-checkpoint-tmp")
