"""Texts to embeddings: sorted by length, few shapes, the device busy while the host pads and fetches.

Texts are taken longest first in micro-batches of about `tokens_per_batch` tokens. A batch is as long as its longest text,
rounded up, and its number of rows follows from that length alone, so each length is compiled once.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jaxtyping import Float, Int

from de_jax.data import files
from de_jax.data.corpus import TokenStore
from de_jax.training.run import Run
from de_jax.types import Array, InputError

FORMAT = "de_jax embeddings 1"
TOKENS_PER_BATCH = {"cpu": 2048}
"""The default micro-batch by jax backend; small ones stay in a processor's cache."""
TOKENS_PER_BATCH_ACCELERATOR = 65536
BATCHES_AHEAD = 4
"""Batches dispatched before the oldest result is fetched; bounds the device memory."""

EncodeFn = Callable[[Array], Array]
"""Token ids [b, L], int32, to embeddings [b, D], float32; jitted, with the parameters bound as arguments."""
Progress = Callable[[int], object]
"""Called with the number of texts just finished; tqdm's `update` is one."""


class Store(Protocol):
    """What encoding asks of a token store; `de_jax.data.corpus.TokenStore` is one."""

    @property
    def num_texts(self) -> int: ...

    def lengths(self, max_length: int) -> np.ndarray:
        """Tokens of each text after truncation, int32 [n]."""

    def pad(self, rows: np.ndarray, max_length: int, pad_to: int) -> np.ndarray:
        """Token ids of some texts, int32 [len(rows), pad_to]."""


class MicroBatch(NamedTuple):
    """One call of the encoder: `positions` of the texts in the request, and the shape they are padded to."""

    positions: np.ndarray
    num_rows: int
    length: int


