"""Readers of JSON, lines of text and arrays. An unreadable file raises an `InputError` that names the file, and the line.

A path may lead to a folder or a pipe, and a file may be damaged in any way. The outcome is always the content or that error,
without a traceback or a wait, and with only the memory that the content needs.
"""

import contextlib
import gzip
import hashlib
import io
import json
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from de_jax.types import InputError

Check = Callable[[Any], Any]
"""Gives a value of JSON as it is used, or raises ValueError: the rest of a sentence that begins with the file."""
MAX_LINE_BYTES = 16 << 20
"""Of one line of text, decompressed; a longer one is a damaged file, or a document to cut into passages."""
MAX_JSON_BYTES = 64 << 20
"""Of a JSON file, unless its reader expects more."""

BOM = b"\xef\xbb\xbf"
_START_BYTES = 4096
_READ_CHARACTERS = 1 << 16
_MAX_RECORD = 1 << 26
_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def require_folder(folder: str | Path, remedy: str) -> None:
    """Raises InputError: there is no such folder, with what to do about it."""
    if not Path(folder).is_dir():
        raise InputError(f"{folder} {'is not a folder' if Path(folder).exists() else 'does not exist'}; {remedy}.")


def regular_file(path: str | Path) -> Path:
    """The path of a file that is there and is neither a folder, a pipe nor a device."""
    path = Path(path)
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(f"{path} does not exist.") from None
    except (OSError, ValueError) as error:  # ValueError: a null character in the name
        raise InputError(f"{str(path)!r} cannot be read ({_reason(error)}); check its name and its permissions.") from None
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "a pipe" if stat.S_ISFIFO(mode) else "a device or socket"
        raise InputError(f"{path} is {kind}; give a regular file.")
    return path


def is_there(path: str | Path) -> bool:
    """Whether anything exists at the path of an optional file; a broken link is refused when read."""
    return os.path.lexists(path)


def read_bytes(path: str | Path, *, max_bytes: int | None = None) -> bytes:
    """The content of a file of at most `max_bytes`, None for any size."""
    path = regular_file(path)
    with _opened(path, is_plain=True) as file:
        content = file.read() if max_bytes is None else file.read(max_bytes + 1)
    if max_bytes is not None and len(content) > max_bytes:
        raise InputError(f"{path} has more than {max_bytes:,} bytes, too many for such a file; check that it is the right one.")
    return content


def state_of(folder: Path) -> str:
    """16 hex digits for the names, sizes and times of a folder's files."""
    files = sorted(path for pattern in ("*", "*/*") for path in folder.glob(pattern) if path.is_file())
    facts = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.sha256(str(facts).encode()).hexdigest()[:16]


