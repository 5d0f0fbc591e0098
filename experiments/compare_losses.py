"""Which loss trains the better retriever, all else equal? One JSON line a run: test scores with BM25 beside.

python -m experiments.compare_losses --dataset_dir=../shared/data/beir/arxiv-title-abstract \\
    --tokenizer=../shared/data/tokenizers/t5 --out_dir=runs/compare_losses --seeds 0

Every run is a plain `de-jax train` followed by `de-jax evaluate beir`, both printed to stderr, so that any line can be repeated
by hand. Finished runs are not trained again. Nothing is chosen on the test split: settings are equal for all losses.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from de_jax import command
from experiments import processes

SETTINGS = {
    "PairsOptions.batch_size": 256,
    "PairsOptions.max_query_length": 32,
    "PairsOptions.max_doc_length": 64,
    "Optimization.learning_rate": 0.03,
    "Logging.log_every_steps": 20,
    "Logging.save_every_steps": 200,
    "T5Config.num_layers": 1,
    "T5Config.dtype": "float32",
    "T5Config.dropout_rate": 0.0,
}
TEMPERATURE = 0.05
LOSSES = {
    "in_batch_softmax": {},
    "samtone_query": {"samtone.same_tower": "query"},
    "samtone_both": {"samtone.same_tower": "both"},
    "pair_samtone_eq3": {"pair.form": "samtone_eq3", "pair.alpha": 0.1},
    "pair_paper": {"pair.form": "pair_paper", "pair.alpha": 0.1},
}


def main() -> None:
    """The command."""
    args = _parse_args()
    for seed in args.seeds:
        for name in args.losses:
            run_dir = args.out_dir / f"{name}-{seed}"
            function = next(loss for loss in ("in_batch_softmax", "samtone", "pair") if name.startswith(loss))
            settings = {
                **SETTINGS,
                **LOSSES[name],
                "beir_pairs.dataset_dir": args.dataset_dir,
                "PairsOptions.tokenizer": args.tokenizer,
                "PairsOptions.seed": seed,
                "Initialization.seed": seed,
                "Optimization.num_steps": args.num_steps,
                "Recipe.loss": f"@{function}",
                f"{function}.temperature": TEMPERATURE,
            }
            train = ["de_jax", "train", "--gin_file=recipes/sde.gin", "--gin_file=models/t5_1_1_tiny.gin", f"--run_dir={run_dir}"]
            summary = processes.run([*train, *(f"--gin.{key}={value}" for key, value in settings.items())])
            evaluate = ["de_jax", "evaluate", "beir", f"--run_dir={run_dir}", f"--dataset_dir={args.dataset_dir}"]
            scores = processes.run([*evaluate, *([] if seed == args.seeds[0] and name == args.losses[0] else ["--no_bm25"])])
            print(json.dumps({"loss": name, "seed": seed, "train_seconds": summary["seconds"], **scores}), flush=True)


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset_dir", required=True, help="a BEIR folder with train and test judgements")
    parser.add_argument("--tokenizer", required=True, help="a sentencepiece model or tokenizer.json")
    parser.add_argument("--out_dir", type=Path, default=Path("runs/compare_losses"), help="gets a run folder a loss and seed")
    parser.add_argument("--losses", nargs="+", choices=list(LOSSES), default=list(LOSSES), help="default all")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--num_steps", type=int, default=400)
    return parser.parse_args()


if __name__ == "__main__":
    command.run(main)
