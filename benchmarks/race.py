"""From the command to the finished model: `de-jax train` beside sentence-transformers' own trainer; prints one JSON line.

taskset -c 1 python -m benchmarks.race --model all-MiniLM-L6-v2/ --dataset_dir data/beir/medquad --length 64 --dtype bfloat16

Each side is a process of its own. It reads the same table of pairs, trains one epoch with the same model, batch size, optimizer,
peak rate, schedule, clipping and scale of scores, and writes its model. Ours starts with an empty cache of compiled programs;
`ours_again` finds them there. The peer is SentenceTransformerTrainer with MultipleNegativesRankingLoss. CPU seconds and the peak of
resident memory are the kernel's of the process when it has ended. A step's CPU seconds are read as its line appears in a log.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import measure
from de_jax import command
from de_jax.data.text import beir
from de_jax.types import InputError

LOOK_SECONDS = 0.02
RATE, WARMUP_STEPS, TEMPERATURE, SEED = 2e-5, 5, 0.05, 0


def main(argv: list[str] | None = None) -> None:
    """The command."""
    args = _parse_args(argv)
    num_steps = -(-args.num_pairs // args.batch_size)
    report: dict[str, Any] = {"benchmark": "race", "model": args.model, "dtype": args.dtype, "length": args.length}
    report |= {"num_pairs": args.num_pairs, "batch_size": args.batch_size, "num_steps": num_steps}
    with tempfile.TemporaryDirectory(prefix="race-", dir=args.work_dir) as name:
        work = Path(name)
        _write_pairs(args, work / "pairs.csv")
        for repeat, side in itertools.product(range(args.repeats), args.sides):
            log = work / f"{side}-{repeat}" / "metrics.jsonl"
            argv_of = _theirs if side == "peer" else _ours
            cache = work / f"programs-{repeat}"
            found = timed(argv_of(args, work, log, num_steps), log, num_steps, {"JAX_COMPILATION_CACHE_DIR": str(cache)})
            measure.log(f"{side}: {found}")
            report.setdefault(side, []).append(found)
    print(json.dumps(report | measure.environment()))


def timed(argv: list[str], log: Path, num_steps: int, environment: dict[str, str]) -> dict[str, float]:
    """Runs a command that writes a line to `log` after each step: its seconds and memory in all, and by step.

    Raises:
        InputError: the command failed, or wrote another number of lines.
    """
    start, environment = time.perf_counter(), os.environ | environment
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has its bytecode
    with open(log.parent.parent / f"{log.parent.name}.txt", "w+") as said:
        process = subprocess.Popen(argv, env=environment, stdout=said, stderr=said)
        steps, usage, status = _followed(process, log)
        seconds = time.perf_counter() - start
        if status or len(steps) != num_steps:
            said.seek(0)
            raise InputError(f"{argv} ended with {status} after {len(steps)} steps: {said.read()[-2000:]}")
    done = [cpu for cpu, _ in steps]
    return {
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 1),
        "wall_seconds": round(seconds, 1),
        "peak_gib": round(usage.ru_maxrss / 2**20, 2),
        "cpu_to_first_step": round(done[0], 1),
        "cpu_of_a_step": round((done[-1] - done[1]) / (num_steps - 2), 3),
        "cpu_after_last_step": round(usage.ru_utime + usage.ru_stime - done[-1], 1),
        "gib_at_first_step": round(steps[0][1], 2),
    }


def _followed(process: subprocess.Popen[str], log: Path) -> tuple[list[tuple[float, float]], Any, int]:
    """(CPU seconds, peak GiB so far) when each step's line appeared; the resources of the whole process, and how it ended."""
    steps: list[tuple[float, float]] = []
    while True:
        ended, status, usage = os.wait4(process.pid, os.WNOHANG)
        num_lines = log.read_bytes().count(b"\n") if log.is_file() else 0
        now = (usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 2**20) if ended else _so_far(process.pid)
        steps += [now] * (num_lines - len(steps))
        if ended:
            process.returncode = os.waitstatus_to_exitcode(status)
            return steps, usage, process.returncode
        time.sleep(LOOK_SECONDS)


