"""FAISS itself, and how its indexes are trained and filled: on the CPU or a GPU, in memory or with inverted lists in a file."""

import contextlib
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from de_jax.retrieval.index import check_finite
from de_jax.types import DISTRIBUTION, InputError

ADD_DOCS = 65536
"""Documents in memory at a time while the corpus is added."""
PART_BYTES = 2**29
"""Of inverted lists that are filled in memory, or on a GPU, before they move to where the index is."""
TRAIN_DOCS, TRAIN_DOCS_A_LIST = 65536, 64
"""The default training sample: this many documents, and at least so many for each inverted list."""

Lists = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Inverted lists one after another: int64 firsts [lists + 1], mapped uint8 codes [n, code_size] and int64 rows [n]."""


def faiss() -> Any:
    """The package; `InputError` if it cannot be imported."""
    try:
        import faiss as library
    except ImportError as error:
        raise InputError(
            f"FAISS cannot be imported ({error}); pip install '{DISTRIBUTION}[cpu]', or '{DISTRIBUTION}[gpu]' for NVIDIA "
            "GPUs, never both."
        ) from None
    return library


@contextlib.contextmanager
def sentence(what: str, fix: str) -> Iterator[None]:
    """Turns FAISS's complaint, which names lines of its C++, into one sentence."""
    try:
        yield
    except RuntimeError as error:
        complaint = " ".join(re.split(r"\.\w+:\d+: ", str(error))[-1].split())
        match = re.fullmatch(r"Error: '(.*?)' failed(?:: (.*))?", complaint)
        reason = (match[2] or match[1]) if match else complaint
        raise InputError(f"{what} ({reason.rstrip('.')}); {fix}.") from None


def on_gpus(index: Any, *, all_gpus: bool = False, is_sharded: bool = True, float16: bool = False) -> Any:
    """The copy of an index on the first GPU or on all; `InputError` if FAISS has no such index there, or it does not fit."""
    cloner = faiss().GpuMultipleClonerOptions()
    cloner.shard, cloner.useFloat16 = is_sharded, float16
    with sentence("FAISS cannot put the index on a GPU", "choose Flat or an IVF index that fits there, or search on the CPU"):
        return faiss().index_cpu_to_gpus_list(index, cloner, gpus=None if all_gpus else [0])


