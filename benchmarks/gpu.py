"""Everything to measure on one GPU, part by part: correctness first, then training, encoding, XXL and the indexes.

python -m benchmarks.gpu --out=gpu_results
python -m benchmarks.gpu --out=gpu_results --part correctness train_base

Each part is a process of its own with a time limit, and one file `<out>/<part>.json`: the command, its seconds, and the JSON lines
that it printed, or the end of its error output. A part that cannot run here is skipped, and its file says why. Finished parts are
not repeated: the same command continues, and takes failed and skipped parts again. The last line counts the parts by outcome; the
exit code is 1 if a part failed. `--rehearse` runs all parts in small sizes on whatever device there is, to see that they work.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import measure
from de_jax import command
from de_jax.files import outputs

LIMIT = 480
"""Seconds of a part."""
TAIL = 4000
"""Characters of error output that are kept."""
PYTEST = "pytest -q -p no:cacheprovider -o addopts=--import-mode=importlib -m gpu tests/gpu"


class Part(NamedTuple):
    """A command with its needs."""

    line: str  # behind `python -m`
    small: str = ""  # flags of a rehearsal; later ones win
    device_gib: float = 0.0  # of the GPU's memory
    host_gib: float = 0.0


def _step(model: str, flags: str, small: str = "", device_gib: float = 16.0) -> Part:
    tiny = "--model tiny --batch_size 8 --num_batches 1 --repeats 1 --query_length 16 --doc_length 32"
    line = f"benchmarks.step_time --model {model} --batch_size 512 --loss samtone --dtype bfloat16 {flags}"
    return Part(line, f"{tiny} {small}", device_gib)


def _index(num_docs: int, device_gib: float, host_gib: float) -> Part:
    line = f"benchmarks.index_throughput --num_docs {num_docs} --indexes flat ivf --num_queries 2048"
    return Part(line, "--num_docs 2000 --num_queries 64 --repeats 1", device_gib, host_gib)


_FULL = "--query_length 64 --doc_length 256 --repeats 5"
_REAL = "--real_lengths --repeats 5"
_ENCODE = "--num_passages 50000 --num_queries 100000 --peer_dtypes bfloat16 --peer_batch_size 512 --peer_compiled"
_FEW = "--model tiny --num_passages 20 --num_queries 20 --repeats 1"
PARTS = {
    "correctness": Part(PYTEST),
    "train_base": _step("base", f"{_FULL} --peer_compiled", "--no_peer"),
    "train_base_real": _step("base", f"{_REAL} --peer_compiled", "--no_peer"),
    "train_large": _step("large", f"{_FULL} --remat dots --peer_compiled", "--no_peer", 48.0),
    "train_large_real": _step("large", f"{_REAL} --remat dots --peer_compiled", "--no_peer", 48.0),
    "train_small": _step("small", f"{_FULL} --peer_compiled", "--no_peer"),
    "encode_base": Part(f"benchmarks.encode_throughput --model base {_ENCODE}", f"{_FEW} --no_peer", 16.0),
    "encode_large": Part(f"benchmarks.encode_throughput --model large {_ENCODE}", f"{_FEW} --no_peer", 16.0),
    "train_xxl": _step(
        "xxl", f"{_FULL} --remat full --gin T5Config.scan_layers=True --gin train.num_chunks=8 --no_peer", device_gib=75.0
    ),
    "index_1m": _index(1_000_000, 8.0, 16.0),
    "index_10m": _index(10_000_000, 48.0, 96.0),
}
"""In this order: where time runs out, the most important figures are there."""


def main(argv: list[str] | None = None) -> None:
    """The command."""
    args = _parse_args(argv)
    device = _device()
    outcomes: collections.Counter[str] = collections.Counter()
    for name in args.part:
        path = args.out / f"{name}.json"
        if path.is_file() and (kept := outputs.read_json(path))["outcome"] == "done" and kept["rehearsed"] == args.rehearse:
            outcomes["done"] += 1
            continue
        part = PARTS[name]
        why_not = None if args.rehearse else _why_not(part, device)
        found = {"outcome": "skipped", "because": why_not} if why_not else _run(part, rehearse=args.rehearse, limit=args.limit)
        outputs.write_json(path, {"part": name, **found, "rehearsed": args.rehearse, "device": device, **measure.environment()})
        measure.log(f"{name}: {found['outcome']} {found.get('because', '')}".rstrip())
        outcomes[found["outcome"]] += 1
    print(json.dumps({"out": str(args.out), **outcomes}))
    if outcomes["failed"]:
        sys.exit(1)


def _device() -> dict[str, Any]:
    """The platform, kind and memory of JAX's first device; asked in a process of its own, which frees it."""
    program = (
        "import jax, json; d = jax.devices()[0]; s = d.memory_stats() or {}; "
        "print(json.dumps({'platform': d.platform, 'kind': d.device_kind, 'bytes': s.get('bytes_limit', 0)}))"
    )
    done = subprocess.run([sys.executable, "-c", program], env=_env(), stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _why_not(part: Part, device: dict[str, Any]) -> str | None:
    """The reason for which a part cannot run here."""
    if device["platform"] != "gpu":
        return f"JAX sees no GPU, only {device['platform']}; see de-jax doctor"
    own, host = device["bytes"] / 2**30, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    if own < part.device_gib:
        return f"it needs {part.device_gib:g} GiB of the GPU, and JAX has {own:.1f}"
    if host < part.host_gib:
        return f"it needs {part.host_gib:g} GiB of memory, and the machine has {host:.1f}"
    return None


def _env() -> dict[str, str]:
    """Almost all of the GPU for the process that measures, and nothing before it asks."""
    others = {name: value for name, value in os.environ.items() if name != "XLA_PYTHON_CLIENT_MEM_FRACTION"}
    return {**others, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_CLIENT_MEM_FRACTION": "0.95"}


def _run(part: Part, *, rehearse: bool, limit: float) -> dict[str, Any]:
    """The outcome of a part with its output."""
    line = f"{part.line} {part.small}" if rehearse else part.line
    start = time.monotonic()
    told: dict[str, Any] = {"command": f"python -m {line}"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", *line.split()], env=_env(), capture_output=True, text=True, timeout=limit, check=False
        )
    except subprocess.TimeoutExpired as error:
        tail = (error.stderr or b"").decode(errors="replace")[-TAIL:]
        return {"outcome": "failed", "because": f"it took longer than {limit:g} seconds", **told, "stderr": tail}
    told |= {"seconds": round(time.monotonic() - start, 1)}
    results = [json.loads(text) for text in done.stdout.splitlines() if text.startswith("{")]
    if done.returncode:
        return {
            "outcome": "failed",
            "because": f"exit code {done.returncode}",
            **told,
            "stderr": (done.stdout + done.stderr)[-TAIL:],
        }
    return {"outcome": "done", **told, "results": results or done.stdout.splitlines()[-1:]}


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = command.Parser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="gets a JSON file for each part")
    parser.add_argument("--part", nargs="+", choices=list(PARTS), default=list(PARTS), help="default all, in this order")
    parser.add_argument("--limit", type=float, default=LIMIT, help=f"seconds of a part (default {LIMIT})")
    parser.add_argument("--rehearse", action="store_true", help="small sizes on any device")
    return parser.parse_args(argv)


if __name__ == "__main__":
    command.run(main)
