"""One visit to a machine with a GPU: correctness on the device first, then training, encoding and search, in one command.

python -m benchmarks.gpu --out=gpu_results --seconds=540
python -m benchmarks.gpu --out=gpu_results --part ceilings correctness

`<out>/results.jsonl` gets a line when a part ends, `<out>/log.txt` all error output. The first line describes the machine.
Without a GPU the exit code is 3 and nothing is written. Parts run in the order of their worth. A part that takes twice its expected
seconds is stopped; a part for which too little time is left is skipped by name. The same command continues with the parts that are
not done. The last line printed counts the parts by outcome; the exit code is 1 if a part failed. `--rehearse` runs all parts in
small sizes on any device.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import importlib
import json
import os
import shlex
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import IO, Any, NamedTuple

import jax

from benchmarks import measure
from de_jax import command
from de_jax.settings import PositiveFloat, numeric

NO_GPU = 3
"""The exit code where JAX sees no GPU."""
SETTINGS = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_CLIENT_MEM_FRACTION": "0.95"}
"""Of JAX: almost all of the GPU for the process that measures, and nothing before it asks."""
FEWER_KERNELS = "--xla_gpu_enable_triton_gemm=false"
"""Of XLA, unless XLA_FLAGS are given: it compiles a step in a third of the time or less."""
RESERVE = 10
"""Seconds at the end that no part may use."""


class Part(NamedTuple):
    """A benchmark with its needs."""

    line: str  # a module of `benchmarks`, and the arguments of its `measured`
    seconds: float  # expected on an H100
    small: str = ""  # arguments of a rehearsal; later ones win
    device_gib: float = 0.0  # of the GPU's memory
    peer: bool = False  # torch alone, in a process without JAX's memory
    compiles: str = ""  # arguments with which it only compiles its programs


def _step(flags: str, seconds: float, *, model: str = "base", small: str = "--no_peer", **needs: Any) -> Part:
    line = f"step_time --model {model} --batch_size 512 --loss samtone --dtype bfloat16 --repeats 3 {flags}"
    tiny = "--model tiny --batch_size 8 --num_batches 1 --repeats 1"
    return Part(line, seconds, f"{tiny} {small}", compiles="" if needs.get("peer") else "--compile_only", **needs)


_SCAN = "--gin T5Config.scan_layers=True --no_peer"
_FULL, _TINY_FULL = "--query_length 64 --doc_length 256", "--query_length 16 --doc_length 32 --no_peer"
_ENCODE = "encode_throughput --model base --num_passages 20000 --num_queries 20000 --repeats 2 --peer_dtypes bfloat16"
_KILL = "killed"
PARTS = {
    "ceilings": Part("ceilings", 25, "--size 64"),
    "correctness": Part(f"device_tests -n 4 -k 'not {_KILL}'", 120),
    "compile": Part("compile", 200),
    "base_packed": _step("--real_lengths --no_peer", 40, device_gib=20),
    "encode": Part(
        f"{_ENCODE} --peer_batch_size 512 --gin T5Config.scan_layers=True",
        50,
        "--model tiny --num_passages 20 --num_queries 20 --repeats 1",
        compiles="--num_passages 300 --num_queries 300 --repeats 1 --no_peer",
    ),
    "base_torch": _step("--real_lengths --no_ours", 60, small="--no_ours --model tiny", device_gib=60, peer=True),
    "large_packed": _step(f"--remat dots {_SCAN} --real_lengths", 60, model="large", device_gib=30),
    "xl_chunks": _step(f"--real_lengths --remat full --gin Devices.num_chunks=8 {_SCAN}", 85, model="xl", device_gib=25),
    "base_full": _step(f"{_FULL} --remat dots {_SCAN}", 40, small=_TINY_FULL, device_gib=37),
    "index": Part(
        "index_throughput --num_docs 1000000 --dim 768 --indexes exact --num_queries 2048",
        30,
        "--num_docs 2000 --num_queries 64 --repeats 1",
    ),
    "kill": Part(f"device_tests -k {_KILL}", 100),
    "base_torch_compiled": _step(
        "--real_lengths --no_ours --peer_compiled", 300, small="--no_ours --model tiny", device_gib=60, peer=True
    ),
}
"""In the order of their worth. The programs of all are compiled at once before the first of them is measured."""


def main(argv: list[str] | None = None) -> None:
    """The command."""
    args = _parse_args(argv)
    if args.worker:
        return _work()
    deadline = time.monotonic() + args.seconds
    os.environ |= (
        SETTINGS | {"XLA_FLAGS": os.environ.get("XLA_FLAGS", FEWER_KERNELS)} | ({"DE_JAX_REHEARSAL": "1"} if args.rehearse else {})
    )
    if jax.default_backend() != "gpu" and not args.rehearse:
        measure.log(f"JAX sees no GPU, only {jax.default_backend()}; nothing was measured. See de-jax doctor.")
        sys.exit(NO_GPU)
    outcomes = _Visit(args, deadline).run(args.part)
    print(json.dumps({"out": str(args.out), **outcomes}))
    if outcomes["failed"]:
        sys.exit(1)


class _Visit:
    """Parts, one after another, and the file of their results."""

    def __init__(self, args: argparse.Namespace, deadline: float) -> None:
        args.out.mkdir(parents=True, exist_ok=True)
        self._rehearse, self._deadline, self._commit = args.rehearse, deadline, args.commit
        self._path = args.out / "results.jsonl"
        self._log = (args.out / "log.txt").open("a")
        self._worker: _Worker | None = None
        self._memory_gib = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 0) / 2**30
        lines = [json.loads(line) for line in self._path.read_text().splitlines()] if self._path.is_file() else []
        of_kind = [line for line in lines if line["rehearsed"] == args.rehearse]
        self._done = {line["part"]: line for line in of_kind if line["outcome"] == "done"}
        if "machine" not in self._done:
            about = {
                "driver": _driver(),
                "xla_flags": os.environ["XLA_FLAGS"],
                "memory_gib": round(self._memory_gib, 1),
                **measure.environment(),
            }
            self._keep("machine", {**about, "outcome": "done"})

    def run(self, names: list[str]) -> collections.Counter[str]:
        """How many parts came to each outcome: done, failed or skipped."""
        outcomes: collections.Counter[str] = collections.Counter()
        for name in names:
            if name not in self._done:
                self._keep(name, self._skipped(PARTS[name]) or self._measured(PARTS[name], names))
            outcomes[self._done[name]["outcome"]] += 1
        if self._worker:
            self._worker.close()
        return outcomes

    def _keep(self, name: str, found: dict[str, Any]) -> None:
        self._done[name] = {"part": name, "rehearsed": self._rehearse, **found, "commit": self._commit}
        with self._path.open("a") as file:
            file.write(f"{json.dumps(self._done[name])}\n")
        measure.log(f"{name}: {found['outcome']} {found.get('because', '')}".rstrip())

    def _left(self) -> float:
        return self._deadline - RESERVE - time.monotonic()

    def _skipped(self, part: Part) -> dict[str, Any] | None:
        if self._rehearse:
            return None
        if self._memory_gib < part.device_gib:
            return _skip(f"it needs {part.device_gib:g} GiB of the GPU, and JAX has {self._memory_gib:.1f}")
        if self._left() < part.seconds:
            return _skip(f"it needs about {part.seconds:g} seconds, and {max(self._left(), 0):.0f} are left")
        return None

    def _compiled(self, names: list[str]) -> dict[str, Any]:
        """Compiles the programs of parts at the same time, on all processors; JAX keeps them for the parts."""
        parts = {name: PARTS[name] for name in names if PARTS[name].compiles and name not in self._done}
        lines = [" ".join([part.line, part.small if self._rehearse else "", part.compiles]) for part in parts.values()]
        workers = [_Worker(False, self._log) for _ in parts]
        start, seconds = time.monotonic(), min(PARTS["compile"].seconds, self._left())
        with concurrent.futures.ThreadPoolExecutor(max(len(parts), 1)) as pool:
            answers = list(pool.map(lambda worker, line: worker.ask(line, seconds), workers, lines))
        for worker in workers:
            worker.close()
        found = {
            name: answer.get("because") or answer["result"].get("compile_seconds")
            for name, answer in zip(parts, answers, strict=True)
        }
        return {"outcome": "done", "result": found, "seconds": round(time.monotonic() - start, 1)}

    def _measured(self, part: Part, names: list[str]) -> dict[str, Any]:
        if part.line == "compile":
            return self._compiled(names)
        line = f"{part.line} {part.small}" if self._rehearse else part.line
        if "ceilings" in self._done and line.startswith(("step_time", "encode")):
            line += f" --peak_tflops {self._done['ceilings']['result']['product_tflops']}"
        if self._worker and (self._worker.peer != part.peer or not self._worker.is_alive()):
            self._worker.close()
            self._worker = None
        if self._worker is None:
            self._worker = _Worker(part.peer, self._log)
        start = time.monotonic()
        answer = self._worker.ask(line, self._left() if self._rehearse else min(2 * part.seconds, self._left()))
        about = {"command": f"python -m benchmarks.{line}", "seconds": round(time.monotonic() - start, 1)}
        return {"outcome": "failed" if "because" in answer else "done", **answer, **about}


class _Worker:
    """A process that measures parts, several one after another; if one kills it, the next part gets another process."""

    def __init__(self, peer: bool, log: IO[str]) -> None:
        self.peer = peer
        env = {**os.environ, **({"JAX_PLATFORMS": "cpu"} if peer else {})}  # then JAX only draws the parameters
        line = [sys.executable, "-m", "benchmarks.gpu", "--worker", "--out=."]
        self._process = subprocess.Popen(line, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)

    def ask(self, line: str, seconds: float) -> dict[str, Any]:
        """The part's report as {"result"}, or the reason for its failure as {"because"}."""
        start, stop = time.monotonic(), threading.Timer(seconds, self._process.kill)
        stop.start()
        print(line, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline() if self._process.stdout else ""
        stop.cancel()
        if answer:
            found: dict[str, Any] = json.loads(answer)
            return found
        code = self._process.wait()
        late = time.monotonic() - start >= seconds
        return {"because": f"it took longer than {seconds:.0f} seconds" if late else f"its process ended with {code}; see log.txt"}

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """Ends the process, which frees its memory."""
        self._process.kill()
        self._process.wait()


def _work() -> None:
    """Answers each line of stdin, a part, with a line of JSON."""
    answers, sys.stdout = sys.stdout, sys.stderr  # what libraries print goes to the log
    command.keep_compiled()
    for line in sys.stdin:
        module, *argv = shlex.split(line)
        try:
            answer = {"result": importlib.import_module(f"benchmarks.{module}").measured(argv)}
        except (Exception, SystemExit) as error:  # the next part may do better
            traceback.print_exc()
            answer = {"because": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


def _skip(because: str) -> dict[str, Any]:
    return {"outcome": "skipped", "because": because}


def _driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=name,driver_version,clocks.max.sm", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = command.Parser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="gets results.jsonl and log.txt")
    parser.add_argument("--seconds", type=numeric(PositiveFloat), default=3600.0, help="of the whole visit (default 3600)")
    parser.add_argument("--part", nargs="+", choices=list(PARTS), default=list(PARTS), help="default all, in this order")
    parser.add_argument("--commit", default=measure.commit(), help="of the code (default: of the clone)")
    parser.add_argument("--rehearse", action="store_true", help="small sizes on any device")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    command.run(main)
