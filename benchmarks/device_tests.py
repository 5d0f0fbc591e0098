"""The tests of a device, in a process of their own; prints one JSON line. A skipped test counts as a failure.

python -m benchmarks.device_tests -k "not killed"
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from typing import Any

from benchmarks import measure
from de_jax import command

PYTEST = "-m pytest -v --durations=8 -p no:cacheprovider -o addopts=--import-mode=importlib -m gpu tests/gpu"
UNTUNED = "--xla_gpu_autotune_level=0"
"""XLA takes the first kernel for a product; it would spend most of the time trying others."""
_COUNT = re.compile(r"(\d+) (passed|failed|skipped|errors?|deselected)")


def main(argv: list[str] | None = None) -> None:
    """The command."""
    print(json.dumps(measured(sys.argv[1:] if argv is None else argv)))


def measured(argv: list[str]) -> dict[str, Any]:
    """The report that the command prints.

    Args:
        argv: more arguments of pytest.

    Raises:
        RuntimeError: a test failed or was skipped, or none was run; with the end of pytest's output.
    """
    start, lines = time.monotonic(), []
    env = {**os.environ, "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {UNTUNED}"}
    with subprocess.Popen([sys.executable, *PYTEST.split(), *argv], env=env, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            measure.log(line.rstrip())
            lines.append(line.rstrip())
    last = next((line for line in reversed(lines) if _COUNT.search(line)), "")
    counts = {kind: int(number) for number, kind in _COUNT.findall(last)}
    if process.returncode or not counts.get("passed") or set(counts) - {"passed", "deselected"}:
        failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        raise RuntimeError("\n".join([f"pytest ended with {process.returncode}: {last}", *failed]))
    return {"benchmark": "device_tests", "seconds": round(time.monotonic() - start, 1), **counts}


if __name__ == "__main__":
    command.run(main)
