"""Buckets: an address gs://bucket/path or s3://bucket/path stands for a path of the cache, and `Objects` reads and writes there.

gs://bucket/run  <->  $DE_JAX_CACHE/buckets/gs/bucket/run

`mirror` keeps both sides equal. All other code sees the path alone.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from de_jax.files import outputs
from de_jax.types import InputError

T = TypeVar("T")

CLIENTS = {"gs": "gcsfs", "s3": "s3fs"}
"""The package that reads each scheme, for fsspec."""
EXTRA = "pip install 'de_jax[buckets]'"
RETRY_SECONDS = (1.0, 2.0, 4.0)
"""Between the attempts of one operation, beyond the client's own."""
SMALL_BYTES = 64 * 2**20
"""Files up to this size are read into memory first: a log may grow while it is sent."""
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_WITHIN = re.compile(r"(?P<before>^|[=,])(?P<address>(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://[^,]*)")
_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


class Unreachable(InputError):
    """The bucket does not answer now; it may later."""


class Object(NamedTuple):
    """A file in a bucket; `version` changes with its content: on GCS its generation, on S3 its ETag, mostly the MD5."""

    size: int
    version: str


class Sent(NamedTuple):
    """A file that was uploaded."""

    size: int
    md5: str | None  # None for a large one


def is_address(text: Any) -> bool:
    """Whether a text is `scheme://...`, of whatever scheme."""
    return isinstance(text, str) and _ADDRESS.match(text) is not None


def is_bucket(text: Any) -> bool:
    """Whether a text is an address of a bucket."""
    return is_address(text) and text.partition("://")[0] in CLIENTS


def foreign(text: str) -> str | None:
    """The first address in a text that is of no bucket; it may stand behind "=" or ","."""
    return next((found["address"] for found in _WITHIN.finditer(text) if found["scheme"] not in CLIENTS), None)


def replaced(text: str, local: Callable[[str], Path]) -> str:
    """A text with `local(address)` in the place of each bucket's address; one may stand behind "=" or ","."""

    def replace(found: re.Match[str]) -> str:
        return f"{found['before']}{local(found['address'])}" if found["scheme"] in CLIENTS else found[0]

    return _WITHIN.sub(replace, text)


def localized(path: str, local: Callable[[str], Path]) -> str:
    """A path, or `local(path)` of an address of a bucket and of a path below "~/"."""
    return str(local(path)) if is_bucket(path) or outputs.is_in_home(path) else path


def root() -> Path:
    """The folder of all copies."""
    return outputs.cache_dir().absolute() / "buckets"


def path_of(address: str) -> Path:
    """Where the copy of an address lies.

    Raises:
        InputError: an address without a bucket, or with a part that is no name.
    """
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
    return f"{scheme}://{'/'.join(parts)}" if scheme in CLIENTS and parts else None


def named(text: str) -> str:
    """A sentence with the address in the place of each path of a copy."""
    for scheme in CLIENTS:
        text = text.replace(f"{root() / scheme}/", f"{scheme}://")
    return text


