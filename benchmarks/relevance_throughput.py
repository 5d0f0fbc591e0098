"""Pairs of queries per second of ROUGE-L, beside the rouge-score package in the same run; prints one JSON line.

python -m benchmarks.relevance_throughput --dataset_dir=data/beir/medquad --num_pairs 500 --num_queries 80

Gold queries and generated ones are the data set's own queries, drawn at random; runs alternate, and a speed-up is the median of the
ratios within one repeat. Both sides begin each repeat with no word stemmed before.
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any

import numpy as np

from benchmarks import measure
from de_jax import command
from de_jax.data.expansion import relevance
from de_jax.data.text import beir


def main(argv: list[str] | None = None) -> None:
    """The command."""
    print(json.dumps(measured(argv)))


def measured(argv: list[str] | None = None) -> dict[str, Any]:
    """The report that the command prints."""
    args = _parse_args(argv)
    from rouge_score import rouge_scorer

    texts = [text for _, text in beir.iter_queries(beir.find_file(args.dataset_dir, "queries"))]
    drawn = np.random.default_rng(args.seed).choice(len(texts), (args.num_pairs, 1 + args.num_queries))
    pairs = [(texts[gold], [texts[row] for row in rows]) for gold, *rows in drawn.tolist()]
    results: dict[str, Any] = {}

    def ours() -> None:
        relevance._STEMS = relevance._Stems()
        results["ours"] = [relevance.rouge_l(0, gold, queries) for gold, queries in pairs]

    def theirs() -> None:
        scorer = rouge_scorer.RougeScorer(["rougeL"], use_stemmer=True)
        scores = [[scorer.score(gold, query)["rougeL"].fmeasure for query in queries] for gold, queries in pairs]
        results["rouge_score"] = [np.array(row, np.float32) for row in scores]

    seconds = measure.in_turns({"ours": ours, "rouge_score": theirs}, args.repeats, args.clock)
    return {
        "benchmark": "relevance_throughput",
        "num_pairs": args.num_pairs,
        "num_queries": args.num_queries,
        "clock": args.clock,
        "queries_per_second": {name: round(drawn[:, 1:].size / statistics.median(own)) for name, own in seconds.items()},
        "speedup": measure.speedup(seconds, "ours", "rouge_score"),
        "equal": all(np.array_equal(a, b) for a, b in zip(results["ours"], results["rouge_score"], strict=True)),
        **measure.environment(),
    }


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset_dir", required=True, help="a BEIR folder")
    parser.add_argument("--num_pairs", type=int, default=500)
    parser.add_argument("--num_queries", type=int, default=80, help="of each pair")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--clock", choices=measure.CLOCKS, default="wall", help="cpu on a machine that others use")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


if __name__ == "__main__":
    command.run(main)
