"""Trains and scores the runs that fill a paper's tables, one cell after another; finished work is kept and skipped.

<out_dir>/runs/<recipe>-<training>-seed<n>/   a run, shared by all papers
          trained.jsonl                       a line for each whole run
          scores.jsonl                        a line for each run and evaluation
          per_query/                          the scores of each query, for tests
          <paper>/table_<number>.md, .jsonl   the tables, and a line for each of their cells
"""

from __future__ import annotations

import hashlib
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from de_jax.data.text import beir
from de_jax.evaluation import metrics
from de_jax.evaluation.report import kept_ranking
from de_jax.files import outputs, reading
from de_jax.settings import Count, list_of, map_of
from de_jax.types import InputError
from reproduction.commands import RunCommand
from reproduction.needs import Needs, Run, Source, Sources
from reproduction.records import Records
from reproduction.tables import RANKS, Column, Evaluation, Paper, Row, Table

TRAINED_FILE = "trained.jsonl"
PerQuery = dict[str, dict[str, float]]
"""Scores by measure and query id."""


class Job(NamedTuple):
    """A run, its needs and its evaluations."""

    run: Run
    needs: Needs
    evaluations: tuple[Evaluation, ...]


class Missing(NamedTuple):
    """Missing data or a missing model, and the rows that wait for it."""

    source: Source
    rows: dict[str, list[str]]  # by the number of their table


def jobs_of(paper: Paper, chosen: Sequence[Table], seeds: Sequence[int], sources: Sources) -> list[Job]:
    """The jobs that fill some tables of a paper; each run comes after the runs that it starts from.

    Raises:
        InputError: an unknown recipe, training or data set.
    """
    wanted: dict[Run, dict[str, Evaluation]] = {}
    for table in chosen:
        for _, column, runs in cells_of(table, seeds):
            for run in runs:
                wanted.setdefault(run, {})[column.evaluation] = paper.evaluations[column.evaluation]
    jobs: dict[Run, Job] = {}

    def add(run: Run) -> None:
        if run not in jobs:
            needs = sources.needs_of(run)
            for first in needs.first:
                add(first)
            jobs[run] = Job(run, needs, tuple(wanted.get(run, {}).values()))

    for run in wanted:
        add(run)
    return list(jobs.values())


def cells_of(table: Table, seeds: Sequence[int]) -> Iterator[tuple[Row, Column, list[Run]]]:
    """Yields (row, column, the runs of all seeds) of each cell that a run fills."""
    for row in table.rows:
        for column in table.columns:
            if column.evaluation and (recipe := row.recipe_on(column.training)):
                yield row, column, [Run(recipe, column.training, seed) for seed in seeds]


