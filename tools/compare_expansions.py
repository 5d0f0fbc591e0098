"""Scores runs on documents with generated queries, for every form and number of queries, with BM25; prints one JSON object.

de-jax compare_expansions --runs vanilla=runs/vanilla curriculum=runs/curriculum random=runs/random \\
    --dataset_dir=data/beir/medquad --expansion=queries/medquad --num_generated 1 2 3 5 10

Each run is scored on the original documents (0 queries), and on documents with their first generated queries in each of --forms:
one vector per query (views: corpus expansion), their mean (typical), or one text (document). BM25 is scored with and without the
same queries. The baseline is the first run on the original documents. forms.png shows the last run and strategies.png all runs,
like figures 5 and 7 of He et al. (2023). A table on stderr gives the cost of each form, and a star marks significant differences
from the baseline. Separate the seeds of a run with commas to average them. Scores and embeddings stay in the runs' folders: repeat
the command to continue after a stop.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from de_jax import arguments, command
from de_jax.data.text import input_policy
from de_jax.evaluation import metrics, significance
from de_jax.evaluation.report import Report, kept_ranking
from de_jax.evaluation.task import Policy, Task, beir_task, evaluate
from de_jax.files import folders, outputs
from de_jax.interop import any_model
from de_jax.reports import plots, tables
from de_jax.retrieval.expanded_search import Expansion

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


def main(argv: list[str] | None = None) -> None:
    """The command."""
    args = _parse_args(argv)
    args.dtype = arguments.dtype(args)
    folders.require_replaceable(args.out_dir, KIND)
    task = beir_task(args.dataset_dir, args.split)
    (measure,) = metrics.names_of([args.measure])
    expansions = {
        (form, number): Expansion(args.expansion, number, form, args.max_generated_length)
        for form in args.forms
        for number in sorted(args.num_generated, reverse=True)  # of the most views, those of fewer are a part
    }
    for expansion in expansions.values():
        expansion.check()
    runs = {name: of_seeds.split(",") for name, of_seeds in arguments.named("--runs", args.runs).items()}
    reports = {name: [_reports(folder, task, expansions, args) for folder in of_seeds] for name, of_seeds in runs.items()}
    first, last = next(iter(runs)), list(runs)[-1]
    p_values = _p_values(reports, first, task, args.measure)
    numbers = [0, *sorted(args.num_generated)]
    lines = [_line(name, form, numbers, seeds, measure) for name, seeds in reports.items() for form in args.forms]
    to_beat = lines[0].scores[0]
    lines += _of_bm25(task, expansions, args)

    found = [_with_evidence(line, numbers, reports.get(line.system, []), p_values) for line in lines]
    costs = {form: {number: _cost(reports, (form, number)) for number in numbers if number} for form in args.forms}
    report = {"dataset": task.name, "split": args.split, "measure": measure, "to_beat": first, "lines": found, "costs": costs}
    title = f"{task.name}: documents with generated queries"
    drawn = {"title": title, "measure": args.measure, "to_beat": (f"{first}, documents as they are", to_beat)}
    of_last = {line.form if line.system == last else BM25: line for line in lines if line.system in (last, BM25)}
    by_form = {form: {line.system: line for line in lines if line.form == form or line.system == BM25} for form in args.forms}
    with folders.atomic_dir(args.out_dir, KIND) as temporary:
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
    print(json.dumps(report))


def _reports(folder: str, task: Task, expansions: Mapping[Cell, Expansion], args: argparse.Namespace) -> dict[Cell, Report]:
    run, policy = any_model.open_model(folder, args.step, dtype=args.dtype), _policy(args, bm25=False)
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
    """A line of the report: its p-values, and the folders of its rankings, which `compare_runs` takes."""
    cells: dict[int, Cell] = {number: (line.form if number else "", number) for number in numbers}
    p = {number: p_values[line.system, cell] for number, cell in cells.items() if (line.system, cell) in p_values}
    kept = {number: [seed[cell]["evaluation_dir"] for seed in seeds] for number, cell in cells.items()}
    return line._asdict() | {"p": p, "evaluations": kept}


def _cost(reports: Mapping[str, Sequence[Mapping[Cell, Report]]], cell: Cell) -> dict[str, int | float]:
    """The median over all runs, which differ in the time they took alone."""
    costs = [seed[cell]["cost"] for seeds in reports.values() for seed in seeds]
    return {name: statistics.median(cost[name] for cost in costs) for name in costs[0]}


def _of_bm25(task: Task, expansions: dict[tuple[str, int], Expansion], args: argparse.Namespace) -> list[Line]:
    """BM25 reads the queries behind the document, whatever the form."""
    policy = _policy(args, bm25=True)
    by_number = {number: one for (_, number), one in expansions.items()}
    scores = {number: evaluate(task, policy._replace(expansion=one))[BM25] for number, one in sorted(by_number.items())}
    scores = {0: evaluate(task, policy)[BM25], **scores}
    return [Line(BM25, "document", {number: next(iter(found.values())) for number, found in scores.items()}, {})]


def _policy(args: argparse.Namespace, *, bm25: bool) -> Policy:
    drop = not args.keep_identical_ids
    return Policy(measures=[args.measure], bm25=bm25, skip_empty=args.skip_empty, drop_identical_ids=drop)


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


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = command.Parser(description=__doc__)
    parser.add_argument(
        "--runs", nargs="+", required=True, metavar="NAME=RUN[,RUN]", help="runs to score; forms.png shows the last"
    )
    parser.add_argument("--step", help="checkpoint of all runs: a step, or best; default the newest")
    parser.add_argument("--dataset_dir", required=True, help="a BEIR folder or a table")
    parser.add_argument("--split", default="test", help="split of the judgements (default test)")
    parser.add_argument("--expansion", required=True, help="generated queries of the corpus, from de-jax doc2query")
    parser.add_argument(
        "--num_generated", nargs="+", type=int, default=[1, 2, 3, 5, 10], help="numbers of queries (default 1 2 3 5 10)"
    )
    parser.add_argument("--forms", nargs="+", default=["views", "typical"], help="forms of expansion (default views typical)")
    parser.add_argument("--max_generated_length", type=int, default=32, help="tokens of each query (default 32)")
    parser.add_argument("--measure", default="nDCG@10", help="a measure of ir-measures (default nDCG@10)")
    input_policy.add_flags(parser, identical_ids=True)
    arguments.add_dtype(parser)
    parser.add_argument("--out_dir", type=Path, default=Path("runs/expansions"), help="folder of comparison.json and the pictures")
    return parser.parse_args(argv)


if __name__ == "__main__":
    command.run(main)
