"""`de-jax verify`."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from de_jax.files import folders
from de_jax.files.outputs import is_leftover, progress_bar, read_json
from de_jax.files.reading import require_folder
from de_jax.types import InputError


def verify(folder: Path, /) -> Iterator[dict[str, Any]]:
    """Checks every file with a checksum anywhere below a folder.

    de-jax verify runs/sde
    de-jax verify ~/.cache/de_jax

    Restoring a checkpoint checks all of its files, and opening any other folder its small files. Only this command checks large,
    memory-mapped arrays. Exits with 2 if a file is damaged; "damaged" lists the files. Folders without checksums are "unchecked".
    Prints one JSON object.

    Args:
        folder: a run, a token store, embeddings, or a folder of such folders.
    """
    require_folder(folder, "give a run, a store, embeddings, or a folder of such folders")
    damaged, unchecked = [], []
    outputs = _find_outputs(folder)
    for child in progress_bar(outputs, desc="verify", unit=" folders", delay=0.5):
        found = list(folders.damages(child))
        if not child.is_dir():
            continue  # a trainer removed an old checkpoint meanwhile
        damaged += found
        if not found and not folders.kept(child)[1]:
            unchecked.append(str(child))
            print(f"{child}: no checksums were written, so nothing was checked.", file=sys.stderr)
    if len(unchecked) == len(outputs):
        raise InputError(
            f"no folder below {folder} has a {folders.CHECKSUMS_FILE}, so nothing was checked; exports for other libraries have "
            "none."
        )
    yield {"folder": str(folder), "num_folders": len(outputs), "damaged": damaged, "unchecked": unchecked}
    if damaged:
        raise InputError(f"{damaged[0]}; files below {folder} that are damaged: {len(damaged)}, so copy or make them again.")


def _find_outputs(folder: Path) -> list[Path]:
    """The outputs of this library at and below a folder, the outermost where one holds others."""
    marks = (folders.CHECKSUMS_FILE, folders.MANIFEST_FILE, folders.CHECKPOINT_FILE)
    marked = {path.parent for name in marks for path in folder.rglob(name) if not _is_unfinished(path.relative_to(folder))}
    outermost: list[Path] = []
    for child in sorted(marked):
        is_within = bool(outermost) and child.is_relative_to(outermost[-1])
        if not is_within and (any((child / name).exists() for name in (marks[0], marks[2])) or _has_own_manifest(child)):
            outermost.append(child)
    return outermost


def _has_own_manifest(folder: Path) -> bool:
    """Whether the manifest is this library's; a damaged one may be."""
    try:
        return folders.kind_said(read_json(folder / folders.MANIFEST_FILE)) is not None
    except InputError:
        return True


def _is_unfinished(path: Path) -> bool:
    """Whether this is in a folder that appears under its own name later."""
    return any(is_leftover(Path(part)) or part.endswith(".orbax-checkpoint-tmp") for part in path.parts)
