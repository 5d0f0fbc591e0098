"""Embeddings on disk: a folder that grows shard by shard, and is complete once its manifest exists.

embeddings.npy   float32 [n, D]   in the order of the token store
ids.json         the texts' ids, parallel to the rows
manifest.json    the texts and the model; makes the folder complete
texts.npy        uint64 [n] a hash of each text, by which a corpus that has changed finds the texts encoded before
checksums.json   of all these, see `folders`
progress.json    the same and the rows done, while the folder is incomplete
"""

import hashlib
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int, UInt64

from de_jax.files import folders, outputs, reading
from de_jax.settings import Count, Maybe, PositiveInt, Record, Size, list_of
from de_jax.types import InputError

EMBEDDINGS = folders.Kind(
    "embeddings",
    Record({"num_texts": Size, "dim": PositiveInt, "model": Maybe(str), "max_length": Maybe(PositiveInt)}),
    make="run de-jax encode corpus on it until it ends",
    mend="delete the folder and encode again",
)
HASHES_FILE = "texts.npy"
PROGRESS = Record({"dim": PositiveInt, "num_done": Count, "num_kept": Maybe(Count), "kept": Maybe(str)})
SECONDS_TO_KEEP = 30.0
"""Between two points from which a killed call continues, within a block of rows."""
KEEPS = f"encode (a stop loses {SECONDS_TO_KEEP:.0f} s)"  # on a bar


def open_embeddings(out_dir: str | Path) -> tuple[list[str], np.ndarray, dict[str, Any]]:
    """The ids, the memory-mapped embeddings [n, D] and the manifest of a folder that `encode_to_dir` completed.

    Raises:
        InputError: the folder is absent, half-written or damaged.
    """
    out_dir = Path(out_dir)
    manifest, mend = EMBEDDINGS.open(out_dir), EMBEDDINGS.mend
    ids = reading.read_json(out_dir / "ids.json", list_of(str), mend=mend, max_bytes=None)
    embeddings = reading.read_array(out_dir / "embeddings.npy", "<f4", (manifest["num_texts"], manifest["dim"]), rebuild=mend)
    if len(ids) != len(embeddings):
        raise InputError(f"{out_dir} holds {len(ids)} ids and {len(embeddings)} embeddings; {mend}.")
    return ids, embeddings, manifest


class Truncated:
    """The first dimensions (1 to E) of embeddings [n, E] that may be memory-mapped, cut as they are read, for Matryoshka models.

    `normalize` scales each row to length 1 again.
    """

    def __init__(self, embeddings: Float[np.ndarray, "n E"], dim: int, *, normalize: bool) -> None:
        if not 1 <= dim <= embeddings.shape[1]:
            raise InputError(f"embedding_dim is {dim}, but embeddings have {embeddings.shape[1]} dimensions; give 1 to that many.")
        self._embeddings, self._normalize = embeddings, normalize
        self.shape, self.dtype = (len(embeddings), dim), embeddings.dtype

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any) -> np.ndarray:
        cut = np.asarray(self._embeddings[rows, : self.shape[1]])
        return cut / np.maximum(np.linalg.norm(cut, axis=1, keepdims=True), 1e-12) if self._normalize else cut


