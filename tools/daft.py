"""Gives a retrieval model light query towers by DAFT, and shows what their speed costs; prints one JSON object, a table to stderr.

python -m tools.daft --model=all-MiniLM-L6-v2/ --query_layers 1 2 3 --dataset_dir=data/beir/nfcorpus --out_dir=runs/daft

For each number of layers: the first stage aligns a query tower of so many of the model's layers with the document tower, which is
frozen; the second one trains both (Leonhardt et al.). What comes out is a run for search, export and evaluation:

<out_dir>/model                    the model as it came
          2_layers/aligned         the first stage       2_layers/tuned   the second: the pair of towers
          report.json              scores, latencies, what collapsed
          tradeoff.png             quality against the time a query takes
          alignment.png            divergence over the first stage       towers.png   both towers' embeddings of the same queries

A setting of both recipes is written --gin.NAME=VALUE, of recipes/daft_stage1.gin alone --gin1.NAME=VALUE, of the second --gin2. The
same command continues one that was stopped.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from de_jax import command
from de_jax.data import beir, files
from de_jax.evaluation import daft_report, dev_scores, latency
from de_jax.evaluation.task import Policy, beir_tasks, evaluate
from de_jax.interop import checkpoints
from de_jax.interop.pretrained import Pretrained
from de_jax.recipe import Recipe, read_recipe
from de_jax.train import first_params, train
from de_jax.training.preemption import StopOnTerminate
from de_jax.training.run import BEST_DIR, Run, complete_steps, load_run, write_run
from de_jax.types import InputError

MAX_DRAWN = 300
STAGES = ("gin", "gin1", "gin2")


def main(argv: list[str] | None = None) -> None:
    """The command."""
    args, settings = _parse_args(argv)
    task = beir_tasks(args.dataset_dir, args.test_split)[0]  # fails here, before anything is trained
    queries = list(beir.read(args.dataset_dir, args.test_split, skip_empty=args.skip_empty).queries.texts)
    model = args.out_dir / daft_report.MODEL
    if not model.exists():
        _import(args, model)
    chosen = {number: _layers(load_run(model, only_sizes=True), number, args.which) for number in args.query_layers}
    runs, panels = {daft_report.MODEL: load_run(model)}, {}
    for number, layers in chosen.items():
        name = daft_report.name_of(number)
        aligned, tuned = (args.out_dir / name / stage for stage in ("aligned", "tuned"))
        first_stage = read_recipe(["recipes/daft_stage1.gin"], _bindings(args, model, settings, 1, layers))
        _train(first_stage, aligned)
        before = load_run(aligned)._replace(params=first_params(first_stage))
        _train(read_recipe(["recipes/daft_stage2.gin"], _bindings(args, aligned, settings, 2)), tuned)
        runs[name] = load_run(tuned, "best" if complete_steps(tuned / BEST_DIR) else None)
        stages = {"before": before, "aligned": load_run(aligned), "trained": runs[name]}
        panels[name] = {stage: dev_scores.by_both_towers(run, queries[:MAX_DRAWN]) for stage, run in stages.items()}
    policy = Policy(bm25=False, skip_empty=args.skip_empty)
    scores = {name: evaluate(task, policy, run)["dense"] for name, run in runs.items()}
    latencies = latency.measure(runs, queries, num_calls=args.num_calls)
    report = {
        "dataset": task.name,
        "split": args.test_split,
        "device": latency.device(),
        "systems": {
            name: {
                "run_dir": str(run.run_dir),
                "step": run.step,
                "scores": scores[name],
                "latency": [row._asdict() for row in latencies if row.name == name],
                **(daft_report.stages(run.run_dir.parent) if name in panels else {}),
            }
            for name, run in runs.items()
        },
    }
    daft_report.draw(args.out_dir, report, panels)
    files.write_json(args.out_dir / "report.json", report)
    print(daft_report.table(report), file=sys.stderr)
    print(json.dumps(report))


def _train(recipe: Recipe, run_dir: Path) -> None:
    """A stage to its end; a machine that is taken away ends the command, as it does `de-jax train`."""
    if train(recipe, run_dir)["stopped"] == StopOnTerminate.REASON:
        sys.exit(command.EXIT_STOPPED)


def _import(args: argparse.Namespace, folder: Path) -> None:
    """The model as a run, its lengths those that it is trained and tested with."""
    pretrained: Pretrained = checkpoints.read(args.model)
    if pretrained.query_tokenizer is None or pretrained.doc_tokenizer is None:
        raise InputError(f"{args.model} holds no vocabulary; import it with de-jax import_model --tokenizer=<file>.")
    write_run(
        folder,
        pretrained.params,
        model=pretrained.model.with_dtype(args.dtype),
        query_tokenizer=pretrained.query_tokenizer,
        doc_tokenizer=pretrained.doc_tokenizer,
        max_query_length=args.max_query_length,
        max_doc_length=args.max_doc_length,
    )


def _layers(run: Run, number: int, which: str) -> tuple[int, ...]:
    """The first `number` of the query tower's layers, or as many evenly spread over all."""
    depth = run.model.query.encoder.num_layers  # type: ignore[attr-defined]
    if not 0 <= number <= depth:
        raise InputError(f"--query_layers has {number}, but the model has {depth} layers; give 0 to {depth}.")
    return tuple(range(number)) if which == "first" else tuple(place * depth // number for place in range(number))


def _bindings(
    args: argparse.Namespace, model: Path, settings: dict[str, list[str]], stage: int, layers: tuple[int, ...] | None = None
) -> list[str]:
    num_steps = (args.num_align_steps, args.num_steps)[stage - 1]
    own: dict[str, Any] = {
        "MODEL": model,
        "train.num_steps": num_steps,
        "train.learning_rate": args.learning_rate,
        "train.log_every_steps": 10,
        "train.save_every_steps": max(num_steps // 10, 1),
        "linear.warmup_steps": num_steps // 10,
        "beir_pairs.dataset_dir": args.dataset_dir,
        "beir_pairs.batch_size": args.batch_size,
        "beir_pairs.max_query_length": args.max_query_length,
        "beir_pairs.max_doc_length": args.max_doc_length,
        "train.seed": args.seed,
        "beir_pairs.seed": args.seed,
    }
    if stage == 1:
        own |= {"QUERY_LAYERS": layers, "Alignment.every_steps": max(num_steps // 20, 1)}
    else:
        has_dev = (Path(args.dataset_dir) / "qrels" / "dev.tsv").exists()
        own |= {"train.evaluate_every_steps": max(num_steps // 5, 1), "beir_pairs.dev_split": "dev" if has_dev else None}
    return [f"{name}={value}" for name, value in own.items()] + settings["gin"] + settings[f"gin{stage}"]


def _parse_args(argv: list[str] | None) -> tuple[argparse.Namespace, dict[str, list[str]]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder of sentence-transformers or Hugging Face, a run, or a hub name")
    parser.add_argument("--query_layers", nargs="+", type=int, required=True, help="of the query tower; a pair each")
    parser.add_argument("--which", choices=("first", "spread"), default="first", help="of the model's layers (default first)")
    parser.add_argument("--dataset_dir", required=True, help="a BEIR folder; its dev split, if any, chooses checkpoints")
    parser.add_argument("--test_split", default="test", help="that scores are of (default test)")
    parser.add_argument("--out_dir", type=Path, default=Path("runs/daft"), help="gets everything (default runs/daft)")
    parser.add_argument("--num_align_steps", type=int, default=500, help="updates of the first stage, at most (default 500)")
    parser.add_argument("--num_steps", type=int, default=500, help="updates of the second stage (default 500)")
    parser.add_argument("--learning_rate", type=float, default=5e-5, help="at its peak (default 5e-5)")
    parser.add_argument("--batch_size", type=int, default=48, help="pairs (default 48, as in the paper)")
    parser.add_argument("--max_query_length", type=int, default=64, help="tokens (default 64)")
    parser.add_argument("--max_doc_length", type=int, default=256, help="tokens (default 256)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="of all towers' products; default the model's")
    parser.add_argument("--num_calls", type=int, default=200, help="for each latency (default 200)")
    parser.add_argument("--skip_empty", action="store_true", help="pass over empty texts instead of refusing them, in the test")
    parser.add_argument("--seed", type=int, default=0)
    args, rest = parser.parse_known_args(argv)
    settings: dict[str, list[str]] = {stage: [] for stage in STAGES}
    for argument in rest:
        stage, _, setting = argument.removeprefix("--").partition(".")
        if stage not in settings or not argument.startswith("--"):
            parser.error(f"unknown argument {argument}; settings are written --gin.name=value, --gin1. or --gin2.")
        settings[stage].append(setting)
    return args, settings


if __name__ == "__main__":
    command.run(main)
