"""Schemas of JSON files: checks that combine to a description, and readers that apply them.

    MANIFEST = record({"format": constant("de_jax store 1"), "num_texts": integer(1), "dev": Maybe(text, "")})
    manifest = read(folder / "manifest.json", MANIFEST, mend="build it again")

A check takes a value and returns it, with defaults for missing keys, or raises `Mismatch` with the keys that lead to the fault.
Keys that a description does not name stay unchanged.
"""

from __future__ import annotations

import inspect
import reprlib
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from de_jax.files.reading import MAX_JSON_BYTES, parse_json, read_json, read_lines
from de_jax.types import InputError

Check = Callable[[Any], Any]

MAX_INTEGER = 2**63 - 1
MAX_SIZE = 2**31 - 1
"""The largest length, and the largest value of other int32 numbers."""

_LARGEST = sys.float_info.max
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 60


class Mismatch(ValueError):
    """A value that does not fit, its place, and the expected value."""

    def __init__(self, found: Any, expected: str, path: str = "") -> None:
        self.found, self.expected, self.path = found, expected, path
        super().__init__(f"{path + ' is ' if path else 'found '}{_SHORT.repr(found)}, expected {expected}")

    def below(self, key: str) -> Mismatch:
        """The same, seen from the object or list that holds it under `key`."""
        return Mismatch(self.found, self.expected, f"{_SHORT.repr(key)[1:-1]}/{self.path}" if self.path else key[:60])


class Absent:
    """Stands for the value of a missing key."""

    def __repr__(self) -> str:
        return "absent"


ABSENT = Absent()


class Maybe(NamedTuple):
    """A key that may be absent; `default` stands in its place then, or nothing."""

    check: Check
    default: Any = ABSENT


def constant(*allowed: Any) -> Check:
    """One of these values, of their very type: true is not 1."""

    def check(value: Any) -> Any:
        if not any(type(value) is type(one) and value == one for one in allowed):
            raise Mismatch(value, " or ".join(map(repr, allowed)))
        return value

    return check


def text(value: Any) -> str:
    """Any string."""
    if not isinstance(value, str):
        raise Mismatch(value, "a text")
    return value


def some_text(value: Any) -> str:
    """A string that is not empty."""
    if not text(value):
        raise Mismatch(value, "a text that is not empty")
    return value  # type: ignore[no-any-return]


