"""Compares kinds of negatives at one or more checkpoints of a run: gradients, loss, ranks, mining cost; prints one JSON object.

de-jax analyse_negatives --run_dir=runs/ance --dataset_dir=data/beir/scifact \\
    --negatives bm25=runs/bm25/negatives/000001 ance=runs/ance/negatives --steps 0 500 1000

Measures each kind on the same training pairs: loss, gradient norms before clipping, score margins, ranks, and overlap with the
model's top 100. Documents of other pairs (in_batch) and any documents (random) are always included. Pictures, analysis.json,
efficiency.md and report.html go to --out_dir.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from de_jax import command
from de_jax.arguments import named
from de_jax.data.batches.pair_batches import TrainingPairs
from de_jax.data.negatives.generations import open_newest
from de_jax.data.sources.training_set import open_stores, qrel_pairs, text_hashes
from de_jax.data.text import beir, input_policy
from de_jax.evaluation import negative_analysis
from de_jax.files.folders import atomic_dir, require_replaceable
from de_jax.files.outputs import progress_bar
from de_jax.mining import efficiency
from de_jax.reports import negative_report
from de_jax.retrieval import maxp
from de_jax.settings import PositiveFloat, Seed, numeric
from de_jax.training.run.run_folder import load_run
from de_jax.training.step import grad_norms

KIND = "analysis of negatives"


def main(argv: list[str] | None = None) -> None:
    """The command."""
    args = _parse_args(argv)
    groups, name = named("--groups", args.groups), beir.folder_of(args.dataset_dir).resolve().name
    out_dir = args.out_dir or args.run_dir / "analysis" / f"negatives-{name}-{args.split}"
    require_replaceable(out_dir, KIND)
    folders = named("--negatives", args.negatives)
    generations = {kind: open_newest(folder) for kind, folder in folders.items()}
    qrels = beir.read_qrels(beir.find_qrels(args.dataset_dir, args.split))
    wanted = {load_run(args.run_dir, step, only_sizes=True).step: step for step in args.steps or [None]}  # all are there
    first = load_run(args.run_dir, only_sizes=True)
    temperature = negative_analysis.temperature_of(first, args.temperature)
    grad_norms.group_norms(first.params, groups)  # refuses patterns that match nothing
    stores = open_stores(args.dataset_dir, first.query.tokenizer, first.doc.tokenizer, skip_empty=args.skip_empty)
    pairs, passages = qrel_pairs(qrels, *stores), maxp.passages_of(first, stores[1])
    texts = TrainingPairs(name, *stores, pairs, text_hashes(args.dataset_dir), passages, not args.keep_identical_ids)
    counts = {"num_pairs": args.num_pairs, "num_negatives": args.num_negatives}
    sample = negative_analysis.sample(texts, generations, seed=args.seed, **counts)
    options: dict[str, Any] = {"temperature": temperature, "groups": groups, "depth": args.depth}
    with progress_bar(total=len(wanted) * (1 + len(sample.kinds)), desc="analyse", delay=0.5) as bar:
        runs = (load_run(args.run_dir, step) for _, step in sorted(wanted.items()))  # a trainer may have written newer ones
        checkpoints = list(negative_analysis.analyse(runs, sample, progress=bar.update, **options))
    about = {"run": str(args.run_dir), "dataset": name, "split": args.split, "seed": args.seed, "temperature": temperature}
    about |= {"num_pairs": len(sample.pairs), "drawn_from": sample.num_pairs, "num_negatives": args.num_negatives}
    about["negatives"] = {kind: str(generation.folder) for kind, generation in generations.items()}
    costs = efficiency.of_run(args.run_dir, generations, num_docs=stores[1].num_texts)
    with atomic_dir(out_dir, KIND) as temporary:
        title = f"Negatives of {args.run_dir.name} on {name}"
        report = negative_report.write(temporary, title, about, checkpoints, costs, depth=args.depth)
    print(efficiency.markdown(costs), file=sys.stderr)
    print(json.dumps({"report": str(out_dir / "report.html"), **report}))


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = command.Parser(description=__doc__)
    parser.add_argument("--run_dir", type=Path, required=True, help="the run to analyse")
    parser.add_argument("--steps", nargs="+", help="checkpoints: steps, or best; default the newest")
    parser.add_argument("--dataset_dir", required=True, help="the run's BEIR folder of training data")
    parser.add_argument("--split", default="train", help="split of the pairs (default train)")
    input_policy.add_flags(parser, identical_ids=True)
    parser.add_argument(
        "--negatives", nargs="+", default=[], metavar="NAME=FOLDER", help="a generation, or a folder of generations: its newest"
    )
    parser.add_argument("--num_pairs", type=int, default=64, help="sampled training pairs (default 64)")
    parser.add_argument("--num_negatives", type=int, default=1, help="negatives per pair in the loss (default 1, as in ANCE)")
    parser.add_argument("--temperature", type=numeric(PositiveFloat), help="temperature of the loss; default the run's")
    parser.add_argument("--groups", nargs="+", default=[], metavar="NAME=PATTERN", help="groups of parameter paths; default thirds")
    parser.add_argument("--depth", type=int, default=100, help="depth of the ranking for the overlap (default 100)")
    parser.add_argument("--seed", type=numeric(Seed), default=0, help="seed of the sample and of the drawn negatives")
    parser.add_argument(
        "--out_dir",
        type=Path,
        help="output folder; a former analysis in it is replaced; default <run_dir>/analysis/negatives-<data set>-<split>",
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    command.run(main)
