"""The report of an evaluation as one JSON object, and its folder.

<run_dir>/evaluations/<task>-<key>/   result.json   the report, written last
                                      dense.trec    the rankings as TREC run files
                                      bm25.trec     and fusion.trec, where BM25 was asked for
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from de_jax.evaluation import metrics, significance
from de_jax.evaluation.metrics import Results
from de_jax.files import folders, outputs, schema
from de_jax.types import InputError

Report = dict[str, Any]
"""A JSON object: the data set, the settings, and the measures of "dense", "bm25" and "fusion", each if it was asked for. With at
least 2 queries, "intervals" holds the 95 % confidence interval of each measure, and "half_widths" half its width before it was cut
to the range of the measure."""

SYSTEMS = ("dense", "bm25", "fusion")
RESULT_FILE = "result.json"
_COUNTS = ("num_docs", "num_queries")
_SETTINGS = schema.record({"settings": schema.record({"measures": schema.texts})})
KIND = "evaluation"
_MEND = "remove its folder, and it is scored again"


def keep(evaluation_dir: Path, report: Report, results: Mapping[str, Results], *, name: str) -> None:
    """Writes a report and the rankings of its systems into a new folder, which appears once it is complete.

    Args:
        evaluation_dir: must not exist.
        report, results: the scores and the rankings of each system.
        name: what TREC run files call the model.
    """
    with folders.atomic_dir(evaluation_dir, KIND) as temporary:
        for system, found in results.items():
            metrics.write_trec_run(temporary / f"{system}.trec", found, name=f"{name}-{system}")
        outputs.write_json(temporary / RESULT_FILE, report)


def kept_report(evaluation_dir: str | Path, names: Sequence[str]) -> Report:
    """The report in a folder that `evaluate` kept, with these measures of each system in this order.

    Raises:
        InputError: a damaged folder, or other measures.
    """
    folder = Path(evaluation_dir)
    folders.check_files(folder, mend=_MEND)
    scores = schema.Maybe(schema.record(dict.fromkeys(names, schema.number())))
    ends = schema.list_of(schema.number(), least=2, most=2)
    kept = schema.record(
        {
            "dataset": schema.text,
            **dict.fromkeys(_COUNTS, schema.integer()),
            **dict.fromkeys(SYSTEMS, scores),
            "intervals": schema.Maybe(schema.map_of(schema.map_of(ends))),
            "half_widths": schema.Maybe(schema.map_of(schema.map_of(schema.number()))),
        }
    )
    report: Report = schema.read(folder / RESULT_FILE, kept, mend=_MEND)
    return report | {system: {name: report[system][name] for name in names} for system in SYSTEMS if system in report}


def kept_reports(run_dir: str | Path, like: Mapping[str, Any]) -> list[Report]:
    """The reports that `evaluate` kept below a run with these settings, by data set; a damaged one costs a warning."""
    reports = []
    for path in sorted((Path(run_dir) / "evaluations").glob(f"*/{RESULT_FILE}")):
        try:
            settings = schema.read(path, _SETTINGS)["settings"]
            if all(settings.get(name) == value for name, value in like.items()):
                reports.append(kept_report(path.parent, metrics.names_of(settings["measures"])))
        except InputError as error:
            warnings.warn(f"{error} Its scores are left out.", stacklevel=2)
    return sorted(reports, key=lambda report: str(report["dataset"]))


def kept_ranking(evaluation_dir: str | Path) -> Results:
    """A model's ranking in the folder that `evaluate` wrote.

    Raises:
        InputError: a damaged folder.
    """
    folders.check_files(Path(evaluation_dir), mend=_MEND)
    return metrics.read_trec_run(Path(evaluation_dir) / f"{SYSTEMS[0]}.trec")


def averaged(name: str, reports: Sequence[Report]) -> Report:
    """The mean of several reports as one, each counting once, with its intervals where all have them; nothing is rounded."""
    systems = [system for system in SYSTEMS if all(system in report for report in reports)]
    means = {
        system: {measure: _mean([report[system][measure] for report in reports]) for measure in reports[0][system]}
        for system in systems
    }
    counts = {count: sum(report[count] for report in reports) for count in _COUNTS}
    average = {"dataset": name, **counts, **means}
    if any("half_widths" not in report for report in reports):
        return average

    def of_each(of_average: Callable[..., Any], *parts: str) -> dict[str, dict[str, Any]]:
        return {
            system: {name: of_average(*([report[part][system][name] for report in tables] for part in parts)) for name in found}
            for system, found in means.items()
        }

    tables = [{**report, "means": report} for report in reports]
    intervals = of_each(significance.interval_of_average, "means", "intervals", "half_widths")
    return {**average, "intervals": intervals, "half_widths": of_each(significance.half_width_of_average, "half_widths")}


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
