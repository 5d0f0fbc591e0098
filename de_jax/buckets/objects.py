"""The objects of a bucket, by fsspec's clients: listed, read, written, and created on condition that they are absent."""

import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from de_jax.files.outputs import of_the_disk
from de_jax.settings import needs
from de_jax.types import InputError

T = TypeVar("T")

RETRY_SECONDS = (1.0, 2.0, 4.0)
"""Between the attempts of one operation, beyond the client's own."""
SMALL_BYTES = 64 * 2**20
"""Files up to this size are read into memory first: a log may grow while it is sent."""


class Unreachable(InputError):
    """The bucket does not answer now; it may later."""


class Object(NamedTuple):
    """A file in a bucket; `version` changes with its content: on GCS its generation, on S3 its ETag."""

    size: int
    version: str


class Objects:
    """The objects below one address, by their names below it; "" is the address itself, if that is a file.

    Raises:
        InputError: the client is not installed, the bucket does not exist, or the account may not do this; names the fix.
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

    def read(self, name: str) -> bytes | None:
        """An object's bytes; None if it is missing."""
        try:
            return self._attempt(lambda: self._files.cat_file(self._at(name)), is_object=True)  # type: ignore[no-any-return]
        except FileNotFoundError:
            return None

    def put(self, name: str, content: Path | bytes, *, is_new: bool = False) -> int:
        """Writes a file or bytes as an object; the number of bytes.

        Args:
            content: its bytes, or the file that holds them; FileNotFoundError if that is gone.
            is_new: FileExistsError where the object exists, which the server decides (S3's If-None-Match: *, ifGenerationMatch=0
                on GCS). It may be this request, repeated after its answer was lost.
        """
        mode: dict[str, Any] = {"mode": "create"} if is_new else {}
        if isinstance(content, Path):
            size = content.stat().st_size
            if size > SMALL_BYTES:
                self._attempt(lambda: self._files.put_file(str(content), self._at(name), **mode))
                return size
            content = content.read_bytes()
            # In one chunk: gcsfs sends less than a chunk between boundaries, where a last byte \r is lost.
            mode["chunksize"] = len(content) or 1
        self._attempt(lambda: self._files.pipe_file(self._at(name), content, **mode))
        return len(content)

    def remove(self, names: Iterable[str]) -> None:
        """Removes objects, one after another; a missing one is no fault."""
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                self._attempt(lambda name=name: self._files.rm_file(self._at(name)), is_object=True)  # type: ignore[misc]

    def _at(self, name: str) -> str:
        return f"{self._place}/{name}" if name else self._place

    @property
    def _files(self) -> Any:
        with _making:
            return _client(self._scheme, os.getpid())

    def _attempt(self, operation: Callable[[], T], *, is_object: bool = False) -> T:
        """The result of an operation, which is repeated while the bucket does not answer."""
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


@functools.cache
def _client(scheme: str, process: int) -> Any:
    """The client of a scheme, for this process: its threads do not survive a fork."""
    with needs("buckets", f"{scheme}://"):
        import fsspec

        logging.getLogger("gcsfs").setLevel(logging.ERROR)  # it guesses the bucket's kind, and warns of each guess
        return fsspec.filesystem(scheme, skip_instance_cache=True, use_listings_cache=False)


def _version(facts: dict[str, Any]) -> str:
    return str(next(facts[name] for name in ("generation", "ETag", "etag", "created") if facts.get(name)))


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
        if isinstance(error, OSError) and of_the_disk(error):
            raise
        if "PreconditionFailed" in f"{error!r} {error.__cause__!r}":  # s3fs makes of it an OSError like others
            raise FileExistsError(address) from None
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
