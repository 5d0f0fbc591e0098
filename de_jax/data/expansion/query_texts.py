"""The generated queries of a corpus in memory-mapped arrays: their texts for ranking, their tokens for the tower.

query_texts-<key>/    texts.npy      uint8 [total]   the queries of each document, JSON under zlib, end to end
                      offsets.npy    int64 [n + 1]   document i's are texts[offsets[i]:offsets[i + 1]]
                      counts.npy     int32 [n]       queries of each document
                      ids.npy        bytes [n]       UTF-8, in the order of the expansion
                      id_order.npy   int64 [n]       the rows in ascending order of id
generated-<key>/      tokens.npy     uint16 [total] (int32 of a vocabulary that needs it), of all queries, document after document
                      offsets.npy    int64 [queries + 1]   query i is tokens[offsets[i]:offsets[i + 1]]; blank ones have none
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import mmap
import zlib
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, overload

import numpy as np
from jaxtyping import Int, Int32, Int64, UInt8

from de_jax.data.expansion.generated_queries import fingerprint, read_expansion
from de_jax.data.stores.corpus import rows_by_id
from de_jax.data.stores.store_writer import joined
from de_jax.data.text import input_policy
from de_jax.data.text.tokenizing import Tokenizer
from de_jax.files import folders, outputs
from de_jax.files.folders import Kind
from de_jax.files.reading import read_array
from de_jax.settings import Record, Size
from de_jax.types import InputError

QUERY_TEXTS = Kind(
    "query texts",
    Record({"num_docs": Size, "num_bytes": Size}),
    make="it is made when an expansion is read",
    mend="remove its folder, and it is made again",
)
QUERY_TOKENS = Kind(
    "query tokens",
    Record({"num_queries": Size, "num_tokens": Size}),
    make="it is made when an expansion is used",
    mend="remove its folder, and it is made again",
    version=2,
)
_DOCS = 4096
"""Their queries are tokenized at a time."""
_IDS = 8192
"""Looked up, or read, at a time."""


class QueryTexts(Sequence[list[str]]):
    """The queries of each document of a corpus by its row, as the expansion has them.

    Attributes:
        counts: int64 [n] how many each document has.
        fingerprint: changes whenever the queries do.
    """

    def __init__(
        self,
        texts: UInt8[np.ndarray, " total"],
        offsets: Int64[np.ndarray, " m_and_1"],
        counts: Int32[np.ndarray, " m"],
        rows: Int[np.ndarray, " n"],
        name: str,
    ) -> None:
        """Copies nothing.

        Args:
            texts, offsets, counts: of the folder, by its rows.
            rows: the folder's row of each document of the corpus; -1 for a document without queries.
            name: of the folder, which identifies it.
        """
        self._texts, self._offsets, self._rows = texts, offsets, rows
        self.counts = np.where(rows >= 0, counts[np.maximum(rows, 0)], 0).astype(np.int64)
        self.fingerprint = hashlib.sha256(name.encode() + np.asarray(rows, "<i8").tobytes()).hexdigest()

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, row: int) -> list[str]: ...
    @overload
    def __getitem__(self, row: slice) -> list[list[str]]: ...
    def __getitem__(self, row: int | slice) -> list[str] | list[list[str]]:
        if isinstance(row, slice):
            return [self[one] for one in range(*row.indices(len(self)))]
        place = int(self._rows[row])
        return unpacked(self._texts[self._offsets[place] : self._offsets[place + 1]].tobytes()) if place >= 0 else []


def packed(queries: Sequence[str]) -> bytes:
    """The queries of a document in few bytes."""
    return zlib.compress(json.dumps(queries, ensure_ascii=False, separators=(",", ":")).encode())


def unpacked(raw: bytes) -> list[str]:
    """What `packed` was given."""
    return json.loads(zlib.decompress(raw))  # type: ignore[no-any-return]


def queries_by_row(
    path: str | Path,
    doc_ids: Sequence[str],
    cache_dir: str | Path,
    *,
    is_part: bool = False,
    only: Int[np.ndarray, " d"] | None = None,
) -> QueryTexts:
    """The queries of each document of a corpus as the expansion has them; `curriculum` passes over blank and equal ones.

    Args:
        path: an expansion; documents without a line in it have no queries.
        doc_ids: the corpus.
        cache_dir: gets a folder with the texts on first use.
        is_part: `doc_ids` may be a part of the corpus; the queries of others are passed over.
        only: the rows of documents whose queries are wanted; all by default. Others have none then.

    Raises:
        InputError: a document that the corpus lacks, or a repeated document.
    """
    folder = Path(cache_dir) / f"query_texts-{folders.key_of(str(QUERY_TEXTS.format), fingerprint(path))}"
    arrays = folders.build_once(folder, _open, lambda out_dir: _build(path, out_dir))
    parts = (doc_ids[start : start + _IDS] for start in range(0, len(doc_ids), _IDS))
    rows = np.concatenate([rows_by_id(arrays["ids"], arrays["id_order"], part) for part in parts])
    if not is_part and np.count_nonzero(rows >= 0) < len(arrays["ids"]):
        unknown = arrays["ids"][np.setdiff1d(np.arange(len(arrays["ids"])), rows)[0]].decode()
        raise InputError(f"{path} has queries for {unknown}, which is not a document here; the expansion is for another corpus.")
    if not arrays["counts"][rows[rows >= 0]].any():
        raise InputError(f"{path} has no query for any document here; the expansion is for another corpus.")
    if only is not None:
        wanted = np.full(len(rows), -1)
        wanted[only] = rows[only]
        rows = wanted
    return QueryTexts(arrays["texts"], arrays["offsets"], arrays["counts"], rows, folder.name)


def _build(path: str | Path, folder: Path) -> dict[str, np.ndarray]:
    sizes, counts, ids = array("q", [0]), array("i"), [np.zeros(0, "S1")]
    docs = ((doc.doc_id.encode(), len(doc.queries), packed(doc.queries)) for doc in read_expansion(path))
    with QUERY_TEXTS.writing(folder) as temporary:
        with outputs.growing_array(temporary / "texts.npy", "|u1") as append:
            while block := list(itertools.islice(docs, _IDS)):
                own_ids, own_counts, texts = zip(*block, strict=True)
                append(np.frombuffer(b"".join(texts), np.uint8))
                sizes.extend(map(len, texts))
                counts.extend(own_counts)
                ids.append(np.array(own_ids, dtype=bytes))
        encoded = np.concatenate(ids)  # as wide as the longest
        if not len(encoded):
            raise InputError(f"{path} has no query for any document here; the expansion is for another corpus.")
        offsets = np.cumsum(np.frombuffer(sizes, np.int64))
        order = np.argsort(encoded, kind="stable")
        if (twice := np.flatnonzero(encoded[order[1:]] == encoded[order[:-1]])).size:
            raise InputError(f"{path} has two lines for the document {encoded[order[twice[0]]].decode()}; remove one.")
        arrays: dict[str, np.ndarray] = {"offsets": offsets, "ids": encoded, "id_order": order}
        arrays["counts"] = np.frombuffer(counts, np.int32)
        for name, values in arrays.items():
            outputs.save_array(temporary / f"{name}.npy", values)
        QUERY_TEXTS.write_manifest(temporary, {"num_docs": len(encoded), "num_bytes": int(offsets[-1])})
    return _open(folder)


def _open(folder: Path) -> dict[str, np.ndarray]:
    manifest = QUERY_TEXTS.open(folder)
    num_docs = manifest["num_docs"]
    described = {
        "texts": ("|u1", manifest["num_bytes"]),
        "offsets": ("<i8", num_docs + 1),
        "counts": ("<i4", num_docs),
        "ids": ("S", num_docs),
        "id_order": ("<i8", num_docs),
    }
    return {
        name: read_array(folder / f"{name}.npy", dtype, (size,), rebuild=QUERY_TEXTS.mend)
        for name, (dtype, size) in described.items()
    }


class QueryTokens(NamedTuple):
    """Queries of documents as tokens, numbered document after document; document d's are numbers [firsts[d], firsts[d + 1])."""

    tokens: np.ndarray  # uint16 or int32 [total]
    offsets: np.ndarray  # int64 [queries + 1]: query i is tokens[offsets[i] : offsets[i + 1]]
    firsts: np.ndarray  # int64 [n + 1]
    tokenizer_fingerprint: str
    content_hash: str  # equal for equal queries and vocabularies


