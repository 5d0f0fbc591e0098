"""How much more relevant is one group of a curriculum than the next? Prints one JSON object.

python -m experiments.group_relevance --dataset_dir=data/medquad_4000 --expansion=queries/medquad_4000

Relevance is the ROUGE-L F of a generated query to the pair's own query. Each pair's queries are sorted by it and split into groups
as in training (`Curriculum`); the groups are printed from the least relevant to the most relevant one. Beside them stand the number
of different queries of a pair's document and, of the pairs with as many queries as groups, the share whose queries are all equally
relevant.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from de_jax import command
from de_jax.data.expansion.curriculum import RankedQueries, ranked_texts
from de_jax.data.expansion.generated_queries import read_expansion
from de_jax.data.text import beir
from de_jax.files import reading
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


def ranked_pairs(
    dataset_dir: str | Path,
    split: str,
    expansion: str | Path,
    *,
    measure: str = "rouge_l",
    score_file: str | Path = "",
    skip_empty: bool = False,
) -> RankedQueries:
    """The ranking of a BEIR folder's training pairs, as a curriculum has it, without a tokenizer; kept beside the expansion.

    Args:
        dataset_dir: the corpus that the expansion is of, with the pairs' queries and judgements.
        split: whose judgements are the pairs.
        expansion: a folder, or a single file.
        measure: a name out of `relevance.MEASURES`.
        score_file: scores in its place, see `relevance.ScoreFile`.
        skip_empty: pairs of empty texts are left out, as `training_set.qrel_pairs` leaves them out.

    Raises:
        InputError: an unknown measure, or what reading the files raises.
    """
    queries_file, docs_file = beir.find_file(dataset_dir, "queries"), beir.find_file(dataset_dir, "corpus")
    qrels_file = beir.find_qrels(dataset_dir, split)

    def read() -> tuple[list[tuple[str, str]], list[str], Callable[[int], list[str]]]:
        every = functools.partial(beir.iter_all, skip_empty=skip_empty)
        golds, qrels = dict(every(queries_file, with_title=False)), beir.read_qrels(qrels_file)
        empty = {text_id for text_id, text in every(docs_file, with_title=True) if not text} if skip_empty else set()
        pairs = [(query_id, doc_id) for query_id, judged in qrels.items() for doc_id, score in judged.items() if score > 0]
        if unknown := next((query_id for query_id, _ in pairs if query_id not in golds), None):
            raise InputError(f"{qrels_file} judges the query {unknown}, which {queries_file} lacks; give matching files.")
        if skip_empty:
            pairs = [(query_id, doc_id) for query_id, doc_id in pairs if golds[query_id] and doc_id not in empty]
        generated = {doc.doc_id: doc.queries for doc in read_expansion(expansion)}
        return pairs, [golds[query_id] for query_id, _ in pairs], lambda pair: generated.get(pairs[pair][1], [])

    hashes = [reading.sha256_of(queries_file), reading.sha256_of(qrels_file)]
    if skip_empty:
        hashes.append(reading.sha256_of(docs_file))
    return ranked_texts(read, hashes, expansion, measure=measure, score_file=score_file)


if __name__ == "__main__":
    command.run(main)
