"""The report of an evaluation as one JSON object, and its folder.

<run_dir>/evaluations/<task>-<key>/   result.json   the report, written last
                                      dense.trec    the rankings as TREC run files
                                      bm25.trec     and fusion.trec, where BM25 was asked for
"""

import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from de_jax.evaluation import metrics, significance
from de_jax.evaluation.metrics import Results
from de_jax.files import folders, outputs, reading
from de_jax.settings import Count, Maybe, Record, list_of
from de_jax.types import InputError

Report = dict[str, Any]
"""A JSON object: the data set, the settings, and the measures of "dense", "bm25" and "fusion", each if it was asked for. With at
least 2 queries, "intervals" holds the 95 % confidence interval of each measure, and "half_widths" half its width before it was cut
to the range of the measure."""

SYSTEMS = ("dense", "bm25", "fusion")
RESULT_FILE = "result.json"
_COUNTS = ("num_docs", "num_queries")
_SETTINGS = Record({"settings": Record({"measures": list_of(str)})})
KIND = "evaluation"
_MEND = "remove its folder, and it is scored again"


def keep(evaluation_dir: Path, report: Report, results: Mapping[str, Results], *, name: str) -> None:
    """Writes a report and its systems' rankings into a new folder, which appears complete; run files call the model `name`."""
    with folders.atomic_dir(evaluation_dir, KIND) as temporary:
        for system, found in results.items():
            metrics.write_trec_run(temporary / f"{system}.trec", found, name=f"{name}-{system}")
        outputs.write_json(temporary / RESULT_FILE, report)


def kept_report(evaluation_dir: str | Path, names: Sequence[str]) -> Report:
    """The report that `evaluate` kept, with these measures of each system in this order; InputError: damaged, or other measures."""
    folder = Path(evaluation_dir)
    folders.check_files(folder, mend=_MEND)
    scores = Maybe(Record(dict.fromkeys(names, float)))
    kept = Record({"dataset": str, **dict.fromkeys(_COUNTS, Count), **dict.fromkeys(SYSTEMS, scores)})
    report: Report = reading.read_json(folder / RESULT_FILE, kept, mend=_MEND)
    return report | {system: {name: report[system][name] for name in names} for system in SYSTEMS if system in report}


def kept_reports(run_dir: str | Path, like: Mapping[str, Any]) -> list[Report]:
    """The reports that `evaluate` kept below a run with these settings, by data set; a damaged one costs a warning."""
    reports = []
    for path in sorted((Path(run_dir) / "evaluations").glob(f"*/{RESULT_FILE}")):
        try:
            settings = reading.read_json(path, _SETTINGS)["settings"]
            if all(settings.get(name) == value for name, value in like.items()):
                reports.append(kept_report(path.parent, metrics.names_of(settings["measures"])))
        except InputError as error:
            warnings.warn(f"{error} Its scores are left out.", stacklevel=2)
    return sorted(reports, key=lambda report: str(report["dataset"]))


def kept_ranking(evaluation_dir: str | Path) -> Results:
    """A model's ranking in the folder that `evaluate` wrote; InputError if it is damaged."""
    folders.check_files(Path(evaluation_dir), mend=_MEND)
    return metrics.read_trec_run(Path(evaluation_dir) / f"{SYSTEMS[0]}.trec")


def averaged(name: str, reports: Sequence[Report]) -> Report:
    """The mean of several reports as one, each counting once, with its intervals where all have them; nothing is rounded."""
    systems = [system for system in SYSTEMS if all(system in report for report in reports)]

    def of_each(of_average: Callable[..., Any], *parts: str) -> dict[str, dict[str, Any]]:
        """By system and measure, from the reports' lists of the scores, "", or of the parts with these names."""
        tables = [[report[part] if part else report for report in reports] for part in parts]
        return {
            system: {measure: of_average(*([one[system][measure] for one in table] for table in tables)) for measure in of_system}
            for system, of_system in ((system, reports[0][system]) for system in systems)
        }

    counts = {count: sum(report[count] for report in reports) for count in _COUNTS}
    average = {"dataset": name, **counts, **of_each(statistics.fmean, "")}
    if any("half_widths" not in report for report in reports):
        return average
    intervals = of_each(significance.interval_of_average, "", "intervals", "half_widths")
    return {**average, "intervals": intervals, "half_widths": of_each(significance.half_width_of_average, "half_widths")}
