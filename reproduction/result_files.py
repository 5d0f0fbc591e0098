"""Recorded results: `results/<theme>.yaml`, from which docs/results.md and docs/results/ are rendered.

A file is a `Theme` with entries by name. An entry (`Entry`) describes how a result was made, and has its numbers and caveats. Its
tables are written as in Markdown, and `scores` beside a table names the numbers that the commands print again.
"""

from __future__ import annotations

import datetime
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any, Literal

from de_jax.settings import Check, Mismatch, file_name, list_of, map_of, of_class, some_text
from de_jax.types import InputError
from reproduction.yaml_files import read_yaml

_NUMBER = re.compile(r"([-+]?\d*\.?\d+)(?: ± (\d*\.?\d+))?")
_CHANGE = re.compile(r"([-+]\d*\.?\d+) \(p (\d*\.?\d+)\)")
_CONFIDENCE = 0.95
OUTCOMES = ("yes", "partly", "no", "not tested")
"""Whether a claim holds here."""


@dataclass(frozen=True)
class Scores:
    """Which numbers of a table a command prints again, and where.

    A number is the mean over the JSON objects that the entry's commands print. Only objects count that have the values of `lines`
    for its row, and a number under the keys of `columns`. The keys of `changes` lead to a system of `de-jax compare runs`, whose
    difference and p (permutation test, Holm-corrected) the row has as `Table.change`.
    """

    lines: Mapping[str, Mapping[str, Any]]  # by the first cell of a row
    columns: Mapping[str, list[str | int]] = field(default_factory=dict)  # by the head of a column, the keys within an object
    changes: Mapping[str, list[str | int]] = field(default_factory=dict)  # likewise
    tolerance: float | None = None  # by default from the spread over seeds
    because: str | None = None  # the reason for a stated tolerance


@dataclass(frozen=True)
class Table:
    """The head and the other rows of a table, cells as they are shown."""

    rows: list[list[str]]
    caption: str = ""
    scores: list[Scores] = field(default_factory=list)

    def cell(self, row: str, column: str) -> str:
        """The cell of the one row that begins with `row`.

        Raises:
            ValueError: not one such row, or not one such column.
        """
        found = [cells for cells in self.rows[1:] if cells[0] == row]
        if len(found) != 1 or self.rows[0].count(column) != 1:
            raise ValueError(f"the table has no single row {row!r} or no single column {column!r}")
        return found[0][self.rows[0].index(column)]

    def change(self, row: str, column: str) -> tuple[float, float]:
        """A row's change and its p: the cell "+.0203 (p .0006)", or the cells under the next "change" and "p" after the column.

        Raises:
            ValueError: as of `cell`, or there is no such change.
        """
        cell, (head, *rows) = self.cell(row, column), self.rows
        start = head.index(column) + 1
        for place, pair in enumerate(itertools.pairwise(head[start:]), start):
            if pair in (("change", "p"), (f"change of {column}", "p")):
                cells = next(cells for cells in rows if cells[0] == row)
                cell = f"{cells[place]} (p {cells[place + 1]})"
                break
        found = _CHANGE.fullmatch(cell.replace("*", ""))
        if not found:
            raise ValueError(f"{cell!r} is no change and its p, such as '+.0203 (p .0006)'")
        return float(found[1]), float(found[2])


@dataclass(frozen=True)
class Panel:
    """A column of a table as a panel of a drawn picture."""

    title: str
    entry: str
    column: str
    table: int = 1  # counted from 1


@dataclass(frozen=True)
class Drawing:
    """A picture of tables alone: the same rows in every panel."""

    rows: list[str]
    panels: list[Panel]


@dataclass(frozen=True)
class Picture:
    """A file of docs/images, and its content in words."""

    file: str
    alt: str
    drawing: Drawing | None = None  # how it is drawn, unless an experiment drew it


@dataclass(frozen=True)
class Entry:
    """One result: the question, how it was made, the numbers, the verdict, and the caveats."""

    title: str
    question: str
    verdict: str  # one sentence
    date: datetime.date  # when it was recorded
    commits: list[str]
    machine: str
    versions: str
    seeds: list[int]
    commands: list[str] = field(default_factory=list)  # bash, from the root of the repository
    needs: list[str] = field(default_factory=list)  # files and folders that the commands read
    after: list[str] = field(default_factory=list)  # entries whose runs the commands use
    design: str = ""  # experiments/<name>.yaml, where it was registered before any test split was scored
    method: str = ""
    tables: list[Table] = field(default_factory=list)
    pictures: list[Picture] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    caveats: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Claim:
    """A claim of a paper beside our results."""

    says: str
    published: str  # its numbers
    here: str  # one of OUTCOMES
    found: str  # our numbers, whatever their outcome
    entries: list[str] = field(default_factory=list)  # that have them
    effects: list[str] = field(
        default_factory=list
    )  # arms of their designs beside baselines, as in "sde_query - sde_none" or "entry: x - y"
    under_tuned: bool = False  # in each of its designs an arm that should win had one rate, or the best at an end of its grid

    @property
    def outcome(self) -> str:
        """`here`, and whether better rates may change it."""
        return f"{self.here}, under-tuned" if self.under_tuned else self.here


