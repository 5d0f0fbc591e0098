"""Edits of bytes, of values of JSON, of lines, of gzip and of headers of arrays, by a random generator."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from typing import Any

ODD_VALUES = (
    *(None, True, False, 0, 1, -1, 2, 0.5, -0.0, 1e30, 1e999, float("nan"), 10**25, -(2**63), 2**31, "", "x", " ", "a b", "a\tb"),
    *("../x", "/etc/passwd", "a\0b", "\ud800", "\U0001f600", "x" * 300, [], {}, [[]], {"a": 1}, ["x"], [1, "x"], [None]),
)
RAW_VALUES = (
    *("9" * 5000, "9" * 400, "[" * 3000 + "]" * 3000, '"\\uD800"', '"\\udfff"', "NaN", "-Infinity", "1e400", "01", "'x'"),
    "[" * 100000,
)
NPY_EDITS = (
    *((b"<i4", b">i4"), (b"<i8", b"<i4"), (b"<f4", b"<f8"), (b"<i4", b"|O "), (b"False", b"True "), (b"descr", b"descx")),
    *((b"(", b"(-"), (b"(", b"(9**9,"), (b")", b"0)"), (b"1,", b"9,"), (b"'", b"\0")),
    *((b" \n", b"\xff\n"), (b"{", b"((("), (b", }", b", 1}")),
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
        *(b"\0", b"\xff", b"\xed\xa0\x80", b"\n", b"\r", b"\t", b'"', b"{", b"]", b",", b"1_0", b"nan", b"\xef\xbb\xbf"),
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
