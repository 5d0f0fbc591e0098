"""Cost of mining hard negatives; prints one JSON line a setting: encode, search at each size, training, beside.

python -m benchmarks.mine_throughput --num_docs 10000 100000 1000000 --model base
python -m benchmarks.mine_throughput --num_docs --gin_file=recipes/ance_firstp.gin --gin.MODEL=runs/bm25_neg \\
    --gin.beir_pairs.dataset_dir=data/beir/scifact --gin.Optimization.num_steps=400 --out_dir=runs/mine_throughput

encode    texts per second of a model file on MS MARCO-like lengths (`encode_throughput`)
search    queries per second, recall, size and build time of each index (`index_throughput`), and the seconds that one refresh of a
          corpus of that size would take: encoding it and the training queries, building the index, searching it
training  with a recipe: seconds of an update by `de-jax train` alone, of the stages of one `de-jax mine --once`, and the share of
          its time that a run which mines by itself spends mining, for each interval
beside    the same training with `de-jax mine` in a second process. On one device, or on the same cores, the two take turns: give
          each its own by --trainer_prefix and --miner_prefix ("taskset -c 0", "env CUDA_VISIBLE_DEVICES=1")
"""

from __future__ import annotations

import argparse
import json
import resource
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import encode_throughput, index_throughput, measure
from de_jax import command
from de_jax.recipe import Recipe
from de_jax.training.run.run_log import METRICS_FILE, read_metrics
from de_jax.types import InputError
from reproduction.commands import parse_with_settings

DEPTH = 200
"""ANCE draws from the first 200; documents are planted in groups of as many, since beyond a group there is only noise."""
UNMEASURED_LINES = 2
"""Lines of the log in which steps are still compiled."""
MINER_ENDS_SECONDS = 600


def main(argv: list[str] | None = None) -> None:
    """The command."""
    args, settings = _parse_args(argv)
    for report in _reports(args, settings):
        print(json.dumps({"benchmark": "mine_throughput", **report, **index_throughput.environment()}), flush=True)


def _reports(args: argparse.Namespace, settings: list[str]) -> Iterator[dict[str, Any]]:
    if args.num_docs:
        encoding = _encoding(args)
        yield {"setting": "encode", **encoding}
        for num_docs in args.num_docs:
            report = index_throughput.of_size(num_docs, args)
            rates = encoding["passages_per_second"], encoding["queries_per_second"]
            indexes = [name for name in index_throughput.INDEXES if name in report]
            report["num_train_queries"] = args.num_train_queries
            report["refresh_seconds"] = {name: _refresh_seconds(report[name], num_docs, *rates, args) for name in indexes}
            yield {"setting": "search", **report, "peak_mib": _peak_mib()}
    if args.gin_file:
        alone = _trained(args.out_dir / "alone", args, settings)
        mined = _mined_once(args.out_dir / "alone", args, settings)
        share = {every: round(mined["total"] / (mined["total"] + every * alone["step"]), 4) for every in args.refresh_every_steps}
        seconds = {"seconds_per_step": alone["step"], "seconds_of_mining": mined, "mining_share_by_interval": share}
        yield {"setting": "training", **seconds}
        yield {"setting": "beside", **_beside(alone, args, settings)}


def _encoding(args: argparse.Namespace) -> dict[str, Any]:
    numbers = [f"--num_passages={args.num_texts}", f"--num_queries={args.num_texts}", f"--repeats={args.repeats}"]
    report = encode_throughput.measured(["--no_peer", "--peak_tflops=1", f"--model={args.model}", *numbers])
    rates = {f"{kind}_per_second": report[kind]["texts_per_second"]["ours"] for kind in ("passages", "queries")}
    return {"model": args.model, "dtype": report["dtype"], "num_texts": args.num_texts, **rates, "peak_mib": _peak_mib()}


def _refresh_seconds(
    index: dict[str, Any], num_docs: int, docs_per_second: float, queries_per_second: float, args: argparse.Namespace
) -> float:
    queries = args.num_train_queries
    encoding = num_docs / docs_per_second + queries / queries_per_second
    return round(encoding + index["build_seconds"] + queries / index["queries_per_second"], 1)


