"""Embeddings that are there already: of a corpus that has changed, only the new texts are encoded."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int, UInt64

from de_jax.files import folders, outputs
from de_jax.files.reading import read_array
from de_jax.retrieval.embedding_files import open_embeddings
from de_jax.retrieval.micro_batches import Store
from de_jax.types import InputError

HASHES_FILE = "texts.npy"
_TEXTS = 4096
"""Hashed at a time."""


class Known(NamedTuple):
    """Embeddings by the hash of their text."""

    hashes: UInt64[np.ndarray, " n"]  # ascending
    rows: Int[np.ndarray, " n"]  # of `embeddings`
    embeddings: Float[np.ndarray, "n D"]

    def find(self, hashes: UInt64[np.ndarray, " r"]) -> Int[np.ndarray, " r"]:
        """The row of each text; -1 where it is not known."""
        places = np.minimum(np.searchsorted(self.hashes, hashes), len(self.hashes) - 1)
        return np.where(self.hashes[places] == hashes, self.rows[places], -1)


def text_hashes(store: Store, max_length: int) -> UInt64[np.ndarray, " n"]:
    """64 bits that tell the tokens of each text, cut to `max_length`, from others: a sum of tokens times random odd numbers.

    Two texts of fewer than 2^17 different tokens have equal hashes with a probability below 2^-46.
    """
    lengths = store.lengths(max_length)
    factors = np.random.default_rng(0).integers(0, 2**63, int(lengths.max()), dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    hashes = np.empty(store.num_texts, np.uint64)
    for start in range(0, store.num_texts, _TEXTS):
        rows = np.arange(start, min(start + _TEXTS, store.num_texts))
        width = int(lengths[rows].max())
        tokens = store.pad(rows, max_length, width).astype(np.uint64)
        hashes[rows] = tokens @ factors[:width]
    return hashes


def keep(folder: Path, hashes: UInt64[np.ndarray, " n"]) -> None:
    """Puts the hashes beside complete embeddings."""
    if not (folder / HASHES_FILE).exists():
        with outputs.atomic_file(folder / HASHES_FILE) as temporary:
            outputs.save_array(temporary, hashes)
        if record := folders.read_checksums(folder):
            folders.write_checksums(folder, record["kind"], record["files"] | folders.facts(folder, [HASHES_FILE]))


def find(embeddings_dir: Path, *, model: str, max_length: int) -> Known | None:
    """The largest embeddings of a run's folder by one model, for texts cut to one length, or None."""
    found: Known | None = None
    for path in sorted(embeddings_dir.glob(f"*/step_*/{HASHES_FILE}")):
        try:
            _, embeddings, manifest = open_embeddings(path.parent)
            hashes = read_array(path, "<u8", (len(embeddings),), in_memory=True)
        except InputError:  # damaged embeddings are of no use
            continue
        if (manifest.get("model"), manifest.get("max_length")) != (model, max_length):
            continue
        if found is None or len(found.hashes) < len(hashes):
            order = np.argsort(hashes, kind="stable")
            found = Known(hashes[order], order, embeddings)
    return found
