"""Disk and memory that the generated queries of a large corpus take; prints one JSON line.

python -m benchmarks.expansion_memory --num_docs 10000 --num_queries 80 --full_store full

A synthetic table of queries is imported as other people's are (`generated_queries.write_released`), read into a store of tokens
and texts (`expansion.query_store`), and ranked by ROUGE-L for `--num_pairs` training pairs (`expansion.curriculum`), as a
curriculum does; then queries of random documents are read. `memory_mib` is the process's own memory
at the beginning of each step and at its peak, without mapped files. Each document has its own pool of 30 words for its queries,
since the generated queries of one document repeat each other; a word is one token, every third one two. `of_full_corpus` scales
disk and time of one document to `--full_corpus` documents. With --full_store the tokens of that many documents are in a folder of
this name, random ones, which are written if it is absent, and batches of documents and hard negatives with one query each are drawn
from it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import measure
from de_jax import command
from de_jax.data.batches import layout
from de_jax.data.expansion.curriculum import ranked_texts
from de_jax.data.expansion.document_texts import TextsWithOneQuery
from de_jax.data.expansion.generated_queries import write_released
from de_jax.data.expansion.query_store import GeneratedQueries, open_queries
from de_jax.data.stores.corpus import TextIds, TokenStore, build_token_store

DOCS_PER_PART, NUM_WORDS, WORDS_A_POOL = 4096, 100_000, 30
BATCH, NEGATIVES, TOKENS_A_QUERY = 512, 7, 8


def main(argv: list[str] | None = None) -> None:
    """The command."""
    args = _parse_args(argv)
    print(json.dumps({"benchmark": "expansion_memory", **measured(args), **measure.environment()}))


def measured(args: argparse.Namespace) -> dict[str, Any]:
    """The figures that the command prints."""
    rng = np.random.default_rng(args.seed)
    doc_ids = TextIds(args.num_docs, lambda rows: list(map(str, rows.tolist())))
    steps: dict[str, Step] = {}
    with tempfile.TemporaryDirectory(dir=args.work_dir) as work_dir:
        folder = Path(work_dir)
        expansion, cache_dir = folder / "expansion", folder / "cache"
        golds = _write(folder, doc_ids, args, rng)
        with _step("import", steps):
            write_released([folder / "queries.tsv"], folder / "corpus.jsonl", expansion, docs_per_part=DOCS_PER_PART, about={})
        (folder / "queries.tsv").unlink()
        docs = build_token_store(((doc_id, "a document") for doc_id in doc_ids), Words(), folder / "docs", progress=False)
        for name in ("store", "open"):
            with _step(name, steps):
                queries = open_queries(expansion, docs, Words(), cache_dir)
        rows = _spread(args.num_docs, args.num_pairs)
        pairs = [(str(number), doc_ids[row]) for number, row in enumerate(rows)]
        with _step("ranking", steps):
            ranked = ranked_texts(lambda: (pairs, golds, lambda pair: queries.texts(rows[pair])), ["synthetic"], expansion)
        read_rows, start = rng.integers(args.num_docs, size=args.num_reads).tolist(), time.perf_counter()
        letters = sum(len(query) for row in read_rows for query in queries.texts(row))
        read = (time.perf_counter() - start) / args.num_reads
        disk = sum(path.stat().st_size for path in cache_dir.glob("generated-*/*.npy")) / args.num_docs
        of_numbers = 4 * queries.counts.nbytes  # counts, the rows of documents, and the first query and text of each
        store = _of_full_store(args, rng) if args.full_store else {}
    scale = args.full_corpus / args.num_docs
    return {
        "num_docs": args.num_docs,
        "num_queries": args.num_queries,
        "num_pairs": len(ranked.offsets) - 1,
        "letters_a_query": round(letters / args.num_reads / args.num_queries, 1),
        "tokens_a_query": round(len(queries.tokens) / (len(queries.offsets) - 1), 2),
        "bytes_a_doc": round(disk, 1),
        "seconds": {name: round(step.seconds, 2) for name, step in steps.items()},
        "read_microseconds": round(1e6 * read, 1),
        "memory_mib": {name: {"before": step.before, "peak": step.peak} for name, step in steps.items()},
        "of_full_corpus": {
            "num_docs": args.full_corpus,
            "disk_gib": round(disk * args.full_corpus / 2**30, 2),
            "memory_mib": round(of_numbers * scale / 2**20),
            "hours": {name: round(step.seconds * scale / 3600, 2) for name, step in steps.items()},
        },
        **store,
    }


@dataclasses.dataclass
class Step:
    """What one step took."""

    seconds: float
    before: int  # MiB of the process's own memory
    peak: int


@contextlib.contextmanager
def _step(name: str, steps: dict[str, Step]) -> Iterator[None]:
    """Measures the block."""
    steps[name] = step = Step(0.0, _status_mib("RssAnon"), 0)
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(0.02):
            step.peak = max(step.peak, _status_mib("RssAnon"))

    thread, start = threading.Thread(target=watch), time.perf_counter()
    thread.start()
    try:
        yield
    finally:
        step.seconds = time.perf_counter() - start
        step.peak = max(step.peak, _status_mib("RssAnon"))
        is_over.set()
        thread.join()


def _spread(num_docs: int, num_pairs: int) -> list[int]:
    """Documents of as many pairs, all over the corpus."""
    return (np.arange(num_pairs) * num_docs // num_pairs).tolist()  # type: ignore[no-any-return]


def _of_full_store(args: argparse.Namespace, rng: np.random.Generator) -> dict[str, Any]:
    """Batches with queries of a corpus of full size, whose tokens are random numbers; its folder is kept for the next call."""
    num_docs, num_queries = args.full_corpus, args.full_corpus * args.num_queries
    files, start = {name: args.full_store / f"{name}.npy" for name in ("tokens", "offsets")}, time.perf_counter()
    if not files["offsets"].exists():
        args.full_store.mkdir(parents=True, exist_ok=True)
        tokens = np.lib.format.open_memmap(files["tokens"], "w+", np.int32, (num_queries * TOKENS_A_QUERY,))
        for first in range(0, len(tokens), 1 << 24):
            tokens[first : first + (1 << 24)] = rng.integers(2, 32128, len(tokens[first : first + (1 << 24)]), np.int32)
        np.save(files["offsets"], np.arange(num_queries + 1, dtype=np.int64) * TOKENS_A_QUERY)
    written, start = time.perf_counter() - start, time.perf_counter()
    tokens, offsets = (np.load(file, mmap_mode="r") for file in files.values())
    firsts, counts = np.arange(num_docs) * args.num_queries, np.full(num_docs, args.num_queries)
    store = GeneratedQueries(tokens, offsets, firsts, counts, Words.fingerprint, "random numbers")
    texts = TextsWithOneQuery(_equal_docs(num_docs), store)

    def drawn() -> np.ndarray:
        docs = rng.integers(num_docs, size=(BATCH, 1 + NEGATIVES))
        return (texts.bare[docs] + rng.integers(1 + args.num_queries, size=docs.shape)).astype(np.int32)

    shape = layout.packings({"doc": layout.Sample(texts, 128, [drawn() for _ in range(4)])})["doc"]
    lay_out = layout.packed_as(shape, texts, 128)
    opened, start = time.perf_counter() - start, time.perf_counter()
    for _ in range(args.num_batches):
        lay_out(drawn(), 0)
    return {
        "full_store": {
            "num_queries": num_queries,
            "num_tokens": len(store.tokens),
            "disk_gib": round(sum(path.stat().st_size for path in files.values()) / 2**30, 2),
            "write_seconds": round(written, 1),
            "open_seconds": round(opened, 2),
            "texts_of_a_batch": BATCH * (1 + NEGATIVES),
            "milliseconds_a_batch": round(1e3 * (time.perf_counter() - start) / args.num_batches, 1),
            "memory_mib": {
                "anonymous": _status_mib("RssAnon"),
                "with_mapped_files": _status_mib("VmRSS"),
                "peak": _status_mib("VmHWM"),
            },
        }
    }


class Words:
    """A tokenizer of the synthetic words, without a vocabulary."""

    vocab_size, prefix_ids, suffix_ids, pad_id, fingerprint = 32128, (), (1,), 0, "words"

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """A token of each word, and two of every third."""
        found = []
        for text in texts:
            numbers = [zlib.crc32(word.encode()) for word in text.split()]
            found.append(np.array([token for one in numbers for token in [2 + one % 32126] * (1 + (one % 3 == 0))], np.int32))
        return found

    def decode(self, ids: Sequence[np.ndarray]) -> list[str]:
        """Nothing is read back."""
        raise NotImplementedError

    def save(self, directory: Path) -> None:
        """Nothing is saved."""
        raise NotImplementedError


def _equal_docs(num_docs: int) -> TokenStore:
    """A corpus of equal documents of 60 tokens, in little memory: here the queries are measured."""
    arrays = {
        "tokens.npy": np.broadcast_to(np.int32(5), (60 * num_docs,)),
        "offsets.npy": 60 * np.arange(num_docs + 1),
        "ids.npy": np.broadcast_to(np.bytes_(b"d"), (num_docs,)),
        "id_order.npy": np.broadcast_to(np.int64(0), (num_docs,)),
    }
    about = {name: getattr(Words, name) for name in ("vocab_size", "prefix_ids", "suffix_ids")}
    return TokenStore(Path(), {**about, "tokenizer_fingerprint": Words.fingerprint, "content_hash": "equal documents"}, arrays)


def _write(folder: Path, doc_ids: Sequence[str], args: argparse.Namespace, rng: np.random.Generator) -> list[str]:
    """Writes a corpus and a table of queries; gives a query to each pair."""
    words = ["".join(letters) for letters in rng.choice(list("abcdefghijklmnoprstuvw"), (NUM_WORDS, 5))]
    golds, own = list[str](), set(_spread(len(doc_ids), args.num_pairs))
    with open(folder / "corpus.jsonl", "w") as corpus, open(folder / "queries.tsv", "w") as table:
        for row, doc_id in enumerate(doc_ids):
            corpus.write(json.dumps({"_id": doc_id, "title": "", "text": "a document"}) + "\n")
            pool = [words[word] for word in (NUM_WORDS * rng.random(WORDS_A_POOL) ** 3).astype(int)]  # frequent words first
            chosen = rng.integers(WORDS_A_POOL, size=(args.num_queries, 6)).tolist()
            table.writelines(f"{doc_id}\t{' '.join([pool[place] for place in places])}\n" for places in chosen)
            if row in own:
                golds.append(" ".join(pool[:6]))
    return golds


def _status_mib(name: str) -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) // 1024


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = command.Parser(description=__doc__)
    parser.add_argument("--num_docs", type=int, default=200_000, help="of the synthetic corpus (default 200000)")
    parser.add_argument("--num_queries", type=int, default=80, help="of each document (default 80)")
    parser.add_argument("--num_pairs", type=int, default=12_000, help="documents with a training pair (default 12000)")
    parser.add_argument("--num_reads", type=int, default=10_000, help="documents whose queries are read (default 10000)")
    parser.add_argument("--full_corpus", type=int, default=8_800_000, help="documents to extrapolate to (default 8800000)")
    parser.add_argument("--full_store", type=Path, help="folder of the tokens of the full corpus; batches are drawn from it")
    parser.add_argument("--num_batches", type=int, default=50, help="drawn from there (default 50)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--work_dir", help="where files are written (default the system's temporary folder)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    command.run(main)
