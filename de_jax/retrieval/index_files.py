"""A saved index on disk: a folder whose manifest, written last, holds the sizes and checksums of the rest.

index.faiss      as FAISS writes it; its i-th vector is row i of the corpus
ids.json         the documents' ids, parallel to the rows
manifest.json    what the two hold
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from de_jax.files import folders, outputs, schema
from de_jax.types import InputError

KIND = "faiss index"
FORMAT = f"de_jax {KIND} 1"
INDEX_FILE, IDS_FILE, MANIFEST_FILE = "index.faiss", "ids.json", "manifest.json"
_PARTS = (INDEX_FILE, IDS_FILE)
MANIFEST = schema.record(
    {
        "format": schema.constant(FORMAT),
        "factory": schema.some_text,
        "num_docs": schema.integer(1),
        "dim": schema.integer(1, schema.MAX_SIZE),
        "bytes": schema.record(dict.fromkeys(_PARTS, schema.integer()), only=True),
        "sha256": schema.record(dict.fromkeys(_PARTS, schema.some_text), only=True),
    }
)


def write(folder: Path, write_index: Callable[[Path], None], ids: Sequence[str], about: dict[str, Any]) -> None:
    """Makes the folder appear complete, by a rename; an older saved index there is replaced.

    Args:
        folder: absent, empty or a saved index.
        write_index: called with the path of the index file.
        ids: the documents' ids.
        about: what the manifest says beside format, sizes and checksums.

    Raises:
        InputError: the folder holds something else.
    """
    with folders.atomic_dir(folder, KIND) as temporary:
        write_index(temporary / INDEX_FILE)
        (temporary / IDS_FILE).write_text(json.dumps(list(ids), ensure_ascii=False, indent=0) + "\n", encoding="utf-8")
        parts = [temporary / INDEX_FILE, temporary / IDS_FILE]
        sizes = {part.name: part.stat().st_size for part in parts}
        checksums = {part.name: outputs.sha256_of(part) for part in parts}
        outputs.write_json(temporary / MANIFEST_FILE, {"format": FORMAT, **about, "bytes": sizes, "sha256": checksums})


def read_manifest(folder: Path, *, check_index: bool) -> dict[str, Any]:
    """The manifest of a folder that is complete and undamaged.

    Args:
        folder: a saved index.
        check_index: read the index file for its checksum; else its size must do.

    Raises:
        InputError: the folder is absent, half-written, damaged or of another version.
    """
    if not (folder / MANIFEST_FILE).is_file():
        raise InputError(f"{folder} holds no saved index (no {MANIFEST_FILE}); build one and save it there.")
    manifest: dict[str, Any] = schema.read(folder / MANIFEST_FILE, MANIFEST, mend="build the index again")
    for name, num_bytes in manifest["bytes"].items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != num_bytes:
            raise InputError(f"{path} is missing or is not the {num_bytes} bytes of its manifest; build the index again.")
        if (check_index or name != INDEX_FILE) and outputs.sha256_of(path) != manifest["sha256"][name]:
            raise InputError(f"{path} does not have the checksum of its manifest; it is damaged, so build the index again.")
    return manifest
