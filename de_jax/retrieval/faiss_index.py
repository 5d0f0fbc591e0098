"""Search with FAISS: whatever its factory strings name, behind the protocol of `ExactIndex`."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import shutil
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from de_jax.files import outputs, reading
from de_jax.files.folders import Kind
from de_jax.retrieval import milvus_index
from de_jax.retrieval.faiss_filling import Filling, check_on_disk, faiss, on_gpus, read_on_disk, sentence, write_index
from de_jax.retrieval.index import ExactIndex, Index, check_documents, check_search, ranking_of, ranks_by_id
from de_jax.retrieval.index_settings import IndexSettings
from de_jax.settings import PositiveInt, Record, Size, list_of, some_text
from de_jax.types import DISTRIBUTION, InputError, Ranking

INDEX_FILE, IDS_FILE, LISTS_FILE = "index.faiss", "ids.json", "lists.bin"
"""As FAISS writes it, its i-th vector row i of the corpus; the documents' ids; the inverted lists of an index on disk."""
SAVED_INDEX = Kind(
    "faiss index",
    Record({"factory": some_text, "num_docs": Size, "dim": PositiveInt}),
    make="build one and save it there",
    mend="build the index again",
)
RESULT_ENTRIES = 2**22
"""Results fetched at a time; bounds the memory of a search of many queries."""
GPU_DEPTH = 2048
"""The most results that FAISS returns from a GPU."""
LISTS_A_PROBE = 16
"""An inverted index visits one of so many lists, unless `nprobe` is given or saved; FAISS itself visits one in all."""
IndexBuilder = Callable[..., Index]
"""(embeddings [n, D], ids, folder to keep it in or None) -> index."""
ON_CPU = IndexSettings()


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

    def __init__(
        self, index: Any, ids: Sequence[str], factory: str, options: IndexSettings, lists_file: Path | None = None
    ) -> None:
        """Wraps a filled FAISS index on the CPU whose i-th vector is that of `ids[i]`; `lists_file` holds lists that it maps."""
        self._index, self._ids, self._factory, self._lists_file = index, ids, factory, lists_file
        self._id_ranks = ranks_by_id(ids)
        is_on_gpu = options.faiss_device != "cpu" and lists_file is None
        self._searcher = _on_device(index, options) if is_on_gpu else index
        self._max_depth = min(len(ids), GPU_DEPTH) if is_on_gpu else len(ids)

    @classmethod
    def build(
        cls,
        embeddings: Float[Any, "n D"],
        ids: Sequence[str],
        *,
        factory: str = "Flat",
        options: IndexSettings = ON_CPU,
        train_size: int | None = None,
        seed: int = 0,
    ) -> FaissIndex:
        """Trains on a sample and adds the corpus, 65,536 documents in memory at a time.

        Args:
            embeddings: one row a document, float32, finite; may be memory-mapped and larger than memory, if the index
                itself is small enough.
            ids: the documents' ids, unique, parallel to the rows.
            factory: as FAISS writes it, such as "Flat", "IVF1024,Flat", "HNSW32" or "OPQ64,IVF4096,PQ64x4fs".
            options: how the result is searched; its `index` is not read, nor `faiss_on_disk`, see `build_on_disk`.
            train_size: documents drawn to train with, where the index needs it; by default 65,536 and 64 a list at least.
            seed: of that draw.

        Raises:
            InputError: FAISS is not installed or refuses the factory, the sample or the device; as for `ExactIndex`.
        """
        filling = _filling(embeddings, ids, factory, options, train_size=train_size, seed=seed)
        index = filling.in_memory()
        _set_parameters(index, factory, options)  # it may come from a GPU
        return cls(index, ids, factory, options)

    @classmethod
    def build_on_disk(
        cls,
        embeddings: Float[Any, "n D"],
        ids: Sequence[str],
        folder: str | Path,
        *,
        factory: str,
        options: IndexSettings = ON_CPU,
        **training: Any,
    ) -> FaissIndex:
        """Writes an IVF index larger than memory to a folder, part by part, and opens it; rankings are those of `build`.

        Args:
            folder: absent, empty or an older saved index; appears complete, by a rename.
            embeddings, ids, factory, options, training: of `build`.

        Raises:
            InputError: an index whose lists cannot be in a file, a disk with too little space; as of `build` and `save`.
        """
        filling = _filling(embeddings, ids, factory, dataclasses.replace(options, faiss_on_disk=True), **training)

        def write(path: Path) -> None:
            write_index(filling.on_disk(path.with_name(LISTS_FILE)), path)

        _save(folder, write, ids, factory, embeddings.shape[1])
        return cls.load(folder, options=options)

    def search(self, queries: Float[Any, "q D"], k: int) -> Ranking:
        """The best k documents that the index finds for each query; InputError as of `ExactIndex`, or `k` above a GPU's limit."""
        check_search(queries, k, self._index.d)
        if self._max_depth < min(k, len(self._ids)):
            raise InputError(f"k is {k}; a GPU gives at most {self._max_depth} documents, so ask for fewer or search on the CPU.")
        queries = np.ascontiguousarray(queries, np.float32)
        return ranking_of(self._search, queries, int(k), self._id_ranks, max_depth=self._max_depth, result_entries=RESULT_ENTRIES)

    def save(self, folder: str | Path) -> None:
        """Writes the index to a folder that is absent, empty or a saved index (else InputError); it appears complete."""

        def write(path: Path) -> None:
            write_index(self._index, path)
            if self._lists_file:
                shutil.copyfile(self._lists_file, path.with_name(LISTS_FILE))

        _save(folder, write, self._ids, self._factory, self._index.d)

    @classmethod
    def load(cls, folder: str | Path, *, options: IndexSettings = ON_CPU) -> FaissIndex:
        """The index that `save` or `build_on_disk` wrote.

        Args:
            folder: a saved index. Of a file of lists beyond 16 MiB, which stays on disk, only the size is checked; `de-jax verify`
                compares all checksums.
            options: of the search.

        Raises:
            InputError: the folder is absent, half-written, damaged or of another version, or an option does not apply.
        """
        folder = Path(folder)
        faiss()  # a machine without it is refused first
        _check_device(options)
        lists_file = next(iter(folder.glob(LISTS_FILE)), None)
        manifest = SAVED_INDEX.open(folder, is_thorough=lists_file is None)
        ids = reading.read_json(folder / IDS_FILE, list_of(str), max_bytes=None)
        index_file = folder / INDEX_FILE
        with sentence(f"{index_file} cannot be read", "build the index again"):
            index = read_on_disk(index_file, lists_file) if lists_file else faiss().read_index(str(index_file))
        found, expected = (len(ids), index.ntotal, index.d), (manifest["num_docs"], manifest["num_docs"], manifest["dim"])
        if found != expected:
            raise InputError(f"{folder} holds (ids, vectors, dimensions) {found}, not {expected} as its manifest; build it again.")
        _set_parameters(index, manifest["factory"], options)
        return cls(index, ids, manifest["factory"], options, lists_file)

    def _search(self, queries: Float[np.ndarray, "q D"], depth: int) -> tuple[np.ndarray, np.ndarray]:
        with sentence(f"{self._factory!r} cannot be searched", "ask for fewer documents or search on the CPU"):
            scores, rows = self._searcher.search(queries, depth)
        if rows.max(initial=-1) >= len(self._ids):  # of a large mapped file, whose checksum is not compared
            raise InputError(f"the index holds document {rows.max()} of {len(self._ids)}, so it is damaged; {SAVED_INDEX.mend}.")
        scores[rows < 0] = -np.inf  # FAISS fills up with the least float
        return scores, rows


