"""Speed, memory, build time, size and recall of the exact JAX index, of NumPy and of FAISS; prints one JSON line a size.

python -m benchmarks.index_throughput --num_docs 10000 100000
OMP_NUM_THREADS=1 taskset -c 0 python -m benchmarks.index_throughput --num_docs 100000 --dim 384 --num_queries 256 \
    --indexes numpy flat --clock cpu
python -m benchmarks.index_throughput --num_docs 8841823 --dim 128 --indexes ivfpq --faiss_on_disk --num_lists 2048 --work_dir /tmp

Documents are random unit vectors in groups: a document is its group's centre plus as much noise, and a query is another such
vector, so that its nearest documents are planted. Recall is the part of the exact k best that an index finds. Each index is
built, searched and freed before the next; queries per second are those of the median call, with all queries and one by one. Peak
memory is that of the process while it builds and searches an index, less its memory before. On a machine that others use, put
`taskset -c 0` before the command and add `--clock cpu`. IVF has 4 sqrt(n) lists and visits a sixteenth of them. With --work_dir the
documents are in a file there, which is mapped, so that they may be larger than memory.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib.metadata
import json
import math
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np

from benchmarks import measure
from de_jax import command
from de_jax.retrieval.encode import aligned
from de_jax.retrieval.faiss_index import FaissIndex
from de_jax.retrieval.index import ExactIndex
from de_jax.retrieval.index_settings import Device, IndexSettings
from de_jax.types import InputError, Ranking

INDEXES = ("exact", "numpy", "flat", "ivf", "hnsw", "ivfpq")
DEFAULT_INDEXES = INDEXES[:5]
CHUNK_DOCS = 65536


def main(argv: list[str] | None = None) -> None:
    """The command."""
    args = _parse_args(argv)
    for num_docs in args.num_docs:
        print(json.dumps({"benchmark": "index_throughput", **of_size(num_docs, args), **environment()}), flush=True)


def measured(argv: list[str]) -> dict[str, Any]:
    """The reports that the command prints, by size."""
    args = _parse_args(argv)
    return {str(num_docs): of_size(num_docs, args) for num_docs in args.num_docs}


def of_size(num_docs: int, args: argparse.Namespace) -> dict[str, Any]:
    """The figures of every index at one size; `args` are those of `add_arguments`."""
    with tempfile.TemporaryDirectory(dir=args.work_dir) as work_dir:
        return _of_all(num_docs, args, Path(work_dir))


def _of_all(num_docs: int, args: argparse.Namespace, work_dir: Path) -> dict[str, Any]:
    file = work_dir / "docs.npy" if args.work_dir else None
    docs, queries = planted(num_docs, args.num_queries, args.dim, args.docs_a_group, args.seed, file)
    ids = [f"{row:08d}" for row in range(num_docs)]
    expected = None
    report: dict[str, Any] = {"num_docs": num_docs, "num_queries": args.num_queries}
    report |= {name: getattr(args, name) for name in ("dim", "k", "docs_a_group", "seed", "faiss_device", "clock")}
    for name in INDEXES:
        if name != "exact" and name not in args.indexes:  # the exact index is what recall is measured against
            continue
        report[name], found = _measured(name, docs, ids, queries, args, work_dir)
        expected = found if expected is None else expected
        report[name][f"recall@{args.k}"] = round(recall(found, expected), 4)
        measure.log(f"{num_docs} documents, {name}: {report[name]}")
    return report


def environment() -> dict[str, Any]:
    """Machine, packages and commit, FAISS among them."""
    found = measure.environment()
    found["versions"] |= {dist: importlib.metadata.version(dist) for dist in _faiss_packages()}
    return found


def planted(
    num_docs: int, num_queries: int, dim: int, docs_a_group: int, seed: int, file: Path | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Documents [num_docs, dim] and queries [num_queries, dim], unit vectors, float32, made chunk by chunk, in a file if given."""
    rng = np.random.default_rng(seed)
    centres = _unit(rng, np.zeros((-(-num_docs // docs_a_group), dim), np.float32))
    docs = np.lib.format.open_memmap(file, "w+", np.float32, (num_docs, dim)) if file else aligned(num_docs, dim)
    for start in range(0, num_docs, CHUNK_DOCS):
        rows = np.arange(start, min(start + CHUNK_DOCS, num_docs))
        docs[rows] = _unit(rng, centres[rows % len(centres)])
    if file:
        docs = np.load(file, mmap_mode="r")
    return docs, _unit(rng, centres[rng.integers(0, len(centres), num_queries)])


def recall(found: np.ndarray, expected: np.ndarray) -> float:
    """The mean part of the expected rows [q, k] that were found."""
    return float(np.mean([len(set(a) & set(b)) / len(b) for a, b in zip(found.tolist(), expected.tolist(), strict=True)]))


class _NumpyIndex:
    """What NumPy users write; its products are those of its BLAS."""

    def __init__(self, docs: np.ndarray) -> None:
        self._docs = docs

    def search(self, queries: np.ndarray, k: int) -> Ranking:
        """The k best documents of each query, 128 queries at a time."""
        found = []
        for start in range(0, len(queries), 128):
            scores = queries[start : start + 128] @ self._docs.T
            best = np.argpartition(scores, -k, axis=1)[:, -k:]
            best_scores = np.take_along_axis(scores, best, axis=1)
            order = np.argsort(-best_scores, axis=1)
            found.append([np.take_along_axis(each, order, axis=1) for each in (best, best_scores)])
        return Ranking(*map(np.concatenate, zip(*found, strict=True)))


def _measured(
    name: str, docs: np.ndarray, ids: Sequence[str], queries: np.ndarray, args: argparse.Namespace, work_dir: Path
) -> tuple[dict[str, Any], np.ndarray]:
    """The figures of one index, and the rows [q, k] it finds."""
    report: dict[str, Any] = {}
    clock = measure.CLOCKS[args.clock]
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # freed memory that the process kept
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what is held now
    before = _peak_mib()
    start = clock()
    if name == "exact":
        index: ExactIndex | FaissIndex | _NumpyIndex = ExactIndex(docs, ids)
    elif name == "numpy":
        index = _NumpyIndex(docs)
    else:
        report, options = _settings(name, len(docs), args)
        named: dict[str, Any] = {"factory": report["factory"], "options": options, "seed": args.seed}
        if options.faiss_on_disk:
            index = FaissIndex.build_on_disk(docs, ids, work_dir / name, **named)
        else:
            index = FaissIndex.build(docs, ids, **named)
    report["build_seconds"] = round(clock() - start, 3)
    found = index.search(queries, args.k)
    for size, figure in ((len(queries), "queries_per_second"), (1, "queries_per_second_one_by_one")):
        index.search(queries[:size], args.k)  # compiles, and fills caches
        seconds = []
        for _ in range(args.repeats):
            start = clock()
            index.search(queries[:size], args.k)
            seconds.append(clock() - start)
        report[figure] = round(size / statistics.median(seconds), 1)
    report["peak_mib"] = _peak_mib() - before
    report["bytes"] = _num_bytes(index, work_dir) if isinstance(index, FaissIndex) else docs.nbytes
    return report, found.doc_rows


def _peak_mib() -> int:
    """The most memory that this process has held, without kernel memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmHWM"))) // 1024


def _settings(name: str, num_docs: int, args: argparse.Namespace) -> tuple[dict[str, Any], IndexSettings]:
    num_lists = args.num_lists or max(1, round(4 * num_docs**0.5))
    nprobe = args.nprobe or max(1, num_lists // 16)
    settings = {
        "flat": {"factory": "Flat"},
        "ivf": {"factory": f"IVF{num_lists},Flat", "nprobe": nprobe},
        "ivfpq": {"factory": f"IVF{num_lists},PQ{math.gcd(args.dim, 64)}", "nprobe": nprobe},
        "hnsw": {"factory": "HNSW32", "ef_search": args.ef_search},
    }[name]
    device = "cpu" if name == "hnsw" else args.faiss_device  # FAISS has no HNSW on GPUs
    on_disk = args.faiss_on_disk and "nprobe" in settings
    return settings, IndexSettings("", settings.get("nprobe"), settings.get("ef_search"), device, faiss_on_disk=on_disk)


def _num_bytes(index: FaissIndex, work_dir: Path) -> int:
    with tempfile.TemporaryDirectory(dir=work_dir) as folder:
        index.save(folder)
        return sum(path.stat().st_size for path in Path(folder).iterdir() if path.suffix != ".json")


def _faiss_packages() -> list[str]:
    return [dist for dist in ("faiss-cpu", "faiss-gpu") if any(importlib.metadata.distributions(name=dist))]


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    return checked(parser.parse_args(argv))


def add_arguments(parser: argparse.ArgumentParser, *, k: int = 10, docs_a_group: int = 20) -> None:
    """Adds the flags for the vectors, the indexes and the repeats; the arguments are the defaults of the depth and the groups."""
    parser.add_argument("--num_docs", type=int, nargs="*", default=[10_000, 100_000], help="sizes (default 10000 100000)")
    parser.add_argument(
        "--indexes",
        nargs="+",
        default=list(DEFAULT_INDEXES),
        choices=INDEXES,
        help=f"beside exact (default {', '.join(DEFAULT_INDEXES)})",
    )
    parser.add_argument("--num_queries", type=int, default=512, help="queries in one call (default 512)")
    parser.add_argument("--dim", type=int, default=768, help="dimensions (default 768)")
    parser.add_argument("--k", type=int, default=k, help=f"depth (default {k})")
    parser.add_argument("--docs_a_group", type=int, default=docs_a_group, help="planted documents of one centre")
    parser.add_argument("--num_lists", type=int, help="of IVF (default 4 sqrt(n))")
    parser.add_argument("--nprobe", type=int, help="lists that IVF visits (default a sixteenth)")
    parser.add_argument("--ef_search", type=int, default=max(128, 2 * k), help="candidates that HNSW keeps; at least the depth")
    parser.add_argument("--repeats", type=int, default=3, help="measured calls of each index (default 3)")
    parser.add_argument("--faiss_device", default="cpu", choices=get_args(Device), help="where Flat and IVF search (default cpu)")
    parser.add_argument("--clock", default="wall", choices=tuple(measure.CLOCKS), help="wall, or cpu seconds of all threads")
    parser.add_argument("--faiss_on_disk", action="store_true", help="IVF indexes are built with their lists in a file")
    parser.add_argument("--work_dir", help="gets the documents' embeddings as a mapped file (default in memory)")
    parser.add_argument("--seed", type=int, default=0)


def checked(args: argparse.Namespace) -> argparse.Namespace:
    """Those arguments, as they are.

    Raises:
        InputError: sizes that cannot be.
    """
    for name in ("num_queries", "dim", "k", "docs_a_group", "repeats"):
        if getattr(args, name) < 1:
            raise InputError(f"--{name} is {getattr(args, name)}; give at least 1.")
    if (smallest := min(args.num_docs, default=args.k)) < args.k:
        raise InputError(f"--num_docs is {smallest}, fewer than --k {args.k}; recall needs at least k documents.")
    return args


def _unit(rng: np.random.Generator, centres: np.ndarray) -> np.ndarray:
    """Each centre plus a random direction of length about 1, at length 1."""
    vectors = rng.standard_normal(centres.shape, np.float32)
    vectors *= np.float32(centres.shape[1] ** -0.5)
    vectors += centres
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors


if __name__ == "__main__":
    command.run(main)
