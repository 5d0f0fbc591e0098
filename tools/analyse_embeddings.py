"""Analyses a run's embeddings on a BEIR data set: pictures, analysis.json and report.html; prints the JSON object.

de-jax analyse_embeddings --run_dir=runs/sde --dataset_dir=data/beir/scifact

Documents are embedded once and kept in the run's folder. --max_docs embeds a sample that contains all judged documents; scores in a
sample are higher than in the whole collection.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from de_jax import arguments, command
from de_jax.data.text import input_policy
from de_jax.evaluation import embedding_analysis
from de_jax.evaluation.task import Policy, beir_task
from de_jax.files.folders import atomic_dir, require_replaceable
from de_jax.files.outputs import write_json
from de_jax.reports import embedding_report
from de_jax.settings import Seed, numeric

KIND = "analysis of embeddings"


def main(argv: list[str] | None = None) -> None:
    """The command."""
    args = _parse_args(argv)
    task = beir_task(args.dataset_dir, args.split)  # fails here, before the model loads
    if args.out_dir:
        require_replaceable(args.out_dir, KIND)
    run = arguments.model(args)
    out_dir = args.out_dir or run.run_dir / "analysis" / f"{task.name}-{args.split}-{run.step}"
    require_replaceable(out_dir, KIND)
    policy = Policy(skip_empty=args.skip_empty, drop_identical_ids=not args.keep_identical_ids)
    texts = embedding_analysis.embed(run, task, policy=policy, max_docs=args.max_docs, seed=args.seed)
    analysis = embedding_analysis.analyse(texts, depth=args.depth, seed=args.seed)
    about = {"run": str(args.run_dir), "step": run.step, "dataset": task.name, "split": args.split, "seed": args.seed}
    if args.max_docs:
        about["documents"] = f"a sample of {len(texts.docs):,} with all judged ones in it"
    with atomic_dir(out_dir, KIND) as temporary:
        write_json(temporary / "analysis.json", {**about, **analysis.numbers})
        title = f"Embeddings of {run.run_dir.name} on {task.name}"
        embedding_report.write(analysis, temporary, title, about, seed=args.seed)
    print(json.dumps({"report": str(out_dir / "report.html"), **about, **analysis.numbers}))


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = command.Parser(description=__doc__)
    arguments.add_model(parser, "to analyse")
    parser.add_argument("--dataset_dir", required=True, help="a BEIR folder or a table")
    parser.add_argument("--split", default="test", help="split of the judgements (default test)")
    input_policy.add_flags(parser, identical_ids=True)
    parser.add_argument("--max_docs", type=int, help="embed a sample of this many documents; default all")
    parser.add_argument("--depth", type=int, default=100, help="ranks counted as recalled (default 100)")
    parser.add_argument("--seed", type=numeric(Seed), default=0, help="seed of samples and t-SNE")
    parser.add_argument(
        "--out_dir",
        type=Path,
        help="output folder; a former analysis in it is replaced; default <run_dir>/analysis/<data set>-<split>-<step>",
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    command.run(main)