def _trained(run_dir: Path, args: argparse.Namespace, settings: list[str]) -> dict[str, float]:
    """Seconds of an update, the median over the log's lines, and of the whole, of a run that mines its first negatives alone."""
    process = _start(run_dir, args.trainer_prefix, "train", args, settings)
    summary = json.loads(_output(process))
    lines = [line for line in read_metrics(run_dir / METRICS_FILE) if "pairs_per_second" in line][UNMEASURED_LINES:]
    if not lines:
        raise InputError(
            f"{run_dir} has too few steps to measure; set Optimization.num_steps to at least {3 * args.log_every_steps}."
        )
    speed = statistics.median(line["pairs_per_second"] for line in lines)
    batch_size = Recipe.load(run_dir).options.batch_size
    return {"step": round(batch_size / speed, 4), "total": summary["seconds"]}


def _mined_once(run_dir: Path, args: argparse.Namespace, settings: list[str]) -> dict[str, float]:
    """Seconds of the stages of one refresh by the finished run."""
    report = json.loads(_output(_start(run_dir, args.miner_prefix, "mine", args, settings, "--once")))
    return {**report["seconds"], "total": round(sum(report["seconds"].values()), 3)}


def _beside(alone: dict[str, float], args: argparse.Namespace, settings: list[str]) -> dict[str, Any]:
    """The same run with a miner in a process of its own, which mines by every new checkpoint."""
    run_dir = args.out_dir / "beside"
    miner = _start(run_dir, args.miner_prefix, "mine", args, settings, "--poll_seconds=0.2")
    try:
        beside = _trained(run_dir, args, settings)
        generations = _output(miner).splitlines()
    finally:
        miner.kill()
    seconds = sum(sum(json.loads(line)["seconds"].values()) for line in generations)
    return {
        "seconds_per_step": {"alone": alone["step"], "beside": beside["step"]},
        "slowdown": round(beside["step"] / alone["step"] - 1, 4),
        "num_generations": len(generations),
        "mining_share_of_time": round(seconds / beside["total"], 4),
        "prefixes": {"trainer": args.trainer_prefix, "miner": args.miner_prefix},
    }


def _start(
    run_dir: Path, prefix: str, verb: str, args: argparse.Namespace, settings: list[str], *more: str
) -> subprocess.Popen[str]:
    own = ["HardNegatives.mine_every_steps=None", f"Logging.log_every_steps={args.log_every_steps}"]
    gin = [f"--gin_file={name}" for name in args.gin_file] + [f"--gin.{setting}" for setting in (*own, *settings)]
    line = [*shlex.split(prefix), sys.executable, "-m", "de_jax", verb, *gin, f"--run_dir={run_dir}", *more]
    measure.log(shlex.join(line))
    return subprocess.Popen(line, stdout=subprocess.PIPE, text=True)


def _output(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=None if "train" in process.args else MINER_ENDS_SECONDS)  # type: ignore[operator]
    if process.returncode:
        raise InputError(f"{shlex.join(process.args)} ended with code {process.returncode}; its message is above.")  # type: ignore[arg-type]
    return output


def _peak_mib() -> int:
    """The most memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def _parse_args(argv: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    index_throughput.add_arguments(parser, k=DEPTH, docs_a_group=DEPTH)
    parser.add_argument("--model", default="small", help="whose encoding is timed, a model file (default small)")
    parser.add_argument("--num_texts", type=int, default=1000, help="passages, and queries, of a timed encoding (default 1000)")
    parser.add_argument("--num_train_queries", type=int, default=500_000, help="of a refresh (default 500000, MS MARCO's)")
    parser.add_argument("--gin_file", action="append", default=[], help="a recipe that mines; its settings as for de-jax train")
    parser.add_argument("--refresh_every_steps", type=int, nargs="+", default=[1000, 5000, 10_000], help="intervals")
    parser.add_argument("--log_every_steps", type=int, default=10, help="updates whose mean time is one measurement (default 10)")
    parser.add_argument("--trainer_prefix", default="", help="words before the trainer's command")
    parser.add_argument("--miner_prefix", default="", help="words before the miner's command")
    parser.add_argument("--out_dir", type=Path, help="gets the two runs")
    args, settings = parse_with_settings(parser, argv)
    if args.gin_file and (not args.out_dir or args.out_dir.exists()):
        raise InputError("--out_dir is missing or there already; name a new folder for the two runs.")
    return index_throughput.checked(args), settings


if __name__ == "__main__":
    command.run(main)
