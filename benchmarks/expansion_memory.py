"""Disk and memory that the generated queries of a large corpus take; prints one JSON line.

python -m benchmarks.expansion_memory --num_docs 200000 --num_queries 80

A synthetic expansion is read into mapped texts (`expansion.query_texts`), as a curriculum does, and queries of random documents are
read from there. Each document has its own pool of 30 words for its queries, since the generated queries of one document repeat
each other. `of_full_corpus` scales the figures of one document to `--full_corpus` documents.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import measure
from de_jax import command
from de_jax.expansion.generated_queries import DocQueries, ExpansionWriter
from de_jax.expansion.query_texts import queries_by_row

DOCS_PER_PART, NUM_WORDS, WORDS_A_POOL = 4096, 100_000, 30


def main(argv: list[str] | None = None) -> None:
    """The command."""
    args = _parse_args(argv)
    print(json.dumps({"benchmark": "expansion_memory", **measured(args), **measure.environment()}))


def measured(args: argparse.Namespace) -> dict[str, Any]:
    """The figures that the command prints."""
    rng = np.random.default_rng(args.seed)
    doc_ids = [str(row) for row in range(args.num_docs)]
    with tempfile.TemporaryDirectory(dir=args.work_dir) as work_dir:
        expansion, cache_dir = Path(work_dir) / "expansion", Path(work_dir) / "cache"
        _write(expansion, doc_ids, args.num_queries, rng)
        before, start = _peak_mib(), time.perf_counter()
        queries = queries_by_row(expansion, doc_ids, cache_dir)
        built, start = time.perf_counter() - start, time.perf_counter()
        queries = queries_by_row(expansion, doc_ids, cache_dir)
        opened, start = time.perf_counter() - start, time.perf_counter()
        rows = rng.integers(args.num_docs, size=args.num_reads).tolist()
        letters = sum(len(query) for row in rows for query in queries[row])
        read = (time.perf_counter() - start) / len(rows)
        num_bytes = sum(path.stat().st_size for path in cache_dir.rglob("*.npy"))
        of_ids_and_counts = sum(array.nbytes for array in (queries.counts, queries.counts))  # and the rows of documents
    return {
        "num_docs": args.num_docs,
        "num_queries": args.num_queries,
        "letters_a_query": round(letters / len(rows) / args.num_queries, 1),
        "bytes_a_doc": round(num_bytes / args.num_docs, 1),
        "build_seconds": round(built, 1),
        "open_seconds": round(opened, 2),
        "read_microseconds": round(1e6 * read, 1),
        "peak_mib": {"before": before, "after": _peak_mib()},
        "of_full_corpus": {
            "num_docs": args.full_corpus,
            "disk_gib": round(num_bytes / args.num_docs * args.full_corpus / 2**30, 2),
            "memory_mib": round(of_ids_and_counts / args.num_docs * args.full_corpus / 2**20),
            "build_hours": round(built / args.num_docs * args.full_corpus / 3600, 2),
        },
    }


def _write(folder: Path, doc_ids: list[str], num_queries: int, rng: np.random.Generator) -> None:
    words = ["".join(letters) for letters in rng.choice(list("abcdefghijklmnoprstuvw"), (NUM_WORDS, 5))]
    writer = ExpansionWriter(folder, {"seed": 0})
    for start in range(0, len(doc_ids), DOCS_PER_PART):
        part = []
        for doc_id in doc_ids[start : start + DOCS_PER_PART]:
            pool = [words[word] for word in (NUM_WORDS * rng.random(WORDS_A_POOL) ** 3).astype(int)]  # frequent words first
            chosen = rng.integers(WORDS_A_POOL, size=(num_queries, 6)).tolist()
            part.append(DocQueries(doc_id, [" ".join([pool[place] for place in places]) for places in chosen]))
        writer.append(part)
    writer.finish(num_docs=len(doc_ids))


def _peak_mib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = command.Parser(description=__doc__)
    parser.add_argument("--num_docs", type=int, default=200_000, help="of the synthetic corpus (default 200000)")
    parser.add_argument("--num_queries", type=int, default=80, help="of each document (default 80)")
    parser.add_argument("--num_reads", type=int, default=10_000, help="documents whose queries are read (default 10000)")
    parser.add_argument("--full_corpus", type=int, default=8_800_000, help="documents to extrapolate to (default 8800000)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--work_dir", help="where files are written (default the system's temporary folder)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    command.run(main)
