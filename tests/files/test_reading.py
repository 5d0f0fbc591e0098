"""One reader for JSON, lines and arrays: every damage of a file is one sentence with its name."""

import gzip
import json
import os

import numpy as np
import pytest

from de_jax.files import reading
from de_jax.types import InputError

BAD_JSON = {
    "empty": "",
    "deep": "[" * 100_000,
    "a long integer": "1" * 5_000,
    "NaN": '{"a": NaN}',
    "Infinity": "[-Infinity]",
    "a key twice": '{"a": 1, "a": 2}',
    "half a surrogate pair": '"\\ud800"',
    "half a surrogate pair, upper case": '"\\uD83D"',
    "half a surrogate pair in a key": '{"\\uDC00": 1}',
    "cut off": '{"a": [1, 2',
    "two values": "{} {}",
    "a control character": '"\0"',
}
BAD_BYTES = {"no UTF-8": b'"\xff"', "a raw surrogate": b'"\xed\xa0\x80"', "UTF-16": '"a"'.encode("utf-16")}


@pytest.mark.parametrize(
    "content", [*(text.encode() for text in BAD_JSON.values()), *BAD_BYTES.values()], ids=[*BAD_JSON, *BAD_BYTES]
)
def test_what_is_no_json_is_one_sentence_with_the_file(tmp_path, content):
    file = tmp_path / "a.json"
    file.write_bytes(content)
    with pytest.raises(InputError, match=r"a\.json.*\.$"):
        reading.read_json(file)


@pytest.mark.parametrize("text", BAD_JSON.values(), ids=BAD_JSON)
def test_a_bad_line_is_as_bad_as_a_file(text):
    with pytest.raises(ValueError, match=r"^not valid JSON"):
        reading.parse_json(text)


def test_a_log_may_hold_nan():
    assert reading.parse_json('{"loss": Infinity}', allow_nan=True) == {"loss": float("inf")}


def test_a_byte_order_mark_and_whole_surrogate_pairs_are_read(tmp_path):
    file = tmp_path / "a.json"
    file.write_bytes(b'\xef\xbb\xbf{"a": "\\uD83D\\uDE00"}\r\n')
    assert reading.read_json(file) == {"a": "😀"}


def test_a_file_too_large_for_a_description_is_refused_before_it_is_read(tmp_path):
    file = tmp_path / "a.json"
    with open(file, "wb") as sparse:
        sparse.truncate(3 << 30)
    with pytest.raises(InputError, match=r"a\.json has more than 67,108,864 bytes"):
        reading.read_json(file)


READERS = {
    "read_json": reading.read_json,
    "read_bytes": reading.read_bytes,
    "read_lines": lambda path: list(reading.read_lines(path)),
    "read_array": lambda path: reading.read_array(path, np.int32, (None,)),
}


@pytest.mark.parametrize("place", ["folder", "pipe", "absent", "below a file", "null in its name", "too long a name", "loop"])
@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_what_is_no_file_is_refused_at_once(tmp_path, read, place):
    path = tmp_path / "thing"
    if place == "folder":
        path.mkdir()
    elif place == "pipe":
        os.mkfifo(path)
    elif place == "below a file":
        path.write_text("")
        path = path / "more"
    elif place == "null in its name":
        path = tmp_path / "thing\0"
    elif place == "too long a name":
        path = tmp_path / ("thing" * 100)
    elif place == "loop":
        path.symlink_to(path)
    with pytest.raises(InputError, match="thing"):
        read(path)


def _lines(path, **options):
    return list(reading.read_lines(path, **options))


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_lines_have_no_mark_and_no_ends(tmp_path, name):
    with gzip.open(tmp_path / name, "wb") if name.endswith(".gz") else open(tmp_path / name, "wb") as file:
        file.write("\ufefffirst\r\n\r\n \nsecond\u2028half\x85end\r\nthird".encode())
    assert _lines(tmp_path / name) == [(1, "first"), (4, "second\u2028half\x85end"), (5, "third")]
    assert [line for _, line in _lines(tmp_path / name, keep_blank=True)] == ["first", "", " ", "second\u2028half\x85end", "third"]


