"""Writes a generation of hard negatives as jsonl, for people and other tools; prints one JSON object to stdout.

de-jax export_negatives runs/ance/negatives --out=negatives.jsonl.gz

A line is a training pair: {"query_id", "doc_id", "neg_doc_ids": [...], "neg_query_ids": [...]}. `de_jax.tasks.mined` reads a folder
of such files.
"""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path

from de_jax import command
from de_jax.data.negatives import generations
from de_jax.files import outputs
from de_jax.types import InputError


def main(argv: list[str] | None = None) -> None:
    """The command."""
    args = _parse_args(argv)
    if args.out.exists():
        raise InputError(f"--out {args.out} is there already; choose another name, or remove it.")
    generation = generations.open_newest(args.negatives_dir)
    with outputs.atomic_file(args.out) as temporary:
        open_ = gzip.open if args.out.suffix == ".gz" else open
        with open_(temporary, "wt", encoding="utf-8") as file:
            for mined in generations.read_mined(generation):
                file.write(json.dumps(mined._asdict(), ensure_ascii=False) + "\n")
    print(
        json.dumps({"generation_dir": str(generation.folder), "num_pairs": generation.manifest["num_pairs"], "out": str(args.out)})
    )


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = command.Parser(description=__doc__)
    parser.add_argument("negatives_dir", type=Path, help="a generation, or a folder of generations: its newest complete one")
    parser.add_argument("--out", type=Path, required=True, help="a new file; compressed if its name ends in .gz")
    return parser.parse_args(argv)


if __name__ == "__main__":
    command.run(main)
