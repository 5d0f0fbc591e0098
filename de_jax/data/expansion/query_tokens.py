"""The generated queries of a corpus as tokens in memory-mapped arrays; how large they are is a matter of the disk alone.

tokens.npy     uint16 [total] (int32 of a vocabulary that needs it)   those of each document's queries, end to end
lengths.npy    uint16 [queries]   tokens of each query, in the order of the documents
offsets.npy    int64 [n + 1]      the tokens of document i are tokens[offsets[i]:offsets[i + 1]]
manifest.json  written last

Until then the arrays grow in a folder `<name>.begun` with `progress.json`, from where a killed process continues.
"""

from __future__ import annotations

import mmap
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int, Int64, Integer

from de_jax.data.stores.store_writer import joined
from de_jax.data.text.tokenizing import Tokenizer
from de_jax.files import folders, outputs, schema
from de_jax.files.kind import Kind
from de_jax.files.reading import read_array
from de_jax.types import InputError

_SIZE = schema.integer(1)
QUERY_TOKENS = Kind(
    "query tokens",
    {
        "num_docs": _SIZE,
        "num_queries": _SIZE,
        "num_tokens": _SIZE,
        "token_dtype": schema.constant("<u2", "<i4"),
        "tokenizer_fingerprint": schema.some_text,
        "made_from": schema.some_text,
    },
    make="it is made when an expansion is used",
    mend="remove its folder, and it is made again",
)
PROGRESS_FILE = "progress.json"
MAX_TOKENS = 2**16 - 1
"""Of a query; longer ones are cut, which no batch has room for."""
_DOCS, _TEXTS = 4096, 8192
"""Documents between two points from which a killed process continues, and texts that are encoded at a time."""
_ROWS = 65536


class QueryTokens:
    """The queries of documents as tokens, numbered document after document; open them with `built`.

    Attributes:
        tokens: [total], memory-mapped.
        lengths: uint16 [queries] tokens of each query, memory-mapped.
        num_queries: of all documents.
        tokenizer_fingerprint: of the vocabulary.
        content_hash: equal for equal queries and vocabularies.
    """

    def __init__(self, folder: Path, firsts: Int64[np.ndarray, " n_and_1"]) -> None:
        """Maps the arrays of a folder; `firsts` are each document's first query, and their number at the end."""
        manifest, mend = QUERY_TOKENS.open(folder), QUERY_TOKENS.mend
        sizes = {"num_docs": len(firsts) - 1, "num_queries": int(firsts[-1])}
        if wrong := {name: manifest[name] for name, size in sizes.items() if manifest[name] != size}:
            raise InputError(f"{folder} is of {wrong}, not of {sizes}; {mend}.")
        self.folder, self._firsts, self.num_queries = folder, firsts, manifest["num_queries"]
        self.tokens = read_array(folder / "tokens.npy", manifest["token_dtype"], (manifest["num_tokens"],), rebuild=mend)
        _read_at_random(self.tokens)
        self.lengths = read_array(folder / "lengths.npy", "<u2", (self.num_queries,), rebuild=mend)
        self._offsets = read_array(folder / "offsets.npy", "<i8", (manifest["num_docs"] + 1,), rebuild=mend)
        if self._offsets[0] != 0 or self._offsets[-1] != manifest["num_tokens"] or np.any(np.diff(self._offsets) < 0):
            raise InputError(f"{folder}/offsets.npy is damaged: the offsets do not ascend to the number of tokens; {mend}.")
        self.tokenizer_fingerprint: str = manifest["tokenizer_fingerprint"]
        self.content_hash = folders.key_of(manifest["made_from"], self.tokenizer_fingerprint)

    def spans(self, queries: Int[np.ndarray, " r"]) -> tuple[Int64[np.ndarray, " r"], Int64[np.ndarray, " r"]]:
        """Where the tokens of each query begin, and how many there are; none of a negative query."""
        starts, sizes = np.zeros(len(queries), np.int64), np.zeros(len(queries), np.int64)
        for first in range(0, len(queries), _ROWS):
            block = np.maximum(queries[first : first + _ROWS], 0)
            docs = np.searchsorted(self._firsts, block, side="right") - 1
            own = self._firsts[docs]
            before = own[:, None] + np.arange(int((block - own).max(initial=0)))  # the document's queries before each
            lengths = self.lengths[np.minimum(before, self.num_queries - 1)]
            starts[first : first + _ROWS] = self._offsets[docs] + np.sum(lengths, axis=1, where=before < block[:, None])
            sizes[first : first + _ROWS] = self.lengths[block]
        return starts, np.where(queries >= 0, sizes, 0)


