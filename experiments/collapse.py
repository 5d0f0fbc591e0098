"""Collapse of a pair of unequal towers: trains it at rising learning rates, at once and after DAFT's alignment.

python -m experiments.collapse --model=all-MiniLM-L6-v2/ --dataset_dir=../shared/data/beir/scifact --query_layers 1 2 \\
    --learning_rates 1e-4 3e-4 1e-3 3e-3

"at once" is a plain `de-jax train` with recipes/daft_one_stage.gin. "aligned" is recipes/daft_stage1.gin for half of the updates
and daft_stage2.gin for the rest. All commands are printed to stderr. Each run prints one JSON line: its last loss, the loss of
chance, log(1 + number of negatives), the spread of both towers' embeddings, and the kinds of collapse that the alarm finds.
collapse.png shows the loss by update, and towers.png queries by both towers, before training and after training at the highest
rate. Finished runs are not repeated. Only training pairs are used, except for the divergence, which is measured on the queries of
a dev split.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from de_jax import command
from de_jax.configurables import read_recipe
from de_jax.data.text import beir
from de_jax.reports import plots
from de_jax.trainer import first_params
from de_jax.training.hooks.collapse import CHANCE, LOSS, CollapseAlarm, diagnoses
from de_jax.training.run import run_log
from de_jax.training.run.run_folder import CHECKPOINTS_DIR, complete_steps, load_run
from experiments import processes
from reproduction import daft_report

SPREAD = [f"{tower}_{what}" for tower in ("query", "doc") for what in ("variance", "mean_cosine", "effective_rank")]
WAYS = {"at once": ["daft_one_stage"], "aligned": ["daft_stage1", "daft_stage2"]}
LAST_LINES = 3
"""The last lines of a log, whose means are the result of the run."""
MAX_DRAWN = 300

Curves = dict[tuple[int, str, float], list[dict[str, Any]]]


def main(argv: list[str] | None = None) -> None:
    """The command."""
    args = _parse_args(argv)
    curves: Curves = {}
    for layers, rate, way in itertools.product(args.query_layers, args.learning_rates, WAYS):
        lines = _trained(layers, rate, way, args)
        last = {name: statistics.fmean(line[name] for line in lines[-LAST_LINES:]) for name in (LOSS, CHANCE, *SPREAD)}
        found = {
            "collapsed": list(diagnoses(CollapseAlarm(), last, lines[0])),
            **{name: float(f"{value:.4g}") for name, value in last.items()},
        }
        print(json.dumps({"query_layers": layers, "learning_rate": rate, "trained": way, **found}), flush=True)
        curves[layers, way, rate] = lines
    _draw(curves, args.out_dir / "collapse.png", Path(args.dataset_dir).name)
    rate = max(args.learning_rates)
    panels = {f"{layers}-layer queries": _both_towers(layers, rate, args) for layers in args.query_layers}
    daft_report.towers(panels, args.out_dir / "towers.png", title=f"The same queries by both towers, learning rate {rate:g}")


def _trained(layers: int, rate: float, way: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The lines of the log of all stages, as of one run."""
    model, lines, recipes = args.model, [], WAYS[way]
    num_steps = args.num_steps // len(recipes)
    for stage, recipe in enumerate(recipes):
        run_dir = _run_dir(recipe, layers, rate, args)
        if num_steps not in complete_steps(run_dir / CHECKPOINTS_DIR):
            own = {"MODEL": model, "QUERY_LAYERS": tuple(range(layers))} if stage == 0 else {"MODEL": model}
            own |= {} if recipe == "daft_stage1" else {"PairsOptions.dev_split": None}
            _train(recipe, run_dir, own, rate, num_steps, args)
        logged = [line for line in run_log.read_metrics(run_dir / run_log.METRICS_FILE) if LOSS in line]
        lines += [{**line, "step": line["step"] + stage * num_steps} for line in logged]
        model = run_dir
    return lines