class EmbeddingWriter:
    """The embeddings of one folder while they grow: rows are written and synced, then counted in `progress.json`."""

    def __init__(self, out_dir: Path, source: dict[str, Any], batching: dict[str, int | None]) -> None:
        """Begins, continues or finds complete.

        Args:
            out_dir: absent, empty, or begun by an equal call; InputError names the first difference from another one.
            source: the origin of the embeddings with "num_texts"; complete folders are equal if their sources are.
            batching: everything else that decides the last bits; an incomplete folder continues only with the same.
        """
        self._dir, self._num_texts = out_dir, source["num_texts"]
        self._plan = {"format": EMBEDDINGS.format, **source, **batching}
        self._array, self._progress = out_dir / "embeddings.npy", out_dir / "progress.json"
        self.num_done = self._dim = self._num_kept = 0
        self._key, self._new, self._kept_at = "", list[np.ndarray](), time.monotonic()
        self.is_complete = EMBEDDINGS.is_in(out_dir)
        if self.is_complete:
            EMBEDDINGS.require_same(out_dir, EMBEDDINGS.read_manifest(out_dir), source)
            self._clean()
        elif self._progress.is_file():
            progress = reading.read_json(self._progress, PROGRESS, mend=EMBEDDINGS.mend)
            EMBEDDINGS.require_same(out_dir, progress, self._plan)
            self.num_done, self._dim = progress["num_done"], progress["dim"]
            self._num_kept, self._key = progress.get("num_kept") or 0, progress.get("kept") or ""
            rows, size = self.num_done + self._num_kept, self._array.stat().st_size if self._array.is_file() else 0
            if rows and size < self._size(rows):
                raise InputError(f"{self._array} is shorter than {self._progress} has it; delete {out_dir} and encode again.")
        else:
            folders.require_replaceable(out_dir, None)

    def append(self, block: Float[np.ndarray, "s D"]) -> None:
        """Adds the next rows, durably."""
        self._num_kept = 0
        self._write(block)
        self.num_done += len(block)
        self._count()

    def begin_block(self, order: Int[np.ndarray, " s"], ends: Int[np.ndarray, " b"]) -> Float[np.ndarray, "k D"]:
        """The rows that a killed call kept of the next block, made in the same `order`, in batches up to the same `ends`."""
        key = hashlib.sha256(order.tobytes() + ends.tobytes()).hexdigest()
        self._num_kept = self._num_kept if key == self._key else 0
        self._key, self._new, self._kept_at = key, [], time.monotonic()
        return np.array(self._rows(self.num_done, self._num_kept)) if self._num_kept else np.zeros((0, 0), np.float32)

    def keep(self, rows: Float[np.ndarray, "k D"]) -> None:
        """Keeps the next rows of the block behind the finished ones, durably after `SECONDS_TO_KEEP`."""
        self._new.append(rows)
        if time.monotonic() - self._kept_at >= SECONDS_TO_KEEP:
            self._write(np.concatenate(self._new))
            self._num_kept += sum(map(len, self._new))
            self._count()
            self._new, self._kept_at = [], time.monotonic()

    def written(self) -> np.ndarray:
        """The rows so far, memory-mapped, [num_done, D]; at least one."""
        return self._rows(0, self.num_done)

    def finish(self, ids: Iterable[str]) -> None:
        """Writes the ids, the checksums, and then the manifest, which makes the folder complete."""
        outputs.write_json(self._dir / "ids.json", list(ids))
        EMBEDDINGS.complete(self._dir, {**self._plan, "dim": self._dim}, [self._array.name, "ids.json"])
        self._clean()

    def _clean(self) -> None:
        """Removes files that a complete folder does not need."""
        self._progress.unlink(missing_ok=True)
        outputs.remove_leftovers(self._dir)

    def _rows(self, start: int, number: int) -> np.ndarray:
        return np.memmap(self._array, "<f4", "r", self._size(start), (number, self._dim))

    def _write(self, block: np.ndarray) -> None:
        """Writes rows behind the counted ones, over any that a killed run wrote after its last count."""
        rows, self._dim = self.num_done + self._num_kept, block.shape[1]
        self._count()
        with outputs.naming(self._array), open(self._array, "r+b" if rows else "wb", buffering=0) as file:
            file.write(outputs.array_header("<f4", self._num_texts, self._dim))  # of all rows
            file.truncate(self._size(rows))
            file.seek(0, os.SEEK_END)
            outputs.write_all(file, np.ascontiguousarray(block).data)
            os.fsync(file.fileno())

    def _count(self) -> None:
        kept = {"num_kept": self._num_kept, "kept": self._key} if self._num_kept else {}
        outputs.write_json(self._progress, {**self._plan, "dim": self._dim, "num_done": self.num_done, **kept})

    def _size(self, num_rows: int) -> int:
        return len(outputs.array_header("<f4", self._num_texts, self._dim)) + num_rows * self._dim * 4


class Known(NamedTuple):
    """Embeddings by the hash of their text."""

    hashes: UInt64[np.ndarray, " n"]  # ascending
    rows: Int[np.ndarray, " n"]  # of `embeddings`
    embeddings: Float[np.ndarray, "n D"]

    def find(self, hashes: UInt64[np.ndarray, " r"]) -> Int[np.ndarray, " r"]:
        """The row of each text; -1 if it is not known."""
        places = np.minimum(np.searchsorted(self.hashes, hashes), len(self.hashes) - 1)
        return np.where(self.hashes[places] == hashes, self.rows[places], -1)


def keep_hashes(folder: Path, hashes: UInt64[np.ndarray, " n"]) -> None:
    """Puts the hashes beside complete embeddings."""
    if not (folder / HASHES_FILE).exists():
        with outputs.atomic_file(folder / HASHES_FILE) as temporary:
            outputs.save_array(temporary, hashes)
        if record := folders.read_checksums(folder):
            folders.write_checksums(folder, record["kind"], record["files"] | folders.facts(folder, [HASHES_FILE]))


def find_known(embeddings_dir: Path, *, model: str, max_length: int) -> Known | None:
    """The largest embeddings of a run's folder by one model, for texts cut to one length, or None."""
    found: Known | None = None
    for path in sorted(embeddings_dir.glob(f"*/step_*/{HASHES_FILE}")):
        try:
            _, embeddings, manifest = open_embeddings(path.parent)
            hashes = reading.read_array(path, "<u8", (len(embeddings),), in_memory=True)
        except InputError:  # damaged embeddings are of no use
            continue
        if (manifest.get("model"), manifest.get("max_length")) != (model, max_length):
            continue
        if found is None or len(found.hashes) < len(hashes):
            order = np.argsort(hashes, kind="stable")
            found = Known(hashes[order], order, embeddings)
    return found
