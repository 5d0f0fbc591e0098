"""Damages the files of every reader, by a seed, and looks at the outcome: the right value, or `InputError` with the file.

python tests/fuzzing.py --count=100000 --seed=1

Prints one JSON line. A failure names its own seed; `--count=1 --seed=<that>` repeats it. Anything else than the value that a naive
reader of the same bytes finds, or a sentence with the name of the file, is a failure: a traceback, more than 10 seconds, more than
1 GB, or another value.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import gzip
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fuzzed_readers import Reader, all_readers

from de_jax.types import InputError

SECONDS, MAX_KB = 10, 1 << 20
ODD_VALUES = (
    *(None, True, False, 0, 1, -1, 2, 0.5, -0.0, 1e30, 1e999, float("nan"), 10**25, -(2**63), 2**31, "", "x", " ", "a b", "a\tb"),
    *("../x", "/etc/passwd", "a\0b", "\ud800", "\U0001f600", "x" * 300, [], {}, [[]], {"a": 1}, ["x"], [1, "x"], [None]),
)
RAW_VALUES = ("9" * 5000, "[" * 3000 + "]" * 3000, '"\\uD800"', '"\\udfff"', "NaN", "-Infinity", "1e400", "01", "'x'", "[" * 100000)
NPY_EDITS = (
    *((b"<i4", b">i4"), (b"<i8", b"<i4"), (b"<f4", b"<f8"), (b"<i4", b"|O "), (b"False", b"True "), (b"descr", b"descx")),
    *(
        (b"(", b"(-"),
        (b"(", b"(9**9,"),
        (b")", b"0)"),
        (b"1,", b"9,"),
        (b"'", b"\0"),
        (b" \n", b"\xff\n"),
        (b"{", b"((("),
        (b", }", b", 1}"),
    ),
)
Mutator = Callable[[random.Random, bytes], bytes]


def flip(rng: random.Random, raw: bytes) -> bytes:
    place = rng.randrange(len(raw))
    return raw[:place] + bytes([raw[place] ^ (1 << rng.randrange(8))]) + raw[place + 1 :]


def cut(rng: random.Random, raw: bytes) -> bytes:
    return raw[: rng.randrange(len(raw))]


def remove(rng: random.Random, raw: bytes) -> bytes:
    start = rng.randrange(len(raw))
    return raw[:start] + raw[start + rng.randint(1, 8) :]


def insert(rng: random.Random, raw: bytes) -> bytes:
    what = (
        b"\0",
        b"\xff",
        b"\xed\xa0\x80",
        b"\n",
        b"\r",
        b"\t",
        b'"',
        b"{",
        b"]",
        b",",
        b"1_0",
        b"nan",
        b"\xef\xbb\xbf",
        rng.randbytes(4),
    )
    place = rng.randrange(len(raw) + 1)
    return raw[:place] + rng.choice(what) + raw[place:]


def repeat(rng: random.Random, raw: bytes) -> bytes:
    start = rng.randrange(len(raw))
    part = raw[start : start + rng.randint(1, 64)]
    return raw[:start] + part + raw[start:]


def append(rng: random.Random, raw: bytes) -> bytes:
    return raw + rng.choice((b"garbage", b"\0" * 8, raw, rng.randbytes(16)))


def empty(rng: random.Random, raw: bytes) -> bytes:
    return b""


def change_json(rng: random.Random, raw: bytes) -> bytes:
    """Another value, key or type at a random place of the tree."""
    value = [json.loads(raw)]
    holders: list[Any] = [value]
    for holder in holders:
        holders += [
            one for one in (holder.values() if isinstance(holder, dict) else holder) if isinstance(one, dict | list) and one
        ]
    holder = rng.choice(holders)
    key = rng.choice(list(holder)) if isinstance(holder, dict) else rng.randrange(len(holder))
    kind = rng.choice(("odd", "odd", "raw", "remove", "rename", "double", "again"))
    mark = "\1mark\1"
    if kind == "odd":
        holder[key] = rng.choice(ODD_VALUES)
    elif kind == "raw":
        holder[key] = mark
    elif kind == "remove":
        del holder[key]
    elif isinstance(holder, list):
        holder.insert(rng.randrange(len(holder) + 1), holder[key])
    elif kind == "again":  # the key a second time
        holder[mark] = mark
    else:
        holder[rng.choice(("x", "", "format", "_id", f"{key} ", "../x"))] = holder[key] if kind == "double" else holder.pop(key)
    text = json.dumps(value[0] if value else None, ensure_ascii=rng.random() < 0.5)
    again = f"{json.dumps(str(key))}: {json.dumps(rng.choice(ODD_VALUES))}"
    marked = json.dumps(mark)
    text = text.replace(f"{marked}: {marked}", again).replace(marked, rng.choice(RAW_VALUES))
    return text.encode("utf-8", "surrogatepass") + b"\n"


def change_lines(rng: random.Random, raw: bytes) -> bytes:
    """A line that is gone, there twice, elsewhere, or another one."""
    lines = raw.splitlines(keepends=True)
    place = rng.randrange(len(lines))
    line = lines.pop(place)
    kind = rng.choice(("remove", "twice", "move", "column", "number", "json", "bytes"))
    if kind == "twice":
        lines[place:place] = [line, line]
    elif kind == "move":
        lines.insert(rng.randrange(len(lines) + 1), line)
    elif kind == "column":
        separator = b"\t" if b"\t" in line else b" "
        columns = line.split(separator)
        columns[rng.randrange(len(columns))] = rng.choice(
            (b"", b"x", b"1_0", b"nan", b"1e999", b"9" * 5000, b"a b", b"-1", b"\xc2\xa0")
        )
        lines.insert(place, separator.join(columns))
    elif kind == "json" and line.startswith(b"{"):
        lines.insert(place, change_json(rng, line))
    elif kind != "remove":
        lines.insert(place, rng.choice((flip, cut, insert))(rng, line))
    return b"".join(lines)


def change_gzip(rng: random.Random, raw: bytes) -> bytes:
    """Other bytes of the compressed file, or another text in it."""
    if rng.random() < 0.5:
        return rng.choice((flip, cut, remove, insert, append, empty))(rng, raw)
    return gzip.compress(rng.choice((change_lines, flip, insert))(rng, gzip.decompress(raw)), mtime=0)


def change_header(rng: random.Random, raw: bytes) -> bytes:
    """Another header of a .npy file."""
    if rng.random() < 0.3:
        place = rng.randrange(min(len(raw), 128))
        return raw[:place] + rng.randbytes(1) + raw[place + 1 :]
    old, new = rng.choice(NPY_EDITS)
    return raw.replace(old, new, 1)


BYTES: tuple[Mutator, ...] = (flip, cut, remove, insert, repeat, append, empty)
MUTATORS: dict[str, tuple[Mutator, ...]] = {
    "json": (*(change_json,) * 8, *BYTES),
    "lines": (*(change_lines,) * 8, *BYTES),
    "gz": (*(change_gzip,) * 8, empty),
    "npy": (*(change_header,) * 6, cut, append, empty, flip),
    "bytes": BYTES,
}
PLACES = ("folder", "pipe", "absent", "loop")
HARMLESS: dict[str, tuple[Mutator, ...]] = {
    "json": (lambda rng, raw: b"\xef\xbb\xbf" + raw, lambda rng, raw: json.dumps(json.loads(raw), indent=4).encode()),
    "lines": (
        lambda rng, raw: b"\xef\xbb\xbf" + raw,
        lambda rng, raw: raw.replace(b"\n", b"\r\n"),
        lambda rng, raw: raw.removesuffix(b"\n"),
    ),
    "gz": (
        lambda rng, raw: gzip.compress(b"\xef\xbb\xbf" + gzip.decompress(raw), mtime=9),
        lambda rng, raw: raw + gzip.compress(b""),
        lambda rng, raw: gzip.compress(gzip.decompress(raw).replace(b"\n", b"\r\n"), compresslevel=1),
    ),
    "npy": (),
    "bytes": (),
}
"""What a reader must not notice."""


def kind_of(name: str) -> str:
    """How a file is damaged, by its name."""
    suffix = Path(name).suffix
    known = {
        ".json": "json",
        ".jsonl": "lines",
        ".tsv": "lines",
        ".txt": "lines",
        ".trec": "lines",
        ".gin": "lines",
        ".gz": "gz",
        ".npy": "npy",
    }
    return known.get(suffix, "bytes")


def run(count: int, seed: int) -> dict[str, Any]:
    """Damages `count` files; case i has the seed `seed + i`.

    Returns:
        "cases", "accepted" and "refused" by reader, and "failures": of each the reader, the file, its seed and what happened.
    """
    counts = {"accepted": collections.Counter(), "refused": collections.Counter()}  # type: ignore[var-annotated]
    failures: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        readers = all_readers(Path(folder))
        whole = {reader.name: reader.read(reader.folder) for reader in readers}
        for reader in readers:
            if reader.naive is not None and (found := reader.naive(reader.folder)) != whole[reader.name]:
                raise AssertionError(f"{reader.name} reads {whole[reader.name]!r} from undamaged files, not {found!r}")
        for case in range(seed, seed + count):
            rng = random.Random(case)
            reader = rng.choice(readers)
            outcome, problem = _one_case(rng, reader, whole[reader.name])
            counts[outcome][reader.name] += 1
            if problem:
                failures.append({"reader": reader.name, "seed": case, "problem": problem})
    return {
        "cases": count,
        "seed": seed,
        **{name: dict(sorted(found.items())) for name, found in counts.items()},
        "failures": failures,
    }


def _one_case(rng: random.Random, reader: Reader, whole: Any) -> tuple[str, str]:
    """Whether the damaged files were accepted or refused, and the problem, if any."""
    name = rng.choice(reader.files)
    path, kind = reader.folder / name, kind_of(name)
    before = path.read_bytes()
    is_harmless = bool(HARMLESS[kind]) and name not in reader.exact and rng.random() < 0.06
    try:
        if is_harmless:
            path.write_bytes(rng.choice(HARMLESS[kind])(rng, before))
        elif rng.random() < 0.05:
            _put_elsewhere(rng, path)
        else:
            raw = before
            for _ in range(rng.choice((1, 1, 1, 2, 3))):
                with contextlib.suppress(Exception):  # what was damaged before may be of no kind any more
                    raw = rng.choice(MUTATORS[kind])(rng, raw)
            path.write_bytes(raw)
        return _judged(reader, name, whole, is_harmless=is_harmless)
    finally:
        _restore(path, before)


def _judged(reader: Reader, name: str, whole: Any, *, is_harmless: bool) -> tuple[str, str]:
    try:
        with _limits():
            found = reader.read(reader.folder)
    except InputError as error:
        if is_harmless:
            return "refused", f"{name}: a harmless change is refused: {error}"
        sentence = str(error)
        names_it = any(part in sentence for part in (name, Path(name).name, str(reader.folder)))
        return (
            "refused",
            "" if names_it and "\n" not in sentence else f"{name}: the error names no file, or has several lines: {sentence}",
        )
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return "refused", f"{name}: {''.join(traceback.format_exception(error)[-3:])}"
    if found == whole or (reader.naive is None and not is_harmless):
        return "accepted", ""
    if is_harmless:
        return "accepted", f"{name}: a harmless change makes another value: {found!r:.300}"
    try:
        expected = reader.naive(reader.folder)  # type: ignore[misc]
    except Exception as error:
        return "accepted", f"{name}: accepted {found!r:.300}, but it cannot be read ({error!r:.200})"
    return "accepted", "" if found == expected else f"{name}: reads {found!r:.300}, not {expected!r:.300}"


@contextlib.contextmanager
def _limits() -> Iterator[None]:
    """TimeoutError after 10 seconds; MemoryError where the process has grown by more than 1 GB."""

    def late(number: int, frame: Any) -> None:
        raise TimeoutError(f"more than {SECONDS} seconds")

    previous = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
    if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before > MAX_KB:
        raise MemoryError("more than 1 GB")


def _put_elsewhere(rng: random.Random, path: Path) -> None:
    path.unlink()
    place = rng.choice(PLACES)
    if place == "folder":
        path.mkdir()
    elif place == "pipe":
        os.mkfifo(path)
    elif place == "loop":
        path.symlink_to(path)


def _restore(path: Path, content: bytes) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    path.write_bytes(content)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000, help="damaged files (default 2000)")
    parser.add_argument("--seed", type=int, default=0, help="of the first (default 0)")
    args = parser.parse_args()
    summary = run(args.count, args.seed)
    print(json.dumps(summary))
    sys.exit(bool(summary["failures"]))


if __name__ == "__main__":
    main()