class Progress(NamedTuple):
    """The content of a folder that is not complete."""

    num_docs: int
    num_queries: int
    num_tokens: int


class QueryTokensWriter:
    """Appends documents to the arrays of a folder in the making; the same call continues after a kill.

    Args:
        folder: of the complete arrays.
        num_docs, num_queries: that there will be.
        vocab_size, tokenizer_fingerprint: of the tokenizer.
        made_from: changes whenever the queries do.
    """

    def __init__(
        self, folder: Path, *, num_docs: int, num_queries: int, vocab_size: int, tokenizer_fingerprint: str, made_from: str
    ) -> None:
        self._folder, self._begun = folder, folder.with_name(f"{folder.name}.begun")
        self._dtype = np.dtype("<u2" if vocab_size <= MAX_TOKENS + 1 else "<i4")
        sizes = {"num_docs": num_docs, "num_queries": num_queries, "token_dtype": self._dtype.str}
        self._about: dict[str, Any] = {**sizes, "tokenizer_fingerprint": tokenizer_fingerprint, "made_from": made_from}
        self.done = Progress(0, 0, 0)
        self._resume()

    def append(self, tokens: Integer[np.ndarray, " t"], lengths: Int[np.ndarray, " q"], of_docs: Int[np.ndarray, " d"]) -> None:
        """Adds the next documents: the tokens of all their queries, those of each query, and of each document."""
        ends = self.done.num_tokens + np.cumsum(of_docs)
        num_docs, num_queries = self.done.num_docs + len(of_docs), self.done.num_queries + len(lengths)
        for name, values in (("tokens", tokens.astype(self._dtype)), ("lengths", lengths.astype("<u2")), ("offsets", ends)):
            with outputs.naming(self._file(name)), open(self._file(name), "ab", buffering=0) as file:
                outputs.write_all(file, memoryview(values.tobytes()))
                os.fsync(file.fileno())
        self.done = Progress(num_docs, num_queries, int(ends[-1]))
        outputs.write_json(self._begun / PROGRESS_FILE, self.done._asdict())

    def finish(self) -> None:
        """Writes the headers, and the manifest last; the folder appears by a rename."""
        found = {"num_docs": self.done.num_docs, "num_queries": self.done.num_queries}
        assert found == {name: self._about[name] for name in found}, found
        for name, (dtype, size) in self._arrays().items():
            with open(self._file(name), "r+b") as file:
                file.write(outputs.array_header(dtype, size))
        (self._begun / PROGRESS_FILE).unlink()
        QUERY_TOKENS.write_manifest(self._begun, {**self._about, "num_tokens": self.done.num_tokens})
        folders.write_checksums(self._begun, QUERY_TOKENS.name)
        os.replace(self._begun, self._folder)

    def _arrays(self) -> dict[str, tuple[str, int]]:
        return {
            "tokens": (self._dtype.str, self.done.num_tokens),
            "lengths": ("<u2", self.done.num_queries),
            "offsets": ("<i8", self.done.num_docs + 1),
        }

    def _resume(self) -> None:
        """Cuts the arrays back to their recorded sizes, or begins them."""
        if (self._begun / PROGRESS_FILE).is_file():
            record = schema.read(self._begun / PROGRESS_FILE, schema.record(dict.fromkeys(Progress._fields, schema.integer())))
            self.done = Progress(**record)
        elif self._begun.exists():
            shutil.rmtree(self._begun)
        outputs.make_folder(self._begun)
        for name, (dtype, size) in self._arrays().items():
            with outputs.naming(self._file(name)), open(self._file(name), "ab") as file:
                if not file.tell():
                    file.write(outputs.array_header(dtype, 0))
                    file.write(bytes(np.dtype(dtype).itemsize) if name == "offsets" else b"")
                file.truncate(len(outputs.array_header(dtype, 0)) + size * np.dtype(dtype).itemsize)
        outputs.write_json(self._begun / PROGRESS_FILE, self.done._asdict())

    def _file(self, name: str) -> Path:
        return self._begun / f"{name}.npy"


