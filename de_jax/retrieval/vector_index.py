"""An index to keep: documents' embeddings in a precision, or their passages', searched exactly.

vectors.npy      float32 [n, D], or the codes of `quantization`: int8 [n, D] or [n, ceil(D / 8)]
embeddings.npy   float32 [n, D], if they are kept beside codes
ranges.npy       float32 [2, D], of int8
doc_rows.npy     int32 [n] the document of each vector, where these are passages
ids.json         the documents' ids
manifest.json    sizes, and which of these there are
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, overload

import numpy as np

from de_jax.files import addresses, outputs, reading
from de_jax.files.folders import Kind
from de_jax.retrieval import quantization
from de_jax.retrieval.index import ExactIndex, Index, MaxPIndex, array_of, check_distinct, check_finite
from de_jax.settings import PositiveInt, Range, Record, check_value, list_of
from de_jax.types import Array, Hit, InputError, Ranking

MAX_DEPTH = 2**20
"""Of a ranking of fewer documents, whose remaining places take memory too."""
IDS_FILE = "ids.json"
VECTOR_INDEX = Kind(
    "vector index",
    Record({"precision": Literal[quantization.PRECISIONS], "num_vectors": PositiveInt, "dim": PositiveInt, "arrays": list_of(str)}),
    make="build one and save it there",
    mend="make the index again",
)


class Arrays(NamedTuple):
    """The arrays of an index, which are also the names of its files."""

    vectors: Array
    embeddings: Array | None = None
    ranges: Array | None = None
    doc_rows: Array | None = None


class VectorIndex:
    """Documents that are found by inner product; made by `build` or `load`.

    Rankings are those of `ExactIndex`, or with fewer bytes of `QuantizedIndex`; of passages, a document scores as its best one.

    Attributes:
        ids: of the documents, in the rows of a `Ranking`.
        precision: out of `quantization.PRECISIONS`.
        dim: D of a query.
        model_hash: gives the hash of the document tower, "" if it is unknown.

    Example:
        >>> docs = np.array([[0.6, 0.8], [1.0, 0.0]], np.float32)
        >>> index = VectorIndex.build(docs, ["a", "b"])
        >>> [(hit.rank, hit.id) for hit in index.search(np.array([1.0, 0.0], np.float32), k=9)]
        [(1, 'b'), (2, 'a')]
    """

    def __init__(self, arrays: Arrays, ids: Iterable[Any], *, precision: str, dim: int, devices: Sequence[Any] | None) -> None:
        self.model_hash: Callable[[], str] = str
        if isinstance(ids, str) or not isinstance(ids, Iterable):
            raise InputError(f"ids is {ids!r:.60}; give a list of str, one a document.")
        self.ids, self.precision, self.dim, self._arrays = list(ids), precision, dim, arrays
        num_docs = len(arrays.vectors) if arrays.doc_rows is None else _num_docs(arrays.doc_rows, len(arrays.vectors))
        if len(self.ids) != num_docs:
            raise InputError(f"{len(self.ids)} ids do not match {num_docs} documents; give one id a document.")
        check_distinct(self.ids)
        row_ids = self.ids if arrays.doc_rows is None else [self.ids[row] for row in arrays.doc_rows.tolist()]
        index: Index
        if precision == "float32":
            index = ExactIndex(arrays.vectors, row_ids, devices=devices)
        else:
            options: dict[str, Any] = {"ranges": arrays.ranges, "embeddings": arrays.embeddings, "dim": dim, "devices": devices}
            index = quantization.QuantizedIndex(arrays.vectors, row_ids, precision=precision, **options)
        self._index = index if arrays.doc_rows is None else MaxPIndex(index, arrays.doc_rows)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.ids):,} documents, dim={self.dim}, precision={self.precision!r})"

    @classmethod
    def build(
        cls,
        embeddings: Array,
        ids: Iterable[Any] | None = None,
        *,
        precision: str = "float32",
        ranges: Array | None = None,
        keep_embeddings: bool = True,
        dim: int | None = None,
        doc_rows: Array | None = None,
        devices: Sequence[Any] | None = None,
    ) -> VectorIndex:
        """An index of embeddings, or of the codes that `quantization.quantize` made of them.

        Args:
            embeddings: float32 [n, D], finite, may be memory-mapped; other floats are cast; or int8 codes in this precision.
            ids: the documents' as str, distinct; by default their rows as text.
            precision: how they are searched. "int8" takes a quarter of the bytes, "binary" a thirty-second.
            ranges: [2, D] that "int8" is made with, or was; by default those of the embeddings.
            keep_embeddings: keep them beside codes, to score candidates again.
            dim: D; needed of "binary" codes alone, if it is no multiple of 8.
            doc_rows: int [n] the document of each row, if these are passages; ascending from 0, none left out.
            devices: that share the search; by default all of this process.

        Raises:
            InputError: nothing to search, sizes that do not match, a value that is not finite, or another precision.
        """
        quantization.check_precision(precision, ranges)
        embeddings = array_of("embeddings", embeddings)
        if embeddings.ndim != 2 or not len(embeddings):
            raise InputError(f"embeddings have the shape {embeddings.shape}; give [n, D] of at least one document.")
        is_coded = embeddings.dtype == np.int8
        if not is_coded and not np.issubdtype(embeddings.dtype, np.floating):
            raise InputError(f"embeddings are {embeddings.dtype}; give float32, or the int8 that encoding to int8 or binary gives.")
        if is_coded and precision == "float32":
            raise InputError("embeddings are int8 already; say how they were made: precision='int8' with its ranges, or 'binary'.")
        if not is_coded:  # what `load` reads; beyond its range is infinite, which is refused below
            with np.errstate(over="ignore"):
                embeddings = np.asarray(embeddings, np.float32)
        per_byte = 8 if is_coded and precision == "binary" else 1
        dim = embeddings.shape[1] * per_byte if dim is None else dim
        if embeddings.shape[1] != -(-dim // per_byte):
            raise InputError(f"embeddings have {embeddings.shape[1]} columns, but {dim} dimensions take {-(-dim // per_byte)}.")
        if not is_coded and precision == "int8" and ranges is None:
            ranges = quantization.ranges_of(embeddings)
        vectors = embeddings if is_coded or precision == "float32" else quantization.quantize(embeddings, precision, ranges)
        arrays = Arrays(
            vectors=vectors,
            embeddings=embeddings if keep_embeddings and not is_coded and precision != "float32" else None,
            ranges=np.asarray(ranges, np.float32) if precision == "int8" and ranges is not None else None,
            doc_rows=None if doc_rows is None else np.asarray(doc_rows, np.int32),
        )
        if ids is None:
            ids = [str(row) for row in range(len(vectors) if doc_rows is None else _num_docs(doc_rows, len(vectors)))]
        return cls(arrays, ids, precision=precision, dim=dim, devices=devices)

    @overload
    def search(self, queries: Array, k: int = ..., *, arrays: Literal[False] = ...) -> list[Any]: ...
    @overload
    def search(self, queries: Array, k: int = ..., *, arrays: Literal[True]) -> Ranking: ...
    def search(self, queries: Array, k: int = 10, *, arrays: bool = False) -> Any:
        """The k best documents of each query, or all if there are fewer.

        Args:
            queries: float32 [q, D], or [D] of one query; finite.
            k: from 1 to `MAX_DEPTH`, or to the number of documents if that is more.
            arrays: give a `Ranking` of `doc_rows` and `scores`, both [q, at most k].

        Returns:
            A list of `Hit` for each query, best first; of one query [D] its own list.

        Raises:
            InputError: another number of dimensions, a value that is not finite, no floats, or another `k`.
        """
        queries = array_of("queries", queries)
        if not np.issubdtype(queries.dtype, np.floating) or queries.ndim not in (1, 2):
            raise InputError(f"queries are {queries.dtype} {queries.shape}; give float32 [q, D], which the index quantizes itself.")
        check_value("k", k, Annotated[int, Range(1, max(MAX_DEPTH, len(self.ids)))])
        several = np.asarray(np.atleast_2d(queries), np.float32)
        check_finite(several)
        ranking = self._index.search(several, min(int(k), len(self.ids)))
        if arrays:
            return ranking
        found = [
            [Hit(rank, row, self.ids[row], score) for rank, (row, score) in enumerate(zip(*both, strict=True), 1)]
            for both in zip(np.asarray(ranking.doc_rows).tolist(), np.asarray(ranking.scores).tolist(), strict=True)
        ]
        return found[0] if queries.ndim == 1 else found

    def save(self, folder: str | Path) -> None:
        """Writes the index to a folder that is absent, empty or an older one (else InputError); it appears complete."""
        arrays = {name: array for name, array in self._arrays._asdict().items() if array is not None}
        about = {"precision": self.precision, "num_vectors": len(self._arrays.vectors), "dim": self.dim, "model": self.model_hash()}
        with addresses.written(folder) as path, VECTOR_INDEX.writing(path) as temporary:
            for name, array in arrays.items():
                outputs.save_array(temporary / f"{name}.npy", array)
            outputs.write_json(temporary / IDS_FILE, self.ids)
            VECTOR_INDEX.write_manifest(temporary, {**about, "arrays": sorted(arrays)})

    @classmethod
    def load(cls, folder: str | Path, *, devices: Sequence[Any] | None = None) -> VectorIndex:
        """The index that `save` wrote; its arrays stay on disk, and a search reads them. InputError: none there, or damaged."""
        folder = addresses.local(folder)
        manifest, mend = VECTOR_INDEX.open(folder), VECTOR_INDEX.mend
        ids = reading.read_json(folder / IDS_FILE, list_of(str), mend=mend, max_bytes=None)
        precision, num_vectors, dim, names = (manifest[name] for name in ("precision", "num_vectors", "dim", "arrays"))
        described = {
            "vectors": ("<f4" if precision == "float32" else "|i1", (num_vectors, -(-dim // 8) if precision == "binary" else dim)),
            "embeddings": ("<f4", (num_vectors, dim)),
            "ranges": ("<f4", (2, dim)),
            "doc_rows": ("<i4", (num_vectors,)),
        }
        if "vectors" not in names or not set(names) <= set(described):
            raise InputError(f"{folder / VECTOR_INDEX.file}: arrays are {names}, not some of {[*described]}; {mend}.")
        read = {name: reading.read_array(folder / f"{name}.npy", *described[name], rebuild=mend) for name in names}
        try:
            index = cls(Arrays(**read), ids, precision=precision, dim=dim, devices=devices)
        except InputError as error:
            raise InputError(f"{folder} is damaged ({str(error).rstrip('.')}); {mend}.") from None
        index.model_hash = functools.partial(str, manifest.get("model", ""))
        return index


def _num_docs(doc_rows: Array, num_vectors: int) -> int:
    """How many documents there are, given the document of each passage."""
    rows = np.asarray(doc_rows)
    if rows.shape != (num_vectors,) or rows[0] != 0 or not np.isin(np.diff(rows), (0, 1)).all():
        raise InputError("doc_rows must be the document of each passage [n], from 0 upwards and none left out.")
    return int(rows[-1]) + 1
