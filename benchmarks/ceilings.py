"""The ceilings of a device: the rate of a large bfloat16 product and of a copy; prints one JSON line.

python -m benchmarks.ceilings --size 8192

MFU is quoted relative to the product. Operands are random: zeros run faster. A copy counts the bytes that it reads and writes.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import measure
from de_jax import command


def main(argv: list[str] | None = None) -> None:
    """The command."""
    print(json.dumps(measured(argv)))


def measured(argv: list[str] | None = None) -> dict[str, Any]:
    """The report that the command prints."""
    parser = command.Parser(description=__doc__)
    parser.add_argument("--size", type=int, default=8192, help="rows and columns of both matrices (default 8192)")
    parser.add_argument("--calls", type=int, default=20, help="calls between two readings of the clock (default 20)")
    args = parser.parse_args(argv)
    a, b = (jax.random.normal(jax.random.key(seed), (args.size, args.size), jnp.bfloat16) for seed in (0, 1))
    seconds = {"product": _seconds(jax.jit(jnp.matmul), args.calls, a, b)}
    wide = jax.random.normal(jax.random.key(2), (16 * args.size, args.size), jnp.bfloat16)
    seconds["copy"] = _seconds(jax.jit(jnp.negative), args.calls, wide)
    return {
        "benchmark": "ceilings",
        "size": args.size,
        "product_tflops": round(2 * args.size**3 / seconds["product"] / 1e12, 4),
        "copy_gb_per_second": round(2 * wide.nbytes / seconds["copy"] / 1e9, 2),
        "memory_gib": round((jax.devices()[0].memory_stats() or {}).get("bytes_limit", 0) / 2**30, 2),
        **measure.environment(),
    }


def _seconds(function: Callable[..., Any], calls: int, *args: Any) -> float:
    """The median of five rounds of calls, in seconds a call."""
    jax.block_until_ready(function(*args))
    rounds = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(calls):
            result = function(*args)
        jax.block_until_ready(result)
        rounds.append((time.perf_counter() - start) / calls)
    return statistics.median(rounds)


if __name__ == "__main__":
    command.run(main)
