"""`python -m reproduction compare expansions`."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from de_jax.arguments import AnyDtype, Form, precision
from de_jax.evaluation import metrics, significance
from de_jax.evaluation.report import Report, kept_ranking
from de_jax.evaluation.task import Policy, Task, beir_task, evaluate
from de_jax.files import folders, outputs
from de_jax.interop import any_model
from de_jax.reports import plots, tables
from de_jax.retrieval.expanded_search import Expansion
from de_jax.settings import LocalPath, PositiveInt

BM25 = "bm25"
LEVEL = 0.05
KIND = "comparison of expansions"

Cell = tuple[str, int]
"""A form and how many queries; without queries there is no form, and it is empty."""
MARKERS = ("o", "s", "^", "v", "D", "P", "X", "<")


class Line(NamedTuple):
    """A system's scores with its documents in one form, by the number of queries; 0 is the document as it is."""

    system: str
    form: str
    scores: Mapping[int, float]
    spread: Mapping[int, float]  # of its seeds


def compare_expansions(
    *,
    runs: dict[str, LocalPath],
    dataset_dir: LocalPath,
    expansion: LocalPath,
    num_generated: tuple[PositiveInt, ...] = (1, 2, 3, 5, 10),
    forms: tuple[Form, ...] = ("views", "typical"),
    step: str | None = None,
    split: str = "test",
    max_generated_length: PositiveInt = 32,
    measure: str = "nDCG@10",
    skip_empty: bool = False,
    keep_identical_ids: bool = False,
    dtype: AnyDtype = "auto",
    out_dir: Path = Path("runs/expansions"),
) -> dict[str, Any]:
    """Scores runs on documents with generated queries, for every form and number of queries, with BM25.

    python -m reproduction compare expansions --runs vanilla=runs/vanilla curriculum=runs/curriculum random=runs/random \\
        --dataset_dir=data/beir/medquad --expansion=queries/medquad --num_generated 1 2 3 5 10

    Each run is scored on the original documents (0 queries), and on documents with their first generated queries in each of
    --forms: one vector per query (views: corpus expansion), their mean (typical), or one text (document). BM25 is scored with and
    without the same queries. The baseline is the first run on the original documents. forms.png shows the last run and
    strategies.png all runs, like figures 5 and 7 of He et al. (2023). A table on stderr gives the cost of each form, and a star
    marks significant differences from the baseline. Separate the seeds of a run with commas to average them. Scores and embeddings
    stay in the runs' folders: repeat the command to continue after a stop. Prints one JSON object.

    Args:
        runs: name=run or name=run,run to score; forms.png shows the last.
        expansion: generated queries of the corpus, from de-jax doc2query.
        num_generated: numbers of queries.
        forms: forms of expansion.
        step: checkpoint of all runs: a step, or best; default the newest.
        max_generated_length: tokens of each query.
        out_dir: folder of comparison.json and the pictures.
    """
    plots.require()
    chosen = precision(dtype)
    folders.require_replaceable(out_dir, KIND)
    task = beir_task(dataset_dir, split)
    (shown,) = metrics.names_of([measure])
    policy = Policy(measures=[measure], bm25=False, skip_empty=skip_empty, drop_identical_ids=not keep_identical_ids)
    expansions: dict[Cell, Expansion] = {
        (form, number): Expansion(expansion, number, form, max_generated_length)
        for form in forms
        for number in sorted(num_generated, reverse=True)  # of the most views, those of fewer are a part
    }
    by_seed = {name: of_seeds.split(",") for name, of_seeds in runs.items()}
    reports = {
        name: [_reports(folder, task, expansions, policy, step, chosen) for folder in of_seeds]
        for name, of_seeds in by_seed.items()
    }
    first, last = next(iter(by_seed)), list(by_seed)[-1]
    p_values = _p_values(reports, first, task, measure)
    numbers = [0, *sorted(num_generated)]
    lines = [_line(name, form, numbers, seeds, shown) for name, seeds in reports.items() for form in forms]
    to_beat = lines[0].scores[0]
    lines += _of_bm25(task, expansions, policy._replace(bm25=True))

    found = [_with_evidence(line, numbers, reports.get(line.system, []), p_values) for line in lines]
    costs = {form: {number: _cost(reports, (form, number)) for number in numbers if number} for form in forms}
    report = {"dataset": task.name, "split": split, "measure": shown, "to_beat": first, "lines": found, "costs": costs}
    title = f"{task.name}: documents with generated queries"
    drawn: dict[str, Any] = {"title": title, "measure": measure, "to_beat": (f"{first}, documents as they are", to_beat)}
    of_last = {line.form if line.system == last else BM25: line for line in lines if line.system in (last, BM25)}
    by_form: dict[str, dict[str, Line]] = {
        form: {line.system: line for line in lines if line.form == form or line.system == BM25} for form in forms
    }
    with folders.atomic_dir(out_dir, KIND) as temporary:
        _draw({last: of_last}, temporary / "forms.png", **drawn)
        _draw(by_form, temporary / "strategies.png", **drawn)
        outputs.write_json(temporary / "comparison.json", report)
    rows = [[line["system"], line["form"], *(_text(line, number) for number in numbers)] for line in found]
    for name in ("num_vectors", "bytes", "search_ms_per_query"):
        rows += [[name, form, "", *(f"{cost[name]:,.6g}" for cost in by_number.values())] for form, by_number in costs.items()]
    print(tables.text_table(["run", "form", *map(str, numbers)], rows), file=sys.stderr)
    print(
        f"* p < {LEVEL} beside {first}'s documents as they are, by permutation with Holm's correction for all cells",
        file=sys.stderr,
    )
    return report


