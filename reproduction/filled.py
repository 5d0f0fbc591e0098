"""A paper's table with our numbers in it: each cell as printed, ours, their difference, and the test beside a baseline."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

from de_jax.evaluation import significance
from de_jax.evaluation.significance import Comparison
from de_jax.files import outputs
from reproduction.cells import Reproduction
from reproduction.needs import Run
from reproduction.records import write
from reproduction.tables import Column, Published, Row, Table

LEVEL = 0.05


class Cell(NamedTuple):
    """A cell, in the paper's units. Missing values are None. P-values are two-sided, with Holm's correction for the rows beside one
    baseline."""

    table: str
    row: str
    column: str
    published: Published
    ours: float | None  # the mean over the seeds
    std: float | None  # of the seeds, with n - 1
    seeds: dict[str, float]
    difference: float | None  # ours - published
    beside: str | None  # the baseline's row
    gain: float | None  # ours - the baseline's
    p_t_test: float | None
    p_permutation: float | None
    why_not: str | None = None


def write_tables(work: Reproduction) -> dict[str, Any]:
    """Writes the chosen tables as far as they are filled, as <out_dir>/<paper>/table_<number>.md and .jsonl.

    Returns:
        The markdown files by table, the number of cells, and the number of cells with our score.
    """
    folder, found = work.out_dir / work.paper.name, {table.number: cells(work, table) for table in work.chosen}
    paths = {number: folder / f"table_{number.replace(' ', '_')}.md" for number in found}
    for table in work.chosen:
        path, own = paths[table.number], found[table.number]
        write(path.with_suffix(".jsonl"), [cell._asdict() for cell in own])
        with outputs.atomic_file(path) as unfinished:
            unfinished.write_text(markdown(table, work.paper.title, own), encoding="utf-8")
    ours = [cell.ours for own in found.values() for cell in own]
    return {
        "tables": {number: str(path) for number, path in paths.items()},
        "num_cells": len(ours),
        "num_filled": sum(one is not None for one in ours),
    }


def cells(work: Reproduction, table: Table) -> list[Cell]:
    """The cells of a table, row by row, as far as they are filled."""
    values = {(row.name, column.name): _by_seed(work, row, column) for row in table.rows for column in table.columns}
    for column in table.columns:
        for row in table.rows if column.mean_of else ():
            values[row.name, column.name] = _mean_of([values[row.name, name] for name in column.mean_of])
    scale = 100.0 if table.percent else 1.0
    tests = {column.name: _tests(work, table, column) for column in table.columns}
    found = []
    for row in table.rows:
        for column, published in zip(table.columns, row.published, strict=True):
            own = {seed: scale * value for seed, value in values[row.name, column.name].items()}
            ours = statistics.fmean(own.values()) if own else None
            baseline = values.get((row.beside, column.name)) or {}
            gain = None if ours is None or not baseline else ours - scale * statistics.fmean(baseline.values())
            test = tests[column.name].get(row.name)
            is_number = isinstance(published, float)
            found.append(
                Cell(
                    table=table.number,
                    row=row.name,
                    column=column.name,
                    published=published,
                    ours=ours,
                    std=statistics.stdev(own.values()) if len(own) > 1 else None,
                    seeds={str(seed): value for seed, value in own.items()},
                    difference=ours - published if ours is not None and is_number else None,  # type: ignore[operator]
                    beside=row.beside or None,
                    gain=gain,
                    p_t_test=test.holm_t_test if test else None,
                    p_permutation=test.holm_permutation if test else None,
                    why_not=column.why_not or None,
                )
            )
    return found


def markdown(table: Table, title: str, found: list[Cell]) -> str:
    """The table as markdown: under each row of the paper, our scores, the differences, and the gains with p, where known."""
    head = ["row", "", *(column.name for column in table.columns)]
    lines = [f"### {title}, table {table.number}: {table.title}", "", _line(head), _line(["---"] * len(head))]
    by_row: dict[str, list[Cell]] = defaultdict(list)
    for cell in found:
        by_row[cell.row].append(cell)
    for name, own in by_row.items():
        lines.append(_line([name, "paper", *(_printed(cell.published, table.digits) for cell in own)]))
        if all(cell.ours is None for cell in own):
            continue
        num_seeds = max(len(cell.seeds) for cell in own)
        seeds = "1 seed" if num_seeds == 1 else f"{num_seeds} seeds"
        lines.append(_line(["", f"ours, {seeds}", *(_ours(cell, table.digits) for cell in own)]))
        lines.append(_line(["", "ours - paper", *(_signed(cell.difference, table.digits) for cell in own)]))
        if own[0].beside:
            lines.append(_line(["", f"beside {own[0].beside}", *(_gain(cell, table.digits) for cell in own)]))
    notes = [f"{column.name}: {column.why_not}." for column in table.columns if column.why_not]
    if any(cell.p_permutation is not None for cell in found):
        notes.append(
            f"p: paired permutation test over queries, seeds averaged, with Holm's correction for the rows beside one baseline; "
            f"* p < {LEVEL}."
        )
    return "\n".join([*lines, *(line for note in notes for line in ("", note))]) + "\n"


def _by_seed(work: Reproduction, row: Row, column: Column) -> dict[int, float]:
    recipe = row.recipe_on(column.training)
    if not column.evaluation or not recipe:
        return {}
    scores = {seed: work.score_of(Run(recipe, column.training, seed), column.evaluation, column.measure) for seed in work.seeds}
    return {seed: score for seed, score in scores.items() if score is not None}


def _mean_of(parts: list[dict[int, float]]) -> dict[int, float]:
    """The mean of several columns, for the seeds that have all of them."""
    return {seed: statistics.fmean(part[seed] for part in parts) for seed in parts[0] if all(seed in part for part in parts)}


def _tests(work: Reproduction, table: Table, column: Column) -> dict[str, Comparison]:
    """Each row of a column beside its baseline, query by query, where both have the scores of each query."""
    by_baseline: dict[str, dict[str, Mapping[str, float]]] = defaultdict(dict)
    scores = {row.name: _per_query(work, row, column) for row in table.rows if column.evaluation}
    for row in table.rows:
        own, baseline = scores.get(row.name), scores.get(row.beside)
        if own and baseline and len(own) > 1 and own.keys() == baseline.keys():
            by_baseline[row.beside][row.name] = own
    tests: dict[str, Comparison] = {}
    for name, systems in by_baseline.items():
        baseline = scores[name]
        assert baseline
        tests |= significance.compare_all(systems, baseline)
    return tests


def _per_query(work: Reproduction, row: Row, column: Column) -> dict[str, float] | None:
    """The scores of each query, averaged over the seeds that have them."""
    if not (recipe := row.recipe_on(column.training)):
        return None
    runs = [Run(recipe, column.training, seed) for seed in work.seeds]
    found = [one for run in runs if (one := work.per_query_of(run, column.evaluation, column.measure))]
    return significance.mean_over_seeds(found) if found else None


def _line(parts: list[str]) -> str:
    return f"| {' | '.join(parts)} |"


def _printed(published: Published, digits: int) -> str:
    return "" if published is None else published if isinstance(published, str) else f"{published:.{digits}f}"


def _ours(cell: Cell, digits: int) -> str:
    if cell.ours is None:
        return ""
    spread = "" if cell.std is None else f" ± {cell.std:.{digits}f}"
    return f"**{cell.ours:.{digits}f}**{spread}"


def _signed(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:+.{digits}f}"


def _gain(cell: Cell, digits: int) -> str:
    if cell.gain is None or cell.p_permutation is None:
        return _signed(cell.gain, digits)
    star = "*" if cell.p_permutation < LEVEL else ""
    return f"{cell.gain:+.{digits}f}{star} (p {cell.p_permutation:.3f})"
