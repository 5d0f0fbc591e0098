"""A look at gin files before gin evaluates them: a gin file is code, and gin's own errors name neither file nor line.

Includes are followed, so that one that is absent or that includes itself is told with the line where it stands.
"""

from __future__ import annotations

import ast
import contextlib
import io
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path

from de_jax.data.reading import read_lines
from de_jax.types import InputError

PACKAGE = "de_jax"
_PASSED_OVER = {tokenize.NL, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT}


def check(path: str | Path, find: Callable[[str], str], *, allow_imports: bool = False) -> dict[str, str]:
    """Looks through a gin file and all that it includes; gives file and line of each setting, where it is made last.

    Args:
        path: the file.
        find: the path of an included file by its name; InputError where there is none.
        allow_imports: whether files may import modules outside the package.

    Raises:
        InputError: a file that is absent or not UTF-8, one that includes itself, or an import; names the file and the line.
    """
    places: dict[str, str] = {}
    _check(Path(path), find, allow_imports, (), places)
    return places


@contextlib.contextmanager
def opened(path: str) -> Iterator[io.StringIO]:
    """A gin file for gin itself, read as every file of lines."""
    text = io.StringIO(_text(Path(path)))
    text.name = path  # type: ignore[attr-defined]
    yield text


def _check(path: Path, find: Callable[[str], str], allow_imports: bool, above: tuple[Path, ...], places: dict[str, str]) -> None:
    if path.resolve() in above:
        raise InputError(f"{path} includes itself, through {' and '.join(one.name for one in above)}; remove one of the includes.")
    for line, keyword, rest in _statements(path):
        if keyword == "include":
            _check(Path(_included(path, line, rest, find)), find, allow_imports, (*above, path.resolve()), places)
        elif keyword in ("import", "from") and not allow_imports and rest[:1] not in ([PACKAGE], ["__gin__"]):
            raise InputError(
                f"{path}, line {line}: imports {''.join(rest)}, which runs code from outside {PACKAGE}; if you trust that code, "
                "add --allow_imports."
            )
        elif "=" in rest:
            places["".join([keyword, *rest[: rest.index("=")]]).replace(f"{PACKAGE}.", "")] = f"{path}, line {line}"


def _text(path: Path) -> str:
    """The file with LF at the end of each line; gin drops the rest of a line behind a carriage return without a word."""
    lines = []
    for number, line in read_lines(path, keep_blank=True):
        if "\r" in line:
            raise InputError(f"{path}, line {number}: a carriage return within the line; end lines with LF or CRLF.")
        lines.append(f"{line}\n")
    return "".join(lines)


def _statements(path: Path) -> Iterator[tuple[int, str, list[str]]]:
    """Yields the line, the first word and the other words of each statement."""
    text = _text(path)
    words: list[tokenize.TokenInfo] = []
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.NEWLINE:
                if words:
                    yield words[0].start[0], words[0].string, [word.string for word in words[1:]]
                words = []
            elif token.type not in _PASSED_OVER:
                words.append(token)
    except tokenize.TokenError as error:
        reason, (line, _) = error.args
        raise InputError(f"{path}, line {line}: {reason}.") from None
    except SyntaxError as error:
        raise InputError(f"{path}, line {error.lineno}: {error.msg}.") from None


def _included(path: Path, line: int, words: list[str], find: Callable[[str], str]) -> str:
    try:
        return find(str(ast.literal_eval(" ".join(words))))
    except InputError as error:
        raise InputError(f"{path}, line {line}: {error}") from None
    except (ValueError, SyntaxError):
        raise InputError(f"{path}, line {line}: include takes the name of a file, in quotes.") from None