@pytest.mark.parametrize("raw", BAD_BYTES.values(), ids=BAD_BYTES)
def test_a_line_that_is_no_text_is_named(tmp_path, raw):
    (tmp_path / "a.txt").write_bytes(b"first\n" + raw + b"\n")
    with pytest.raises(InputError, match=r"a\.txt, line 2: not UTF-8"):
        _lines(tmp_path / "a.txt")


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_an_endless_line_is_never_in_memory(tmp_path, name, monkeypatch):
    monkeypatch.setattr(reading, "MAX_LINE_BYTES", 1 << 10)
    with gzip.open(tmp_path / name, "wb") if name.endswith(".gz") else open(tmp_path / name, "wb") as file:
        file.write(b"short\n" + b"x" * 1025)
    with pytest.raises(InputError, match="line 2: longer than 1,024 bytes"):
        _lines(tmp_path / name)


WHOLE_GZIP = gzip.compress(b"a line\n" * 100, mtime=0)
BAD_GZIP = {
    "empty": b"",
    "no gzip": b"a line\n",
    "cut in its header": WHOLE_GZIP[:5],
    "cut": WHOLE_GZIP[:-12],
    "cut in its trailer": WHOLE_GZIP[:-3],
    "another checksum": WHOLE_GZIP[:-8] + bytes(4) + WHOLE_GZIP[-4:],
    "another length": WHOLE_GZIP[:-4] + b"\xff\0\0\0",
    "another method": WHOLE_GZIP[:2] + b"\7" + WHOLE_GZIP[3:],
    "damaged inside": WHOLE_GZIP[:12] + b"\xff\xff\xff" + WHOLE_GZIP[15:],
    "with something after it": WHOLE_GZIP + b"garbage",
    "with half of a second part": WHOLE_GZIP + WHOLE_GZIP[:-6],
}


@pytest.mark.parametrize("content", BAD_GZIP.values(), ids=BAD_GZIP)
def test_a_damaged_gzip_file_is_one_sentence(tmp_path, content):
    (tmp_path / "a.gz").write_bytes(content)
    with pytest.raises(InputError, match=r"a\.gz is truncated or is not gzip"):
        _lines(tmp_path / "a.gz")


@pytest.mark.parametrize(
    "edit",
    [
        lambda raw: raw[:-1],
        lambda raw: raw[:40],
        lambda raw: b"",
        lambda raw: raw.replace(b"<i4", b">i4"),
        lambda raw: raw.replace(b"<i4", b"|O "),
        lambda raw: raw.replace(b"<i4", b"<f4"),
        lambda raw: raw.replace(b"(3, 2)", b"(2, 3)"),
        lambda raw: raw.replace(b"(3, 2)", b"(-3,2)"),
        lambda raw: raw.replace(b"(3, 2)", b"((((((("),
        lambda raw: raw.replace(b"(3, 2), } ", b"(3, 2,9**9**9"),
        lambda raw: raw.replace(b"False", b"True "),
        lambda raw: raw.replace(b"(3, 2)", b"(3,1e9)"),
        lambda raw: raw[:6] + b"\2" + raw[7:],
        lambda raw: raw[:6] + b"\3" + raw[7:],
        lambda raw: raw[:8] + b"\xff\xff" + raw[10:],
        lambda raw: raw.replace(b"descr", b"descx"),
        lambda raw: raw.replace(b"'<i4'", b"\xff\xfe\0  "),
    ],
)
def test_a_damaged_array_is_one_sentence(tmp_path, edit):
    file = tmp_path / "a.npy"
    np.save(file, np.arange(6, dtype=np.int32).reshape(3, 2))
    file.write_bytes(edit(file.read_bytes()))
    with pytest.raises(InputError, match=r"a\.npy .*; mine it again\.$"):
        reading.read_array(file, np.int32, (None, 2), rebuild="mine it again")


@pytest.mark.parametrize("in_memory", [False, True])
@pytest.mark.parametrize("array", [np.arange(6, dtype=np.int32), np.zeros(0, np.int32)], ids=["some", "none"])
def test_a_whole_array_is_read(tmp_path, array, in_memory):
    np.save(tmp_path / "a.npy", array)
    found = reading.read_array(tmp_path / "a.npy", np.int32, (len(array),), in_memory=in_memory)
    assert isinstance(found, np.memmap) != in_memory
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found, array)


def test_json_of_many_lists_is_not_deep(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps([[1]] * 1000))
    assert len(reading.read_json(tmp_path / "a.json")) == 1000
