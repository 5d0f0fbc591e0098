"""A guide's embeddings of the texts in a batch, by which a loss finds false negatives; see `losses.guided`.

<guide_dir>/
    queries/, docs/    embeddings.npy float32 [n, G] and ids.json, as encode corpus writes them
    manifest.json      the guide and the texts it embedded; written last
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Int

from de_jax.data.stores.corpus import KINDS, TokenStore
from de_jax.data.text import input_policy
from de_jax.files import reading
from de_jax.files.folders import Kind
from de_jax.files.reading import read_array
from de_jax.settings import PositiveInt, Record, list_of
from de_jax.types import Guide, InputError

_OF_TEXTS = dict.fromkeys(KINDS, str)
GUIDE = Kind(
    "guide",
    Record({"guide": str, "dim": PositiveInt, "texts": Record(_OF_TEXTS)}),
    make="run de-jax encode guide on it until it ends",
    mend="delete the folder and encode again",
)
_KIND_OF = {"query": "queries", "doc": "docs", "neg_docs": "docs", "neg_queries": "queries"}

GuideOf = Callable[[Mapping[str, np.ndarray]], Guide]
"""Rows of texts [B] or [B, N] by the names of `Batch`, `PADDING_ID` for a missing text, to a guide's embeddings of them."""


class _Embeddings(NamedTuple):
    """Of the texts of one store."""

    vectors: np.ndarray  # float32 [n, G], memory-mapped
    places: np.ndarray  # int64: where each text of the store stands among them

    def of(self, rows: Int[np.ndarray, " *t"]) -> Float32[np.ndarray, "*t G"]:
        """Scaled to length 1; zeros for a negative row."""
        found = np.asarray(self.vectors[self.places[np.maximum(rows, 0)]])
        lengths = np.linalg.norm(found, axis=-1, keepdims=True)
        return np.where(rows[..., None] < 0, np.float32(0.0), found / np.maximum(lengths, np.float32(1e-12)))


def open_guide(guide_dir: str | Path, query_store: TokenStore, doc_store: TokenStore, hashes: Mapping[str, str]) -> GuideOf:
    """The embeddings of a guide for the texts of two stores."""
    folder = Path(guide_dir)
    manifest = GUIDE.open(folder)
    sides = {}
    for kind, store in zip(KINDS, (doc_store, query_store), strict=True):
        if manifest["texts"][kind] not in (hashes.get(kind), store.content_hash):
            raise InputError(
                f"{folder} was made of other {kind} than the training pairs; run de-jax encode guide on their data set, or on "
                "their folder of pairs."
            )
        sides[kind] = _opened(folder / kind, kind, store, manifest["dim"])

    def find(rows: Mapping[str, np.ndarray]) -> Guide:
        return Guide(**{name: sides[_KIND_OF[name]].of(own) for name, own in rows.items()})

    return find


def _opened(folder: Path, kind: str, store: TokenStore, dim: int) -> _Embeddings:
    ids = reading.read_json(folder / "ids.json", list_of(str), mend=GUIDE.mend, max_bytes=None)
    vectors = read_array(folder / "embeddings.npy", "<f4", (len(ids), dim), rebuild=GUIDE.mend)
    rows = store.rows_of(ids)
    places = np.full(store.num_texts, -1)
    places[rows[rows >= 0]] = np.flatnonzero(rows >= 0)
    if (places < 0).any():
        missing = [store.ids[row] for row in np.flatnonzero(places < 0).tolist()]
        raise InputError(f"{folder} lacks {len(missing)} {kind} ({input_policy.examples(missing)}); {GUIDE.mend}.")
    return _Embeddings(vectors, places)
