"""Shows a run: settings, training curves, parameters, shared parts and sharding.

de-jax inspect_run --run_dir=runs/sde

Writes curves.png and parameters.txt to --out_dir (default <run_dir>/report) and prints one JSON object.
"""

from __future__ import annotations

import argparse
import collections
import json
from pathlib import Path
from typing import Any

import jax

from de_jax import arguments, command
from de_jax.files.folders import atomic_dir, require_replaceable
from de_jax.reports import plots
from de_jax.training.mesh import sharding
from de_jax.training.optim import paths
from de_jax.training.run.run_folder import Run
from de_jax.training.run.run_log import METRICS_FILE, read_metrics
from de_jax.training.run.run_settings import read_recipe_file

KIND = "report of a run"
USED_BY = {"query": "query tower", "doc": "doc tower", "shared": "both towers"}


def main(argv: list[str] | None = None) -> None:
    """The command."""
    args = _parse_args(argv)
    run = arguments.model(args)
    out_dir = args.out_dir or run.run_dir / "report"
    require_replaceable(out_dir, KIND)
    lines = read_metrics(run.run_dir / METRICS_FILE) if (run.run_dir / METRICS_FILE).is_file() else []
    with atomic_dir(out_dir, KIND) as temporary:
        if lines:
            plots.training_curves(run.run_dir / METRICS_FILE, temporary / "curves.png", title=run.run_dir.name)
        (temporary / "parameters.txt").write_text(_parameter_table(run))
    summary = {
        "run_dir": str(run.run_dir),
        "step": run.step,
        "recipe": read_recipe_file(run.run_dir),
        "shared": list(run.model.shared),
        "max_query_length": run.query.max_length,
        "max_doc_length": run.doc.max_length,
        "max_passages": run.doc.max_passages,
        "num_parameters": _counts(run),
        "last": lines[-1] if lines else None,
        "best_dev": max((line for line in lines if "dev/ndcg@10" in line), key=lambda line: line["dev/ndcg@10"], default=None),
        "report": str(out_dir),
    }
    print(json.dumps(summary))


def _parameter_table(run: Run) -> str:
    rows = [("parameter", "shape", "dtype", "number", "used by", "on the mesh")]
    for path, leaf in zip(paths.all_paths(run.params), jax.tree.leaves(run.params), strict=True):
        owner = path.partition("/")[0]
        rows.append((path, str(leaf.shape), str(leaf.dtype), f"{leaf.size:,}", USED_BY[owner], sharding.describe(leaf)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]]) + "\n"


def _counts(run: Run) -> dict[str, Any]:
    counts: collections.Counter[str] = collections.Counter()
    for path, leaf in zip(paths.all_paths(run.params), jax.tree.leaves(run.params), strict=True):
        counts["/".join(path.split("/")[:2])] += leaf.size
    return {**counts, "total": sum(counts.values())}


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = command.Parser(description=__doc__)
    arguments.add_model(parser, "to show", dtype=False)
    parser.add_argument("--out_dir", type=Path, help="output folder (default <run_dir>/report)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    command.run(main)
