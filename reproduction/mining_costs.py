"""The cost of hard negatives, from the records of miner and trainer: ANCE (Xiong et al. 2021), Table 6.

python -m reproduction.mining_costs runs/ance --num_docs=5183 --negatives bm25=runs/bm25/negatives ance=runs/ance/negatives
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from de_jax.data.negatives.generations import Generation, open_newest, read
from de_jax.training.run.recipe_file import read_recipe_file
from de_jax.training.run.run_log import METRICS_FILE, read_metrics

ROWS = {
    "docs_per_second": "documents encoded a second",
    "ms_per_doc": "encoding, ms a document",
    "query_encoding_ms": "encoding, ms a query",
    "index_seconds": "index, seconds",
    "search_ms": "search, ms a query",
    "negatives_ms_per_batch": "search and choice of negatives, ms a batch",
    "refresh_seconds": "a generation in all, seconds",
}
STEP = "training step, ms a batch"


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--num_docs", type=int, required=True, help="of the corpus that the negatives were mined from")
    parser.add_argument("--negatives", nargs="+", required=True, help="name=folder of generations")
    args = parser.parse_args(argv)
    folders = dict(one.split("=", 1) for one in args.negatives)
    costs = of_run(args.run_dir, {kind: open_newest(folder) for kind, folder in folders.items()}, num_docs=args.num_docs)
    sys.stdout.write(markdown(costs))


class Costs(NamedTuple):
    """The measured values; unmeasured ones are absent."""

    training: dict[str, float]  # "batch_size" and "step_ms"
    generations: dict[str, dict[str, float]]  # by the name of their kind, under the names of ROWS


def of_run(run_dir: Path, generations: Mapping[str, Generation], *, num_docs: int) -> Costs:
    """The costs of a run's steps and of generations of negatives, for batches of the run's size.

    Args:
        run_dir: any run.
        generations: by the name of their kind.
        num_docs: of the corpus that they were mined from.
    """
    training = of_training(run_dir)
    batch_size = training.get("batch_size")
    return Costs(
        training,
        {kind: of_generation(one, num_docs=num_docs, batch_size=batch_size) for kind, one in generations.items()},
    )


def of_generation(generation: Generation, *, num_docs: int, batch_size: float | None) -> dict[str, float]:
    """The cost of a generation, without values that its manifest lacks.

    Args:
        generation: its manifest has seconds by stage; without "encode_queries" in it, queries count to "encode".
        num_docs: of the corpus.
        batch_size: of the training that uses it.
    """
    seconds = generation.manifest.get("seconds", {})
    pairs = read(generation).pairs
    num_queries = len(np.unique(pairs[:, 0]))
    costs: dict[str, float] = {"refresh_seconds": sum(seconds.values())}
    if encode := seconds.get("encode"):
        costs |= {"docs_per_second": num_docs / encode, "ms_per_doc": 1000 * encode / num_docs}
    for name, stage, scale in (
        ("query_encoding_ms", "encode_queries", 1000 / num_queries),
        ("index_seconds", "index", 1.0),
        ("search_ms", "search", 1000 / num_queries),
    ):
        if stage in seconds:
            costs[name] = scale * seconds[stage]
    if batch_size and {"search", "choose"} <= seconds.keys():
        costs["negatives_ms_per_batch"] = 1000 * (seconds["search"] + seconds["choose"]) * batch_size / len(pairs)
    return {name: float(f"{costs[name]:.4g}") for name in ROWS if name in costs}


def of_training(run_dir: Path) -> dict[str, float]:
    """The batch size of a run and the median milliseconds of its steps; empty for a run that was not trained here."""
    data = (read_recipe_file(run_dir) or {}).get("data") or {}
    sources = (data.get("sources") or {"": data}).values()
    sizes = {source["options"]["batch_size"] for source in sources if "options" in source}
    log = run_dir / METRICS_FILE
    speeds = [line["pairs_per_second"] for line in read_metrics(log) if "pairs_per_second" in line] if log.is_file() else []
    if len(sizes) != 1 or not speeds:
        return {}
    batch_size = float(sizes.pop())
    return {"batch_size": batch_size, "step_ms": float(f"{1000 * batch_size / float(np.median(speeds)):.4g}")}


def table(costs: Costs) -> list[list[Any]]:
    """A head and a row for each operation that somebody did; a column a generation, empty where it did not."""
    rows: list[list[Any]] = [["operation", *costs.generations]]
    for name, label in ROWS.items():
        if any(name in of_kind for of_kind in costs.generations.values()):
            rows.append([label, *(of_kind.get(name, "") for of_kind in costs.generations.values())])
    if "step_ms" in costs.training:
        rows.append([STEP, *(costs.training["step_ms"] for _ in costs.generations)])
    return rows


def markdown(costs: Costs) -> str:
    """The table in Markdown."""
    head, *rows = table(costs)
    lines = [head, ["---", *("---:" for _ in costs.generations)], *rows]
    return "".join(f"| {' | '.join(_cell(cell) for cell in line)} |\n" for line in lines)


def _cell(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
