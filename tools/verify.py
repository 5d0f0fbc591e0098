"""Reads every file that was written with its checksum, anywhere below a folder, and prints one JSON object.

de-jax verify runs/sde
de-jax verify ~/.cache/de_jax

Restoring a checkpoint reads all of its files for their checksums, and opening any other folder its small ones. Large arrays, which
are memory-mapped, are checked by this command alone. Exits with 2 where a file is damaged; "damaged" names all of them.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from de_jax import command
from de_jax.data import files, folders
from de_jax.data.progress import progress_bar
from de_jax.types import InputError


def main(argv: list[str] | None = None) -> None:
    """The command."""
    folder = _parse_args(argv).folder
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder; give a run, a store, embeddings, or a folder of such folders.")
    described = sorted(path.parent for path in folder.rglob(folders.CHECKSUMS_FILE) if not _is_unfinished(path.relative_to(folder)))
    if not described:
        raise InputError(f"no folder below {folder} has a {folders.CHECKSUMS_FILE}; version 0.1.0 wrote none, so make it again.")
    damaged = []
    for child in progress_bar(described, desc="verify", unit=" folders", delay=0.5):
        found = list(folders.damages(child))
        damaged += found if child.is_dir() else []  # a trainer may have removed an old checkpoint meanwhile
    print(json.dumps({"folder": str(folder), "num_folders": len(described), "damaged": damaged}))
    if damaged:
        raise InputError(f"{damaged[0]}; files below {folder} that are damaged: {len(damaged)}, so copy or make them again.")


def _is_unfinished(path: Path) -> bool:
    """Whether this is in a folder that appears under its own name later."""
    return any(files.is_leftover(Path(part)) or part.endswith(".orbax-checkpoint-tmp") for part in path.parts)


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = command.Parser(description=__doc__)
    parser.add_argument("folder", type=command.Path, help="a run, a token store, embeddings, or a folder of such folders")
    return parser.parse_args(argv)


if __name__ == "__main__":
    command.run(main)