class Objects:
    """The objects below one address, by their names below it; "" is the address itself, where that is a file.

    Raises:
        InputError: the client is not installed, the bucket does not exist, or the account may not do this; says the fix.
        Unreachable: no answer, after some attempts.
    """

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")
        self._scheme, _, self._place = self.address.partition("://")

    def list(self) -> dict[str, Object]:
        """All objects."""

        def find() -> dict[str, Any]:
            self._files.invalidate_cache()
            return self._files.find(self._place, detail=True)  # type: ignore[no-any-return]

        found = {str(path).lstrip("/"): facts for path, facts in self._attempt(find).items() if facts.get("type") == "file"}
        below = f"{self._place}/"
        return {
            path.removeprefix(self._place).removeprefix("/"): Object(int(facts["size"]), _version(facts))
            for path, facts in found.items()
            if (path == self._place or path.startswith(below)) and not path.endswith("/")
        }

    def get(self, name: str, path: Path) -> None:
        """Writes an object to a file. FileNotFoundError where the object is gone."""
        self._attempt(lambda: self._files.get_file(self._at(name), str(path)), is_object=True)

    def put(self, name: str, path: Path) -> Sent:
        """Writes a file as an object. FileNotFoundError where the file is gone."""
        size = path.stat().st_size
        if size > SMALL_BYTES:
            self._attempt(lambda: self._files.put_file(str(path), self._at(name)))
            return Sent(size, None)
        data = path.read_bytes()
        # In one chunk: gcsfs sends less than a chunk between boundaries, where a last byte \r is lost.
        self._attempt(lambda: self._files.pipe_file(self._at(name), data, chunksize=len(data) or 1))
        return Sent(len(data), hashlib.md5(data, usedforsecurity=False).hexdigest())

    def read(self, name: str) -> bytes | None:
        """An object's bytes; None where it is missing."""
        try:
            return self._attempt(lambda: self._files.cat_file(self._at(name)), is_object=True)  # type: ignore[no-any-return]
        except FileNotFoundError:
            return None

    def write(self, name: str, data: bytes) -> None:
        """Writes an object."""
        self._attempt(lambda: self._files.pipe_file(self._at(name), data))

    def create(self, name: str, data: bytes) -> bool:
        """Writes an object, unless there is one; whether it was written. The server decides, where it knows the condition."""
        try:
            self._attempt(lambda: self._files.pipe_file(self._at(name), data, mode="create"))
        except FileExistsError:
            return False
        return True

    def remove(self, names: Iterable[str]) -> None:
        """Removes objects, one after another; a missing one is no fault."""
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                self._attempt(lambda name=name: self._files.rm_file(self._at(name)), is_object=True)  # type: ignore[misc]

    def _at(self, name: str) -> str:
        return f"{self._place}/{name}" if name else self._place

    @property
    def _files(self) -> Any:
        return _file_system(self._scheme, os.getpid())

    def _attempt(self, operation: Callable[[], T], *, is_object: bool = False) -> T:
        """The result of an operation, which is repeated while the bucket does not answer.

        Args:
            operation: of the client.
            is_object: a FileNotFoundError is of an object, and not of the bucket.
        """
        for seconds in (*RETRY_SECONDS, None):
            try:
                with _explained(self.address, is_object):
                    return operation()
            except Unreachable:
                if seconds is None:
                    raise
                time.sleep(seconds)
        raise AssertionError("the loop returns or raises")


_making = threading.Lock()


def _file_system(scheme: str, process: int) -> Any:
    """The client of a scheme, for this process: its threads do not survive a fork."""
    with _making:
        return _client(scheme, process)


@functools.cache
def _client(scheme: str, process: int) -> Any:
    try:
        import fsspec

        logging.getLogger("gcsfs").setLevel(logging.ERROR)  # it guesses the bucket's kind, and warns of each guess
        return fsspec.filesystem(scheme, skip_instance_cache=True, use_listings_cache=False)
    except ImportError:
        raise InputError(f"{scheme}:// needs the package {CLIENTS[scheme]}, which is not installed; {EXTRA}.") from None


def _version(facts: dict[str, Any]) -> str:
    known: Sequence[Any] = [facts.get(name) for name in ("generation", "ETag", "etag", "created")]
    return str(next(value for value in known if value))


@contextlib.contextmanager
def _explained(address: str, is_object: bool) -> Iterator[None]:
    """Turns errors of a client into a sentence."""
    try:
        yield
    except (InputError, FileExistsError):
        raise
    except FileNotFoundError:
        if is_object:
            raise
        bucket = "/".join(address.split("/")[:3])
        raise InputError(f"the bucket {bucket} does not exist; create it, or correct the address.") from None
    except Exception as error:  # the clients' own errors have no common base
        if isinstance(error, OSError) and error.errno in _OF_THE_DISK:
            raise
        raise _sentence(address, error) from error


def _sentence(address: str, error: Exception) -> InputError:
    kind, said = type(error).__name__, (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")[:300]
    own = "aws configure, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    login = own if address.startswith("s3:") else "gcloud auth application-default login, or GOOGLE_APPLICATION_CREDENTIALS"
    if "Credential" in kind or "RefreshError" in kind or getattr(error, "code", None) == 401:  # botocore's, google.auth's
        return InputError(f"there are no usable credentials for {address} ({said}); set them by {login}.")
    if isinstance(error, PermissionError) or getattr(error, "code", None) == 403:
        return InputError(
            f"{address} refuses these credentials ({said}); give the account the right to list, read, write and delete there, or "
            f"set others by {login}."
        )
    return Unreachable(f"{address} cannot be reached ({kind}: {said}); check the network, then repeat the command to continue.")
