"""Finds expressions that make prose hard to read, in markdown and in the strings of Python files.

python tests/prose.py README.md docs/*.md tools/*.py
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

BANNED = {
    r"\bnobody('s)?\b": "name the missing thing: unjudged documents, masked pairs",
    r"\b(is|are|was|were|be) (?-i:none)\b": "say the fact: 'the list is empty', 'without a projection'",
    r"\bthere(fore)? (is|are|was|were) none\b": "'missing', 'without'",
    r"\b(is|are|was|were|need) not (be )?there\b": "'missing', 'remote'",
    r"\bfor one[,.;:]": "'for example'",
    r"\bmerely\b": "'only'",
    r"\bsuch an? \w+ as\b": "'a ... like'",
    r"\bof which\b": "two sentences",
    r"\bkin\b": "'similar', 'related'",
    r"\banew\b": "'again', 'new'",
    r"\bbut for\b": "'except'",
    r"\b(one|ones|those|nothing) that\b": "name the thing",
    r"\bwhat (it|they|he|you|we|is|are|was|were|has|can|came|stands|goes|lies|others|becomes|a|an|the|may)\b": "name it",
    r"\b(goes|go|went) on\b": "'continues'",
    r"\bno (more|longer) \w+ than\b": "positive form",
    r"\b(as|than) (it|they) (comes?|came)\b": "'original', 'unchanged'",
    r"\b(tells|is told|are told|has not got|knows)\b": "'gives', 'names', 'records', 'has'",
    r"\bsays (how|which|who|what|where|why|so|no|nothing|that)\b": "'names', 'gives', 'reports'",
    r"^#+ (Who|What|Where|Why)\b.*": "a heading names the topic",
    r"^#+ .*\?$": "a heading names the topic",
    r"\?\s+(?-i:[A-Z])[^.?]*\?": "statements instead of questions in a row",
}


def findings(text: str) -> Iterator[tuple[int, str, str]]:
    """(line number from 1, expression found, advice) of each banned expression."""
    for pattern, advice in BANNED.items():
        for match in re.finditer(pattern.replace(" ", r"\s+"), text, re.IGNORECASE | re.MULTILINE):
            yield text.count("\n", 0, match.start()) + 1, match.group(), advice


def prose_of_markdown(text: str) -> str:
    """The text with code blanked out, its lines kept."""
    text = re.sub(r"^```.*?^```", lambda block: "\n" * block.group().count("\n"), text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]+`", "`code`", text)


def problems(path: Path) -> list[str]:
    """One line for each banned expression of a markdown or Python file."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        strings = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        found = [(node.lineno + line - 1, *rest) for node in strings for line, *rest in findings(prose_of_markdown(node.value))]
    else:
        found = [*findings(prose_of_markdown(text))]
    return [f"{path}:{line}: {' '.join(expression.split())!r}; use {advice}" for line, expression, advice in sorted(found)]


def main(paths: list[str]) -> int:
    """Prints the problems of the files; 1 if there are any."""
    found = [line for path in paths for line in problems(Path(path))]
    print(*found, sep="\n", end="\n" if found else "")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
