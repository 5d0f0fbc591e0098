"""Trains and fills a FAISS index: on the CPU or a GPU, in memory or with its inverted lists in a file larger than memory."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from de_jax.retrieval.faiss_library import faiss, on_gpus, sentence
from de_jax.retrieval.index import check_finite
from de_jax.types import InputError

ADD_DOCS = 65536
"""Documents in memory at a time while the corpus is added."""
PART_BYTES = 2**29
"""Of inverted lists that are filled in memory, or on a GPU, before they move to where the index is."""
TRAIN_DOCS, TRAIN_DOCS_A_LIST = 65536, 64
"""The default training sample: this many documents, and at least so many for each inverted list."""
_PARTS_DIR = "parts"


class Filling:
    """Fills an empty index with a corpus; for one use.

    Args:
        index: empty, as FAISS's factory makes it.
        factory: its name, for messages.
        embeddings: one row a document; may be memory-mapped and larger than memory.
        ids: the documents' ids, parallel to the rows.
        is_on_gpu: an index with inverted lists is trained and filled on the first GPU, others on the CPU.
        train_size, seed: of the training sample; see `FaissIndex.build`.
        progress: called with the number of documents just added.
    """

    def __init__(
        self,
        index: Any,
        factory: str,
        embeddings: Float[Any, "n D"],
        ids: Sequence[str],
        *,
        is_on_gpu: bool = False,
        train_size: int | None = None,
        seed: int = 0,
        progress: Callable[[int], object] | None = None,
    ) -> None:
        self._factory, self._embeddings, self._ids, self._progress = factory, embeddings, ids, progress
        self._is_on_gpu = is_on_gpu and faiss().try_extract_index_ivf(index) is not None
        self._filler = on_gpus(index) if self._is_on_gpu else index  # refuses what no GPU holds, before the work
        if not index.is_trained:
            rows = self._training_rows(index, train_size, seed)
            with sentence(f"{factory!r} cannot be trained on {len(rows)} documents", "raise train_size or choose another index"):
                self._filler.train(self._read(rows))
        self._index = faiss().index_gpu_to_cpu(self._filler) if self._is_on_gpu else index

    def in_memory(self) -> Any:
        """The index on the CPU with the whole corpus."""
        if self._is_on_gpu:
            for part in self._parts():
                faiss().merge_into(self._index, part, False)
            return self._index
        for rows in self._blocks(0, len(self._ids)):
            with sentence(f"{self._factory!r} cannot be filled part by part", "choose another index"):
                self._index.add(self._read(rows))
        return self._index

    def on_disk(self, lists_file: Path) -> Any:
        """The index with its inverted lists in a file, ready to be written; memory is bounded by a part and the training sample.

        Each part is written beside the file and removed once all are joined, so the disk holds the lists twice for a while.

        Raises:
            InputError: there is too little space for that.
        """
        inverted = faiss().extract_index_ivf(self._index)
        num_bytes = len(self._ids) * (inverted.code_size + np.dtype(np.int64).itemsize)
        folder = lists_file.parent / _PARTS_DIR
        folder.mkdir()
        if 2 * num_bytes > (free := shutil.disk_usage(folder).free):
            raise InputError(
                f"the lists of {self._factory!r} take {2 * num_bytes:,} bytes while they are joined, and the disk of "
                f"{folder.parent} has {free:,}; make room or choose shorter codes."
            )
        parts = [_Part.of(part, folder / str(number)) for number, part in enumerate(self._parts())]
        inverted.replace_invlists(_joined(parts, inverted.code_size, lists_file), True)
        self._index.ntotal = inverted.ntotal = len(self._ids)
        shutil.rmtree(folder)
        return self._index

    def _parts(self) -> Iterator[Any]:
        """An index on the CPU with one run of documents after another, numbered by the rows of the corpus."""
        inverted = faiss().extract_index_ivf(self._index)
        part_docs = max(ADD_DOCS, PART_BYTES // (inverted.code_size + np.dtype(np.int64).itemsize))
        for start in range(0, len(self._ids), part_docs):
            for rows in self._blocks(start, min(start + part_docs, len(self._ids))):
                with sentence(f"{self._factory!r} cannot be filled part by part", "choose another index"):
                    self._filler.add_with_ids(self._read(rows), rows)
            yield faiss().index_gpu_to_cpu(self._filler) if self._is_on_gpu else self._filler
            self._filler.reset()

    def _blocks(self, start: int, end: int) -> Iterator[Int[np.ndarray, " b"]]:
        """The rows that are added at a time; each is reported once the next is asked for."""
        for first in range(start, end, ADD_DOCS):
            rows = np.arange(first, min(first + ADD_DOCS, end))
            yield rows
            if self._progress:
                self._progress(len(rows))

    def _training_rows(self, index: Any, train_size: int | None, seed: int) -> Int[np.ndarray, " t"]:
        """Rows drawn without replacement, in order, so that a file is read forwards."""
        if train_size is None:
            inverted = faiss().try_extract_index_ivf(index)
            train_size = max(TRAIN_DOCS, TRAIN_DOCS_A_LIST * (inverted.nlist if inverted is not None else 0))
        num_docs = len(self._ids)
        return np.sort(np.random.default_rng(seed).choice(num_docs, min(train_size, num_docs), replace=False))

    def _read(self, rows: Int[np.ndarray, " r"]) -> Float[np.ndarray, "r D"]:
        part = np.ascontiguousarray(self._embeddings[rows], np.float32)
        check_finite(part, [self._ids[row] for row in rows])
        return part


def check_on_disk(index: Any, factory: str) -> None:
    """Raises InputError for an index whose inverted lists cannot be in a file, or that has none."""
    library = faiss()
    inner = library.downcast_index(index.index) if isinstance(index, library.IndexPreTransform) else index
    if not isinstance(inner, library.IndexIVF) or not isinstance(
        library.downcast_InvertedLists(inner.invlists), library.ArrayInvertedLists
    ):
        raise InputError(
            f"{factory!r} cannot stay on disk; choose an inverted index without HNSW, fast scan (fs) and RFlat at its end, such as "
            "IVF4096,PQ64."
        )


def write_index(index: Any, path: Path) -> None:
    """Through Python's file, as FAISS's own writer does not notice a full disk when it closes."""
    with open(path, "wb") as file:
        faiss().write_index(index, faiss().PyCallbackIOWriter(file.write, 1 << 20))


def read_on_disk(index_file: Path, lists_file: Path) -> Any:
    """The index that was written with its lists in a file, which stays on disk."""
    library = faiss()
    index = library.read_index(str(index_file), library.IO_FLAG_SKIP_IVF_DATA)
    lists = library.downcast_InvertedLists(library.extract_index_ivf(index).invlists)
    lists.filename, lists.read_only = str(lists_file), True
    lists.do_mmap()
    return index


class _Part(NamedTuple):
    """The inverted lists of some documents in files, one list after another; list i is [firsts[i], firsts[i + 1])."""

    firsts: np.ndarray  # int64 [lists + 1]
    codes: np.ndarray  # uint8 [n, code_size], mapped
    rows: np.ndarray  # int64 [n], mapped

    @classmethod
    def of(cls, index: Any, folder: Path) -> _Part:
        """Writes the lists of a filled index to a new folder."""
        lists = faiss().extract_index_ivf(index).invlists
        sizes = np.array([lists.list_size(number) for number in range(lists.nlist)], np.int64)
        folder.mkdir()
        with open(folder / "codes", "wb") as codes, open(folder / "rows", "wb") as rows:
            for number in np.flatnonzero(sizes).tolist():
                size = int(sizes[number])
                codes.write(faiss().rev_swig_ptr(lists.get_codes(number), size * lists.code_size))
                rows.write(faiss().rev_swig_ptr(lists.get_ids(number), size))
        mapped = np.memmap(folder / "codes", np.uint8, "r").reshape(-1, lists.code_size)
        return cls(np.append(0, np.cumsum(sizes)), mapped, np.memmap(folder / "rows", np.int64, "r"))


def _joined(parts: Sequence[_Part], code_size: int, lists_file: Path) -> Any:
    """The inverted lists of all parts, one list after another in a file as FAISS maps it: a list's codes, then its rows.

    FAISS's own `merge_from_multiple` prints to stdout, and ends the process where the disk is full.
    """
    firsts = np.stack([part.firsts for part in parts])
    sizes = np.diff(firsts.sum(axis=0)).astype(np.uint64)
    joined = faiss().OnDiskInvertedLists(len(sizes), code_size, lists_file.name)
    joined.set_all_lists_sizes(faiss().swig_ptr(sizes))  # without room between the lists
    with open(lists_file, "wb") as file:
        for number in range(len(sizes)):
            for name in ("codes", "rows"):
                for part, first, last in zip(parts, firsts[:, number].tolist(), firsts[:, number + 1].tolist(), strict=True):
                    file.write(getattr(part, name)[first:last])
        joined.totsize = file.tell()
    joined.this.disown()  # it will belong to an index
    return joined
