"""The cost of a corpus of many documents on paper: time to encode and to search, memory and disk; prints a Markdown table.

python -m benchmarks.corpus_costs --on v5e:16 h100:8

The rates of two CPU cores were measured (`mine_throughput` at a million documents). Times there grow in proportion to documents and
operations. Times on TPUs and GPUs are arithmetic, not measurements: operations over the published peak times --utilization, an
assumption; for a search, reading all vectors once for each block of queries at the published bandwidth, if that takes longer.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

from de_jax import command
from de_jax.settings import PositiveFloat, PositiveInt, Share, numeric
from de_jax.training.mesh import plan
from de_jax.types import InputError

PQ_BYTES = 64
"""Of a document in FAISS's "IVF...,PQ64"."""
MFLOPS_PER_TOKEN = {"small": 38.5, "base": 172.0, "large": 623.0}
"""Of T5 1.1's encoders at 64 tokens: 2 x parameters of the layers, and attention."""
TPU_BANDWIDTH = {"v4": 1.228e12, "v5e": 0.819e12, "v5p": 2.765e12, "v6e": 1.64e12}
"""Bytes a second of a chip's memory, as docs.cloud.google.com/tpu/docs/<name> has it."""


class Chip(NamedTuple):
    """One TPU chip or GPU, as its maker describes it."""

    peak_flops: float  # per second, bfloat16
    bandwidth: float  # bytes per second
    memory_bytes: int


CHIPS = {name: Chip(plan.CHIPS[name].peak_flops, speed, plan.CHIPS[name].memory_bytes) for name, speed in TPU_BANDWIDTH.items()}
CHIPS |= {name: Chip(gpu.peak_flops, gpu.memory_bytes_per_second, gpu.memory_bytes) for name, gpu in plan.GPUS.items()}


def main(argv: list[str] | None = None) -> None:
    """The command."""
    args = _parse_args(argv)
    places = [_place(text) for text in args.on]
    print("| documents | on | encoding | exact search | GiB: float32 / float16 / int8 / PQ64 | float16 vectors a chip |")
    print("|---|---|---|---|---|---|")
    for num_docs in args.num_docs:
        bytes_each = [4 * args.dim, 2 * args.dim, args.dim, PQ_BYTES]
        sizes = " / ".join(f"{num_docs * size / plan.GIB:,.0f}" for size in bytes_each)
        encoding = num_docs / args.passages_per_second * MFLOPS_PER_TOKEN[args.model] / MFLOPS_PER_TOKEN["small"]
        searching = args.num_queries / args.queries_per_second * num_docs / 1e6
        print(f"| {num_docs:,} | 2 CPU cores | {duration(encoding)} | {duration(searching)} | {sizes} | |")
        for name, count in places:
            chip, each = CHIPS[name], num_docs * 2 * args.dim / count
            encoding = num_docs * args.tokens * MFLOPS_PER_TOKEN[args.model] * 1e6 / (count * chip.peak_flops * args.utilization)
            searching = search_seconds(num_docs, chip, count, args)
            too_many = "" if each <= chip.memory_bytes else f", more than its {chip.memory_bytes / plan.GIB:.1f}"
            vectors = f"{each / plan.GIB:,.1f} GiB{too_many}"
            print(f"| | {count} {name} | {duration(encoding)} | {duration(searching)} | | {vectors} |")


def search_seconds(num_docs: int, chip: Chip, count: int, args: argparse.Namespace) -> float:
    """Seconds of an exact search in float16 vectors by so many chips: the longer of its products and its reads."""
    products = 2 * num_docs * args.dim * args.num_queries / (count * chip.peak_flops * args.utilization)
    reads = -(-args.num_queries // args.query_block) * num_docs * 2 * args.dim / (count * chip.bandwidth)
    return float(max(products, reads))


def duration(seconds: float) -> str:
    """Seconds in the largest unit that they fill at least once.

    >>> duration(5400), duration(30)
    ('1.5 hours', '30 s')
    """
    for unit, size in (("days", 86400), ("hours", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:,.3g} {unit}"
    return f"{seconds:.2g} s"


def _place(text: str) -> tuple[str, int]:
    name, _, count = text.partition(":")
    if name not in CHIPS or not count.isdecimal() or int(count) < 1:
        raise InputError(f"--on {text!r} is no chip and number, such as v5e:16; chips are {', '.join(CHIPS)}.")
    return name, int(count)


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = command.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    corpora = (8_841_823, 100_000_000, 1_000_000_000)
    parser.add_argument("--num_docs", type=numeric(PositiveInt), nargs="+", default=corpora, help="default MS MARCO, 100 M and 1 B")
    parser.add_argument("--num_queries", type=numeric(PositiveInt), default=500_000, help="default 500,000, a refresh of negatives")
    parser.add_argument("--model", choices=MFLOPS_PER_TOKEN, default="base", help="T5 1.1's size (default base)")
    parser.add_argument("--dim", type=numeric(PositiveInt), default=768, help="dimensions (default 768)")
    parser.add_argument("--tokens", type=numeric(PositiveFloat), default=73.0, help="of a document (default 73, MS MARCO's mean)")
    parser.add_argument("--utilization", type=numeric(Share), default=0.4, help="share of the peak (default .4)")
    parser.add_argument("--query_block", type=numeric(PositiveInt), default=4096, help="queries that share a pass over the vectors")
    parser.add_argument("--on", nargs="*", default=["v5e:16", "v6e:16", "h100:8"], help="chips and their number")
    cpu = "measured on two CPU cores"
    parser.add_argument(
        "--passages_per_second", type=numeric(PositiveFloat), default=176.0, help=f"of T5 small, {cpu} (default 176)"
    )
    parser.add_argument(
        "--queries_per_second", type=numeric(PositiveFloat), default=125.0, help=f"among a million documents, {cpu} (default 125)"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    command.run(main)