def text_id(value: Any) -> str:
    """The id of a text: a string that is not empty, or a whole number, which stands for its digits."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if not is_number and (not isinstance(value, str) or not value):
        raise Mismatch(value, "an id, a text that is not empty")
    return str(value)


def flag(value: Any) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise Mismatch(value, "true or false")
    return value


def integer(least: int = 0, most: int = MAX_INTEGER) -> Check:
    """A whole number within these bounds, themselves included."""

    def check(value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise Mismatch(value, f"a whole number from {least} to {most}")
        return value

    return check


def number(least: int | float = -_LARGEST, most: int | float = _LARGEST) -> Check:
    """A finite number within these bounds, whole or not."""

    def check(value: Any) -> int | float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not least <= value <= most:
            raise Mismatch(value, "a finite number" if most == _LARGEST else f"a number from {least} to {most}")
        return value  # type: ignore[no-any-return]

    return check


def nullable(check: Check) -> Check:
    """What `check` allows, or null."""
    return lambda value: None if value is None else check(value)


def list_of(check: Check, *, least: int = 0, most: int = MAX_INTEGER) -> Check:
    """A list of so many values that each fit."""

    def check_all(value: Any) -> list[Any]:
        if not isinstance(value, list) or not least <= len(value) <= most:
            raise Mismatch(value, f"a list of {least}" + (" or more" if most > least else "") if least else "a list")
        return [_checked(check, one, str(number)) for number, one in enumerate(value)]

    return check_all


def texts(value: Any) -> list[str]:
    """A list of strings, which may have millions of them."""
    if not isinstance(value, list) or set(map(type, value)) - {str}:
        raise Mismatch(value, "a list of texts")
    return value


def map_of(check: Check, *, keys: Check = text, least: int = 0) -> Check:
    """An object of at least so many keys, whose values each fit."""

    def check_all(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict) or len(value) < least:
            raise Mismatch(value, "an object" if not least else f"an object of {least} or more keys")
        return {_checked(keys, key, "a key"): _checked(check, one, key) for key, one in value.items()}

    return check_all


def record(fields: Mapping[str, Check | Maybe], *, only: bool = False) -> Check:
    """An object with these keys; others are left as they are, or with `only` refused."""

    def check(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise Mismatch(value, "an object")
        found = dict(value)
        for name, field in fields.items():
            inner, default = field if isinstance(field, Maybe) else (field, ABSENT)
            if name in value:
                found[name] = _checked(inner, value[name], name)
            elif default is not ABSENT:
                found[name] = default
            elif not isinstance(field, Maybe):
                raise Mismatch(ABSENT, "a value", name)
        if only and (unknown := [name for name in found if name not in fields]):
            raise Mismatch(unknown[0], f"a key out of {', '.join(fields)}")
        return found

    return check


def of_class(kind: Any, **given: Check) -> Check:
    """An object with exactly the fields of a dataclass or a NamedTuple; those with a default may be absent.

    Args:
        kind: annotated with bool, int, float, str, Literal, lists of them, or one of them or None.
        given: the checks of fields that their annotation does not describe.
    """
    hints, parameters = typing.get_type_hints(kind), inspect.signature(kind).parameters
    checks = {name: given.get(name) or _of_annotation(hints[name]) for name in parameters}
    is_needed = {name: one.default is inspect.Parameter.empty for name, one in parameters.items()}
    return record({name: check if is_needed[name] else Maybe(check) for name, check in checks.items()}, only=True)


def relative(value: Any) -> str:
    """The name of a file below the folder that a description stands in; "" is the folder itself.

    Symbolic links are followed wherever they lead: the hub's cache consists of them.
    """
    path = Path(text(value))
    if path.is_absolute() or ".." in path.parts or "\0" in value or "\\" in value:
        raise Mismatch(value, "the name of a file in the same folder")
    return value  # type: ignore[no-any-return]


def file_name(value: Any) -> str:
    """The name of a file beside the description."""
    if Path(some_text(value)).name != value or relative(value) != value:
        raise Mismatch(value, "the name of a file in the same folder")
    return value  # type: ignore[no-any-return]


def read(path: str | Path, check: Check, *, mend: str = "copy it again", max_bytes: int | None = MAX_JSON_BYTES) -> Any:
    """The JSON of a file, checked.

    Raises:
        InputError: what `read_json` raises, or a value that does not fit; names the file, the keys and `mend`.
    """
    value = read_json(path, max_bytes=max_bytes)
    try:
        return check(value)
    except Mismatch as error:
        raise InputError(f"{path}: {error}; {mend}.") from None


def read_records(path: str | Path, check: Check) -> Iterator[tuple[int, Any]]:
    """Yields (line number, record) of a jsonl file, plain or .gz; blank lines are passed over.

    Raises:
        InputError: what `read_lines` raises, or a line that is not such a record; names the line.
    """
    for line, raw in read_lines(path):
        try:
            value = check(parse_json(raw))
        except ValueError as error:
            raise InputError(f"{path}, line {line}: {error}.") from None
        yield line, value


def _checked(check: Check, value: Any, key: str) -> Any:
    try:
        return check(value)
    except Mismatch as error:
        raise error.below(key) from None


def _of_annotation(annotation: Any) -> Check:
    plain = {bool: flag, int: integer(-MAX_INTEGER, MAX_INTEGER), float: number(), str: text}
    if annotation in plain:
        return plain[annotation]
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return constant(*arguments)
    if origin in (types.UnionType, typing.Union) and len(arguments) == 2 and type(None) in arguments:
        return nullable(_of_annotation(next(one for one in arguments if one is not type(None))))
    if origin in (list, tuple):
        return list_of(_of_annotation(arguments[0]))
    raise TypeError(f"no check for {annotation}; give one by name")
