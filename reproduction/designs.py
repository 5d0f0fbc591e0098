"""The registered designs that show a paper's effects on small data: experiments/<name>.yaml, and the commands that run them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any, NamedTuple

from de_jax.reports.tables import text_table
from de_jax.settings import Maybe, Record, list_of, some_text, text_id
from de_jax.types import InputError
from reproduction.yaml_files import read_yaml

DESIGNS_DIR = Path("experiments")


class Design(NamedTuple):
    """A design with its commands; its file also holds the question and the criteria."""

    name: str
    papers: tuple[str, ...]
    tables: tuple[str, ...]  # the papers' tables that it stands for; () for all
    commands: tuple[str, ...]  # command lines in order; each continues after a stop
    needs: tuple[str, ...]  # files and folders; results of other designs among them
    results: str  # a file that the last command writes, or ""


def read_designs(paper: str, tables: list[str] | None = None) -> list[Design]:
    """The designs of a paper in ./experiments, each after the designs whose results it needs; with `tables`, only for these tables.

    Designs of other papers are among them if their results are needed and do not exist yet.

    Raises:
        InputError: no such design in the working directory, a malformed file, or designs that need each other.
    """
    every = [one for path in sorted(DESIGNS_DIR.glob("*.yaml")) if (one := _read(path))]
    found = [one for one in every if paper in one.papers]
    chosen = [one for one in found if not tables or not one.tables or set(tables) & set(one.tables)]
    if not chosen:
        if found:
            has = ", ".join(sorted({table for one in found for table in one.tables}))
            raise InputError(f"--table is {' '.join(tables or [])}, for which {paper} has no design; there are designs for {has}.")
        raise InputError(
            f"{DESIGNS_DIR.resolve()} holds no design of {paper}; run --scale small in a checkout of the repository, whose "
            "experiments/*.yaml have `paper` and `commands`."
        )
    return _in_order(chosen, {one.results: one for one in every if one.results})


def run_designs(designs: list[Design], call: Callable[[str], None]) -> list[dict[str, Any]]:
    """Runs the commands of each design; returns its seconds and the path of its results.

    Args:
        designs: in order, as of `read_designs`.
        call: runs a command line.

    Raises:
        InputError: a need is missing that no earlier design writes, before anything runs; or a command failed.
    """
    written: set[str] = set()
    missing: dict[str, str] = {}
    for design in designs:
        missing |= {need: design.name for need in design.needs if need not in written and not Path(need).exists()}
        written.add(design.results)
    if missing:
        need, name = next(iter(missing.items()))
        others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise InputError(
            f"experiments/{name}.yaml needs {need}{others}, which does not exist and is not the `results` of an earlier design; "
            "see docs/paper_recipes.md for the sources of data."
        )
    reports = []
    for design in designs:
        start = time.monotonic()
        for line in design.commands:
            call(line)
        reports.append({"design": design.name, "seconds": round(time.monotonic() - start, 1), "results": design.results or None})
    return reports


def design_tables(report: Mapping[str, Any]) -> Iterator[str]:
    """Two tables for each data set of a report of `experiments.run_design`: the arms' mean scores, and the comparisons of arms."""
    for name, one in report["sets"].items():
        measures = list(next(iter(one["arms"].values()))["mean"])
        rows = [[arm, *(f"{scored['mean'][measure]:.4f}" for measure in measures)] for arm, scored in one["arms"].items()]
        yield text_table([f"{report['design']}: {name}", *measures], rows)
        rows = [
            [f"{arm} beside {pairs['baseline']}", f"{system['difference']:+.4f}", f"{system['holm_permutation']:.4f}"]
            for pairs in one["compared"]
            for arm, system in pairs["systems"].items()
            if arm != pairs["baseline"]
        ]
        if rows:
            yield text_table([f"difference in {one['compared'][0]['measure']}", "", "p (Holm)"], rows)


def _in_order(chosen: list[Design], writers: Mapping[str, Design]) -> list[Design]:
    """The chosen designs, each after the designs that write its needs; other designs are added if their results do not exist."""
    before: dict[Design, list[Design]] = {}
    found = list(chosen)
    for design in found:  # grows meanwhile
        earlier = [writers[need] for need in design.needs if need in writers]
        before[design] = [one for one in earlier if one in chosen or not Path(one.results).exists()]
        found += [one for one in before[design] if one not in found]
    try:
        return list(TopologicalSorter(before).static_order())
    except CycleError as error:
        circle = " -> ".join(f"experiments/{one.name}.yaml" for one in error.args[1])
        raise InputError(f"each of these designs needs the results of another: {circle}; correct their `needs`.") from None


def _read(path: Path) -> Design | None:
    """A design, or None for a file without `paper` or `commands`."""
    found = read_yaml(path, _DESIGN)
    if "paper" not in found or "commands" not in found:
        return None
    return Design(path.stem, found["paper"], found["table"], tuple(found["commands"]), tuple(found["needs"]), found["results"])


def _names(value: Any) -> tuple[str, ...]:
    """One name or several; a number of a table counts as its digits."""
    return tuple(text_id(one) for one in (value if isinstance(value, list) else [value]))


_TEXTS = list_of(some_text)
FIELDS = {
    "paper": Maybe(_names),
    "table": Maybe(_names, ()),
    "commands": Maybe(_TEXTS),
    "needs": Maybe(_TEXTS, []),
    "results": Maybe(some_text, ""),
}
"""The fields of a design that are read here."""
_DESIGN = Record(FIELDS)
