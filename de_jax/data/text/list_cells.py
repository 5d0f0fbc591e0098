"""Lists and documents in a table's cells: JSON in csv and tsv, whose cells are texts."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from typing import Any

from de_jax.files import reading

_WITHOUT_COMMA = re.compile(r"""(['"}]|None|nan)\s+(?=['"{]|None|nan)""")
"""Between the items of an array as numpy prints it."""


def texts(cell: str, column: str) -> str | list[Any] | dict[str, Any]:
    """The JSON object or list that a cell of csv holds; any other cell as it is, as a list of numbers alone.

    >>> texts('["beta", "gamma"]', "positive"), texts("[1] Smith", "positive")
    (['beta', 'gamma'], '[1] Smith')
    """
    bare = cell.strip()
    if (bare[:1], bare[-1:]) not in (("[", "]"), ("{", "}"), ("(", ")")):
        return cell
    kind = "an object" if bare[0] == "{" else "a list"
    try:
        found = reading.parse_json(bare)
    except ValueError:
        if _is_printed(bare):
            as_python = f"holds {kind} as Python prints it, {bare[:40]}; write it as JSON"
            raise ValueError(f"column {column!r} {as_python}, or the table as jsonl or parquet") from None
        return cell
    if isinstance(found, dict) and "text" not in found:
        raise ValueError(f"column {column!r} holds an object without 'text', {bare[:40]}; if this is a text, write jsonl")
    return found if not found or _has_texts(found) else cell


def _has_texts(value: Any) -> bool:
    """Whether a value is a text or an object, or a list with one, with an empty place or with another such list."""
    return isinstance(value, str | dict) or (
        isinstance(value, list | tuple | set) and any(one is None or _has_texts(one) for one in value)
    )


def _is_printed(cell: str) -> bool:
    """Whether a cell is an object, or a list of texts or of objects, as Python, pandas or numpy print it."""
    try:
        found = ast.literal_eval(_WITHOUT_COMMA.sub(r"\1, ", cell).replace("nan", "None"))
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False
    return not isinstance(found, str) and _has_texts(found)


def numbers(value: Any, column: str, kind: str) -> Sequence[Any]:
    """The values of a cell, which holds a list, its JSON, or one value."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = reading.parse_json(value)
        except ValueError:
            raise ValueError(f"column {column!r} holds {value[:40]!r}, not a list of {kind}") from None
    return value if isinstance(value, list | tuple) else [value]
