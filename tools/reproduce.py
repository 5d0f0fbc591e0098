"""Runs a recorded result again and compares its scores: exit code 1 where a score is not within its tolerance.

de-jax reproduce --check bm25

In a clone of the repository: results, and the experiments behind them, are not installed. docs/results.md lists the entries. Prints
one JSON object to stdout, a table to stderr.
"""

from __future__ import annotations

import argparse

from de_jax import command
from de_jax.reports.result_check import check_entry


def main(argv: list[str] | None = None) -> None:
    """The command."""
    check_entry(_parse_args(argv).check)


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = command.Parser(description=__doc__)
    parser.add_argument("--check", metavar="ENTRY", type=str, required=True, help="of results/*.yaml")
    return parser.parse_args(argv)


if __name__ == "__main__":
    command.run(main)
