"""Documents as one text each, from which its fields can be taken: url, title and text."""

from __future__ import annotations

from de_jax.data.text import input_policy
from de_jax.types import FieldName


class _Document(str):
    """Title and text joined by a blank."""

    __slots__ = ("own_title", "own_url")
    own_title: str
    own_url: str


def document(title: str, text: str, url: str = "") -> str:
    """A title, a blank and a text, as one text whose fields `field_of` separates; "" if neither shows anything."""
    title, url, whole = title.strip(), url.strip(), input_policy.shown(f"{title} {text}")
    if not whole or not (title or url):
        return whole
    found = _Document(whole)
    found.own_title, found.own_url = title, url
    return found


def field_of(text: str, name: FieldName) -> str:
    """A field of a document, "" if it has none; all of another text is its "text"."""
    if not isinstance(text, _Document):
        return text if name == "text" else ""
    return {"url": text.own_url, "title": text.own_title, "text": text[len(text.own_title) :].strip()}[name]