def _so_far(pid: int) -> tuple[float, float]:
    """CPU seconds of a running process, and the peak of its resident memory in GiB."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK"), int(status.get("VmHWM", "0 kB").split()[0]) / 2**20


def _ours(args: argparse.Namespace, work: Path, log: Path, num_steps: int) -> list[str]:
    bindings = {
        "MODEL": repr(args.model),
        "table_pairs.path": repr(str(work / "pairs.csv")),
        "PairsOptions.batch_size": args.batch_size,
        "PairsOptions.max_query_length": args.length,
        "PairsOptions.max_doc_length": args.length,
        "table_pairs.dev_fraction": 0.0,
        "pretrained_tower.dtype": repr(args.dtype),
        "in_batch_softmax.temperature": TEMPERATURE,
        "in_batch_softmax.directions": repr("query_to_doc"),
        "Optimization.learning_rate": RATE,
        "Optimization.num_steps": num_steps,
        "Logging.log_every_steps": 1,
        "linear.warmup_steps": WARMUP_STEPS,
        **dict(setting.split("=", 1) for setting in args.gin),
    }
    flags = [f"--gin.{name}={value}" for name, value in bindings.items()]
    return [sys.executable, "-m", "de_jax", "train", "--gin_file=recipes/table.gin", f"--run_dir={log.parent}", *flags]


def _theirs(args: argparse.Namespace, work: Path, log: Path, num_steps: int) -> list[str]:
    flags = {name: getattr(args, name) for name in ("model", "batch_size", "length", "dtype")}
    flags |= {
        "pairs": work / "pairs.csv",
        "log": log,
        "rate": RATE,
        "warmup_steps": WARMUP_STEPS,
        "scale": 1 / TEMPERATURE,
        "seed": SEED,
    }
    return [sys.executable, "-m", "benchmarks.race_peer", *(f"--{name}={value}" for name, value in flags.items())]


def _write_pairs(args: argparse.Namespace, path: Path) -> None:
    """The first pairs of a BEIR folder's training split as a table."""
    dataset = beir.read(args.dataset_dir, "train")
    queries, docs = (dict(zip(texts.ids, texts.texts, strict=True)) for texts in (dataset.queries, dataset.docs))
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["query", "doc"])
        writer.writerows(itertools.islice(_pairs(dataset.qrels, queries, docs), args.num_pairs))


def _pairs(qrels: beir.Qrels, queries: dict[str, str], docs: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Each query with its first relevant document, no text twice, so that both sides have the same batches' worth of pairs."""
    seen: set[str] = set()
    for query_id, judged in qrels.items():
        pair = queries[query_id], docs[next(doc_id for doc_id, grade in judged.items() if grade > 0)]
        if not seen & set(pair):
            seen |= set(pair)
            yield pair


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder of sentence-transformers")
    parser.add_argument("--dataset_dir", required=True, help="a BEIR folder, whose training pairs are used")
    parser.add_argument("--num_pairs", type=int, default=1500, help="pairs of the epoch (default 1500)")
    parser.add_argument("--batch_size", type=int, default=32, help="pairs of a step (default 32)")
    parser.add_argument("--length", type=int, default=64, help="tokens that texts are cut to (default 64)")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="of products; theirs by autocast")
    parser.add_argument("--sides", nargs="+", default=["ours", "peer"], choices=("ours", "ours_again", "peer"), help="who runs")
    parser.add_argument("--repeats", type=int, default=1, help="races (default 1)")
    parser.add_argument("--gin", action="append", default=[], metavar="NAME=VALUE", help="another setting of ours")
    parser.add_argument("--work_dir", help="where runs are written for the time of the race; default the system's temporary folder")
    return parser.parse_args(argv)


if __name__ == "__main__":
    command.run(main)