def _run_dir(recipe: str, layers: int, rate: float, args: argparse.Namespace) -> Path:
    folder: Path = args.out_dir / f"{recipe}-{layers}-{rate:g}"
    return folder


def _train(recipe: str, run_dir: Path, own: Mapping[str, Any], rate: float, num_steps: int, args: argparse.Namespace) -> None:
    settings = {
        "beir_pairs.dataset_dir": args.dataset_dir,
        "PairsOptions.batch_size": args.batch_size,
        "PairsOptions.max_query_length": args.max_query_length,
        "PairsOptions.max_doc_length": args.max_doc_length,
        "Optimization.learning_rate": rate,
        "Optimization.num_steps": num_steps,
        "Logging.log_every_steps": args.log_every_steps,
        "Logging.save_every_steps": num_steps,
        "linear.warmup_steps": num_steps // 10,
        **own,
    }
    gin = [f"--gin.{name}={value}" for name, value in settings.items()]
    processes.run(["de_jax", "train", f"--gin_file=recipes/{recipe}.gin", f"--run_dir={run_dir}", *gin])


def _both_towers(layers: int, rate: float, args: argparse.Namespace) -> dict[str, daft_report.BothTowers]:
    """Some training queries by both towers, before training and after each way of training."""
    queries = list(beir.read(args.dataset_dir, "train", skip_empty=True).queries.texts)[:MAX_DRAWN]
    runs = {way: load_run(_run_dir(recipes[-1], layers, rate, args)) for way, recipes in WAYS.items()}
    start = read_recipe(["recipes/daft_one_stage.gin"], [f"MODEL={args.model}", f"QUERY_LAYERS={tuple(range(layers))}"])
    before = runs["at once"]._replace(params=first_params(start))
    return {stage: daft_report.by_both_towers(run, queries) for stage, run in {"before": before, **runs}.items()}


def _draw(curves: Curves, out_png: Path, name: str) -> None:
    panels = sorted({(layers, way) for layers, way, _ in curves}, key=lambda panel: (panel[0], list(WAYS).index(panel[1])))
    rows = len(panels) // len(WAYS)
    with plots.new_figure(out_png, figsize=(plots.NARROW, 2.6 * rows + 0.3), title=f"{name}: loss by learning rate") as figure:
        axes = figure.subplots(rows, len(WAYS), sharey=True, squeeze=False)
        for axis, panel in zip(axes.flat, panels, strict=True):
            of_panel = {rate: lines for (layers, way, rate), lines in curves.items() if (layers, way) == panel}
            for rate, lines in of_panel.items():
                axis.plot([line["step"] for line in lines], [line[LOSS] for line in lines], label=f"{rate:g}")
            steps = [line["step"] for line in lines]
            axis.plot(steps, [line[CHANCE] for line in lines], color=plots.INK, lw=1, linestyle="--", label="chance")
            axis.set(title=f"query layers: {panel[0]}, {panel[1]}", xlabel="updates")
        for axis in axes[:, 0]:
            axis.set_ylabel("loss, nats")
        axes[-1, -1].legend(title="learning rate")


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="what recipes/fine_tune.gin takes as its MODEL")
    parser.add_argument("--dataset_dir", required=True, help="a BEIR folder")
    parser.add_argument("--query_layers", nargs="+", type=int, default=[1, 2], help="first layers of the model")
    parser.add_argument("--learning_rates", nargs="+", type=float, default=[1e-4, 3e-4, 1e-3, 3e-3])
    parser.add_argument("--num_steps", type=int, default=120, help="updates, of both stages together")
    parser.add_argument("--log_every_steps", type=int, default=2)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--max_query_length", type=int, default=32, help="tokens")
    parser.add_argument("--max_doc_length", type=int, default=64, help="tokens")
    parser.add_argument("--out_dir", type=Path, default=Path("runs/collapse"), help="gets a run folder each, and the picture")
    return parser.parse_args(argv)


if __name__ == "__main__":
    command.run(main)