def _reports(
    folder: str, task: Task, expansions: Mapping[Cell, Expansion], policy: Policy, step: str | None, dtype: str
) -> dict[Cell, Report]:
    run = any_model.open_model(folder, step, dtype=dtype)
    plain = evaluate(task, policy, run)
    return {("", 0): plain} | {cell: evaluate(task, policy._replace(expansion=one), run) for cell, one in expansions.items()}


def _p_values(
    reports: Mapping[str, Sequence[Mapping[Cell, Report]]], baseline: str, task: Task, measure: str
) -> dict[tuple[str, Cell], float]:
    """Of each run and cell beside the baseline's documents as they are, with Holm's correction for all of them."""
    scores: dict[tuple[str, Cell], Mapping[str, float]] = {}
    for name, seeds in reports.items():
        for cell in seeds[0]:
            rankings = [kept_ranking(seed[cell]["evaluation_dir"]) for seed in seeds]
            own = [metrics.scores_by_query(ranking, task.qrels, measure) for ranking in rankings]
            scores[name, cell] = significance.mean_over_seeds(own)
    to_beat = scores.pop((baseline, ("", 0)))
    compared = significance.compare_all({f"{index}": one for index, one in enumerate(scores.values())}, to_beat)
    return {key: compared[f"{index}"].holm_permutation for index, key in enumerate(scores)}


def _line(name: str, form: str, numbers: Sequence[int], seeds: Sequence[Mapping[Cell, Report]], measure: str) -> Line:
    """The mean over the seeds, by the number of queries."""
    scores = {number: [seed[form if number else "", number]["dense"][measure] for seed in seeds] for number in numbers}
    means = {number: statistics.fmean(values) for number, values in scores.items()}
    spread = {number: statistics.stdev(values) if len(values) > 1 else 0.0 for number, values in scores.items()}
    return Line(name, form, means, spread)


def _with_evidence(
    line: Line, numbers: Sequence[int], seeds: Sequence[Mapping[Cell, Report]], p_values: Mapping[tuple[str, Cell], float]
) -> dict[str, Any]:
    """A line of the report: its p-values, and the folders of its rankings, which `compare runs` takes."""
    cells: dict[int, Cell] = {number: (line.form if number else "", number) for number in numbers}
    p = {number: p_values[line.system, cell] for number, cell in cells.items() if (line.system, cell) in p_values}
    kept = {number: [seed[cell]["evaluation_dir"] for seed in seeds] for number, cell in cells.items()}
    return line._asdict() | {"p": p, "evaluations": kept}


def _cost(reports: Mapping[str, Sequence[Mapping[Cell, Report]]], cell: Cell) -> dict[str, int | float]:
    """The median over all runs, which differ in the time they took alone."""
    costs = [seed[cell]["cost"] for seeds in reports.values() for seed in seeds]
    return {name: statistics.median(cost[name] for cost in costs) for name in costs[0]}


def _of_bm25(task: Task, expansions: dict[tuple[str, int], Expansion], policy: Policy) -> list[Line]:
    """BM25 reads the queries behind the document, whatever the form."""
    by_number = {number: one for (_, number), one in expansions.items()}
    scores = {number: evaluate(task, policy._replace(expansion=one))[BM25] for number, one in sorted(by_number.items())}
    scores = {0: evaluate(task, policy)[BM25], **scores}
    return [Line(BM25, "document", {number: next(iter(found.values())) for number, found in scores.items()}, {})]


def _text(line: Mapping[str, Any], number: int) -> str:
    spread = line["spread"].get(number)
    star = "*" if line["p"].get(number, 1.0) < LEVEL else ""
    return f"{line['scores'][number]:.4f}{star}" + (f" ± {spread:.4f}" if spread else "")


def _draw(panels: Mapping[str, Mapping[str, Line]], out_png: Path, *, title: str, measure: str, to_beat: tuple[str, float]) -> None:
    """Draws lines by the number of queries, seeds as a band; a label has the same colour and marker in every panel.

    `to_beat`: the name of a score that every panel has as a dashed line across, and the score.
    """
    labels = list(dict.fromkeys(label for lines in panels.values() for label in lines))
    with plots.new_figure(out_png, figsize=(plots.WIDE if len(panels) > 1 else plots.NARROW, 5.4), title=title) as figure:
        axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
        for axis, (panel, lines) in zip(axes, panels.items(), strict=True):
            for label, line in lines.items():
                index = labels.index(label)
                _draw_line(axis, line, label, plots.colour_of(index), MARKERS[index % len(MARKERS)])
            name, score = to_beat
            axis.axhline(score, color=plots.INK, lw=1, linestyle="--", label=name)
            axis.set_xticks(sorted({number for line in lines.values() for number in line.scores}))
            axis.set_title(panel)
            axis.set_xlabel("generated queries of a document (0: none)")
        axes[0].set_ylabel(measure)
        figure.legend(*axes[-1].get_legend_handles_labels(), loc="outside lower center", ncols=5)


def _draw_line(axis: Any, line: Line, label: str, colour: str, marker: str) -> None:
    numbers = sorted(line.scores)
    values = [line.scores[number] for number in numbers]
    axis.plot(numbers, values, color=colour, marker=marker, ms=4, lw=1.6, label=label)
    widths = [line.spread.get(number, 0.0) for number in numbers]
    if any(widths):
        low, high = ([v + sign * w for v, w in zip(values, widths, strict=True)] for sign in (-1, 1))
        axis.fill_between(numbers, low, high, color=colour, alpha=0.1, linewidth=0)