def tokenized_queries(queries: QueryTexts, tokenizer: Tokenizer, cache_dir: str | Path) -> QueryTokens:
    """The tokens of every document's queries by the document tower's tokenizer, made once; kept in the cache, memory-mapped.

    Raises:
        InputError: no query at all.
    """
    firsts = np.concatenate([[0], np.cumsum(queries.counts)])
    if not firsts[-1]:
        raise InputError("the expansion holds no query; generate some.")
    key = folders.key_of(str(QUERY_TOKENS.format), queries.fingerprint, tokenizer.fingerprint)
    dtype = "<u2" if tokenizer.vocab_size <= 1 << 16 else "<i4"

    def open_tokens(folder: Path) -> QueryTokens:
        manifest, mend = QUERY_TOKENS.open(folder), QUERY_TOKENS.mend
        tokens = read_array(folder / "tokens.npy", dtype, (manifest["num_tokens"],), rebuild=mend)
        if isinstance(tokens, np.memmap) and hasattr(mmap, "MADV_RANDOM"):  # a page is read, and not the many after it
            tokens._mmap.madvise(mmap.MADV_RANDOM)  # type: ignore[attr-defined]
        offsets = read_array(folder / "offsets.npy", "<i8", (int(firsts[-1]) + 1,), rebuild=mend)
        return QueryTokens(tokens, offsets, firsts, tokenizer.fingerprint, key)

    def build(folder: Path) -> QueryTokens:
        num_tokens = 0
        with QUERY_TOKENS.writing(folder) as temporary:
            files = (
                outputs.growing_array(temporary / f"{name}.npy", kind) for name, kind in (("tokens", dtype), ("offsets", "<i8"))
            )
            with contextlib.ExitStack() as stack:
                append_tokens, append_offsets = map(stack.enter_context, files)
                append_offsets(np.zeros(1, np.int64))
                for start in range(0, len(queries), _DOCS):
                    tokens, lengths = _encoded([query for own in queries[start : start + _DOCS] for query in own], tokenizer)
                    append_tokens(tokens.astype(dtype))
                    append_offsets(num_tokens + np.cumsum(lengths))
                    num_tokens += len(tokens)
            QUERY_TOKENS.write_manifest(temporary, {"num_queries": int(firsts[-1]), "num_tokens": num_tokens})
        return open_tokens(folder)

    return folders.build_once(Path(cache_dir) / f"generated-{key}", open_tokens, build)


def gold_queries(golds: Sequence[str], docs_of: Int[np.ndarray, " P"], num_docs: int, tokenizer: Tokenizer) -> QueryTokens:
    """The pairs' own queries as those of their documents, in the order of the pairs; in memory."""
    order = np.argsort(docs_of, kind="stable")
    tokens, lengths = _encoded([golds[pair] for pair in order.tolist()], tokenizer)
    firsts = np.searchsorted(docs_of[order], np.arange(num_docs + 1))
    return QueryTokens(tokens, np.concatenate([[0], np.cumsum(lengths)]), firsts, tokenizer.fingerprint, "in memory")


def _encoded(texts: Sequence[str], tokenizer: Tokenizer) -> tuple[Int32[np.ndarray, " t"], Int64[np.ndarray, " q"]]:
    """The tokens of some queries end to end, and how many each has; none of a blank one."""
    lengths, tokens = np.zeros(len(texts), np.int64), np.zeros(0, np.int32)
    places = [place for place, text in enumerate(texts) if input_policy.shown(text)]
    if places:
        encoded = tokenizer.encode([texts[place] for place in places])
        tokens, lengths[places] = joined([repr(texts[place][:40]) for place in places], encoded, tokenizer)
    return tokens, lengths
