"""A kind of folder: its name, the manifest that makes such a folder complete, and the error sentences about an unusable folder."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from de_jax.files import folders, outputs, schema
from de_jax.types import InputError


@dataclasses.dataclass(frozen=True)
class Kind:
    """Writes, opens and refuses the folders of one kind. A manifest says the kind and the version; a writer writes it last.

    >>> import tempfile
    >>> WORDS = Kind("words", {"num_words": schema.integer(1)}, make="write them", mend="write them again")
    >>> with tempfile.TemporaryDirectory() as parent:
    ...     with WORDS.writing(Path(parent) / "words") as folder:
    ...         manifest = WORDS.write_manifest(folder, {"num_words": 1})
    ...     WORDS.open(Path(parent) / "words")
    {'format': 'de_jax words 1', 'num_words': 1}

    Attributes:
        name: of the kind, "token store".
        entries: checks of the manifest's entries beside its format; others are left as they are.
        make, mend, otherwise: what to do where a folder is of another kind, is damaged, or was begun with other inputs.
        file: the name of the manifest.
        version: 1 or higher.
        is_bare: the manifest's format is the version alone, as in the descriptions of models.
    """

    name: str
    entries: Mapping[str, schema.Check | schema.Maybe]
    make: str
    mend: str = "copy it again, or make it again"
    otherwise: str = "choose another folder or delete this one"
    file: str = folders.MANIFEST_FILE
    version: int = 1
    is_bare: bool = False

    @property
    def format(self) -> str | int:
        """Kind and version in the manifest: "de_jax token store 1"."""
        return self.version if self.is_bare else f"de_jax {self.name} {self.version}"

    def writing(self, folder: str | Path) -> contextlib.AbstractContextManager[Path]:
        """A temporary folder that becomes `folder` once it is written, see `folders.atomic_dir`; it replaces only its own kind."""
        return folders.atomic_dir(folder, self.name)

    def write_manifest(self, folder: Path, entries: Mapping[str, Any]) -> dict[str, Any]:
        """Completes a folder; gives the manifest."""
        manifest = {"format": self.format, **entries}
        outputs.write_json(folder / self.file, manifest)
        return manifest

    def check(self, entries: Mapping[str, Any]) -> None:
        """Whether a manifest of these entries can be read: raises `InputError` before anything is written."""
        try:
            schema.record(self.entries)(json.loads(json.dumps(entries)))
        except (TypeError, ValueError) as error:
            raise InputError(f"this {self.name} cannot be described in a file, and so not be opened again: {error}.") from None

    def is_in(self, folder: Path) -> bool:
        """Whether a folder has the manifest, damaged or not."""
        return os.path.isfile(folder / self.file)

    def read_manifest(self, folder: str | Path) -> dict[str, Any]:
        """The manifest, its other files unseen.

        Raises:
            InputError: it is absent, of another kind or version, or an entry is missing or wrong; names the file.
        """
        path = Path(folder) / self.file
        if not self.is_in(path.parent):
            raise InputError(f"{folder} holds no complete {self.name} (no {self.file}); {self.make}.")
        said = outputs.read_json(path)
        try:
            return schema.record({"format": schema.constant(self.format), **self.entries})(said)  # type: ignore[no-any-return]
        except schema.Mismatch as error:
            is_other = folders.kind_said(said) not in (self.name, None)
            raise InputError(f"{path}: {error}; {'give another folder' if is_other else self.mend}.") from None
        except InputError as error:
            raise InputError(f"{path}: {error}") from None

    def open(self, folder: str | Path, *, is_thorough: bool = False) -> dict[str, Any]:
        """The manifest of a folder whose files are as they were written, by `folders.check`.

        Raises:
            InputError: what `read_manifest` raises, or a file is missing or changed; names the file.
        """
        manifest = self.read_manifest(folder)
        folders.check(Path(folder), mend=self.mend, is_thorough=is_thorough)
        return manifest

    def require_same(self, folder: Path, there: Any, here: Mapping[str, Any]) -> None:
        """Whether a folder may be continued: `InputError` names the first thing that it was begun with and that differs here.

        Args:
            folder: for the sentence.
            there: JSON that the folder holds; what `here` does not name may be anything.
            here: what its like would be written with now.
        """
        if found := _difference(*(json.loads(json.dumps(one, sort_keys=True)) for one in (there, here))):
            path, before, now = found
            raise InputError(f"{folder} was begun with {path} {before!r}, not {now!r}; {self.otherwise}.")


def _difference(there: Any, here: Any, path: str = "") -> tuple[str, Any, Any] | None:
    """Where two JSON values differ first, and the two values there."""
    if isinstance(there, dict) and isinstance(here, dict):
        below = (_difference(there.get(key), value, f"{path}/{key}" if path else key) for key, value in here.items())
        return next((found for found in below if found), None)
    return (path, there, here) if there != here else None