def _milvus(uri: str, options: IndexSettings) -> IndexBuilder:
    if dataclasses.replace(options, index="exact", nprobe=None, ef_search=None) != ON_CPU:
        raise InputError("Milvus chooses its own devices and files; leave the settings of FAISS out.")
    milvus_index.require()
    params = {name: value for name, value in (("nprobe", options.nprobe), ("ef", options.ef_search)) if value is not None}

    def build(embeddings: Float[Any, "n D"], ids: Sequence[str], folder: Path | None = None) -> Index:
        if folder is None:
            raise InputError(
                "Milvus holds whole corpora whose embeddings are kept in a folder; take the exact index or FAISS here."
            )
        return milvus_index.MilvusIndex(uri, folder, embeddings.shape[1], ids, params)

    return build


def index_builder(options: IndexSettings = ON_CPU) -> IndexBuilder:
    """A function from (embeddings, ids, folder) to an index: "exact" is `ExactIndex`, "milvus:<uri>" `MilvusIndex`, the rest FAISS.

    FAISS takes a factory string. If a folder is given, an index with more than the vectors (not "Flat") is saved there and only
    loaded the next time, so the folder must belong to these embeddings alone, as `encode_to_dir` makes it.
    """
    options = options.alone()
    choice = options.index
    if choice.startswith(milvus_index.PREFIX):
        return _milvus(choice.removeprefix(milvus_index.PREFIX), options)
    if choice == "exact":
        if options != ON_CPU:
            raise InputError(
                "the exact index takes no nprobe, ef_search, device or place on disk; name a FAISS index, such as IVF1024,Flat."
            )
        return lambda embeddings, ids, folder=None: ExactIndex(embeddings, ids)
    faiss()
    _check_device(options)
    try:
        trial = _new_index(choice, dim=768)
    except InputError as error:
        if "could not parse" in str(error):  # any other refusal may be due to the dimensions, not known yet
            raise InputError(str(error).replace(" of 768 dimensions", "")) from None
    else:
        _check_empty(trial, choice, options)
    return functools.partial(_kept, choice, options)


