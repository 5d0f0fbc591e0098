"""Builds a retrieval data set from the docstrings on this machine; prints one JSON object to stdout.

de-jax build_pydocs --out_dir=data/pydocs

A query is the first sentence of a docstring; its document is the signature and the rest. In the train split, the words of the name
and sentences of the rest are queries too. Sources are the standard library and the dependencies of de_jax. The folder has the BEIR
layout with the splits train, dev and test. Nothing is downloaded, and no package is imported. With the same installed versions, a
second run changes nothing.
"""

from __future__ import annotations

import argparse
import json

from de_jax import command
from de_jax.data.text import pydocs


def main(argv: list[str] | None = None) -> None:
    """The command; prints the folder and its counts as a JSON object."""
    args = _parse_args(argv)
    versions = pydocs.build(args.out_dir, max_docs=args.max_docs, packages=not args.no_packages, num_processes=args.num_processes)
    packages = len(versions["packages"])
    print(json.dumps({"out_dir": args.out_dir, **versions["counts"], "python": versions["python"], "packages": packages}))


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = command.Parser(description=__doc__)
    parser.add_argument("--out_dir", required=True, help="folder of the data set")
    parser.add_argument("--max_docs", type=int, help="limit the documents, to the same subset each time; reads fewer files")
    parser.add_argument("--no_packages", action="store_true", help="use only the standard library, as quickstart does")
    parser.add_argument("--num_processes", type=int, help="processes that read sources; default one per processor")
    return parser.parse_args(argv)


if __name__ == "__main__":
    command.run(main)
