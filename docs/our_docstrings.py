"""An extension of Griffe for our docstrings: `Example:` is its section `Examples:`, and > begins no quotation."""

import re
from typing import Any

import griffe


class OurDocstrings(griffe.Extension):
    """Changes docstrings before they are parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Griffe calls this for every module, class, function and attribute."""
        if obj.docstring:
            value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
            obj.docstring.value = re.sub(r"^( +[\w, ]+: )>", r"\1\\>", value, flags=re.MULTILINE)
