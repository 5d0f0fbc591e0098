"""One Python file's docstrings as (summary, signature, rest), read from the syntax tree: nothing is imported, nothing runs."""

import ast
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from de_jax.files.reading import read_bytes
from de_jax.types import InputError

# Sections that repeat other functions' summaries, or hold code and literature instead of a description.
_SKIPPED_SECTIONS = {"see also", "references", "reference", "examples", "example", "example usage", "usage", "doctest"}
_MIN_QUERY_WORDS, _MAX_QUERY_WORDS = 4, 40
_MIN_REST_WORDS = 10
_MAX_SIGNATURE = 300  # characters
_MAX_REST = 2000  # characters, about 500 tokens

# The fields in which a statement holds other statements, in source order.
_BLOCKS = ("body", "handlers", "orelse", "finalbody", "cases")
_UNDERLINE = re.compile(r"\s*([-=~^#*\"'`+])\1{2,}\s*$")
_SENTENCE_END = re.compile(r"(?<!e\.g\.)(?<!i\.e\.)(?<!cf\.)(?<!vs\.)(?<!etc\.)(?<=[.!?])\s+(?=[A-Z`\"'(*\[])")
_ROLE = re.compile(r":[\w:+-]+:`[~!]?([^`<]+?)(?:\s*<[^`>]*>)?`")
_DIRECTIVE = re.compile(r"\s*\.\. .*$")
_WORD = re.compile(r"[A-Za-z]{2,}")

Node = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class Docstring(NamedTuple):
    """One documented function, class or module."""

    doc_id: str  # "scipy.signal._filter_design:butter"; the module alone for its own docstring
    summary: str  # the first sentence
    signature: str
    rest: str  # everything after the first sentence, on one line


def read_file(path: Path, module: str) -> list[Docstring]:
    """The usable docstrings of a file in source order; none where it does not parse.

    A docstring is usable when its first sentence has 4 to 40 words and the rest has at least 10 and does not repeat it.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's strings
            tree = ast.parse(read_bytes(path))
        found = [_docstring(module, f"module {module}", tree)]
        found += [_docstring(f"{module}:{name}", _signature(node, f"{module}.{name}"), node) for name, node in _definitions(tree)]
    except (InputError, SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    unique: dict[str, Docstring] = {}
    for docstring in found:
        if docstring is not None:
            unique.setdefault(docstring.doc_id, docstring)
    return list(unique.values())


def split_docstring(docstring: str) -> tuple[str, str] | None:
    """(summary, rest) of a docstring, both free of markup; None if it is not usable."""
    head, *paragraphs = re.split(r"\n[ \t]*\n", docstring.strip(), maxsplit=1)
    lines = head.splitlines()
    body = "\n\n".join(paragraphs)
    # A first line that ends a sentence, or a heading over its underline, stands alone.
    if len(lines) > 1 and _UNDERLINE.match(lines[1]):
        head, body = lines[0], "\n".join([*lines[2:], "", body])
    sentences = _SENTENCE_END.split(" ".join(head.split()), maxsplit=1)
    summary = _plain(sentences[0])
    rest = _plain(" ".join([*sentences[1:], _description(body)]))
    num_words = len(_WORD.findall(summary))
    if not _MIN_QUERY_WORDS <= num_words <= _MAX_QUERY_WORDS or len(summary.split()) > 2 * _MAX_QUERY_WORDS:
        return None
    if len(_WORD.findall(rest)) < _MIN_REST_WORDS or summary.rstrip(".").lower() in rest.lower():
        return None
    return summary, _shorten(rest, _MAX_REST)


def sentences(text: str) -> list[str]:
    """The sentences of a text on one line.

    >>> sentences("Opens a file, e.g. a log. Closes it too.")
    ['Opens a file, e.g. a log.', 'Closes it too.']
    """
    return _SENTENCE_END.split(text)


def _definitions(tree: ast.Module) -> Iterator[tuple[str, Node]]:
    """Yields (qualified name, node) of every function and class, at any depth, in source order."""
    waiting: list[tuple[str, ast.AST]] = [("", node) for node in reversed(tree.body)]
    while waiting:
        scope, node = waiting.pop()
        if isinstance(node, Node):
            scope = f"{scope}.{node.name}" if scope else node.name
            yield scope, node
        children = [child for block in _BLOCKS for child in getattr(node, block, ())]
        waiting += [(scope, child) for child in reversed(children)]


def _docstring(doc_id: str, signature: str, node: Node | ast.Module) -> Docstring | None:
    docstring = ast.get_docstring(node)
    parts = split_docstring(docstring) if docstring else None
    return Docstring(doc_id, parts[0], signature, parts[1]) if parts else None


def _signature(node: Node, name: str) -> str:
    """`name(parameters)`, with defaults and without annotations."""
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        return _shorten(f"class {name}({bases})" if bases else f"class {name}", _MAX_SIGNATURE)
    arguments = node.args
    for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]:
        if argument is not None:
            argument.annotation = None
    return _shorten(f"{name}({ast.unparse(arguments)})", _MAX_SIGNATURE)


def _shorten(text: str, max_characters: int) -> str:
    """Text on one line, cut between words."""
    text = " ".join(text.split())
    return text if len(text) <= max_characters else text[: max_characters - 4].rsplit(" ", 1)[0] + " ..."


def _description(body: str) -> str:
    """The body without doctests, directives, underlines and the sections that do not describe."""
    kept: list[str] = []
    skipped_indent: int | None = None
    lines = body.splitlines()
    in_doctest = False
    for number, line in enumerate(lines):
        text = line.strip()
        indent = len(line) - len(line.lstrip())
        is_underlined = number + 1 < len(lines) and bool(text) and bool(_UNDERLINE.match(lines[number + 1]))
        is_heading = is_underlined or (text.endswith(":") and text.count(" ") < 3)
        if is_heading and text.rstrip(":").lower() in _SKIPPED_SECTIONS:
            skipped_indent = -1 if is_underlined else indent
        elif skipped_indent is not None and text and (is_underlined or (indent <= skipped_indent)):
            skipped_indent = None
        in_doctest = text.startswith(">>>") or (in_doctest and bool(text))
        if skipped_indent is None and not in_doctest and not _UNDERLINE.match(line) and not _DIRECTIVE.match(line):
            kept.append(text)
    return " ".join(kept)


def _plain(text: str) -> str:
    """Text on one line, without reStructuredText roles and backquotes."""
    return " ".join(_ROLE.sub(r"\1", text).replace("`", "").split())
