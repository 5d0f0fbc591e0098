"""Runs the commands of a recorded result again and compares their scores and changes with the recorded ones."""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from de_jax.reports import tables
from de_jax.settings import Maybe, Record
from de_jax.types import InputError
from reproduction.result_files import Entry, Scores, Table, entries_of, expected, read_all, tolerances
from reproduction.yaml_files import read_yaml

RESULTS_DIR = "results"
_LEVEL = 0.05  # of p
_DESIGN = Record({"results": Maybe(str, "")})


def check_entry(name: str) -> None:
    """Runs `python -m reproduction --check` in the working directory: one JSON object on stdout, a table on stderr.

    Raises:
        InputError: as of `check`.
        SystemExit: with code 1, where a score is not within its tolerance, or a change does not come out again.
    """
    report = check(name)
    for compared in filter(None, (report["scores"], report["changes"])):
        rows = [[str(value) for value in one.values()] for one in compared]
        print(tables.text_table(list(compared[0]), rows), file=sys.stderr)
    print(json.dumps(report))
    if not report["within"]:
        sys.exit(1)


def check(name: str, root: str | Path = ".") -> dict[str, Any]:
    """Runs an entry's commands, after those of the entries that it builds on, and compares the scores and the changes.

    A recorded change with p < .05 has to come out with the same sign and with p < .05; other recorded changes are not compared.

    The commands are bash, run in `root` by this Python; their progress goes to stderr. Most continue earlier runs, so an
    interrupted check continues too.

    Args:
        name: of the entry.
        root: a clone of the repository; it holds `results/`, and data below `data/` unless the entry says otherwise.

    Returns:
        {"entry", "scores": [{"score", "expected", "tolerance", "got", "within"}], "changes": [{"change", "expected", "expected_p",
        "got", "got_p", "within"}], "within"}: "within" at the end where all are.

    Raises:
        InputError: no such entry, one without scores, data that is missing, a command that fails, or commands that do not print a
            score.
    """
    root = Path(root)
    entries = entries_of(read_all(root / RESULTS_DIR))
    if name not in entries:
        raise InputError(
            f"--check is {name!r}, which is no entry of {root / RESULTS_DIR}; take one of {', '.join(_checkable(entries))}."
        )
    entry = entries[name]
    if name not in _checkable(entries):
        raise InputError(f"the entry {name} has no scores to compare; take one of {', '.join(_checkable(entries))}.")
    chain = [entries[one] for one in _before(name, entries)]
    missing = _missing([*chain, entry], root)
    if missing:
        raise InputError(f"the entry {name} needs {', '.join(missing)} in {root.resolve()}; put it there, or a link to it.")
    for one in chain:
        _run(one, root)
    printed = _run(entry, root)
    compared = (_compared(name, entry, table, scores, printed) for table in entry.tables for scores in table.scores)
    scores = list(itertools.chain.from_iterable(compared))
    changed = (_changed(name, table, scores, printed) for table in entry.tables for scores in table.scores)
    changes = list(itertools.chain.from_iterable(changed))
    return {"entry": name, "scores": scores, "changes": changes, "within": all(one["within"] for one in scores + changes)}


def _checkable(entries: Mapping[str, Entry]) -> list[str]:
    return [name for name, entry in entries.items() if any(table.scores for table in entry.tables)]


def _before(name: str, entries: Mapping[str, Entry]) -> list[str]:
    """The entries that one builds on, the first to run first."""
    found = [one for earlier in entries[name].after for one in (*_before(earlier, entries), earlier)]
    return list(dict.fromkeys(found))


def _missing(entries: Sequence[Entry], root: Path) -> list[str]:
    """The missing needs that no earlier entry's design writes."""
    missing: list[str] = []
    written: set[str] = set()
    for entry in entries:
        missing += [path for path in entry.needs if path not in written and not (root / path).exists()]
        if entry.design:
            written.add(read_yaml(root / entry.design, _DESIGN)["results"])
    return missing


