"""Finished work as JSON lines: a stopped command continues after the last line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from de_jax import settings
from de_jax.files import outputs, reading
from de_jax.files.reading import is_there

Record = dict[str, Any]


class Records:
    """A file with one JSON object a line, keyed by some of its fields; for a single writer.

    Args:
        path: the file, absent at first.
        key: names of the fields that tell records apart; their values are texts.
        fields: annotations or checks of further required fields, by name.

    Raises:
        InputError: a malformed line; names it.
    """

    def __init__(self, path: Path, key: tuple[str, ...], fields: Mapping[str, Any]) -> None:
        self._path, self._key = path, key
        check = settings.Record({**dict.fromkeys(key, str), **fields})
        lines = reading.read_records(path, check) if is_there(path) else ()
        self._records = {self._of(record): record for _, record in lines}

    def get(self, *key: str) -> Record | None:
        return self._records.get(key)

    def add(self, record: Record) -> None:
        """Adds a record, which replaces an older one with the same key; it is on the disk when this returns."""
        self._records[self._of(record)] = record
        write(self._path, list(self._records.values()))

    def _of(self, record: Record) -> tuple[str, ...]:
        return tuple(record[name] for name in self._key)


def write(path: Path, records: list[Record]) -> None:
    """Writes records as JSON lines, all or none."""
    with outputs.atomic_file(path) as unfinished:
        unfinished.write_text("".join(f"{json.dumps(record, ensure_ascii=False)}\n" for record in records), encoding="utf-8")
