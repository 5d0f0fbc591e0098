"""Measures the latency of query embeddings for one or more runs; prints one JSON object, a table to stderr.

de-jax measure_query_latency --runs full=runs/model light=runs/daft/2_layers --dataset_dir=data/beir/scifact
JAX_PLATFORMS=cpu de-jax measure_query_latency --runs full=runs/model light=runs/daft/2_layers --queries=queries.txt

Reports milliseconds a query at batches of 1 and 32, at the 50th, 95th and 99th percentile of the calls, with and without the
tokenizer, on JAX's default device. The runs take turns call by call; the ratio is the first run's time over each run's time.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from de_jax import command
from de_jax.arguments import named
from de_jax.data.text import beir, input_policy
from de_jax.evaluation import latency
from de_jax.files.outputs import progress_bar
from de_jax.files.reading import read_lines
from de_jax.interop import any_model
from de_jax.reports import tables


def main(argv: list[str] | None = None) -> None:
    """The command."""
    args = _parse_args(argv)
    queries = _queries(args)
    runs = {name: any_model.open_model(folder, args.step) for name, folder in named("--runs", args.runs).items()}
    with progress_bar(total=len(runs) * len(args.batch_sizes) * args.num_calls, desc="measure", unit=" calls", delay=0.5) as bar:
        found = latency.measure(runs, queries, batch_sizes=args.batch_sizes, num_calls=args.num_calls, progress=bar.update)
    print(tables.text_table(list(latency.Latency._fields), [[str(value) for value in row] for row in found]), file=sys.stderr)
    report = {"device": latency.device(), "num_calls": args.num_calls, "latencies": [row._asdict() for row in found]}
    print(json.dumps(report))


def _queries(args: argparse.Namespace) -> list[str]:
    if args.dataset_dir:
        return list(beir.read(args.dataset_dir, args.split, skip_empty=args.skip_empty).queries.texts)
    return [line.strip() for _, line in read_lines(args.queries)]


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = command.Parser(description=__doc__)
    parser.add_argument(
        "--runs", nargs="+", required=True, metavar="NAME=FOLDER", help="runs to measure; the first is the baseline"
    )
    parser.add_argument("--step", help="checkpoint of all runs: a step, or best; default the newest")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--dataset_dir", type=Path, help="a BEIR folder or a table with the queries")
    source.add_argument("--queries", type=Path, help="a file with one query a line")
    parser.add_argument("--split", default="test", help="split of the BEIR folder (default test)")
    input_policy.add_flags(parser)
    parser.add_argument("--batch_sizes", nargs="+", type=int, default=[1, 32], help="queries per call (default 1 32)")
    parser.add_argument("--num_calls", type=int, default=200, help="calls per run and batch size (default 200)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    command.run(main)
