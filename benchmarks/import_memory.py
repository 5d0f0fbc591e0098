"""The most memory that `import pairs`, or a stream, holds while it reads a table, and its time; prints one JSON line.

python -m benchmarks.import_memory --num_rows 1000000
python -m benchmarks.import_memory --num_rows 1000000 --window 100000    # as a seqio task, by seqio_pairs.window

Each row has a query, a document and a hard negative that no other row has, in words drawn by Zipf's law with the lengths of MS
MARCO. Memory that grows with the rows shows by a second call with fewer. The child that imports starts with nothing done before.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks import lengths, measure
from de_jax.data.sources.options import PairsOptions
from de_jax.data.sources.seqio_batches import seqio_pairs
from de_jax.data.sources.seqio_tasks import import_seqio
from de_jax.data.text import vocabulary_training

_ROWS_AT_ONCE = 10_000
_STREAM = "import sys; from benchmarks.import_memory import stream; stream(*sys.argv[1:3], *map(int, sys.argv[3:]))"
_BATCH_SIZE = 512


def main(argv: list[str] | None = None) -> None:
    """The command."""
    args = _parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        words = [f"{first}{second}{third}" for first in "bdfgklmn" for second in "aeiou" for third in "prstvwxz"]
        vocabulary_training.train_sentencepiece([" ".join(words)] * 20, folder / "spiece.model", vocab_size=60)
        table = folder / "table.jsonl"
        _write(table, args.num_rows, words)
        command = [
            "-m",
            "de_jax",
            "import",
            "pairs",
            str(table),
            f"--tokenizer={folder / 'spiece.model'}",
            f"--out_dir={folder / 'pairs'}",
        ]
        if args.window:
            command = ["-c", _STREAM, str(table), str(folder / "spiece.model"), str(args.num_rows), str(args.window)]
        start = time.monotonic()
        environment = {**os.environ, "DE_JAX_CACHE": str(folder / "pairs")}
        done = subprocess.run([sys.executable, *command], check=True, stdout=subprocess.PIPE, text=True, env=environment)
        seconds = round(time.monotonic() - start, 1)
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        stored = sum(path.stat().st_size for path in (folder / "pairs").rglob("*") if path.is_file())
        sizes = {"table_mib": round(table.stat().st_size / 2**20), "store_mib": round(stored / 2**20)}
    report = {
        "peak_mib": round(usage.ru_maxrss / 1024, 1),
        "seconds": seconds,
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime),
    }
    print(json.dumps({**report, "num_rows": args.num_rows, **sizes, **json.loads(done.stdout), **measure.environment()}))


def stream(table: str, tokenizer: str, num_rows: int, window: int) -> None:
    """Makes the batches of an epoch; prints what else the report says."""
    import_seqio()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    options = PairsOptions(batch_size=_BATCH_SIZE)
    arguments = {"module": "de_jax.tasks.local", "module_args": {"files": {"train": table}, "tokenizer": tokenizer}}
    batches, start = seqio_pairs("benchmark", **arguments, window=window, options=options).batches(0), time.monotonic()
    next(batches)
    first = time.monotonic()
    for _ in range(num_rows // _BATCH_SIZE - 1):
        next(batches)
    speed = (num_rows - _BATCH_SIZE) / (time.monotonic() - first)
    said = {"window": window, "mib_before_reading": round(before / 1024, 1), "first_batch_seconds": round(first - start, 1)}
    print(json.dumps({**said, "pairs_per_second": round(speed)}))


def _write(path: Path, num_rows: int, words: list[str]) -> None:
    rng = np.random.default_rng(0)
    with open(path, "w", encoding="utf-8") as file:
        for start in range(0, num_rows, _ROWS_AT_ONCE):
            sizes = {kind: lengths.msmarco_like(kind, _ROWS_AT_ONCE, seed=start) for kind in ("query", "doc")}
            for row in range(start, min(start + _ROWS_AT_ONCE, num_rows)):
                drawn = [" ".join(_drawn(rng, words, int(sizes[kind][row - start]) // 2)) for kind in ("query", "doc", "doc")]
                texts = {name: f"{text} {row}" for name, text in zip(("query", "doc", "negative"), drawn, strict=True)}
                file.write(json.dumps(texts) + "\n")


def _drawn(rng: np.random.Generator, words: list[str], number: int) -> list[str]:
    return [words[place] for place in (rng.zipf(1.3, number) % len(words)).tolist()]


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num_rows", type=int, default=1_000_000)
    parser.add_argument("--window", type=int, default=0, help="stream it, in windows of so many pairs (default: import it)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