def _check_device(options: IndexSettings) -> None:
    if options.faiss_float16 and options.faiss_device == "cpu":
        raise InputError("faiss_float16 is for GPUs; on the CPU put SQfp16 in place of Flat in the factory string.")
    if options.faiss_device != "cpu" and not faiss().get_num_gpus():
        raise InputError(
            f"FAISS sees no GPU; with one in the machine, pip uninstall faiss-cpu and pip install '{DISTRIBUTION}[gpu]', else "
            "search on the CPU."
        )


def _kept(
    factory: str, options: IndexSettings, embeddings: Float[Any, "n D"], ids: Sequence[str], folder: Path | None = None
) -> FaissIndex:
    if options.faiss_on_disk and folder is None:
        raise InputError("an index on disk stands beside its embeddings, which are in memory here; leave faiss_on_disk out.")
    if folder is None or factory == "Flat":  # which is the embeddings again
        return FaissIndex.build(embeddings, ids, factory=factory, options=options)
    name = f"{factory} on disk" if options.faiss_on_disk else factory
    saved = folder / f"index-{hashlib.sha256(name.encode()).hexdigest()[:12]}"
    if not saved.exists():
        of_new = dataclasses.replace(options, nprobe=None, ef_search=None)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".* visits ")  # `index_builder` has said it of these options
            if options.faiss_on_disk:
                FaissIndex.build_on_disk(embeddings, ids, saved, factory=factory, options=of_new)
            else:
                FaissIndex(_filling(embeddings, ids, factory, of_new).in_memory(), ids, factory, ON_CPU).save(saved)
    return FaissIndex.load(saved, options=options)


def _filling(embeddings: Float[Any, "n D"], ids: Sequence[str], factory: str, options: IndexSettings, **more: Any) -> Filling:
    """A trained index about to be filled, once everything was checked."""
    check_documents(embeddings, ids)
    if (train_size := more.get("train_size")) is not None and train_size < 1:
        raise InputError(f"train_size is {train_size}; give at least 1.")
    index = _new_index(factory, embeddings.shape[1])
    _check_empty(index, factory, options)
    return Filling(index, factory, embeddings, ids, is_on_gpu=options.faiss_device != "cpu", **more)


def _check_empty(index: Any, factory: str, options: IndexSettings) -> None:
    """Refuses, before the work, an index that is not searched with these options."""
    _set_parameters(index, factory, options)
    _check_device(options)
    if options.faiss_on_disk:
        check_on_disk(index, factory)
    else:
        _on_device(index, dataclasses.replace(options, faiss_device="cpu" if options.faiss_device == "cpu" else "gpu"))


def _save(folder: str | Path, write: Callable[[Path], None], ids: Sequence[str], factory: str, dim: int) -> None:
    """Writes a saved index; `write` gets the path of the index file, and may write `LISTS_FILE` beside it."""
    with SAVED_INDEX.writing(folder) as temporary:
        write(temporary / INDEX_FILE)
        outputs.write_json(temporary / IDS_FILE, list(ids))
        about = {"factory": factory, "num_docs": len(ids), "dim": dim, "faiss": faiss().__version__}
        SAVED_INDEX.write_manifest(temporary, about)


def _new_index(factory: str, dim: int) -> Any:
    with sentence(f"FAISS cannot make an index {factory!r} of {dim} dimensions", "see its guide to index_factory"):
        return faiss().index_factory(dim, factory, faiss().METRIC_INNER_PRODUCT)


def _set_parameters(index: Any, factory: str, options: IndexSettings) -> None:
    nprobe = options.nprobe
    lists = faiss().try_extract_index_ivf(index)  # also behind a transform, as in PCA64,IVF256,Flat
    if nprobe is None and lists is not None and lists.nprobe == 1:  # FAISS's default
        nprobe = max(1, lists.nlist // LISTS_A_PROBE)
        warnings.warn(f"{factory} visits {nprobe} of its {lists.nlist} lists; a higher nprobe finds more.", stacklevel=2)
    for name, value in (("nprobe", nprobe), ("efSearch", options.ef_search)):
        if value is None:
            continue
        with sentence(f"{name} does not apply to {factory!r}", "leave it out or choose another index"):
            faiss().ParameterSpace().set_index_parameter(index, name, value)


def _on_device(index: Any, options: IndexSettings) -> Any:
    """The index itself, or its copy on one or several GPUs."""
    if options.faiss_device == "cpu":
        return index
    is_sharded = options.faiss_gpu_mode == "shard"
    return on_gpus(index, all_gpus=options.faiss_device == "all_gpus", is_sharded=is_sharded, float16=options.faiss_float16)