@dataclass(frozen=True)
class Paper:
    """The claims of a paper and what became of them here."""

    name: str
    claims: list[Claim]
    picture: Picture
    untested: list[str]


@dataclass(frozen=True)
class Theme:
    """A page of docs/results/."""

    title: str
    entries: Mapping[str, Entry]
    intro: str = ""
    papers: list[Paper] = field(default_factory=list)

    def drawn(self) -> list[tuple[Picture, Drawing]]:
        """The pictures that are drawn from tables, with their drawings."""
        pictures = [*(paper.picture for paper in self.papers), *(one for entry in self.entries.values() for one in entry.pictures)]
        return [(picture, picture.drawing) for picture in pictures if picture.drawing]


def read_all(folder: str | Path) -> dict[str, Theme]:
    """The themes of a folder by the names of their files, checked as a whole.

    Raises:
        InputError: a file that is not such YAML, or an entry that does not fit; names the file and the entry.
    """
    folder = Path(folder)
    files = sorted(folder.glob("*.yaml"))
    if not files:
        raise InputError(
            f"{folder} has no recorded results (*.yaml); run this in a clone of the repository, results are not installed."
        )
    themes = {file.stem: read_yaml(file, _THEME, mend="see the other entries of results/") for file in files}
    entries: dict[str, Entry] = {}
    for file, theme in zip(files, themes.values(), strict=True):
        for name, entry in theme.entries.items():
            if name in entries:
                raise InputError(f"{file}, entry {name}: another file has an entry of this name; give it a name of its own.")
            if mistake := _mistake(entry):
                raise InputError(f"{file}, entry {name}: {mistake}.")
            entries[name] = entry
    for file, theme in zip(files, themes.values(), strict=True):
        _check_names(file, theme, entries)
    return themes


def entries_of(themes: Mapping[str, Theme]) -> dict[str, Entry]:
    """All entries by name."""
    return {name: entry for theme in themes.values() for name, entry in theme.entries.items()}


def expected(cell: str) -> tuple[float, float | None]:
    """The number of a cell, and its deviation over seeds where it has one; marks such as bold and stars are passed over.

    Raises:
        ValueError: no such cell.

    Example:
        >>> expected(".709* ± .007"), expected("**3.47**")
        ((0.709, 0.007), (3.47, None))
    """
    found = _NUMBER.fullmatch(cell.replace("*", "").replace(",", ""))
    if not found:
        raise ValueError(f"the cell {cell!r} is no number, alone or with ± and a deviation")
    return float(found[1]), None if found[2] is None else float(found[2])


def tolerances(cells: Sequence[str], num_seeds: int, num_scores: int) -> list[float]:
    """How far the means of other seeds may be from those of a column's cells.

    With a confidence of 95 % all scores of an entry stay within theirs: prediction intervals of a mean (Student's t), with
    Bonferroni's correction. A cell's deviation s is its own or the root mean square of the column's, whichever is larger:
    t(1 - .025 / m, c (n - 1)) (s + r) sqrt(2 / n) + r, where r is half of the last digit.

    Args:
        cells: c cells, each a mean and its deviation.
        num_seeds: n of each mean, at least 2.
        num_scores: m of the entry.

    Example:
        >>> [round(one, 4) for one in tolerances([".5842 ± .0024", ".5780 ± .0084"], 3, 2)]
        [0.0178, 0.0242]
    """
    from scipy.stats import t

    quantile = float(t.ppf(1 - (1 - _CONFIDENCE) / 2 / num_scores, len(cells) * (num_seeds - 1)))
    numbers = [cell.replace("*", "").split(" ± ") for cell in cells]
    own = [float(deviation) + _half_of_last_digit(deviation) for _, deviation in numbers]
    pooled = math.sqrt(sum(one**2 for one in own) / len(own))
    scale = quantile * math.sqrt(2 / num_seeds)
    return [scale * max(one, pooled) + _half_of_last_digit(mean) for one, (mean, _) in zip(own, numbers, strict=True)]


def _half_of_last_digit(number: str) -> float:
    return 0.5 * 10.0 ** -len(number.partition(".")[2])


