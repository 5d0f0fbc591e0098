"""The papers' tables as data: rows are recipes, columns are evaluations, and every cell has the number that the paper prints.

reproduction/papers/<paper>.yaml   the tables of a paper
reproduction/papers/sources.yaml   data, pretrained models, and what recipes are trained on (`needs`)
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from de_jax.settings import Maybe, Range, Record, check_of, list_of, map_of, of_class, some_text
from de_jax.types import InputError
from reproduction.yaml_files import read_yaml

TABLES_DIR = Path(__file__).parent / "papers"
SOURCES = "sources"
RANKS = "ranks"
"""Instead of judgements: the evaluation writes `evaluation.first_ranks` itself."""

Published = float | str | None
"""A cell as the paper prints it: a score, a word such as "collapses", or nothing."""


class Evaluation(NamedTuple):
    """How a run is scored."""

    name: str
    command: str  # a verb of de-jax and its flags, except --run_dir; {name} is the folder of a data set
    data: tuple[str, ...]  # the data sets that it reads, by their names in sources.yaml
    per_query: str = ""  # judgements by which the kept ranking is scored query by query, or `RANKS`; "" for no test


class Column(NamedTuple):
    """A column: an evaluation after a training, the mean of other columns, or a column without a command here."""

    name: str
    training: str = ""
    evaluation: str = ""
    measure: str = ""  # as ir-measures writes it
    mean_of: tuple[str, ...] = ()
    why_not: str = ""


class Row(NamedTuple):
    """A row: a recipe, or a recipe for each training; empty for a system that is only quoted."""

    name: str
    published: tuple[Published, ...]
    recipe: str | Mapping[str, str] = ""
    beside: str = ""  # the row that it is tested against

    def recipe_on(self, training: str) -> str | None:
        """The recipe of the row for a training; None where the paper has no such run."""
        return (self.recipe if isinstance(self.recipe, str) else self.recipe.get(training)) or None


class Table(NamedTuple):
    """A table of a paper."""

    number: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    percent: bool  # the paper prints scores times 100
    digits: int  # behind the point


class Paper(NamedTuple):
    """A paper's tables."""

    name: str
    title: str
    evaluations: dict[str, Evaluation]
    columns: dict[str, Column]
    tables: dict[str, Table]

    def chosen(self, numbers: Sequence[str] | None) -> list[Table]:
        """Some of the tables, by default all.

        Raises:
            InputError: the paper has no such table here.
        """
        for number in numbers or ():
            if number not in self.tables:
                raise InputError(f"--table is {number!r}; {self.title} has {', '.join(map(repr, self.tables))} here.")
        return [self.tables[number] for number in numbers or self.tables]


def names() -> list[str]:
    """The papers that have tables here."""
    return sorted(path.stem for path in TABLES_DIR.glob("*.yaml") if path.stem != SOURCES)


def read_paper(name: str) -> Paper:
    """The tables of a paper.

    Raises:
        InputError: an unknown paper, or a file that does not fit together.

    Example:
        >>> table = read_paper("samtone").tables["3"]
        >>> [(row.name, row.published[0]) for row in table.rows]
        [('without', 15.7), ('queries', 17.6), ('both towers', 18.2)]
    """
    if name not in names():
        near = difflib.get_close_matches(name, names(), 1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise InputError(f"there are no tables of the paper {name!r}{hint}; there are those of {', '.join(names())}.")
    path = TABLES_DIR / f"{name}.yaml"
    found = read_yaml(path, _PAPER)
    evaluations = {key: Evaluation(key, **_tuples(value)) for key, value in found["evaluations"].items()}
    columns = {key: Column(key, **_tuples(value)) for key, value in found["columns"].items()}
    tables = {number: _table(path, number, value, columns) for number, value in found["tables"].items()}
    for column in columns.values():
        if column.evaluation and column.evaluation not in evaluations:
            raise InputError(f"{path}: the column {column.name!r} names an evaluation that the file lacks, {column.evaluation!r}.")
    return Paper(name, found["title"], evaluations, columns, tables)


def _table(path: Path, number: str, found: dict[str, Any], columns: Mapping[str, Column]) -> Table:
    place = f"{path}, table {number!r}"
    if unknown := [name for name in found["columns"] if name not in columns]:
        raise InputError(f"{place} has the column {unknown[0]!r}, which is not described under columns.")
    own = tuple(columns[name] for name in found["columns"])
    for column in own:
        if missing := [name for name in column.mean_of if name not in found["columns"]]:
            raise InputError(f"{place}: the column {column.name!r} is a mean of {missing[0]!r}, which the table does not have.")
    rows = tuple(Row(**_tuples(row)) for row in found["rows"])
    for row in rows:
        if len(row.published) != len(own):
            raise InputError(f"{place}: the row {row.name!r} has {len(row.published)} numbers for {len(own)} columns.")
        if row.beside and row.beside not in [other.name for other in rows]:
            raise InputError(f"{place}: the row {row.name!r} stands beside {row.beside!r}, which is no row of it.")
    return Table(number, found["title"], own, rows, found["percent"], found["digits"])


def _tuples(value: dict[str, Any]) -> dict[str, Any]:
    """Lists as tuples."""
    return {key: tuple(one) if isinstance(one, list) else one for key, one in value.items()}


def _published(value: Any) -> Published:
    return value if value is None or isinstance(value, str) else float(check_of(float)(value))


def _recipe(value: Any) -> Any:
    return value if isinstance(value, str) else map_of(some_text, least=1)(value)


_ROW = of_class(Row, published=list_of(_published, least=1), recipe=_recipe)
_PAPER = Record(
    {
        "title": some_text,
        "evaluations": map_of(
            Record(
                {
                    "command": some_text,
                    "data": list_of(some_text, least=1),
                    "per_query": Maybe(some_text, ""),
                },
                only=True,
            )
        ),
        "columns": map_of(
            Record(
                {
                    **dict.fromkeys(("training", "evaluation", "measure", "why_not"), Maybe(some_text, "")),
                    "mean_of": Maybe(list_of(some_text, least=1), ()),
                },
                only=True,
            ),
            least=1,
        ),
        "tables": map_of(
            Record(
                {
                    "title": some_text,
                    "columns": list_of(some_text, least=1),
                    "rows": list_of(_ROW, least=1),
                    "percent": Maybe(bool, False),
                    "digits": Maybe(Annotated[int, Range(0, 9)], 3),
                },
                only=True,
            ),
            least=1,
        ),
    },
    only=True,
)
