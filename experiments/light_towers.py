"""Quality and latency of light query towers, with DAFT's alignment and without; reads the runs of experiments.fine_tune.

python -m experiments.fine_tune --model=all-MiniLM-L6-v2/ --data_dir=../shared/data/beir --train scifact nfcorpus --zero_shot \\
    --methods in_batch_softmax daft_1 one_stage_1 daft_2 one_stage_2 --num_steps=100 --learning_rate=1e-4 --out_dir=runs/light
python -m experiments.light_towers --data_dir=../shared/data/beir --train scifact nfcorpus --query_layers 1 2 --out_dir=runs/light

The first JSON line has the milliseconds a query of every query tower, measured in turns. Then comes a line for each set and split,
by `de-jax compare runs`, with three baselines: the original model for all systems, the whole model with the same training for all
systems, and the same towers trained at once for DAFT. tradeoff.png shows nDCG@10 on test against latency (Leonhardt et al.,
figure 6), alignment.png the divergence over the first stages (their figure 4). experiments.light_tradeoff draws the first picture
from recorded numbers.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from de_jax import command
from de_jax.data.text import beir
from de_jax.files import outputs
from de_jax.reports import plots
from de_jax.training.hooks.alignment import KL
from de_jax.training.run import run_log
from de_jax.types import InputError
from experiments import processes
from reproduction import daft_report

WAYS = {"daft": "aligned first (DAFT)", "one_stage": "in one stage"}
BEFORE, WHOLE, MEASURE = "before", "in_batch_softmax", "ndcg@10"
MeanAndDeviation = tuple[float, float]


def main(argv: list[str] | None = None) -> None:
    """The command."""
    args = _parse_args(argv)
    folders = {dataset: {split: _evaluations(dataset, split, args) for split in _splits(dataset, args)} for dataset in args.train}
    milliseconds = _milliseconds(args)
    print(json.dumps({"ms_per_query": milliseconds}), flush=True)
    for dataset, by_split in folders.items():
        for split, systems in by_split.items():
            print(json.dumps({"dataset": dataset, "split": split, **_compared(dataset, split, systems, args)}), flush=True)
    alone = {system: of_system["1"] for system, of_system in milliseconds.items()}
    draw({dataset: _scores(by_split["test"]) for dataset, by_split in folders.items()}, alone, args.out_dir / "tradeoff.png")
    found = {dataset: {number: _divergence(dataset, number, args) for number in args.query_layers} for dataset in args.train}
    thresholds = [threshold for of_set in found.values() for *_, threshold in of_set.values() if threshold is not None]
    panels = {
        f"{dataset}, seed {args.seeds[0]}": {
            daft_report.name_of(number).replace("_", " "): (steps, values) for number, (steps, values, _) in of_set.items()
        }
        for dataset, of_set in found.items()
    }
    daft_report.alignment_curves(panels, args.out_dir / "alignment.png", threshold=next(iter(thresholds), None))


def _splits(dataset: str, args: argparse.Namespace) -> list[str]:
    return ["test", *(["dev"] if "dev" in beir.find_splits(args.data_dir / dataset) else [])]


def _evaluations(dataset: str, split: str, args: argparse.Namespace) -> dict[str, list[Path]]:
    """By system, the folders that `de-jax evaluate beir` wrote, one a seed."""
    methods = [WHOLE, *(f"{way}_{number}" for number in args.query_layers for way in WAYS)]
    runs = {method: [args.out_dir / f"{dataset}-{method}-{seed}" for seed in args.seeds] for method in methods}
    runs = {BEFORE: [args.out_dir / "base"], **runs}
    return {system: [_evaluation(run_dir, dataset, split) for run_dir in run_dirs] for system, run_dirs in runs.items()}


def _evaluation(run_dir: Path, dataset: str, split: str) -> Path:
    for result in run_dir.glob(f"evaluations/{dataset}-*/result.json"):
        if outputs.read_json(result)["split"] == split:
            return result.parent
    raise InputError(f"{run_dir} holds no evaluation on {dataset}'s {split} split; run experiments.fine_tune first.")


def _compared(dataset: str, split: str, systems: dict[str, list[Path]], args: argparse.Namespace) -> dict[str, Any]:
    """All systems beside the original model, all beside the whole model trained alike, and DAFT beside one stage at each depth."""

    def compare(names: list[str]) -> Any:
        qrels = beir.find_qrels(args.data_dir / dataset, split)
        named = [f"{name}={','.join(map(str, systems[name]))}" for name in names]
        return processes.run(["de_jax", "compare", "runs", f"--qrels={qrels}", "--systems", *named])["systems"]

    each = {str(number): compare([f"{way}_{number}" for way in reversed(WAYS)]) for number in args.query_layers}
    whole = compare([WHOLE, *(system for system in systems if system not in (BEFORE, WHOLE))])
    return {"beside_the_model": compare(list(systems)), "beside_the_whole_model_trained_alike": whole, "beside_one_stage": each}


def _milliseconds(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Medians and ratios to the model's, by depth and batch size; the speed of a tower does not depend on its training set."""
    runs = {BEFORE: args.out_dir / "base"}
    runs |= {f"{number}": args.out_dir / f"{args.train[0]}-daft_{number}-{args.seeds[0]}" for number in args.query_layers}
    named = [f"{name}={folder}" for name, folder in runs.items()]
    measure = ["de_jax", "compare", "latency", f"--dataset_dir={args.data_dir / args.train[0]}", f"--num_calls={args.num_calls}"]
    found: dict[str, dict[str, float]] = {}
    for row in processes.run([*measure, "--runs", *named])["latencies"]:
        found.setdefault(row["name"], {}).update({f"{row['batch_size']}": row["p50"], f"{row['batch_size']}_ratio": row["ratio"]})
    return found