def _mistake(entry: Entry) -> str | None:
    """The first contradiction within an entry, or None."""
    if not entry.commands and any(table.scores for table in entry.tables):
        return "it has scores and no commands that print them"
    for table in entry.tables:
        for scores in table.scores:
            if not scores.columns and not scores.changes:
                return f"the scores of {', '.join(scores.lines)} have neither columns nor changes; give one of them"
            if (scores.tolerance is None) != (scores.because is None):
                return f"the scores of {', '.join(scores.columns)} have a tolerance without `because`, or the reverse; give both"
            for column, row in itertools.product(scores.columns, scores.lines):
                try:
                    _, deviation = expected(table.cell(row, column))
                except ValueError as error:
                    return f"the score {row}, {column}: {error}"
                if scores.tolerance is None and (deviation is None or len(entry.seeds) < 2):
                    return f"the score {row}, {column} has no deviation over two seeds or more; give its tolerance and `because`"
            for column, row in itertools.product(scores.changes, scores.lines):
                try:
                    table.change(row, column)
                except ValueError as error:
                    return f"the change {row}, {column}: {error}"
    return None


def _check_names(file: Path, theme: Theme, entries: Mapping[str, Entry]) -> None:
    """Whether the entries that a theme names are there, and come one after another."""
    try:
        TopologicalSorter({name: [one for one in entry.after if one in entries] for name, entry in entries.items()}).prepare()
    except CycleError as error:
        raise InputError(f"{file}: the entries {', '.join(error.args[1])} come after one another in a circle.") from None
    named = {f"entry {name}": entry.after for name, entry in theme.entries.items()}
    for paper in theme.papers:
        named[paper.name] = [name for claim in paper.claims for name in claim.entries]
    for picture, drawing in theme.drawn():
        named[picture.file] = [panel.entry for panel in drawing.panels]
    for place, names in named.items():
        if unknown := [name for name in names if name not in entries]:
            raise InputError(f"{file}, {place}: there is no entry {unknown[0]!r}; name one out of {', '.join(entries)}.")
    for _, drawing in theme.drawn():
        for panel, row in itertools.product(drawing.panels, drawing.rows):
            try:
                expected(entries[panel.entry].tables[panel.table - 1].cell(row, panel.column))
            except (IndexError, ValueError) as error:
                raise InputError(f"{file}, the panel {panel.title!r} of entry {panel.entry}: {error}.") from None


def _rows(value: Any) -> list[list[str]]:
    """The rows of a Markdown table, which needs no line of dashes."""
    lines = some_text(value).splitlines()
    rows = [[cell.strip() for cell in line.strip()[1:-1].split("|")] for line in lines]
    for line, row in zip(lines, rows, strict=True):
        if not re.fullmatch(r"\|.*\|", line.strip()) or len(row) != len(rows[0]):
            raise Mismatch(line, f"a row of {len(rows[0])} cells with | before and after each")
    return rows


def _day(value: Any) -> datetime.date:
    if type(value) is not datetime.date:
        raise Mismatch(value, "a day such as 2026-11-23")
    return value


def _key(value: Any) -> str | int:
    if not isinstance(value, str | int) or isinstance(value, bool):
        raise Mismatch(value, "a key or a place in a list")
    return value


def _commit(value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[0-9a-f]{7,40}", value):
        raise Mismatch(value, 'a commit, in quotes where it has digits alone: "1234567"')
    return value


def _made(kind: Any, **given: Any) -> Callable[[Any], Any]:
    """A check for an object with the fields of a dataclass, which becomes one."""
    check = of_class(kind, **given)
    return lambda value: kind(**check(value))


def _list_of(kind: Any, **given: Any) -> Check:
    return list_of(_made(kind, **given))


_NAME = re.compile(r"[a-z0-9_]+")


def _name(value: Any) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise Mismatch(value, "a name of small letters, digits and _")
    return value


_PICTURE = _made(Picture, file=file_name, drawing=_made(Drawing, panels=_list_of(Panel)))
_KEYS = map_of(list_of(_key, least=1))
_SCORES = _list_of(
    Scores,
    columns=_KEYS,
    changes=_KEYS,
    lines=map_of(map_of(Any), least=1),
)
_ENTRY = _made(
    Entry,
    date=_day,
    commits=list_of(_commit),
    tables=_list_of(Table, rows=_rows, scores=_SCORES),
    pictures=list_of(_PICTURE),
)
_PAPER = _made(
    Paper,
    picture=_PICTURE,
    claims=_list_of(Claim, here=Literal[OUTCOMES]),
)
_THEME = _made(Theme, entries=map_of(_ENTRY, keys=_name, least=1), papers=list_of(_PAPER))