def plan(lengths: Int[np.ndarray, " n"], *, tokens_per_batch: int, length_multiple: int) -> Iterator[MicroBatch]:
    """Micro-batches over all texts, longest first; only the last one may need filler rows.

    Args:
        lengths: tokens of each text.
        tokens_per_batch: bound of `num_rows * length`; a text longer than this gets a batch of its own.
        length_multiple: padded lengths are multiples of this.
    """
    order = np.argsort(-lengths, kind="stable")
    start = 0
    while start < len(order):
        length = max(1, -(-int(lengths[order[start]]) // length_multiple)) * length_multiple
        num_rows = _rows_of(length, tokens_per_batch)
        yield MicroBatch(order[start : start + num_rows], num_rows, length)
        start += num_rows


def encode(
    encode_fn: EncodeFn,
    store: Store,
    *,
    max_length: int,
    rows: Int[np.ndarray, " r"] | None = None,
    tokens_per_batch: int | None = None,
    length_multiple: int = 32,
    progress: Progress | None = None,
) -> Float[np.ndarray, "r D"]:
    """Embeddings of a store's texts, float32, in the store's order.

    Args:
        encode_fn: the tower.
        store: the tokenized texts.
        max_length: tokens, special ones included; longer texts are cut.
        rows: which texts, in which order; all by default.
        tokens_per_batch: tokens of a micro-batch, padding included; by default what was measured best on this backend.
        length_multiple: padded lengths are multiples of this; smaller wastes less work and compiles more.
        progress: called with the number of texts of each finished micro-batch.

    Raises:
        InputError: there is no text, or a parameter is below 1.
    """
    rows = np.arange(store.num_texts) if rows is None else np.asarray(rows)
    if not len(rows):
        raise InputError("there is no text to encode; give a store with at least one.")
    tokens_per_batch = _checked_tokens_per_batch(tokens_per_batch, max_length, length_multiple)
    batches = plan(store.lengths(max_length)[rows], tokens_per_batch=tokens_per_batch, length_multiple=length_multiple)
    embeddings: np.ndarray | None = None
    for batch, result in _dispatched(encode_fn, store, rows, batches, max_length):
        block = np.asarray(result, np.float32)[: len(batch.positions)]
        if embeddings is None:
            embeddings = np.empty((len(rows), block.shape[1]), np.float32)
        embeddings[batch.positions] = block
        if progress:
            progress(len(batch.positions))
    assert embeddings is not None
    return embeddings


def encode_to_dir(
    encode_fn: EncodeFn,
    store: TokenStore,
    out_dir: str | Path,
    *,
    max_length: int,
    model_hash: str,
    tokens_per_batch: int | None = None,
    length_multiple: int = 32,
    texts_per_shard: int = 32768,
    progress: Progress | None = None,
) -> None:
    """Writes a store's embeddings to a folder, shard by shard; the same call after a kill continues and ends byte-equal.

    The folder holds `embeddings.npy` ([n, D] float32), `ids.json` and, written last, `manifest.json`. A complete folder of
    the same model and store is left as it is.

    Args:
        encode_fn: the tower.
        store: a `TokenStore`.
        out_dir: a folder that is absent, empty, begun or completed by the same call.
        max_length: tokens, special ones included.
        model_hash: tells this tower from every other, as `model_hash(run, "doc")` does.
        texts_per_shard: texts between two points from which a killed run continues.
        tokens_per_batch, length_multiple, progress: as for `encode`.

    Raises:
        InputError: `out_dir` belongs to another model, store or batching; names the first difference.
    """
    tokens_per_batch = _checked_tokens_per_batch(tokens_per_batch, max_length, length_multiple)
    source = {
        "format": FORMAT,
        "model": model_hash,
        "store": store.content_hash,
        "tokenizer": store.tokenizer_fingerprint,
        "max_length": max_length,
        "num_texts": store.num_texts,
    }
    batching = {"tokens_per_batch": tokens_per_batch, "length_multiple": length_multiple, "texts_per_shard": texts_per_shard}
    shards = _ShardFile(Path(out_dir), source, batching)
    if shards.is_complete():
        return
    for start in range(shards.num_done, store.num_texts, texts_per_shard):
        rows = np.arange(start, min(start + texts_per_shard, store.num_texts))
        shards.append(encode(encode_fn, store, max_length=max_length, rows=rows, progress=progress, **_encode_options(batching)))
    shards.finish(store.ids)


def open_embeddings(out_dir: str | Path) -> tuple[list[str], np.ndarray, dict[str, Any]]:
    """The ids, the memory-mapped embeddings [n, D] and the manifest of a folder that `encode_to_dir` completed.

    Raises:
        InputError: the folder is absent, half-written or damaged.
    """
    out_dir = Path(out_dir)
    if not (out_dir / "manifest.json").is_file():
        raise InputError(f"{out_dir} holds no complete embeddings (no manifest.json); run encode_corpus on it until it ends.")
    manifest = files.read_json(out_dir / "manifest.json")
    if manifest.get("format") != FORMAT:
        raise InputError(f"{out_dir}/manifest.json has format {manifest.get('format')!r}, not {FORMAT!r}; encode the corpus again.")
    ids = files.read_json(out_dir / "ids.json")
    try:
        embeddings = np.load(out_dir / "embeddings.npy", mmap_mode="r")
    except (OSError, ValueError) as error:
        raise InputError(f"{out_dir}/embeddings.npy cannot be read ({error}); delete {out_dir} and encode again.") from None
    expected = (manifest["num_texts"], manifest["dim"])
    if embeddings.shape != expected or len(ids) != len(embeddings):
        raise InputError(
            f"{out_dir} holds {len(ids)} ids and embeddings of shape {embeddings.shape}, but its manifest says {expected}; "
            "delete it and encode again."
        )
    return ids, embeddings, manifest


def queries(run: Run, store: Store, **options: Any) -> Float[np.ndarray, "r D"]:
    """Query embeddings by a `Run`; `options` are `encode`'s."""
    return encode(encode_fn(run, "query"), store, **{"max_length": run.max_query_length, **options})


def docs(run: Run, store: Store, **options: Any) -> Float[np.ndarray, "r D"]:
    """Document embeddings by a `Run`; `options` are `encode`'s."""
    return encode(encode_fn(run, "doc"), store, **{"max_length": run.max_doc_length, **options})


def docs_to_dir(run: Run, store: TokenStore, out_dir: str | Path, **options: Any) -> None:
    """Writes document embeddings by a `Run`; `options` are `encode_to_dir`'s."""
    options = {"max_length": run.max_doc_length, **options}
    encode_to_dir(encode_fn(run, "doc"), store, out_dir, model_hash=model_hash(run, "doc"), **options)


def encode_fn(run: Run, tower: str) -> EncodeFn:
    """One tower ("query" or "doc") of a `Run` as a jitted function of tokens; the same model is compiled once a process."""
    return functools.partial(_jitted(run.model, tower), run.params)


def model_hash(run: Run, tower: str) -> str:
    """Hex SHA-256 of one tower's shape and parameters: equal exactly when it gives equal embeddings."""
    digest = hashlib.sha256(f"{tower} {run.model!r}".encode())
    parts = {name: run.params[name] for name in (tower, "shared") if name in run.params}
    for path, leaf in jax.tree_util.tree_leaves_with_path(parts):
        array = np.ascontiguousarray(leaf)
        digest.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}".encode())
        digest.update(array.view(np.uint8).data)
    return digest.hexdigest()


class _ShardFile:
    """The embeddings of one folder while they grow: rows are appended, synced, then counted in `progress.json`."""

    def __init__(self, out_dir: Path, source: dict[str, Any], batching: dict[str, int]) -> None:
        self._dir, self._source, self._plan = out_dir, source, {**source, **batching}
        self._array = out_dir / "embeddings.npy"
        self._progress = out_dir / "progress.json"
        self.num_done = 0
        if self.is_complete():
            _check_same(files.read_json(out_dir / "manifest.json"), source, out_dir)
        elif self._progress.is_file():
            progress = files.read_json(self._progress)
            _check_same(progress, self._plan, out_dir)
            self.num_done, self._dim = progress["num_done"], progress["dim"]
            if self.num_done and (not self._array.is_file() or self._array.stat().st_size < self._size(self.num_done)):
                raise InputError(f"{self._array} is shorter than {self._progress} says; delete {out_dir} and encode again.")
        elif out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
            raise InputError(f"{out_dir} holds something else; choose a folder that is absent or empty.")

    def is_complete(self) -> bool:
        return (self._dir / "manifest.json").is_file()

    def append(self, block: Float[np.ndarray, "s D"]) -> None:
        if self.num_done == 0:
            self._begin(block.shape[1])
        with open(self._array, "r+b") as file:
            file.truncate(self._size(self.num_done))  # what a killed run wrote after its last count
            file.seek(0, os.SEEK_END)
            file.write(np.ascontiguousarray(block).data)
            file.flush()
            os.fsync(file.fileno())
        self.num_done += len(block)
        files.write_json(self._progress, {**self._plan, "dim": self._dim, "num_done": self.num_done})

    def finish(self, ids: Any) -> None:
        with files.atomic_file(self._dir / "ids.json") as temporary:
            temporary.write_text(json.dumps(list(ids), ensure_ascii=False, indent=0) + "\n", encoding="utf-8")
        files.write_json(self._dir / "manifest.json", {**self._plan, "dim": self._dim})
        self._progress.unlink(missing_ok=True)

    def _begin(self, dim: int) -> None:
        self._dim = dim
        files.write_json(self._progress, {**self._plan, "dim": dim, "num_done": 0})
        header = {"descr": "<f4", "fortran_order": False, "shape": (self._source["num_texts"], dim)}
        with open(self._array, "wb") as file:
            np.lib.format.write_array_header_1_0(file, header)

    def _size(self, num_rows: int) -> int:
        with open(self._array, "rb") as file:
            np.lib.format.read_magic(file)
            np.lib.format.read_array_header_1_0(file)
            return file.tell() + num_rows * self._dim * 4


def _dispatched(
    encode_fn: EncodeFn, store: Store, rows: np.ndarray, batches: Iterator[MicroBatch], max_length: int
) -> Iterator[tuple[MicroBatch, Array]]:
    """Runs the batches `BATCHES_AHEAD` in advance of the consumer, which waits for each result as it copies it."""
    in_flight: collections.deque[tuple[MicroBatch, Array]] = collections.deque()
    for batch in batches:
        tokens = np.zeros((batch.num_rows, batch.length), np.int32)
        tokens[: len(batch.positions)] = store.pad(rows[batch.positions], max_length, batch.length)
        in_flight.append((batch, encode_fn(tokens)))
        if len(in_flight) > BATCHES_AHEAD:
            yield in_flight.popleft()
    yield from in_flight


def _rows_of(length: int, tokens_per_batch: int) -> int:
    num_rows = tokens_per_batch // length
    return num_rows // 8 * 8 if num_rows >= 8 else max(1, num_rows)


def _checked_tokens_per_batch(tokens_per_batch: int | None, max_length: int, length_multiple: int) -> int:
    if tokens_per_batch is None:
        tokens_per_batch = TOKENS_PER_BATCH.get(jax.default_backend(), TOKENS_PER_BATCH_ACCELERATOR)
    values = {"tokens_per_batch": tokens_per_batch, "max_length": max_length, "length_multiple": length_multiple}
    for name, value in values.items():
        if value < 1:
            raise InputError(f"{name} is {value}; give at least 1.")
    return tokens_per_batch


def _encode_options(batching: dict[str, int]) -> dict[str, int]:
    return {name: batching[name] for name in ("tokens_per_batch", "length_multiple")}


def _check_same(found: dict[str, Any], expected: dict[str, Any], out_dir: Path) -> None:
    for name, value in expected.items():
        if found.get(name) != value:
            raise InputError(
                f"{out_dir} was begun with {name} {found.get(name)!r}, not {value!r}; choose another folder or delete this one."
            )


@functools.lru_cache(maxsize=16)
def _jitted(model: Any, tower: str) -> Callable[..., Array]:
    return jax.jit(getattr(model, f"encode_{tower}"))
