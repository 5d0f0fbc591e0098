"""How much more relevant is one group of a curriculum than the next? Prints one JSON object.

python -m experiments.group_relevance --dataset_dir=data/medquad_4000 --expansion=queries/medquad_4000

Relevance is the ROUGE-L F of a generated query to the pair's own query. Each pair's queries are sorted by it and split into groups
as in training (`Curriculum`); the groups are printed from the least relevant to the most relevant one. Beside them stand the number
of different queries of a pair's document and, of the pairs with as many queries as groups, the share whose queries are all equally
relevant.
"""

from __future__ import annotations

import argparse
import itertools
import json
from typing import Any

import numpy as np

from de_jax import command
from de_jax.data.expansion.curriculum import RankedQueries, ranked_pairs
from de_jax.types import InputError


def main(argv: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset_dir", required=True, help="a BEIR folder")
    parser.add_argument("--expansion", required=True, help="its generated queries")
    parser.add_argument("--split", default="train", help="whose pairs")
    parser.add_argument("--num_groups", type=int, default=3)
    args = parser.parse_args(argv)
    ranked = ranked_pairs(args.dataset_dir, args.split, args.expansion, skip_empty=True)
    print(json.dumps(described(ranked, args.num_groups)))


def described(ranked: RankedQueries, num_groups: int) -> dict[str, Any]:
    """The report; pairs with fewer queries than groups are left out of the groups."""
    counts = np.diff(ranked.offsets)
    means, ranges = [], []
    for first, count in zip(ranked.offsets[:-1], counts, strict=True):
        scores = ranked.scores[first : first + count]
        if count >= num_groups:
            bounds = np.arange(num_groups + 1) * count // num_groups
            means.append([scores[start:end].mean() for start, end in itertools.pairwise(bounds)])
            ranges.append(scores[0] - scores[-1])
    if not means:
        raise InputError(f"no pair has {num_groups} different queries or more; generate more of them.")
    return {
        "num_pairs": len(counts),
        "num_queries": {"mean": round(float(counts.mean()), 2), "least": int(counts.min())},
        "rouge_l": [round(float(mean), 4) for mean in np.mean(means, axis=0)[::-1]],
        "share_without_difference": round(float(np.mean(np.array(ranges) == 0)), 4),
    }


if __name__ == "__main__":
    command.run(main)
