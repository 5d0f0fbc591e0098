"""Makes light query towers for a model with DAFT, and plots quality against speed; prints one JSON object, a table to stderr.

de-jax daft --model=all-MiniLM-L6-v2 --query_layers 1 2 3 --dataset_dir=data/beir/nfcorpus --out_dir=runs/daft

The first stage aligns a query tower of some of the model's layers with the frozen document tower. The second stage trains both
towers (Leonhardt et al.). The result for each number of layers is a run for search, export and evaluation:

<out_dir>/model                    the original model; with --query_model also query_model, the source of the query towers
          2_layers/aligned         the first stage
          2_layers/tuned           the second stage: the pair of towers
          report.json              scores, latencies, collapses
          tradeoff.png             quality against milliseconds per query
          alignment.png            divergence during the first stage
          towers.png               the same queries by both towers, before, between and after the stages

--gin.NAME=VALUE changes a setting of both recipes, --gin1.NAME=VALUE of recipes/daft_stage1.gin alone, and --gin2.NAME=VALUE of
recipes/daft_stage2.gin alone. --num_align_steps=0 trains both towers in one stage with recipes/daft_one_stage.gin, in
2_layers/at_once. Repeat the command to continue after a stop.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

from de_jax import command
from de_jax.configurables import read_recipe
from de_jax.data.text import beir, input_policy
from de_jax.data.text.sides import Side
from de_jax.evaluation import dev_scores, latency
from de_jax.evaluation.task import Policy, beir_task, evaluate
from de_jax.files import folders, outputs
from de_jax.interop import any_model
from de_jax.interop.pretrained import Pretrained
from de_jax.reports import daft_report
from de_jax.settings import NonNegativeInt, PositiveFloat, Seed, numeric
from de_jax.trainer import first_params, train
from de_jax.training.run.run_folder import BEST_DIR, Run, complete_steps, load_run, write_run
from de_jax.types import InputError

MAX_DRAWN = 300
QUERY_MODEL = "query_model"
RECIPES = {"aligned": "daft_stage1", "tuned": "daft_stage2", "at_once": "daft_one_stage"}
STAGES = (("at_once",), ("aligned", "tuned"))
"""Without alignment, and with it."""
Settings = dict[str, list[str]]
"""Gin's NAME=VALUE, by the prefix that they were given with."""
PREFIXES = ("gin", "gin1", "gin2")
OWN_PROJECTION = {
    **dict.fromkeys((f"pretrained_tower.projection_{what}" for what in ("dim", "bias", "init")), None),
    "Initialization.init_new": (),
}
"""Settings for a model trained with a projection: it keeps the projection. The paper's models start without."""


def main(argv: list[str] | None = None) -> None:
    """The command."""
    args, settings = _parse_args(argv)
    task = beir_task(args.dataset_dir, args.test_split)  # fails here, before anything is trained
    queries = list(beir.read(args.dataset_dir, args.test_split, skip_empty=args.skip_empty).queries.texts)
    model, query_model = (args.out_dir / name for name in (daft_report.MODEL, QUERY_MODEL))
    if not model.exists():
        folders.require_replaceable(args.out_dir, None)
        _import(args, args.model, model)
    if args.query_model and not query_model.exists():
        _import(args, args.query_model, query_model)
    cut = load_run(query_model if args.query_model else model, only_sizes=True)
    chosen = {number: _layers(cut, number, args.which) for number in args.query_layers}
    pairs = {}
    for number, layers in chosen.items():
        name = daft_report.name_of(number)
        pairs[name] = _pair(args, settings, layers, args.out_dir / name, queries[:MAX_DRAWN])
    runs = {daft_report.MODEL: load_run(model), **{name: pair.run for name, pair in pairs.items()}}
    policy = Policy(bm25=False, skip_empty=args.skip_empty, drop_identical_ids=not args.keep_identical_ids)
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
                **(daft_report.stages(pairs[name].folders) if name in pairs else {}),
            }
            for name, run in runs.items()
        },
    }
    daft_report.draw(args.out_dir, report, {name: pair.panels for name, pair in pairs.items()})
    outputs.write_json(args.out_dir / "report.json", report)
    print(daft_report.table(report), file=sys.stderr)
    print(json.dumps(report))


class _Pair(NamedTuple):
    """The result of training a pair of towers."""

    run: Run
    folders: list[Path]  # of its stages
    panels: dict[str, daft_report.BothTowers]  # some queries by both towers, before, between and after the stages


def _pair(args: argparse.Namespace, settings: Settings, layers: tuple[int, ...], folder: Path, queries: list[str]) -> _Pair:
    """Trains the stages, each from the previous stage, the first from the original model."""
    source, runs = args.out_dir / daft_report.MODEL, {}
    for stage in STAGES[bool(args.num_align_steps)]:
        recipe = read_recipe([f"recipes/{RECIPES[stage]}.gin"], _bindings(args, source, settings, stage, layers))
        source = folder / stage
        train(recipe, source)
        if not runs:
            runs["before"] = load_run(source)._replace(params=first_params(recipe))
        runs[stage] = load_run(source, "best" if complete_steps(source / BEST_DIR) else None)
    panels = {stage.replace("_", " "): dev_scores.by_both_towers(run, queries) for stage, run in runs.items()}
    return _Pair(runs[stage], [folder / stage for stage in runs if stage in RECIPES], panels)


