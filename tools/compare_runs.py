"""Tests whether systems differ significantly from a baseline, query by query, from TREC run files.

de-jax compare_runs --qrels=data/beir/scifact/qrels/test.tsv --systems bm25=bm25.trec minilm=minilm.trec
de-jax compare_runs --qrels=test.tsv --out_png=gains.png \\
    --systems minilm=runs/minilm/evaluations/scifact-0a tuned=seed0.trec,seed1.trec,seed2.trec

The first system is the baseline. A system is a TREC run file or a folder in <run_dir>/evaluations. Separate the seeds of a system
with commas: each query then has its mean over the seeds. The tests are a paired t-test and a paired permutation test over queries,
two-sided, each also with Holm's correction for the number of systems. Prints one JSON object to stdout and a table to stderr.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from de_jax import command
from de_jax.data.text import beir
from de_jax.evaluation import fusion, metrics, significance
from de_jax.evaluation.metrics import Results
from de_jax.evaluation.report import kept_ranking
from de_jax.reports import plots, tables
from de_jax.settings import Seed, numeric
from de_jax.types import InputError


def main(argv: list[str] | None = None) -> None:
    """The command."""
    args = _parse_args(argv)
    qrels = beir.read_qrels(args.qrels)
    runs = {name: [_read(Path(path)) for path in paths] for name, paths in _systems(args.systems).items()}
    (measure,) = metrics.names_of([args.measure])
    seeds = {name: [metrics.scores_by_query(run, qrels, args.measure) for run in found] for name, found in runs.items()}
    scores = {name: significance.mean_over_seeds(found) for name, found in seeds.items()}
    baseline, *others = scores
    compared = significance.compare_all(
        {name: scores[name] for name in others}, scores[baseline], num_resamples=args.num_resamples, seed=args.seed
    )
    systems: dict[str, dict[str, Any]] = {}
    for name, found in runs.items():
        systems[name] = significance.spread_over_seeds(seeds[name])._asdict()
        systems[name][f"hole@{args.k}"] = statistics.fmean(fusion.hole(run, qrels, args.k) for run in found)
        systems[name][f"overlap@{args.k}"] = statistics.fmean(fusion.overlap(run, runs[baseline][0], args.k) for run in found)
        systems[name] |= compared[name]._asdict() if name in compared else {}
    if args.out_png:
        differences = {name: significance.paired_differences(scores[name], scores[baseline]) for name in others}
        plots.query_differences(differences, args.out_png, title=f"{measure} of each query: gain over {baseline}")
    print(_table(measure, systems), file=sys.stderr)
    print(json.dumps({"measure": measure, "num_queries": len(scores[baseline]), "baseline": baseline, "systems": systems}))


def _systems(arguments: Sequence[str]) -> dict[str, list[str]]:
    """The paths of each system's runs, by its name."""
    systems: dict[str, list[str]] = {}
    for argument in arguments:
        name, _, paths = argument.partition("=")
        if not name or not paths or name in systems:
            raise InputError(f"--systems has {argument!r}; give each system once, as name=run_file or name=seed_0,seed_1.")
        systems[name] = paths.split(",")
    if len(systems) < 2:
        raise InputError("--systems has one system; give a baseline and at least one to compare with it.")
    return systems


def _read(path: Path) -> Results:
    return kept_ranking(path) if path.is_dir() else metrics.read_trec_run(path)


def _table(measure: str, systems: dict[str, dict[str, Any]]) -> str:
    columns = list(next(reversed(systems.values())))
    rows = [[name, *(_cell(system.get(column)) for column in columns)] for name, system in systems.items()]
    return tables.text_table([measure, *columns], rows)


def _cell(value: int | float | None) -> str:
    return "" if value is None else str(value) if isinstance(value, int) else f"{value:.4f}"


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = command.Parser(description=__doc__)
    parser.add_argument("--qrels", required=True, help="judgements with BEIR's three columns or TREC's four")
    parser.add_argument(
        "--systems", nargs="+", required=True, metavar="NAME=RUN[,RUN]", help="systems to compare, the baseline first"
    )
    parser.add_argument("--measure", default="nDCG@10", help="a measure of ir-measures (default nDCG@10)")
    parser.add_argument("--k", type=int, default=10, help="depth of hole@k and overlap@k (default 10)")
    parser.add_argument("--num_resamples", type=int, default=significance.NUM_RESAMPLES, help="resamples of the permutation test")
    parser.add_argument("--seed", type=numeric(Seed), default=0, help="seed of the permutation test")
    parser.add_argument("--out_png", help="picture of the gain of each query")
    return parser.parse_args(argv)


if __name__ == "__main__":
    command.run(main)