class Filling:
    """Fills an empty index with a corpus; for one use."""

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
    ) -> None:
        self._factory, self._embeddings, self._ids = factory, embeddings, ids
        inverted = faiss().try_extract_index_ivf(index)
        self._is_on_gpu = is_on_gpu and inverted is not None
        self._filler = on_gpus(index) if self._is_on_gpu else index  # refuses what no GPU holds, before the work
        if not index.is_trained:
            wanted = train_size or max(TRAIN_DOCS, TRAIN_DOCS_A_LIST * (inverted.nlist if inverted is not None else 0))
            rows = np.sort(np.random.default_rng(seed).choice(len(ids), min(wanted, len(ids)), replace=False))
            fix = "raise train_size" if len(rows) < len(ids) else "choose fewer lists, such as IVF16,Flat, or exact"
            with sentence(f"{factory!r} cannot be trained on {len(rows)} documents", fix):
                self._filler.train(self._read(rows))
        self._index = faiss().index_gpu_to_cpu(self._filler) if self._is_on_gpu else index

    def in_memory(self) -> Any:
        """The index on the CPU with the whole corpus."""
        if self._is_on_gpu:
            for part in self._parts():
                faiss().merge_into(self._index, part, False)
        else:
            self._add(0, len(self._ids), lambda docs, _: self._index.add(docs))
        return self._index

    def on_disk(self, lists_file: Path) -> Any:
        """The index with its inverted lists in a file, ready to be written; memory is bounded by a part and the training sample.

        Each part is written beside the file and removed once all are joined, so the disk holds the lists twice for a while;
        InputError if it has too little space.
        """
        inverted = faiss().extract_index_ivf(self._index)
        num_bytes = len(self._ids) * (inverted.code_size + np.dtype(np.int64).itemsize)
        folder = lists_file.parent / "parts"
        folder.mkdir()
        if 2 * num_bytes > (free := shutil.disk_usage(folder).free):
            needed = f"the lists of {self._factory!r} take {2 * num_bytes:,} bytes while they are joined"
            raise InputError(f"{needed}, and the disk of {folder.parent} has {free:,}; make room or choose shorter codes.")
        parts = [_written_lists(part, folder / str(number)) for number, part in enumerate(self._parts())]
        inverted.replace_invlists(_joined(parts, inverted.code_size, lists_file), True)
        self._index.ntotal = inverted.ntotal = len(self._ids)
        shutil.rmtree(folder)
        return self._index

    def _parts(self) -> Iterator[Any]:
        """An index on the CPU with one run of documents after another, numbered by the rows of the corpus."""
        inverted = faiss().extract_index_ivf(self._index)
        part_docs = max(ADD_DOCS, PART_BYTES // (inverted.code_size + np.dtype(np.int64).itemsize))
        for start in range(0, len(self._ids), part_docs):
            self._add(start, min(start + part_docs, len(self._ids)), self._filler.add_with_ids)
            yield faiss().index_gpu_to_cpu(self._filler) if self._is_on_gpu else self._filler
            self._filler.reset()

    def _add(self, start: int, end: int, add: Callable[[np.ndarray, np.ndarray], None]) -> None:
        """Gives `add` the embeddings and the numbers of some rows, `ADD_DOCS` at a time."""
        for first in range(start, end, ADD_DOCS):
            rows = np.arange(first, min(first + ADD_DOCS, end))
            with sentence(f"{self._factory!r} cannot be filled part by part", "choose another index"):
                add(self._read(rows), rows)

    def _read(self, rows: Int[np.ndarray, " r"]) -> Float[np.ndarray, "r D"]:
        part = np.ascontiguousarray(self._embeddings[rows], np.float32)
        check_finite(part, [self._ids[row] for row in rows])
        return part


def check_on_disk(index: Any, factory: str) -> None:
    """Raises InputError for an index whose inverted lists cannot be in a file, or that has none."""
    library = faiss()
    inner = library.downcast_index(index.index) if isinstance(index, library.IndexPreTransform) else index
    lists = library.downcast_InvertedLists(inner.invlists) if isinstance(inner, library.IndexIVF) else None
    if not isinstance(lists, library.ArrayInvertedLists):
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
    library, num_bytes = faiss(), lists_file.stat().st_size
    index = library.read_index(str(index_file), library.IO_FLAG_SKIP_IVF_DATA)
    lists = library.downcast_InvertedLists(library.extract_index_ivf(index).invlists)
    ends = [one.offset + one.capacity * (lists.code_size + 8) for one in map(lists.lists.at, range(lists.nlist))]
    if max(ends, default=0) > num_bytes:
        raise InputError(f"{index_file} has lists beyond the {num_bytes} bytes of {lists_file}; build the index again.")
    lists.filename, lists.read_only = str(lists_file), True
    lists.do_mmap()
    return index


def _written_lists(index: Any, folder: Path) -> Lists:
    """The lists of a filled index, in a new folder."""
    lists = faiss().extract_index_ivf(index).invlists
    sizes = np.array([lists.list_size(number) for number in range(lists.nlist)], np.int64)
    folder.mkdir()
    with open(folder / "codes", "wb") as codes, open(folder / "rows", "wb") as rows:
        for number in np.flatnonzero(sizes).tolist():
            size = int(sizes[number])
            codes.write(faiss().rev_swig_ptr(lists.get_codes(number), size * lists.code_size))
            rows.write(faiss().rev_swig_ptr(lists.get_ids(number), size))
    mapped = np.memmap(folder / "codes", np.uint8, "r").reshape(-1, lists.code_size)
    return np.append(0, np.cumsum(sizes)), mapped, np.memmap(folder / "rows", np.int64, "r")


def _joined(parts: Sequence[Lists], code_size: int, lists_file: Path) -> Any:
    """The inverted lists of all parts, one list after another in a file as FAISS maps it: a list's codes, then its rows.

    FAISS's own `merge_from_multiple` prints to stdout, and ends the process where the disk is full.
    """
    firsts = np.stack([part[0] for part in parts])
    sizes = np.diff(firsts.sum(axis=0)).astype(np.uint64)
    joined = faiss().OnDiskInvertedLists(len(sizes), code_size, lists_file.name)
    joined.set_all_lists_sizes(faiss().swig_ptr(sizes))  # without room between the lists
    with open(lists_file, "wb") as file:
        for number in range(len(sizes)):
            for array in (1, 2):
                for part in parts:
                    file.write(part[array][part[0][number] : part[0][number + 1]].data)
        joined.totsize = file.tell()
    joined.this.disown()  # it will belong to an index
    return joined
