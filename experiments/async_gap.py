"""Effect of the age of mined negatives: trains ANCE with several refresh intervals and learning rates, and two ways of mining.

python -m experiments.async_gap --model=runs/minilm --dataset_dir=data/beir/nfcorpus --learning_rates 1e-5 5e-5 --refresh 10 40

Every run is a plain `de-jax train` with recipes/ance_firstp.gin, printed to stderr so that it can be repeated by hand. A run mines
its negatives itself, or, where the refresh is "beside", a second process does: `de-jax mine`, which on one machine takes its share
of the processor. Each run prints one JSON line: the dev scores and the loss by update, the age of the negatives, and the number of
generations. The picture is figure 9 of the ANCE paper (Xiong et al. 2021) for this data. Finished runs are not repeated, and no
test split is used.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from de_jax import command
from de_jax.data.negatives import generations
from de_jax.reports import plots
from de_jax.training.run import run_log
from de_jax.training.run.run_folder import CHECKPOINTS_DIR, complete_steps

BESIDE = "beside"
LINES = (("-", "o"), ("--", "s"), (":", "^"))  # of the learning rates, with their markers


def main(argv: list[str] | None = None) -> None:
    """The command."""
    args = _parse_args(argv)
    curves: dict[tuple[float, str], list[list[float]]] = {}
    for rate, refresh in itertools.product(args.learning_rates, args.refresh):
        run_dir = args.out_dir / f"{Path(args.dataset_dir).name}-{rate:g}-{refresh}"
        if args.num_steps not in complete_steps(run_dir / CHECKPOINTS_DIR):
            _train(run_dir, rate, refresh, args)
        lines = run_log.read_metrics(run_dir / run_log.METRICS_FILE)
        report = {name: _curve(lines, name) for name in ("dev/ndcg@10", "loss", "negatives/staleness")}
        num_generations = len(generations.numbers(run_dir / "negatives"))
        print(json.dumps({"learning_rate": rate, "refresh": refresh, "num_generations": num_generations, **report}), flush=True)
        curves[rate, _words(refresh, args.num_steps)] = report["dev/ndcg@10"]
    _draw(curves, args.out_dir / "async_gap.png", f"{Path(args.dataset_dir).name}: how negatives are mined")


def _train(run_dir: Path, rate: float, refresh: str, args: argparse.Namespace) -> None:
    settings = {
        "MODEL": args.model,
        "beir_pairs.dataset_dir": args.dataset_dir,
        "PairsOptions.dev_split": "dev",
        "PairsOptions.batch_size": args.batch_size,
        "PairsOptions.max_query_length": args.max_query_length,
        "PairsOptions.max_doc_length": args.max_doc_length,
        "Optimization.optimizer": "@adamw",
        "Optimization.learning_rate": rate,
        "linear.end": rate,  # a falling rate would hide what old negatives do
        "linear.warmup_steps": 0,
        "Optimization.num_steps": args.num_steps,
        "HardNegatives.mine_every_steps": None if refresh == BESIDE else int(refresh),
        "Logging.save_every_steps": args.save_every_steps,
        "Logging.evaluate_every_steps": args.evaluate_every_steps,
        "Logging.log_every_steps": args.evaluate_every_steps,
    }
    arguments = ["--gin_file=recipes/ance_firstp.gin", f"--run_dir={run_dir}"]
    arguments += [f"--gin.{name}={value}" for name, value in settings.items()]
    with _miner(arguments) if refresh == BESIDE else contextlib.nullcontext():
        line = [sys.executable, "-m", "de_jax", "train", *arguments]
        print(shlex.join(line), file=sys.stderr, flush=True)
        subprocess.run(line, check=True, stdout=subprocess.DEVNULL)


@contextlib.contextmanager
def _miner(arguments: list[str]) -> Iterator[None]:
    """The second process, as long as the run needs it."""
    line = [sys.executable, "-m", "de_jax", "mine", *arguments, "--poll_seconds=0.5"]
    print(shlex.join(line), file=sys.stderr, flush=True)
    miner = subprocess.Popen(line, stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        miner.kill()
        miner.wait()


def _curve(lines: list[dict[str, Any]], name: str) -> list[list[float]]:
    return [[line["step"], line[name]] for line in lines if name in line]


def _words(refresh: str, num_steps: int) -> str:
    if refresh == BESIDE:
        return "by a second process"
    return "once" if int(refresh) >= num_steps else f"every {refresh} updates"


def _draw(curves: dict[tuple[float, str], list[list[float]]], out_png: Path, title: str) -> None:
    """One colour for each way of mining, one kind of line for each learning rate."""
    rates, ways = (list(dict.fromkeys(names)) for names in zip(*curves, strict=True))
    with plots.new_figure(out_png, figsize=(plots.NARROW, 4.2)) as figure:
        axis = figure.add_subplot()
        for (rate, way), curve in sorted(curves.items(), key=lambda item: ways.index(item[0][1])):  # the legend's columns
            label = way if len(rates) == 1 else f"{way}, rate {rate:g}"
            line, marker = LINES[rates.index(rate) % len(LINES)]
            colour = plots.COLOURS[ways.index(way)]
            axis.plot(*zip(*curve, strict=True), line, color=colour, lw=1.8, marker=marker, ms=4.5, label=label)
        axis.set(xlabel="updates", ylabel="dev nDCG@10", title=title)
        figure.legend(loc="outside lower center", ncols=len(ways), handlelength=2.2, columnspacing=1.2)


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="what recipes/fine_tune.gin takes as its MODEL")
    parser.add_argument("--dataset_dir", required=True, help="a BEIR folder with a dev split")
    parser.add_argument("--learning_rates", nargs="+", type=float, default=[1e-5, 5e-5])
    parser.add_argument("--refresh", nargs="+", default=["10", "40", BESIDE], help="updates between two minings, or 'beside'")
    parser.add_argument("--num_steps", type=int, default=80)
    parser.add_argument("--evaluate_every_steps", type=int, default=10)
    parser.add_argument("--save_every_steps", type=int, default=10, help="updates between checkpoints")
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--max_query_length", type=int, default=32, help="tokens")
    parser.add_argument("--max_doc_length", type=int, default=64, help="tokens")
    parser.add_argument("--out_dir", type=Path, default=Path("runs/async_gap"), help="gets a run folder each, and the picture")
    return parser.parse_args(argv)


if __name__ == "__main__":
    command.run(main)
