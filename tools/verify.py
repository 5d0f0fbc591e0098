"""Checks every file with a checksum anywhere below a folder; prints one JSON object.

de-jax verify runs/sde
de-jax verify ~/.cache/de_jax

Restoring a checkpoint checks all of its files, and opening any other folder its small files. Only this command checks large,
memory-mapped arrays. Exits with 2 if a file is damaged; "damaged" lists the files. Folders without checksums are "unchecked".
"""

from __future__ import annotations

import argparse
import json
import sys

from de_jax import command
from de_jax.files import folders
from de_jax.files.progress import progress_bar
from de_jax.types import InputError


def main(argv: list[str] | None = None) -> None:
    """The command."""
    folder = _parse_args(argv).folder
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder; give a run, a store, embeddings, or a folder of such folders.")
    damaged, unchecked = [], []
    outputs = folders.find_outputs(folder)
    for child in progress_bar(outputs, desc="verify", unit=" folders", delay=0.5):
        found = list(folders.damages(child))
        if not child.is_dir():
            continue  # a trainer removed an old checkpoint meanwhile
        damaged += found
        if not found and not folders.has_checksums(child):
            unchecked.append(str(child))
            print(f"{child}: no checksums were written, so nothing was checked.", file=sys.stderr)
    if len(unchecked) == len(outputs):
        raise InputError(
            f"no folder below {folder} has a {folders.CHECKSUMS_FILE}, so nothing was checked; exports for other libraries have "
            "none."
        )
    print(json.dumps({"folder": str(folder), "num_folders": len(outputs), "damaged": damaged, "unchecked": unchecked}))
    if damaged:
        raise InputError(f"{damaged[0]}; files below {folder} that are damaged: {len(damaged)}, so copy or make them again.")


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = command.Parser(description=__doc__)
    parser.add_argument("folder", type=command.Path, help="a run, a token store, embeddings, or a folder of such folders")
    return parser.parse_args(argv)


if __name__ == "__main__":
    command.run(main)
