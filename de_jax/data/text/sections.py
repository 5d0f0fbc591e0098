"""The sections of text files, each below its heading: Markdown (.md, .markdown, .txt) and reStructuredText (.rst).

Headings within code are text. A title in the front matter is that of the text before the first heading.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from de_jax.data.text.words import UNSPACED
from de_jax.types import InputError

SUFFIXES = (".md", ".markdown", ".txt", ".rst")
MOST_WORDS = 200
"""Of a section; a longer one becomes several at the ends of sentences, as models read 256 or 512 tokens."""
WORD = re.compile(rf"[{UNSPACED}]{{1,2}}|[^\s{UNSPACED}]+")
"""A word, or two characters where no blank parts words."""
SENTENCE_END = re.compile(
    "(?<=[.!?\u0964\u061f\u06d4])(?<!\\be\\.g\\.)(?<!\\bi\\.e\\.)(?<!\\b(?:Dr|Mr|Ms|St|vs|cf)\\.)(?<!\\b[A-Z]\\.)\\s+"
    "|(?<=[.!?][\"'\u201d\u2019)\\]])\\s+|(?<=[\u3002\uff01\uff1f])\\s*(?!$)"
)
"""Of Latin, Indian and Arabic scripts, also after a quotation, and of Chinese and Japanese without a blank."""
_FENCE = re.compile(r" {0,3}(`{3,}(?=[^`]*$)|~{3,})")
_ATX = re.compile(r" {0,3}#{1,6}[ \t]+(.*?)(?:[ \t]+#+)?[ \t]*")
_UNDERLINE = re.compile(r" {0,3}(?:={3,}|-{3,})[ \t]*")
_PARAGRAPH = re.compile(r" {0,3}(?![-*+#][ \t]|[>|]|\d+[.)][ \t])\S.*")
"""A line that may be a heading above its underline, so no item of a list, no quotation and no row of a table."""
_ADORNMENT = re.compile(r"([=\-~^\"'`*+#:._])\1+[ \t]*")
_TITLE = re.compile(r"title\s*[:=]\s*[\"']?(?![>|])(.*?)[\"']?\s*")
_SETTING = re.compile(r"\s*[\w-]+\s*[:=]")


def files_of(folder: Path) -> tuple[list[Path], list[Path]]:
    """The text files of a folder and of those in it, and its other files; without hidden ones, and without runs."""
    found: tuple[list[Path], list[Path]] = [], []
    for parent, folders, names in os.walk(folder):
        if "run.json" in names:
            names, folders[:] = [], []
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for path in (Path(parent) / name for name in sorted(names) if not name.startswith(".")):
            found[path.suffix.lower() not in SUFFIXES or not path.is_file()].append(path)
    return found


def read(file: Path) -> Iterator[tuple[str, str]]:
    """Yields (title, text) of each section of a file, with single blanks; the title is "" without a heading.

    Raises:
        InputError: no UTF-8 text.
    """
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise InputError(f"{file} is not UTF-8 text; save it as UTF-8, or move it elsewhere.") from None
    for title, body in _by_restructured(lines) if file.suffix.lower() == ".rst" else _by_markdown(lines):
        for text in _passages(" ".join(" ".join(body).split())):
            yield title, text


def _by_markdown(lines: list[str]) -> Iterator[tuple[str, list[str]]]:
    title, fence = "", ""
    body: list[str] = []
    first, after = (*map(str.rstrip, lines[:1]), "")[0], next((line for line in lines[1:] if line.strip()), "")
    if first in ("---", "+++") and _SETTING.match(after) and first in map(str.rstrip, lines[1:]):
        end = [line.rstrip() for line in lines].index(first, 1)
        title = next((found[1] for line in lines[1:end] if (found := _TITLE.fullmatch(line))), "")
        lines = lines[end + 1 :]
    for line in lines:
        opened = _FENCE.match(line)
        if fence or opened:
            if not fence:
                fence = opened[1] if opened else ""
            elif opened and opened[1].startswith(fence) and not line.strip(" \t`~"):
                fence = ""
            body.append("" if opened else line)
        elif heading := _ATX.fullmatch(line):
            yield title, body
            title, body = heading[1], []
        elif _UNDERLINE.fullmatch(line) and body and _PARAGRAPH.fullmatch(body[-1]):
            yield title, body[:-1]
            title, body = body[-1].strip(), []
        else:
            body.append(line)
    yield title, body


def _by_restructured(lines: list[str]) -> Iterator[tuple[str, list[str]]]:
    title = ""
    body: list[str] = []
    for line in lines:
        above = body[-1].rstrip() if body else ""
        is_under = _ADORNMENT.fullmatch(line) and above.strip() and not _ADORNMENT.fullmatch(above)
        has_over = len(body) > 1 and body[-2].rstrip() == line.rstrip()
        if is_under and len(line.rstrip()) >= min(4, len(above)) and (has_over or not above[0].isspace()):
            yield title, body[: -2 if has_over else -1]
            title, body = above.strip(), []
        else:
            body.append(line)
    yield title, body


def _passages(text: str) -> Iterator[str]:
    """A text in parts of at most `MOST_WORDS`, which end with a sentence where one is not longer than that."""
    begin, end, count = 0, 0, 0
    for sentence in _spans(text):
        words = len(WORD.findall(text, *sentence))
        if count and count + words > MOST_WORDS:
            yield text[begin:end].strip()
            begin, count = sentence[0], 0
        end, count = sentence[1], count + words
    if count:
        yield text[begin:end].strip()


def _spans(text: str) -> Iterator[tuple[int, int]]:
    """Where each sentence is, or each `MOST_WORDS` words of a longer one."""
    begin = 0
    for end in (*(found.end() for found in SENTENCE_END.finditer(text)), len(text)):
        starts = [found.start() for found in WORD.finditer(text, begin, end)][MOST_WORDS::MOST_WORDS]
        for start in (*starts, end):
            yield begin, start
            begin = start
