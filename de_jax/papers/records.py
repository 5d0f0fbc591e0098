"""What is done already, as JSON lines: a stopped command goes on behind the last of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from de_jax.files import outputs, schema
from de_jax.files.reading import is_there

Record = dict[str, Any]


class Records:
    """A file with one JSON object a line, each under the values of some of its fields; for its only writer.

    Args:
        path: the file, absent at first.
        key: names of the fields that tell records apart; their values are texts.
        fields: what else a record must have, by name, as checks of `files.schema`.

    Raises:
        InputError: a line that is not such a record; names it.
    """

    def __init__(self, path: Path, key: tuple[str, ...], fields: Mapping[str, schema.Check]) -> None:
        self._path, self._key = path, key
        check = schema.record({**dict.fromkeys(key, schema.text), **fields})
        lines = schema.read_records(path, check) if is_there(path) else ()
        self._records = {self._of(record): record for _, record in lines}

    def get(self, *key: str) -> Record | None:
        return self._records.get(key)

    def add(self, record: Record) -> None:
        """Keeps a record in the place of an older one with its key; it is on the disk when this returns."""
        self._records[self._of(record)] = record
        write(self._path, list(self._records.values()))

    def _of(self, record: Record) -> tuple[str, ...]:
        return tuple(record[name] for name in self._key)


def write(path: Path, records: list[Record]) -> None:
    """Writes records as JSON lines, all or none."""
    with outputs.atomic_file(path) as unfinished:
        unfinished.write_text("".join(f"{json.dumps(record, ensure_ascii=False)}\n" for record in records), encoding="utf-8")