def _divergence(dataset: str, number: int, args: argparse.Namespace) -> tuple[list[float], list[float], float | None]:
    """Updates, divergences and the threshold of a first stage; None if its towers began below the usual threshold."""
    log = args.out_dir / f"{dataset}-daft_{number}-{args.seeds[0]}-stage1" / run_log.METRICS_FILE
    lines = [line for line in run_log.read_metrics(log) if f"alignment/{KL}" in line]
    steps, values = ([float(line[name]) for line in lines] for name in ("step", f"alignment/{KL}"))
    return steps, values, lines[0].get("alignment/threshold")


def _scores(systems: dict[str, list[Path]]) -> dict[str, MeanAndDeviation]:
    """By system, over the seeds."""
    found = {}
    for system, folders in systems.items():
        values = [float(outputs.read_json(folder / "result.json")["dense"][MEASURE]) for folder in folders]
        found[system] = statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0
    return found


def draw(scores: Mapping[str, Mapping[str, MeanAndDeviation]], milliseconds: Mapping[str, float], out_png: Path) -> None:
    """A panel for each set: means and deviations over the seeds against the milliseconds of a query.

    Args:
        scores: by set and system.
        milliseconds: of `BEFORE`, and of query towers by their number of layers.
        out_png: appears by rename.
    """
    with plots.new_figure(out_png, figsize=(plots.WIDE, 4.2)) as figure:
        axes = figure.subplots(1, len(scores), squeeze=False)[0]
        for axis, (dataset, by_system) in zip(axes, scores.items(), strict=True):
            for system, marker, label in (BEFORE, "s", "the original model"), (WHOLE, "D", "the whole model, fine-tuned"):
                axis.plot(milliseconds[BEFORE], by_system[system][0], marker, color=plots.INK, label=label)
            for (way, label), colour in zip(WAYS.items(), plots.COLOURS, strict=False):
                own = {milliseconds[system.rpartition("_")[2]]: one for system, one in by_system.items() if system.startswith(way)}
                means, deviations = zip(*own.values(), strict=True)
                axis.errorbar(list(own), means, yerr=deviations, fmt="o-", color=colour, capsize=2.5, label=label)
            axis.set(title=dataset, xlabel="milliseconds a query, alone")
            axis.set_xlim(left=0)
        axes[0].set_ylabel("nDCG@10 on test")
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data_dir", type=Path, required=True, help="holds the BEIR folders")
    parser.add_argument("--train", nargs="+", default=["scifact", "nfcorpus", "medquad"], help="sets that runs were trained on")
    parser.add_argument("--query_layers", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--num_calls", type=int, default=300, help="for each latency (default 300)")
    parser.add_argument("--out_dir", type=Path, default=Path("runs/fine_tune"), help="of experiments.fine_tune; gets the pictures")
    return parser.parse_args(argv)


if __name__ == "__main__":
    command.run(main)