class Reproduction:
    """Fills tables of a paper from runs of its recipes.

    Args:
        paper: the paper of the tables.
        chosen: the tables to fill.
        seeds: of the runs.
        sources: data, models and trainings.
        out_dir: see the module; for one process at a time.
        settings: of gin, NAME=VALUE, added to every run, such as the mesh.
        run_command: runs a verb of de-jax.

    Raises:
        InputError: as `jobs_of`; or `out_dir` holds a malformed record, or a run with other settings or of other data.
    """

    def __init__(
        self,
        paper: Paper,
        chosen: Sequence[Table],
        seeds: Sequence[int],
        sources: Sources,
        out_dir: Path,
        run_command: RunCommand,
        settings: Sequence[str] = (),
    ) -> None:
        self.paper, self.chosen, self.seeds, self.sources, self.out_dir = paper, list(chosen), list(seeds), sources, out_dir
        self.jobs = jobs_of(paper, chosen, seeds, sources)
        self._settings, self._run_command = list(settings), run_command
        self._data_dir = str(sources.data_dir.absolute())
        of_run = {"data_dir": str, "settings": list_of(str), "seconds": float}
        self._trained = Records(out_dir / TRAINED_FILE, ("run",), of_run)
        scored = {"scores": map_of(float), "per_query": str, "seconds": float}
        self._scores = Records(out_dir / "scores.jsonl", ("run", "command"), scored)
        for job in self.jobs:
            self._check_same(job)

    def has_models(self, job: Job) -> bool:
        """Whether the models and runs that a run starts from are there."""
        models = [source for source in job.needs.sources if source.name in self.sources.weights]
        return not any(model.missing_files for model in models) and all(self._is_trained(first) for first in job.needs.first)

    def missing(self) -> list[Missing]:
        """Missing data and models of the unfinished cells."""
        rows = self._rows_by_run()
        waiting: dict[Source, set[tuple[str, str]]] = {}
        for job in self._open_jobs():
            lacking = [] if self._is_trained(job.run) else list(job.needs.sources)
            lacking += [one for evaluation in self._unscored(job) for one in self.sources.of_data(evaluation.data)]
            for source in lacking:
                if source.missing_files:
                    waiting.setdefault(source, set()).update(rows[job.run])
        return [Missing(source, self._by_table(found)) for source, found in waiting.items()]

    def fill(self, show: Callable[[], object]) -> None:
        """Trains and scores every run whose data and models are present; calls `show` after each new score.

        Raises:
            InputError: a command failed.
        """
        blocked: set[Run] = set()
        for job in self._open_jobs():
            if not self._is_trained(job.run):
                lacks = any(source.missing_files for source in job.needs.sources) or blocked & set(job.needs.first)
                if lacks:
                    blocked.add(job.run)
                    continue
                self._train(job)
            for evaluation in self._unscored(job):
                if not any(source.missing_files for source in self.sources.of_data(evaluation.data)):
                    self._score(job, evaluation)
                    show()

    def score_of(self, run: Run, evaluation: str, measure: str) -> float | None:
        """A score, or None if it is missing."""
        record = self._scores.get(run.folder, self.paper.evaluations[evaluation].command)
        return None if record is None else record["scores"].get(score_name(measure))

    def per_query_of(self, run: Run, evaluation: str, measure: str) -> dict[str, float] | None:
        """The score of each query, or None if they are missing."""
        record = self._scores.get(run.folder, self.paper.evaluations[evaluation].command)
        if record is None or not record["per_query"]:
            return None
        found: PerQuery = reading.read_json(
            self.out_dir / record["per_query"],
            map_of(map_of(float)),
            mend="remove its line in scores.jsonl",
        )
        return found.get(score_name(measure))

    def _open_jobs(self) -> list[Job]:
        """The jobs with work left, for themselves or for a run that starts from them; in order."""
        needed: set[Run] = set()
        for job in reversed(self.jobs):
            if self._unscored(job) or (job.run in needed and not self._is_trained(job.run)):
                needed.add(job.run)
                if not self._is_trained(job.run):
                    needed.update(job.needs.first)
        return [job for job in self.jobs if job.run in needed and (self._unscored(job) or not self._is_trained(job.run))]

    def _by_table(self, rows: set[tuple[str, str]]) -> dict[str, list[str]]:
        """The rows by table, in the order of the tables; "all rows" stands for every row with a recipe."""
        found = {}
        for table in self.chosen:
            names = [row.name for row in table.rows if (table.number, row.name) in rows]
            if names:
                found[table.number] = ["all rows"] if len(names) == sum(bool(row.recipe) for row in table.rows) else names
        return found

    def _rows_by_run(self) -> dict[Run, list[tuple[str, str]]]:
        """The rows that each run fills, directly or through runs that start from it, as (table, row)."""
        rows: dict[Run, list[tuple[str, str]]] = {job.run: [] for job in self.jobs}
        for table in self.chosen:
            for row, _, runs in cells_of(table, self.seeds):
                for run in runs:
                    rows[run].append((table.number, row.name))
        for job in reversed(self.jobs):
            for first in job.needs.first:
                rows[first] += rows[job.run]
        return rows

    def _is_trained(self, run: Run) -> bool:
        return self._trained.get(run.folder) is not None

    def _unscored(self, job: Job) -> list[Evaluation]:
        return [one for one in job.evaluations if self._scores.get(job.run.folder, one.command) is None]

    def _check_same(self, job: Job) -> None:
        """Refuses a run that was trained on other data or with other settings."""
        trained = self._trained.get(job.run.folder)
        if trained is None:
            return
        folder, given = self.sources.run_dir(job.run), " ".join(trained["settings"]) or "none"
        if trained["settings"] != self._settings:
            raise InputError(f"{folder} was trained with other --gin settings ({given}); give these, or another --out_dir.")
        if trained["data_dir"] != self._data_dir:
            raise InputError(
                f"{folder} was trained on the data in {trained['data_dir']}, not in {self._data_dir}; give that --data_dir, or "
                f"another --out_dir. If the same data moved, write the new place into {self.out_dir / TRAINED_FILE}."
            )

    def _train(self, job: Job) -> None:
        start = time.monotonic()
        more = [f"--gin.{setting}" for setting in self._settings]
        summary = self._run_command(["train", *job.needs.arguments, *more, f"--run_dir={self.sources.run_dir(job.run)}"])
        kept = {name: summary.get(name) for name in ("step", "stopped", "num_parameters")}
        seconds = round(time.monotonic() - start, 1)
        made = {"run": job.run.folder, "data_dir": self._data_dir, "settings": self._settings, "seconds": seconds}
        self._trained.add(made | kept)

    def _score(self, job: Job, evaluation: Evaluation) -> None:
        start = time.monotonic()
        words = [self.sources.filled(part) for part in shlex.split(evaluation.command)]
        key = hashlib.sha256(f"{job.run.folder}\n{evaluation.command}".encode()).hexdigest()[:16]
        ranks = self.out_dir / "per_query" / f"{key}.ranks.json"
        keep = [f"--out_ranks={ranks}"] if evaluation.per_query == RANKS else []
        report = self._run_command([*words, f"--run_dir={self.sources.run_dir(job.run)}", *keep])
        found = report.get("dense", report)
        scores = {name: value for name, value in found.items() if isinstance(value, int | float) and not isinstance(value, bool)}
        per_query = self._per_query(evaluation, report, ranks)
        name = f"per_query/{key}.json" if per_query else ""
        if name:
            outputs.write_json(self.out_dir / name, per_query)
        seconds = round(time.monotonic() - start, 1)
        record = {"run": job.run.folder, "command": evaluation.command, "scores": scores, "per_query": name, "seconds": seconds}
        self._scores.add(record)

    def _per_query(self, evaluation: Evaluation, report: dict[str, Any], ranks: Path) -> PerQuery:
        """The scores of each query, for every measure that a column takes from this evaluation."""
        if evaluation.per_query == RANKS:
            found = metrics.of_first_ranks(reading.read_json(ranks, map_of(Count, least=1), mend="score the run again"))
            return {name: {query_id: own[name] for query_id, own in found.items()} for name in ("p@1", "mrr")}
        if not evaluation.per_query or "evaluation_dir" not in report:
            return {}
        results = kept_ranking(report["evaluation_dir"])
        qrels = beir.read_qrels(self.sources.filled(evaluation.per_query))
        measures = {column.measure for column in self.paper.columns.values() if column.evaluation == evaluation.name}
        return {score_name(measure): metrics.scores_by_query(results, qrels, measure) for measure in sorted(measures)}


def score_name(measure: str) -> str:
    """The name of a measure in a report."""
    return metrics.names_of([measure])[0]
