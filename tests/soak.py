"""The tests that take long by their nature: random kills in number, every mesh, long fuzzing. Ends with one JSON line.

bash tests/soak.sh --kills=1000 --fuzz=100000 --seed=7
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from often import ONLY_IN_CI

ROOT = Path(__file__).resolve().parents[1]


class Outcomes:
    """Counts how the tests ended, and keeps the names of those that failed."""

    def __init__(self):
        self.counts, self.failed = Counter(), []

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            self.counts[report.outcome] += 1
        if report.failed:
            self.failed.append(report.nodeid)


def at_least_1(text):
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def parse_args(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=at_least_1, default=50, help="kills of each command")
    parser.add_argument("--fuzz", type=int, default=10000, help="damaged files that readers are given")
    parser.add_argument("--seed", type=int, default=0, help="the same seed repeats the moments of the kills, and the fuzz")
    parser.add_argument("--workers", type=at_least_1, default=1, help="tests that run at a time")
    parser.add_argument("--only", default="", help="tests whose name matches, as pytest's -k")
    return parser.parse_args(argv)


def main(argv=None):
    args = parse_args(argv)
    os.chdir(ROOT)
    os.environ["DE_JAX_SOAK"] = json.dumps({"kills": args.kills, "fuzz": args.fuzz, "seed": args.seed})
    began, outcomes = time.monotonic(), Outcomes()
    with contextlib.redirect_stdout(sys.stderr):
        options = [*(["-n", str(args.workers)] if args.workers > 1 else []), *(["-k", args.only] if args.only else [])]
        names = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "tests").rglob("test_*.py"))]
        files = [name for name in names if name.startswith(ONLY_IN_CI) or "mark.soak" in Path(name).read_text()]
        code = pytest.main(["-m", "soak", "--timeout=36000", *options, *files], plugins=[outcomes])
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    found = {"tests": dict(outcomes.counts), "failed_tests": outcomes.failed}
    print(json.dumps({"commit": commit, **vars(args), **found, "seconds": round(time.monotonic() - began)}))
    sys.exit(int(code))


if __name__ == "__main__":
    main()
