"""Addresses of buckets: gs://bucket/path and s3://bucket/path stand for paths of the cache.

gs://bucket/run  <->  $DE_JAX_CACHE/buckets/gs/bucket/run

All other code sees the path alone. `de_jax.buckets` fetches and uploads it, and is imported for such paths alone.
"""

import contextlib
import importlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from de_jax.files import outputs
from de_jax.types import InputError

SCHEMES = ["gs", "s3"]
_WING = "de_jax.buckets.copies"
_WITHIN = re.compile(r"(?P<before>^|[=,])(?P<address>(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://[^,]*)")


def is_bucket(text: Any) -> bool:
    """Whether a text is an address of a bucket."""
    return isinstance(text, str) and text.partition("://")[0] in SCHEMES and "://" in text


def foreign(text: str) -> str | None:
    """The first address in a text that is of no bucket; it may stand behind "=" or ","."""
    return next((found["address"] for found in _WITHIN.finditer(text) if found["scheme"] not in SCHEMES), None)


def replaced(text: str, local: Callable[[str], Path]) -> str:
    """A text with `local(address)` in the place of each bucket's address; one may stand behind "=" or ","."""
    given = lambda found: f"{found['before']}{local(found['address'])}" if found["scheme"] in SCHEMES else found[0]  # noqa: E731
    return _WITHIN.sub(given, text)


def root() -> Path:
    """The folder of all copies."""
    return outputs.cache_dir().absolute() / "buckets"


def path_of(address: str) -> Path:
    """Where the copy of an address lies. InputError: an address without a bucket, or with a part that is no name."""
    scheme, _, rest = address.partition("://")
    parts = rest.rstrip("/").split("/")
    if any(part in ("", ".", "..") for part in parts):
        raise InputError(f"{address} is no address of a folder or file; write it like {scheme}://bucket/folder.")
    return root() / scheme / Path(*parts)


def address_of(path: str | Path) -> str | None:
    """The address whose copy a path is, or is in; None for any other path."""
    path = Path(path)
    if not path.is_absolute() or not path.is_relative_to(root()):
        return None
    scheme, *parts = path.relative_to(root()).parts or ("",)
    return f"{scheme}://{'/'.join(parts)}" if scheme in SCHEMES and parts else None


def named(text: str) -> str:
    """A sentence with the address in the place of each path of a copy."""
    for scheme in SCHEMES:
        text = text.replace(f"{root() / scheme}/", f"{scheme}://")
    return text


def wing(path: str | Path) -> Any:
    """The module `de_jax.buckets.copies` for a path in the copy of an address; None for any other path."""
    return importlib.import_module(_WING) if address_of(path) else None


def local(address: str | Path) -> Path:
    """The path to use for a path of this machine or an address, which is fetched."""
    if not isinstance(address, str | os.PathLike) or not os.fspath(address):
        raise InputError(f"the path is {address!r:.60}; name a folder by a str or a Path.")
    if not is_bucket(address):
        return outputs.require_local(address)
    path = path_of(str(address))
    wing(path).fetch(path)
    return path


def owner_of(path: str | Path) -> Any:
    """The `Owner` of a folder that `only_one` holds in this process; None for any other path."""
    copies = wing(path)
    return copies and copies.claimed.get(Path(path))


def upload(*, is_failed: bool = False) -> None:
    """Uploads what this process completed at addresses; behind an error that must not be hidden, it warns where it cannot."""
    if copies := sys.modules.get(_WING):
        copies.upload(is_failed=is_failed)


@contextlib.contextmanager
def written(path: str | Path) -> Iterator[Path]:
    """The path to write to for a path or an address; an address is uploaded after the block."""
    yield local(path)
    upload()


@contextlib.contextmanager
def only_one(path: str | Path, what: str) -> Iterator[Any]:
    """As `outputs.only_one`; for the copy of an address on all machines, by an `Owner` of the file's folder, which it yields."""
    folder = Path(path).parent
    with outputs.only_one(path, what):
        owners = importlib.import_module("de_jax.buckets.owners") if wing(folder) else None
        with owners.owned(folder, named(what)) if owners else contextlib.nullcontext() as owner:
            yield owner
