"""Differences of each kind of encoder from transformers: prints the rows of the table in docs/checkpoints.md from pytest's report.

python -m pytest tests/interop/test_architectures.py -m "soak or not soak" -k "hidden_vectors or written" --junitxml=parity.xml
python -m experiments.parity --report=parity.xml

A kind's number is the largest over its configurations, whose names begin with the name of the kind.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from de_jax import command
from de_jax.types import InputError

WAYS = {"test_hidden_vectors": "import", "test_what_is_written": "export"}
"""The direction that a test compares, by the beginning of its name."""


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    parser = command.Parser(description=__doc__)
    parser.add_argument("--report", type=Path, required=True, help="pytest's --junitxml")
    args = parser.parse_args(argv)
    largest: dict[str, dict[str, float]] = collections.defaultdict(lambda: dict.fromkeys(WAYS.values(), 0.0))
    for case in ElementTree.parse(args.report).iter("testcase"):
        kind = re.search(r"\[([\w-]+?)(-padded|-packed)?[\], ]", case.attrib["name"])
        way = next((way for test, way in WAYS.items() if case.attrib["name"].startswith(test)), None)
        if way is None or kind is None:
            continue
        if case.find("failure") is not None or case.find("error") is not None:
            raise InputError(f"{args.report}: {case.attrib['name']} failed; mend that first.")
        found = [float(one.attrib["value"]) for one in case.iter("property") if one.attrib["name"] == "difference"]
        largest[kind[1]][way] = max(largest[kind[1]][way], *found)
    print("| kind | import | export |\n|---|---|---|")
    for name, ways in largest.items():
        print(f"| {name} | {ways['import']:.1e} | {ways['export']:.1e} |")


if __name__ == "__main__":
    command.run(main)