def _import(args: argparse.Namespace, source: str, folder: Path) -> None:
    """Imports a model as a run, with the lengths of training and test."""
    pretrained: Pretrained = any_model.read(source)
    query, doc = pretrained.query.tokenizer, pretrained.doc.tokenizer
    if query is None or doc is None:
        raise InputError(f"{source} holds no vocabulary; import it with de-jax import_model --tokenizer=<file>.")
    write_run(
        folder,
        pretrained.params,
        model=pretrained.model.with_dtype(args.dtype),
        query=Side(query, args.max_query_length),
        doc=Side(doc, args.max_doc_length),
        origin=[source],
    )


def _layers(run: Run, number: int, which: str) -> tuple[int, ...]:
    """The first `number` of the query tower's layers, or as many evenly spread over all."""
    depth = run.model.query.encoder.num_layers  # type: ignore[attr-defined]
    if not 0 <= number <= depth:
        raise InputError(f"--query_layers has {number}, but the model has {depth} layer{'s' * (depth != 1)}; give 0 to {depth}.")
    return tuple(range(number)) if which == "first" else tuple(place * depth // number for place in range(number))


def _bindings(args: argparse.Namespace, model: Path, settings: Settings, stage: str, layers: tuple[int, ...]) -> list[str]:
    aligns = stage == "aligned"
    num_steps = args.num_align_steps if aligns else args.num_steps
    own: dict[str, Any] = {
        "MODEL": model,
        "Optimization.num_steps": num_steps,
        "Optimization.learning_rate": args.learning_rate,
        "Logging.log_every_steps": 10,
        "Logging.save_every_steps": max(num_steps // 10, 1),
        "linear.warmup_steps": num_steps // 10,
        "beir_pairs.dataset_dir": args.dataset_dir,
        "beir_pairs.skip_empty": args.skip_empty,
        "PairsOptions.keep_identical_ids": args.keep_identical_ids,
        "PairsOptions.batch_size": args.batch_size,
        "PairsOptions.max_query_length": args.max_query_length,
        "PairsOptions.max_doc_length": args.max_doc_length,
        "Initialization.seed": args.seed,
        "PairsOptions.seed": args.seed,
    }
    if stage != "tuned":  # an aligned run's towers are as deep as they are
        own |= {"QUERY_LAYERS": layers}
        if args.query_model:
            own |= {"QUERY_MODEL": args.out_dir / QUERY_MODEL}
        elif load_run(model, only_sizes=True).model.doc.projection_dim:
            own |= OWN_PROJECTION
    if aligns:
        own["Alignment.every_steps"] = max(num_steps // 20, 1)
    else:
        own |= {"Logging.evaluate_every_steps": max(num_steps // 5, 1), "PairsOptions.dev_split": beir.dev_split(args.dataset_dir)}
    return [f"{name}={value}" for name, value in own.items()] + settings["gin"] + settings["gin1" if aligns else "gin2"]


def _parse_args(argv: list[str] | None) -> tuple[argparse.Namespace, Settings]:
    parser = command.Parser(description=__doc__)
    parser.add_argument("--model", required=True, help="a folder of sentence-transformers or Hugging Face, a run, or a hub name")
    parser.add_argument("--query_model", help="cut query towers from this model instead, which may have another vocabulary")
    parser.add_argument(
        "--query_layers",
        nargs="+",
        type=numeric(NonNegativeInt),
        required=True,
        help="numbers of query layers; one pair of towers each",
    )
    parser.add_argument(
        "--which", choices=("first", "spread"), default="first", help="choice of the model's layers (default first)"
    )
    parser.add_argument("--dataset_dir", required=True, help="a BEIR folder or a table; its dev split, if any, selects checkpoints")
    parser.add_argument("--test_split", default="test", help="split for the scores (default test)")
    parser.add_argument("--out_dir", type=Path, default=Path("runs/daft"), help="output folder (default runs/daft)")
    parser.add_argument(
        "--num_align_steps", type=numeric(NonNegativeInt), default=500, help="most updates of the first stage; 0 skips it"
    )
    parser.add_argument("--num_steps", type=int, default=500, help="updates of the second stage (default 500)")
    parser.add_argument("--learning_rate", type=numeric(PositiveFloat), default=5e-5, help="peak learning rate (default 5e-5)")
    parser.add_argument("--batch_size", type=int, default=48, help="pairs (default 48, as in the paper)")
    parser.add_argument("--max_query_length", type=int, default=64, help="tokens (default 64)")
    parser.add_argument("--max_doc_length", type=int, default=256, help="tokens (default 256)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="type of matrix products; default the model's")
    parser.add_argument("--num_calls", type=int, default=200, help="calls per latency (default 200)")
    input_policy.add_flags(parser, identical_ids=True)
    parser.add_argument("--seed", type=numeric(Seed), default=0)
    args, rest = parser.parse_known_args(argv)
    settings: Settings = {prefix: [] for prefix in PREFIXES}
    for argument in rest:
        prefix, _, setting = argument.removeprefix("--").partition(".")
        if prefix not in settings or not argument.startswith("--"):
            parser.error(f"unknown argument {argument}; settings are written --gin.name=value, --gin1. or --gin2.")
        settings[prefix].append(setting)
    if settings["gin1"] and not args.num_align_steps:
        parser.error("--gin1 is of the first stage, which --num_align_steps=0 leaves out; write --gin or --gin2.")
    return args, settings


if __name__ == "__main__":
    command.run(main)