def _run(entry: Entry, root: Path) -> list[dict[str, Any]]:
    """The JSON objects that an entry's commands print."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    printed: list[dict[str, Any]] = []
    for command in entry.commands:
        print(command.rstrip(), file=sys.stderr, flush=True)
        line = ["bash", "-eo", "pipefail", "-c", command]
        done = subprocess.run(line, cwd=root, env={**os.environ, "PATH": path}, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            raise InputError(
                f"a command of {entry.title!r} ended with exit code {done.returncode}, and has said why: {command.split()[0]}."
            )
        printed += _objects(done.stdout)
    return printed


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """The JSON objects among the lines of a text, each on one line or on several; other lines are passed over."""
    lines, decoder = text.splitlines(keepends=True), json.JSONDecoder()
    while lines:
        rest = "".join(lines)
        try:
            found, end = decoder.raw_decode(rest)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            lines = lines[1:]
            continue
        yield found
        lines = rest[end:].splitlines(keepends=True)


def _compared(
    name: str, entry: Entry, table: Table, scores: Scores, printed: Sequence[Mapping[str, Any]]
) -> Iterator[dict[str, Any]]:
    for column, keys in scores.columns.items():
        allowed = _from_seeds(entry, table, column) if scores.tolerance is None else dict.fromkeys(scores.lines, scores.tolerance)
        for row, wanted in scores.lines.items():
            got, most = _mean(name, f"score {row}, {column}", wanted, keys, printed), allowed[row]
            mean, _ = expected(table.cell(row, column))
            compared = {"score": f"{row}, {column}", "expected": mean, "tolerance": round(most, 6), "got": round(got, 6)}
            yield compared | {"within": abs(got - mean) <= most}


def _changed(name: str, table: Table, scores: Scores, printed: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for (column, keys), (row, wanted) in itertools.product(scores.changes.items(), scores.lines.items()):
        change, p = table.change(row, column)
        if p >= _LEVEL:
            continue
        got, got_p = (
            _mean(name, f"change {row}, {column}", wanted, [*keys, key], printed) for key in ("difference", "holm_permutation")
        )
        compared = {"change": f"{row}, {column}", "expected": change, "expected_p": p, "got": round(got, 6), "got_p": got_p}
        yield compared | {"within": got * change > 0 and got_p < _LEVEL}


def _mean(
    name: str, score: str, wanted: Mapping[str, Any], keys: Sequence[str | int], printed: Sequence[Mapping[str, Any]]
) -> float:
    """The mean of the numbers under these keys in the printed objects that have the wanted values."""
    lines = [line for line in printed if all(key in line and line[key] == value for key, value in wanted.items())]
    found = [value for line in lines if (value := _value(line, keys)) is not None]
    if not found:
        place = json.dumps({"line": wanted, "value": keys})
        raise InputError(f"the commands of the entry {name} printed no {score} ({place}); correct one of them.")
    return statistics.fmean(found)


def _from_seeds(entry: Entry, table: Table, column: str) -> dict[str, float]:
    """The tolerances of a table's column by row, from the spread over seeds of all its rows, wherever their scores are printed."""
    derived = [(one, scores) for one in entry.tables for scores in one.scores if scores.tolerance is None]
    num_scores = sum(len(scores.columns) * len(scores.lines) for _, scores in derived)
    rows = [row for one, scores in derived if one is table and column in scores.columns for row in scores.lines]
    found = tolerances([table.cell(row, column) for row in rows], len(entry.seeds), num_scores)
    return dict(zip(rows, found, strict=True))


def _value(line: Any, keys: Sequence[str | int]) -> float | None:
    """The number at the end of the keys; None without such a number."""
    for key in keys:
        try:
            line = line[key]
        except (KeyError, IndexError, TypeError):
            return None
    return float(line) if isinstance(line, int | float) and not isinstance(line, bool) else None
