"""A saved index on disk: a folder whose manifest, written last, holds the sizes and checksums of the rest.

index.faiss      as FAISS writes it; its i-th vector is row i of the corpus
lists.bin        the inverted lists that index.faiss maps, of an index on disk
ids.json         the documents' ids, parallel to the rows
manifest.json    sizes of these
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from de_jax.files import outputs, schema
from de_jax.files.folders import Kind

INDEX_FILE, IDS_FILE, LISTS_FILE = "index.faiss", "ids.json", "lists.bin"


SAVED_INDEX = Kind(
    "faiss index",
    {
        "factory": schema.some_text,
        "num_docs": schema.integer(1),
        "dim": schema.integer(1, schema.MAX_SIZE),
    },
    make="build one and save it there",
    mend="build the index again",
)


def write(folder: Path, write_index: Callable[[Path], None], ids: Sequence[str], about: dict[str, Any]) -> None:
    """Makes the folder appear complete, by a rename; an older saved index there is replaced.

    Args:
        folder: absent, empty or a saved index.
        write_index: called with the path of the index file; may write `LISTS_FILE` beside it.
        ids: the documents' ids.
        about: facts of the manifest beside its format.

    Raises:
        InputError: the folder holds something else.
    """
    with SAVED_INDEX.writing(folder) as temporary:
        write_index(temporary / INDEX_FILE)
        outputs.write_json(temporary / IDS_FILE, list(ids))
        SAVED_INDEX.write_manifest(temporary, about)
