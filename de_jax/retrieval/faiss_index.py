"""Search with FAISS: whatever its factory strings name, behind the protocol of `ExactIndex`."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from jaxtyping import Float, Int

from de_jax.files import schema
from de_jax.retrieval import index_files, milvus_index
from de_jax.retrieval.index import ExactIndex, Index, check_finite, ranking_of, ranks_by_id
from de_jax.types import InputError, Ranking

ADD_DOCS = 65536
"""Documents in memory at a time while the corpus is added."""
TRAIN_DOCS, TRAIN_DOCS_A_LIST = 65536, 64
"""The default training sample: this many documents, and at least so many for each inverted list."""
RESULT_ENTRIES = 2**22
"""Results fetched at a time; bounds the memory of a search of many queries."""
GPU_DEPTH = 2048
"""The most results that FAISS returns from a GPU."""
Device = Literal["cpu", "gpu", "all_gpus"]
GPUMode = Literal["shard", "replicate"]
DEVICES, GPU_MODES = get_args(Device), get_args(GPUMode)


IndexBuilder = Callable[..., Index]
"""(embeddings [n, D], ids, folder to keep it in or None) -> index."""


class SearchOptions(NamedTuple):
    """How and where an index is searched; None keeps the value of a saved index, or FAISS's default in a new one.

    `nprobe`: inverted lists visited (IVF). `ef_search`: candidates kept (HNSW). `device`: "cpu", "gpu" (the first) or
    "all_gpus". `gpu_mode`: several GPUs hold a "shard" each, or "replicate" the whole and share the queries.
    `float16`: a GPU stores the vectors in half precision; the saved index keeps its own.
    """

    nprobe: int | None = None
    ef_search: int | None = None
    device: str = "cpu"
    gpu_mode: str = "shard"
    float16: bool = False


ON_CPU = SearchOptions()


class FaissIndex:
    """Documents in a FAISS index for inner products; made by `build` or `load`.

    Rankings follow the conventions of `ExactIndex`: documents with equal scores are in descending order of their ids, compared as
    strings, and a query that finds fewer than k documents is filled up with row -1 and score -inf. "Flat" finds the same documents
    as `ExactIndex`, with scores equal to float32 rounding. A tie deeper than `GPU_DEPTH` results on a GPU is cut as FAISS cuts it.

    Example:
        >>> index = FaissIndex.build(np.eye(3, dtype=np.float32), ["c", "a", "b"], factory="Flat")
        >>> index.search(np.array([[0.0, 1.0, 1.0]], np.float32), k=2).doc_rows.tolist()
        [[2, 1]]
    """

    def __init__(self, index: Any, ids: Sequence[str], factory: str, options: SearchOptions) -> None:
        """Wraps a filled FAISS index on the CPU whose i-th vector is that of `ids[i]`."""
        self._index, self._ids, self._factory = index, ids, factory
        self._id_ranks = ranks_by_id(ids)
        self._searcher = _on_device(index, options)
        self._max_depth = len(ids) if options.device == "cpu" else min(len(ids), GPU_DEPTH)

    @classmethod
    def build(
        cls,
        embeddings: Float[Any, "n D"],
        ids: Sequence[str],
        *,
        factory: str = "Flat",
        options: SearchOptions = ON_CPU,
        train_size: int | None = None,
        seed: int = 0,
        progress: Callable[[int], object] | None = None,
    ) -> FaissIndex:
        """Trains on a sample and adds the corpus, `ADD_DOCS` documents in memory at a time, on the CPU.

        Args:
            embeddings: one row a document, float32, finite; may be memory-mapped and larger than memory, if the index
                itself is small enough.
            ids: the documents' ids, unique, parallel to the rows.
            factory: as FAISS writes it, such as "Flat", "IVF1024,Flat", "HNSW32" or "OPQ64,IVF4096,PQ64x4fs".
            options: how the result is searched.
            train_size: documents drawn to train with, where the index needs it; by default 65,536 and 64 a list at least.
            seed: of that draw.
            progress: called with the number of documents just added.

        Raises:
            InputError: FAISS is not installed or refuses the factory, the sample or the device; as for `ExactIndex`.
        """
        if not len(embeddings):
            raise InputError("the corpus has no documents to search; give embeddings of at least one.")
        if len(ids) != len(embeddings):
            raise InputError(f"{len(ids)} document ids do not match {len(embeddings)} embeddings; give one id a row.")
        if train_size is not None and train_size < 1:
            raise InputError(f"train_size is {train_size}; give at least 1.")
        index = _new_index(factory, embeddings.shape[1])
        _set_parameters(index, factory, options)
        _on_device(index, options._replace(device=options.device.replace("all_gpus", "gpu")))  # refuses before the work
        if not index.is_trained:
            rows = _training_rows(index, len(ids), train_size, seed)
            with _sentence(f"{factory!r} cannot be trained on {len(rows)} documents", "raise train_size or choose another index"):
                index.train(_read(embeddings, ids, rows))
        for start in range(0, len(ids), ADD_DOCS):
            shard = _read(embeddings, ids, np.arange(start, min(start + ADD_DOCS, len(ids))))
            with _sentence(f"{factory!r} cannot be filled part by part", "choose another index"):
                index.add(shard)
            if progress:
                progress(len(shard))
        return cls(index, ids, factory, options)

    def search(self, queries: Float[Any, "q D"], k: int) -> Ranking:
        """The best k documents that the index finds for each query.

        Args:
            queries: [q, D] float32, finite; no rows give an empty ranking.
            k: depth, at least 1.

        Raises:
            InputError: another number of dimensions than the documents', a value that is not finite, or `k` below 1 or above
                the limit of a GPU.
        """
        if k < 1:
            raise InputError(f"k is {k}; ask for at least 1 document.")
        if queries.shape[1] != self._index.d:
            raise InputError(
                f"queries have {queries.shape[1]} dimensions and documents {self._index.d}; "
                "encode both with the same model and checkpoint."
            )
        if self._max_depth < min(k, len(self._ids)):
            raise InputError(f"k is {k}; a GPU gives at most {self._max_depth} documents, so ask for fewer or search on the CPU.")
        check_finite(queries)
        queries = np.ascontiguousarray(queries, np.float32)
        return ranking_of(self._search, queries, k, self._id_ranks, max_depth=self._max_depth, result_entries=RESULT_ENTRIES)

    def save(self, folder: str | Path) -> None:
        """Writes the index to a folder that is absent, empty or an older saved index; it appears complete, by a rename.

        Raises:
            InputError: the folder holds something else.
        """
        about = {"factory": self._factory, "num_docs": len(self._ids), "dim": self._index.d, "faiss": _faiss().__version__}
        index_files.write(Path(folder), self._write_index, self._ids, about)

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        mmap: bool = False,
        options: SearchOptions = ON_CPU,
    ) -> FaissIndex:
        """The index that `save` wrote.

        Args:
            folder: a saved index.
            mmap: leave the vectors on disk and read only the parts that a search touches; for a large file only the size is
                checked, not the checksum.
            options: of the search.

        Raises:
            InputError: the folder is absent, half-written, damaged or of another version, or an option does not apply.
        """
        folder = Path(folder)
        faiss = _faiss()
        _check_device(options)
        manifest = index_files.SAVED_INDEX.open(folder, is_thorough=not mmap)
        ids = schema.read(folder / index_files.IDS_FILE, schema.texts, max_bytes=None)
        index_file = folder / index_files.INDEX_FILE
        with _sentence(f"{index_file} cannot be read", "build the index again"):
            index = faiss.read_index(str(index_file), faiss.IO_FLAG_MMAP_IFC if mmap else 0)
        found, expected = (len(ids), index.ntotal, index.d), (manifest["num_docs"], manifest["num_docs"], manifest["dim"])
        if found != expected:
            raise InputError(f"{folder} holds (ids, vectors, dimensions) {found}, not {expected} as its manifest; build it again.")
        _set_parameters(index, manifest["factory"], options)
        return cls(index, ids, manifest["factory"], options)

    def _write_index(self, path: Path) -> None:
        """Through Python's file, as FAISS's own writer does not notice a full disk when it closes."""
        faiss = _faiss()
        with open(path, "wb") as file:
            faiss.write_index(self._index, faiss.PyCallbackIOWriter(file.write, 1 << 20))

    def _search(self, queries: Float[np.ndarray, "q D"], depth: int) -> tuple[np.ndarray, np.ndarray]:
        with _sentence(f"{self._factory!r} cannot be searched", "ask for fewer documents or search on the CPU"):
            scores, rows = self._searcher.search(queries, depth)
        scores[rows < 0] = -np.inf  # FAISS fills up with the least float
        return scores, rows


def _milvus(uri: str, options: SearchOptions) -> IndexBuilder:
    if options._replace(nprobe=None, ef_search=None) != ON_CPU:
        raise InputError("Milvus chooses its own devices; leave the FAISS device out.")
    milvus_index.require()
    named = {"nprobe": options.nprobe, "ef": options.ef_search}
    params = {name: value for name, value in named.items() if value is not None}

    def build(embeddings: Float[Any, "n D"], ids: Sequence[str], folder: Path | None = None) -> Index:
        if folder is None:
            raise InputError(
                "Milvus holds whole corpora whose embeddings are kept in a folder; take the exact index or FAISS here."
            )
        return milvus_index.MilvusIndex(uri, folder, embeddings.shape[1], ids, params)

    return build


def index_builder(choice: str, options: SearchOptions = ON_CPU) -> IndexBuilder:
    """A function from (embeddings, ids, folder) to an index: "exact" is `ExactIndex`, "milvus:<uri>" `MilvusIndex`, the rest FAISS.

    FAISS takes a factory string. If a folder is given, an index with more than the vectors (not "Flat") is saved there and only
    loaded the next time, so the folder must belong to these embeddings alone, as `encode_to_dir` makes it.

    Raises:
        InputError: FAISS or pymilvus is not installed, FAISS does not know the choice, or there is no such device; before
            anything is built.
    """
    if choice.startswith(milvus_index.PREFIX):
        return _milvus(choice.removeprefix(milvus_index.PREFIX), options)
    if choice == "exact":
        if options != ON_CPU:
            raise InputError("the exact index takes no nprobe, ef_search or device; name a FAISS index, such as IVF1024,Flat.")
        return lambda embeddings, ids, folder=None: ExactIndex(embeddings, ids)
    _faiss()
    _check_device(options)
    try:
        trial = _new_index(choice, dim=768)
    except InputError as error:
        if "could not parse" in str(error):  # any other refusal may be due to the dimensions, not known yet
            raise
    else:
        _set_parameters(trial, choice, options)
    return functools.partial(_kept, choice, options)


def _kept(
    factory: str, options: SearchOptions, embeddings: Float[Any, "n D"], ids: Sequence[str], folder: Path | None = None
) -> FaissIndex:
    if folder is None or factory == "Flat":  # which is the embeddings again
        return FaissIndex.build(embeddings, ids, factory=factory, options=options)
    saved = folder / f"index-{hashlib.sha256(factory.encode()).hexdigest()[:12]}"
    if not saved.exists():
        FaissIndex.build(embeddings, ids, factory=factory).save(saved)
    return FaissIndex.load(saved, options=options)


def _faiss() -> Any:
    try:
        import faiss
    except ImportError as error:
        raise InputError(
            f"FAISS cannot be imported ({error}); pip install 'de_jax[cpu]', or 'de_jax[gpu]' for NVIDIA GPUs, never both."
        ) from None
    return faiss


def _new_index(factory: str, dim: int) -> Any:
    faiss = _faiss()
    with _sentence(f"FAISS cannot make an index {factory!r} of {dim} dimensions", "see its guide to index_factory"):
        return faiss.index_factory(dim, factory, faiss.METRIC_INNER_PRODUCT)


def _set_parameters(index: Any, factory: str, options: SearchOptions) -> None:
    for name, value in (("nprobe", options.nprobe), ("efSearch", options.ef_search)):
        if value is None:
            continue
        if value < 1:
            raise InputError(f"{name} is {value}; give at least 1.")
        with _sentence(f"{name} does not apply to {factory!r}", "leave it out or choose another index"):
            _faiss().ParameterSpace().set_index_parameter(index, name, value)


def _check_device(options: SearchOptions) -> None:
    if options.device not in DEVICES or options.gpu_mode not in GPU_MODES:
        raise InputError(
            f"device is {options.device!r} and gpu_mode {options.gpu_mode!r}; choose from {', '.join(DEVICES)} and from "
            f"{', '.join(GPU_MODES)}."
        )
    if options.float16 and options.device == "cpu":
        raise InputError("float16 is for GPUs; on the CPU put SQfp16 in place of Flat in the factory string.")
    if options.device != "cpu" and not _faiss().get_num_gpus():
        raise InputError(
            "FAISS sees no GPU; with one in the machine, pip uninstall faiss-cpu and pip install 'de_jax[gpu]', else search on "
            "the CPU."
        )


def _on_device(index: Any, options: SearchOptions) -> Any:
    """The index itself, or its copy on one or several GPUs."""
    _check_device(options)
    if options.device == "cpu":
        return index
    faiss = _faiss()
    cloner = faiss.GpuMultipleClonerOptions()
    cloner.shard, cloner.useFloat16 = options.gpu_mode == "shard", options.float16
    with _sentence("FAISS cannot put the index on a GPU", "choose Flat or an IVF index that fits there, or search on the CPU"):
        return faiss.index_cpu_to_gpus_list(index, cloner, gpus=[0] if options.device == "gpu" else None)


def _training_rows(index: Any, num_docs: int, train_size: int | None, seed: int) -> Int[np.ndarray, " t"]:
    """Rows drawn without replacement, in order, so that a file is read forwards."""
    if train_size is None:
        inverted = _faiss().try_extract_index_ivf(index)
        train_size = max(TRAIN_DOCS, TRAIN_DOCS_A_LIST * (inverted.nlist if inverted is not None else 0))
    return np.sort(np.random.default_rng(seed).choice(num_docs, min(train_size, num_docs), replace=False))


def _read(embeddings: Float[Any, "n D"], ids: Sequence[str], rows: Int[np.ndarray, " r"]) -> Float[np.ndarray, "r D"]:
    part = np.ascontiguousarray(embeddings[rows], np.float32)
    check_finite(part, [ids[row] for row in rows])
    return part


@contextlib.contextmanager
def _sentence(what: str, fix: str) -> Iterator[None]:
    """Turns FAISS's complaint, which names lines of its C++, into one sentence."""
    try:
        yield
    except RuntimeError as error:
        complaint = " ".join(re.split(r"\.\w+:\d+: ", str(error))[-1].split())
        match = re.fullmatch(r"Error: '(.*?)' failed(?:: (.*))?", complaint)
        reason = (match[2] or match[1]) if match else complaint
        raise InputError(f"{what} ({reason.rstrip('.')}); {fix}.") from None