def sha256_of(path: str | Path) -> str:
    """The hex SHA-256 of a file's bytes. InputError: the file is absent, or is a folder or a device."""
    with open(regular_file(path), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_json(
    path: str | Path, check: Check | None = None, *, mend: str = "copy it again", max_bytes: int | None = MAX_JSON_BYTES
) -> Any:
    """The JSON value in a UTF-8 file.

    Refused beside malformed JSON: NaN and Infinity, a key that an object has twice, and half of a surrogate pair.

    Args:
        check: gives the value as it is returned, see `settings.Record`.
    """
    path = Path(path)
    content = read_bytes(path, max_bytes=max_bytes)
    try:
        value = _decode(_text(content.removeprefix(BOM)), _STRICT)
    except json.JSONDecodeError as error:
        raise InputError(f"{path}, line {error.lineno}: not valid JSON ({error.msg}).") from None
    except ValueError as error:
        raise InputError(f"{path}: not valid JSON ({error}).") from None
    try:
        return check(value) if check else value
    except InputError:  # a whole sentence
        raise
    except ValueError as error:
        raise InputError(f"{path}: {error}; {mend}.") from None


def read_records(path: str | Path, check: Check) -> Iterator[tuple[int, Any]]:
    """Yields (line number, record) of a jsonl file, plain or .gz; blank lines are passed over."""
    for line, raw in read_lines(path):
        try:
            value = check(parse_json(raw))
        except ValueError as error:
            raise InputError(f"{path}, line {line}: {error}.") from None
        yield line, value


def parse_json(text: str, *, allow_nan: bool = False) -> Any:
    """The JSON value in a line, as strict as `read_json`. ValueError: the rest of a sentence that begins with file and line."""
    try:
        return _decode(text, _WITH_NAN if allow_nan else _STRICT)
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON ({error.msg.removesuffix(' at')} at column {error.colno})") from None
    except ValueError as error:
        raise ValueError(f"not valid JSON ({error})") from None


def read_objects(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (line that it begins in, object) of a UTF-8 file, plain or .gz: an array of objects, or objects one after another."""
    path = regular_file(path)
    with _opened(path) as file, io.TextIOWrapper(file, encoding="utf-8-sig") as opened:
        text = _JsonText(path, opened.read)
        is_array = text.take("[")
        is_first = True
        while not text.is_at_end():
            if is_array and text.take("]"):
                if not text.is_at_end():
                    raise text.error("expected the end of the file after its array")
                return
            if is_array and not is_first and not text.take(","):
                raise text.error("expected a comma or the end of the array")
            is_first = False
            yield text.take_object()
        if is_array:
            raise text.error("the array is cut off")


def read_lines(path: str | Path, *, keep_blank: bool = False) -> Iterator[tuple[int, str]]:
    """Yields (number from 1, line without its end) of a UTF-8 file, plain or .gz, a line in memory at a time.

    A byte order mark is dropped; lines end in LF or CRLF.
    """
    for line, raw in read_byte_lines(path):
        try:
            text = _text(raw).rstrip("\r\n")
        except ValueError as error:
            raise InputError(f"{path}, line {line}: {error}.") from None
        if keep_blank or text.strip():
            yield line, text


def read_byte_lines(path: str | Path) -> Iterator[tuple[int, bytes]]:
    """Yields (number from 1, line with its end) of a file, plain or .gz, for readers that skip lines that are not UTF-8."""
    path = regular_file(path)
    line = 0
    with _opened(path, lambda: f" after line {line}") as file:
        while raw := file.readline(MAX_LINE_BYTES + 1):
            line += 1
            if len(raw) > MAX_LINE_BYTES:
                raise InputError(f"{path}, line {line}: longer than {MAX_LINE_BYTES:,} bytes; cut the text into shorter ones.")
            if line == 1 and raw.startswith((b"\xff\xfe", b"\xfe\xff")):
                raise InputError(f"{path} is UTF-16 text; save it as UTF-8.")
            if raw := raw.removeprefix(BOM) if line == 1 else raw:
                yield line, raw


def begins_with(path: str | Path, start: bytes) -> bool:
    """Whether a file, plain or .gz, begins with these bytes, a byte order mark and blanks aside; errors as of `read_bytes`."""
    with _opened(regular_file(path)) as file:
        read = file.read(_START_BYTES).removeprefix(BOM).lstrip()
        while not read and (more := file.read(_START_BYTES)):
            read = more.lstrip()
    return read.startswith(start)


def read_array(
    path: str | Path, dtype: Any, shape: Sequence[int | None], *, in_memory: bool = False, rebuild: str = "make it again"
) -> np.ndarray:
    """The array in a .npy file, memory-mapped for reading.

    Args:
        dtype: that it must have, byte order included; "S" for byte strings of any width.
        shape: that it must have; None if any size will do.
        in_memory: read the file instead of mapping it.
        rebuild: how a damaged file is mended, for the error.
    """
    path = regular_file(path)
    try:
        array = np.load(path, mmap_mode=None if in_memory else "r")
        if not isinstance(array, np.ndarray):
            raise ValueError("an archive of arrays")
    except Exception as error:  # numpy evaluates a header as Python, so a damaged one raises anything
        said = f"cannot be read ({_reason(error)})" if isinstance(error, OSError) else "is no .npy file or is damaged"
        raise InputError(f"{path} {said}; {rebuild}.") from None
    wanted = np.dtype(dtype)
    is_of_type = array.dtype == wanted or (wanted.str == "|S0" and array.dtype.kind == "S")
    fits = array.ndim == len(shape) and all(s is None or s == f for s, f in zip(shape, array.shape, strict=True))
    if not is_of_type or not fits or not array.flags.c_contiguous:
        sizes = ", ".join("any" if size is None else str(size) for size in shape)
        raise InputError(f"{path} holds {array.dtype} of shape {array.shape}, not {wanted} of shape ({sizes}); {rebuild}.")
    return array


@contextlib.contextmanager
def _opened(path: Path, place: Callable[[], str] = str, *, is_plain: bool = False) -> Iterator[IO[bytes]]:
    """A file's bytes, decompressed if its name ends in .gz; errors while reading become InputError."""
    is_compressed = path.suffix == ".gz" and not is_plain
    try:
        if is_compressed and not path.stat().st_size:
            raise EOFError("no bytes at all")  # gzip reads an empty file as an empty text
        with gzip.open(path, "rb") if is_compressed else open(path, "rb") as file:
            yield file  # type: ignore[misc]
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{path} is truncated or is not gzip,{place() or ' from its start'} ({error}); fetch it again.") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read{place()} ({_reason(error)}); check its permissions and its disk.") from None


class _JsonText:
    """The rest of a JSON file, partly in memory."""

    def __init__(self, path: Path, read_more: Callable[[int], str]) -> None:
        self._path, self._read_more, self._left, self._line = path, read_more, "", 1

    def is_at_end(self) -> bool:
        """Whether nothing but blanks is left, which are passed over."""
        while True:
            rest = self._left.lstrip(" \t\r\n")
            self._pass(len(self._left) - len(rest))
            if self._left or not self._read():
                return not self._left

    def take(self, character: str) -> bool:
        """Passes over blanks and this character; whether it was there."""
        is_there = not self.is_at_end() and self._left.startswith(character)
        self._pass(int(is_there))
        return is_there

    def take_object(self) -> tuple[int, dict[str, Any]]:
        """The object that comes next, and its first line."""
        self.is_at_end()
        if not self._left.startswith("{"):
            raise self.error("not a JSON object")
        while True:
            try:
                record, end = _decode(self._left, _STRICT, is_prefix=True)
            except json.JSONDecodeError as error:
                if len(self._left) < _MAX_RECORD and self._read():
                    continue
                self._pass(error.pos)
                raise self.error(error.msg) from None
            except ValueError as error:
                raise self.error(str(error)) from None
            line = self._line
            self._pass(end)
            return line, record

    def error(self, reason: str) -> InputError:
        return InputError(f"{self._path}, line {self._line}: not valid JSON ({reason}).")

    def _read(self) -> bool:
        number = max(_READ_CHARACTERS, len(self._left))  # twice as much each time: a long record is parsed seldom
        try:
            more = self._read_more(number)
        except UnicodeDecodeError:
            raise InputError(f"{self._path} is not UTF-8 text.") from None
        self._left += more
        return bool(more)

    def _pass(self, num_characters: int) -> None:
        self._line += self._left.count("\n", 0, num_characters)
        self._left = self._left[num_characters:]


def _text(raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        raise ValueError("not UTF-8 text") from None


def _decode(text: str, decoder: json.JSONDecoder, *, is_prefix: bool = False) -> Any:
    """The JSON value of a text, or with its end the value at its start; ValueError gives the reason for invalid JSON."""
    try:
        value, end = decoder.raw_decode(text) if is_prefix else (decoder.decode(text), len(text))
        if _ESCAPED_SURROGATE.search(text, 0, end):
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("too many lists and objects inside each other") from None
    except UnicodeEncodeError:
        raise ValueError("half of a surrogate pair, which is not a character") from None
    return (value, end) if is_prefix else value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in found if keys.count(key) > 1)
        raise ValueError(f"the key {twice[:80]!r} is there twice")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number of JSON")


_STRICT = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_no_constant)
_WITH_NAN = json.JSONDecoder(object_pairs_hook=_object)


def _reason(error: Exception) -> str:
    return os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
