"""What does fine-tuning a pretrained model give, where it is trained and elsewhere? One JSON line a run, then a summary.

python -m benchmarks.fine_tune --model=all-MiniLM-L6-v2/ --data_dir=../shared/data/beir --out_dir=runs/fine_tune

For every training set, loss and seed: a plain `de-jax train` with recipes/fine_tune.gin, then `de-jax evaluate_beir` on the test
split of that set and of the sets that no run is trained on alone; all are printed to stderr, so that any line can be repeated by
hand. What is finished is not done again. Nothing is chosen on a test split: settings are equal for all and fixed in advance. The
summary compares each loss with the model as it came, query by query, the seeds averaged first; p-values are corrected by Holm's
method over all comparisons of the table.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from de_jax import command
from de_jax.data import beir
from de_jax.evaluation import metrics, significance

MEASURE = "nDCG@10"
LOSSES = {
    "in_batch_softmax": {},
    "samtone": {"samtone.same_tower": "query"},
}


def main(argv: list[str] | None = None) -> None:
    """The command."""
    args = _parse_args(argv)
    base = args.out_dir / "base"
    if not (base / "run.json").exists():
        lengths = [f"--max_query_length={args.max_query_length}", f"--max_doc_length={args.max_doc_length}"]
        _run(["tools.import_model", f"--from={args.model}", f"--run_dir={base}", "--dtype=bfloat16", *lengths])
    before = _evaluated(base, [*args.train, *args.zero_shot], args)
    print(json.dumps({"trained_on": None, **_means(before)}), flush=True)
    after: dict[tuple[str, str, str], list[dict[str, float]]] = {}
    for dataset in args.train:
        for loss in args.losses:
            for seed in args.seeds:
                run_dir = args.out_dir / f"{dataset}-{loss}-{seed}"
                _train(base, run_dir, dataset, loss, seed, args)
                scores = _evaluated(run_dir, list(dict.fromkeys([dataset, *args.zero_shot])), args)
                print(json.dumps({"trained_on": dataset, "loss": loss, "seed": seed, **_means(scores)}), flush=True)
                for tested, by_query in scores.items():
                    after.setdefault((dataset, loss, tested), []).append(by_query)
    print(json.dumps({"summary": _summary(before, after)}))


def _train(base: Path, run_dir: Path, dataset: str, loss: str, seed: int, args: argparse.Namespace) -> None:
    settings = {
        **LOSSES[loss],
        "MODEL": base,
        "beir_pairs.dataset_dir": args.data_dir / dataset,
        "beir_pairs.batch_size": args.batch_size,
        "beir_pairs.max_query_length": args.max_query_length,
        "beir_pairs.max_doc_length": args.max_doc_length,
        "beir_pairs.seed": seed,
        "train.seed": seed,
        "train.loss": f"@{loss}",
        "train.num_steps": args.num_steps,
        "train.log_every_steps": 10,
        "linear.warmup_steps": args.num_steps // 10,
    }
    gin = [f"--gin.{name}={value}" for name, value in settings.items()]
    _run(["de_jax.train", "--gin_file=recipes/fine_tune.gin", f"--run_dir={run_dir}", *gin])


def _evaluated(run_dir: Path, datasets: list[str], args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """The measure of each test query, by set."""
    folders = [str(args.data_dir / dataset) for dataset in datasets]
    report = _run(["tools.evaluate_beir", f"--run_dir={run_dir}", "--no_bm25", "--skip_empty", "--dataset_dirs", *folders])
    name = metrics.names_of([MEASURE])[0]
    scores = {}
    for dataset, found in zip(datasets, report["sets"], strict=True):
        results = metrics.read_trec_run(Path(found["evaluation_dir"]) / "dense.trec")
        qrels = beir.read_qrels(beir.find_qrels(args.data_dir / dataset, "test"))
        by_query = metrics.score_results(results, qrels, measures=[MEASURE])
        scores[dataset] = {query_id: values[name] for query_id, values in by_query.items()}
    return scores


def _summary(
    before: dict[str, dict[str, float]], after: dict[tuple[str, str, str], list[dict[str, float]]]
) -> list[dict[str, Any]]:
    rows = []
    for (trained_on, loss, tested_on), seeds in after.items():
        spread = significance.spread_over_seeds(seeds)
        compared = significance.compare(significance.mean_over_seeds(seeds), before[tested_on])
        names = {"trained_on": trained_on, "loss": loss, "tested_on": tested_on}
        rows.append({**names, "before": _mean(before[tested_on]), **spread._asdict(), **compared._asdict()})
    for name in ("p_t_test", "p_permutation"):
        for row, corrected in zip(rows, significance.holm([row[name] for row in rows]), strict=True):
            row[f"{name}_holm"] = corrected
    return rows


def _means(scores: dict[str, dict[str, float]]) -> dict[str, float]:
    return {dataset: round(_mean(by_query), 5) for dataset, by_query in scores.items()}


def _mean(by_query: dict[str, float]) -> float:
    return sum(by_query.values()) / len(by_query)


def _run(arguments: list[str]) -> dict[str, Any]:
    line = [sys.executable, "-m", *arguments]
    print(shlex.join(line), file=sys.stderr, flush=True)
    found: dict[str, Any] = json.loads(subprocess.run(line, check=True, stdout=subprocess.PIPE, text=True).stdout)
    return found


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="what import_model takes, such as a folder of sentence-transformers")
    parser.add_argument("--data_dir", type=Path, required=True, help="holds the BEIR folders")
    parser.add_argument("--train", nargs="+", default=["scifact", "nfcorpus", "medquad"], help="sets to train on, one a run")
    parser.add_argument("--zero_shot", nargs="+", default=["scifact", "nfcorpus", "cranfield"], help="sets to test every run on")
    parser.add_argument("--losses", nargs="+", choices=list(LOSSES), default=list(LOSSES), help="default all")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--num_steps", type=int, default=60)
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--max_query_length", type=int, default=64, help="tokens (default 64)")
    parser.add_argument("--max_doc_length", type=int, default=128, help="tokens, in training and in tests (default 128)")
    parser.add_argument("--out_dir", type=Path, default=Path("runs/fine_tune"), help="gets a run folder each")
    return parser.parse_args(argv)


if __name__ == "__main__":
    command.run(main)
