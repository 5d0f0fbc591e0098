"""The recipes of the papers' tables, with the papers' scores: prints the tables of docs/reference/paper_rows.md.

python -m experiments.paper_recipes
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from de_jax.gin_settings import RECIPES_DIR

FOLDER = RECIPES_DIR / "recipes" / "paper"


class Row(NamedTuple):
    """A recipe by its comment: the paper, then the row, then its scores; the command comes last."""

    name: str  # under recipes/paper
    paper: str
    place: str
    scores: str
    start: str  # MODEL, the model that it starts from


def read(file: Path) -> Row:
    text = file.read_text(encoding="utf-8")
    comment = [line.removeprefix("# ") for line in text.splitlines() if line.startswith("# ")]
    paper, place = re.fullmatch(r"(.*?\)), (.*)\.", comment[0]).groups()  # type: ignore[union-attr]
    start = re.search(r'^MODEL = "(.*)"', text, re.MULTILINE)
    return Row(f"{file.parent.name}/{file.stem}", paper, place, " ".join(comment[1:-2]), start[1] if start else "")


def table() -> Iterator[str]:
    """The lines of the page's tables, a table for each paper."""
    rows = map(read, sorted(FOLDER.glob("*/*.gin")))
    for paper, own in groupby(rows, lambda row: row.paper):
        yield from ("", f"### {paper}", "", "| recipe | row | starts from | the paper's scores |", "|---|---|---|---|")
        for row in own:
            yield f"| `{row.name}` | {row.place} | `{row.start}` | {row.scores} |"


if __name__ == "__main__":
    print("\n".join(table()))
