"""Lists and documents in a table's cells: JSON in csv and tsv, whose cells are texts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from de_jax.files import reading

_QUOTED = r"""(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
_OF_PYTHON = re.compile(
    rf"\s*(?:\[\s*(?:{_QUOTED}(?:[\s,]+(?:{_QUOTED}|None|nan))*[\s,]*|\{{.*'text'\s*:.*\}}\s*)\]|\{{.*'text'\s*:.*\}})\s*",
    re.DOTALL,
)
"""A document, or a list of texts or of documents, as Python, pandas or numpy print it."""


def texts(cell: str, column: str) -> str | list[Any] | dict[str, Any]:
    """The JSON object with a text, or the list of texts or such objects, that a cell of csv holds; any other cell as it is.

    >>> texts('["beta", "gamma"]', "positive"), texts("[1] Smith", "positive")
    (['beta', 'gamma'], '[1] Smith')

    Raises:
        ValueError: either as Python prints it; the rest of a sentence that the caller begins with the place.
    """
    if not cell.lstrip().startswith(("[", "{")):
        return cell
    try:
        found = reading.parse_json(cell)
    except ValueError:
        found = None
    is_document = lambda value: isinstance(value, dict) and "text" in value  # noqa: E731
    if is_document(found) or (isinstance(found, list) and all(isinstance(one, str) or is_document(one) for one in found[:1])):
        return found
    if _OF_PYTHON.fullmatch(cell):
        kind, shown = "an object" if cell.lstrip().startswith("{") else "a list", cell.strip()[:40]
        raise ValueError(
            f"column {column!r} holds {kind} as Python prints it, {shown}; write it as JSON, or the table as jsonl or parquet"
        )
    return cell


def numbers(value: Any, column: str, kind: str) -> Sequence[Any]:
    """The values of a cell, which holds a list, its JSON, or one value.

    Raises:
        ValueError: malformed JSON; names the `kind` of its values. The rest of a sentence as of `texts`.
    """
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = reading.parse_json(value)
        except ValueError:
            raise ValueError(f"column {column!r} holds {value[:40]!r}, not a list of {kind}") from None
    return value if isinstance(value, list | tuple) else [value]
