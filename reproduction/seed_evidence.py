"""Recorded changes with seeds and queries as samples: an interval and a p of each, and one pooled effect of several.

A record has the change of the mean score, its p over queries (seeds averaged) and both arms' deviations over seeds. From these come
the two variances of the change: of the queries, from its p by the normal distribution, and of the seeds, from both deviations as of
independent samples. Each contains the noise of a single query and seed, and a p with Holm's correction is never too small: the
intervals err on the wide side. `significance.over_seeds` needs the scores themselves, and is exact.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from reproduction.result_files import Entry, Table, expected
from reproduction.yaml_files import read_yaml

LEVEL, POWER = 0.05, 0.8
_TELLING = 0.5
"""The largest p over queries from which a variance is taken."""


class Effect(NamedTuple):
    """How much an arm is above its baseline, over queries and seeds."""

    entry: str
    arm: str  # of the design
    data: str  # the set that was scored, as the design's report names it
    baseline: str  # its arm
    difference: float
    error: float  # the standard error
    freedom: float  # degrees of it
    p_queries: float  # as recorded, over queries alone

    @property
    def change(self) -> str:
        """The arm and its baseline."""
        return f"{self.arm} - {self.baseline}"

    @property
    def p(self) -> float:
        """Two-sided, over queries and seeds."""
        return float(2 * stats.t.sf(abs(self.difference) / self.error, self.freedom))

    @property
    def interval(self) -> tuple[float, float]:
        """Of 95 %."""
        half = _quantile(self.freedom) * self.error
        return self.difference - half, self.difference + half

    @property
    def smallest_visible(self) -> float:
        """The difference that four of five such designs would find, `POWER`, at `LEVEL`."""
        return float(_quantile(self.freedom) + stats.t.ppf(POWER, self.freedom)) * self.error


class Pooled(NamedTuple):
    """The mean effect over data sets, by random effects."""

    difference: float
    low: float  # of the interval of 95 %
    high: float
    num_sets: int


def effects_of(name: str, entry: Entry, root: Path) -> list[Effect]:
    """The changes of an entry whose baseline and whose deviations over seeds are in its tables.

    Args:
        name: of the entry.
        entry: the record.
        root: of the repository, where its designs are.
    """
    cells = {key: cell for table in entry.tables for key, cell in _means(table)}
    found = []
    for table in entry.tables:
        for scores in table.scores:
            for (column, keys), (row, line) in itertools.product(scores.changes.items(), scores.lines.items()):
                design, (*place, _, number, _, arm) = str(line.get("design", "")), keys
                baseline = _comparisons(root, design)[int(number)]["beside"]
                deviations = [cells.get((design, *place, which), (0.0, None))[1] for which in (arm, baseline)]
                if None not in deviations:
                    found.append((str(arm), baseline, str(place[-1]), *table.change(row, column), deviations))
    errors: dict[str, float] = {}  # the largest over queries of each set: a p near 1 tells none
    for *_, data, change, p, _ in found:
        if p <= _TELLING:
            errors[data] = max(errors.get(data, 0.0), _of_queries(change, p))
    effects = []
    for arm, baseline, data, change, p, deviations in found:
        if p <= _TELLING or data in errors:
            of_queries = _of_queries(change, p) if p <= _TELLING else errors[data]
            of_seeds = [deviation**2 / len(entry.seeds) for deviation in deviations if deviation is not None]
            error = math.sqrt(of_queries**2 + sum(of_seeds))
            spread = sum(one**2 for one in of_seeds) / (len(entry.seeds) - 1)
            freedom = error**4 / spread if spread else math.inf  # Welch and Satterthwaite
            effects.append(Effect(name, arm, data, baseline, change, error, freedom, p))
    return effects


def _of_queries(change: float, p: float) -> float:
    """The standard error of a change with this p over queries, by the normal distribution."""
    return abs(change) / float(stats.norm.isf(p / 2))


def pooled(effects: Sequence[Effect]) -> Pooled:
    """One mean effect (DerSimonian and Laird 1986), its interval by Hartung and Knapp (2001).

    Effects on one data set share its queries, often its start too, and count as one: their mean, with the mean of their variances,
    as if they were fully dependent. A single set has the interval of its mean.

    Example:
        >>> two = [Effect("", "", name, "", change, 0.01, 8.0, 0.1) for name, change in (("a", 0.02), ("b", 0.04))]
        >>> round(pooled(two).difference, 3)
        0.03
    """
    sets: dict[str, list[Effect]] = {}
    for one in effects:
        sets.setdefault(one.data, []).append(one)
    values = np.array([np.mean([one.difference for one in own]) for own in sets.values()])
    variances = np.array([np.mean([one.error**2 for one in own]) for own in sets.values()])
    freedom, num_sets = min(one.freedom for one in effects), len(sets)
    if num_sets == 1:
        half = _quantile(freedom) * math.sqrt(variances[0])
        return Pooled(float(values[0]), float(values[0] - half), float(values[0] + half), 1)
    weights = 1 / variances
    mean = np.sum(weights * values) / np.sum(weights)
    excess = np.sum(weights * (values - mean) ** 2) - (num_sets - 1)
    between = max(0.0, excess / (np.sum(weights) - np.sum(weights**2) / np.sum(weights)))
    weights = 1 / (variances + between)
    mean = float(np.sum(weights * values) / np.sum(weights))
    scale = max(1.0, float(np.sum(weights * (values - mean) ** 2)) / (num_sets - 1))  # never narrower than without it
    half = _quantile(num_sets - 1) * math.sqrt(scale / float(np.sum(weights)))
    return Pooled(mean, mean - half, mean + half, num_sets)


def _quantile(freedom: float) -> float:
    return float(stats.t.ppf(1 - LEVEL / 2, freedom))


def _means(table: Table) -> Iterator[tuple[tuple[Any, ...], tuple[float, float | None]]]:
    """((design, set, arm), (mean, deviation)) of each score of a table that is an arm's mean."""
    for scores in table.scores:
        for (column, keys), (row, line) in itertools.product(scores.columns.items(), scores.lines.items()):
            if "arms" in keys:
                at = keys.index("arms")
                yield (str(line.get("design", "")), *keys[:at], keys[at + 1]), expected(table.cell(row, column))


@functools.cache
def _comparisons(root: Path, design: str) -> list[dict[str, Any]]:
    path = root / "experiments" / design
    return read_yaml(path, dict).get("compare", []) if design and path.is_file() else []
