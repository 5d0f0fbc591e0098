"""An extension of Griffe: the section `Example:` of a docstring is read as `Examples:`, as Griffe calls a section of doctests."""

import re
from typing import Any

import griffe


class DocstringExamples(griffe.Extension):
    """Renames the section before the docstring is parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Griffe calls this for every module, class, function and attribute."""
        if obj.docstring:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
