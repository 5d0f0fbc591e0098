"""The objects of a JSON array, or of jsonl, one by one: such files are larger than memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from de_jax.files import reading
from de_jax.types import InputError

_READ_CHARACTERS = 1 << 16
_MAX_RECORD = 1 << 26


def read(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (line that it begins in, object) of a UTF-8 file, plain or .gz: an array of objects, or objects one after another."""
    path = Path(path)
    with reading.open_text(path) as file:
        text = _Text(path, file.read)
        is_array = text.take("[")
        is_first = True
        while not text.is_at_end():
            if is_array and text.take("]"):
                if not text.is_at_end():
                    raise text.error("expected the end of the file after its array")
                return
            if is_array and not is_first and not text.take(","):
                raise text.error("expected a comma or the end of the array")
            is_first = False
            yield text.take_object()
        if is_array:
            raise text.error("the array is cut off")


class _Text:
    """The rest of a JSON file, partly in memory."""

    def __init__(self, path: Path, read_more: Callable[[int], str]) -> None:
        self._path, self._read_more, self._left, self._line = path, read_more, "", 1

    def is_at_end(self) -> bool:
        """Whether nothing but blanks is left, which are passed over."""
        while True:
            rest = self._left.lstrip(" \t\r\n")
            self._pass(len(self._left) - len(rest))
            if self._left or not self._read():
                return not self._left

    def take(self, character: str) -> bool:
        """Passes over blanks and this character; whether it was there."""
        is_there = not self.is_at_end() and self._left.startswith(character)
        self._pass(int(is_there))
        return is_there

    def take_object(self) -> tuple[int, dict[str, Any]]:
        """The object that comes next, and its first line."""
        self.is_at_end()
        while True:
            try:
                record, end = reading.parse_object(self._left)
            except json.JSONDecodeError as error:
                if len(self._left) < _MAX_RECORD and self._read():
                    continue
                self._pass(error.pos)
                raise self.error(error.msg) from None
            except ValueError as error:
                raise self.error(str(error)) from None
            line = self._line
            self._pass(end)
            return line, record

    def error(self, reason: str) -> InputError:
        return InputError(f"{self._path}, line {self._line}: not valid JSON ({reason}).")

    def _read(self) -> bool:
        more = self._read_more(max(_READ_CHARACTERS, len(self._left)))  # twice as much each time: a long record is parsed seldom
        self._left += more
        return bool(more)

    def _pass(self, num_characters: int) -> None:
        self._line += self._left.count("\n", 0, num_characters)
        self._left = self._left[num_characters:]