def built(
    folder: Path,
    queries: Sequence[Sequence[str]],
    counts: Int[np.ndarray, " n"],
    tokenizer: Tokenizer,
    *,
    made_from: str,
    wanted: Callable[[Sequence[str]], np.ndarray],
) -> QueryTokens:
    """The tokens of all documents' queries, made on first use by one process; a killed one is continued.

    Args:
        folder: named by everything that decides its content.
        queries: of each document.
        counts: how many each document has.
        tokenizer: of the document tower.
        made_from: see `QueryTokensWriter`.
        wanted: the indices of a document's queries that may be asked for; others take no tokens.
    """
    firsts = np.concatenate([[0], np.cumsum(counts)])

    def build(out_dir: Path) -> QueryTokens:
        sizes = {"num_docs": len(counts), "num_queries": int(firsts[-1]), "vocab_size": tokenizer.vocab_size}
        writer = QueryTokensWriter(out_dir, **sizes, tokenizer_fingerprint=tokenizer.fingerprint, made_from=made_from)
        for start in range(writer.done.num_docs, len(counts), _DOCS):
            writer.append(*_encoded(range(start, min(start + _DOCS, len(counts))), queries, firsts, tokenizer, wanted))
        writer.finish()
        return QueryTokens(out_dir, firsts)

    return folders.build_once(folder, lambda folder: QueryTokens(folder, firsts), build)


def _encoded(
    docs: range,
    queries: Sequence[Sequence[str]],
    firsts: Int64[np.ndarray, " n_and_1"],
    tokenizer: Tokenizer,
    wanted: Callable[[Sequence[str]], np.ndarray],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The tokens of some documents' queries, those of each query, and of each document."""
    own = firsts[docs.start : docs.stop + 1] - firsts[docs.start]
    lengths = np.zeros(int(own[-1]), np.int64)
    texts, names, places = list[str](), list[str](), list[int]()
    for doc, first in zip(docs, own.tolist(), strict=False):
        generated = queries[doc] if firsts[doc] < firsts[doc + 1] else ()
        for index in wanted(generated).tolist():
            texts.append(generated[index])
            names.append(f"{doc}/{index}")
            places.append(first + index)
    tokens = [np.zeros(0, np.int32)]
    for start in range(0, len(texts), _TEXTS):
        chunk = slice(start, start + _TEXTS)
        encoded = [ids[:MAX_TOKENS] for ids in tokenizer.encode(texts[chunk])]
        found, lengths[places[chunk]] = joined(names[chunk], encoded, tokenizer)
        tokens.append(found)
    before = np.concatenate([[0], np.cumsum(lengths)])
    return np.concatenate(tokens), lengths, np.diff(before[own])


def _read_at_random(mapped: np.ndarray) -> None:
    """Tells the system that a text is read here and there, so that a page is read and not the many after it."""
    if isinstance(mapped, np.memmap) and hasattr(mmap, "MADV_RANDOM"):
        mapped._mmap.madvise(mmap.MADV_RANDOM)  # type: ignore[attr-defined]
