"""An extension of Griffe for our docstrings.

`Example:` is its section `Examples:`, > begins no quotation, and of several names before one description each gets an entry.
"""

import re
from typing import Any

import griffe

SEVERAL_NAMES = re.compile(r"^    ((?:\w+, )+)(\w+): ", re.MULTILINE)


class OurDocstrings(griffe.Extension):
    """Changes docstrings before they are parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Griffe calls this for every module, class, function and attribute."""
        if obj.docstring:
            value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
            value = SEVERAL_NAMES.sub(_an_entry_each, value)
            obj.docstring.value = re.sub(r"^( +\w+: )>", r"\1\\>", value, flags=re.MULTILINE)


def _an_entry_each(match: re.Match[str]) -> str:
    *first, last = [*match[1].removesuffix(", ").split(", "), match[2]]
    return "".join(f"    {name}: see `{last}`.\n" for name in first) + f"    {last}: "
