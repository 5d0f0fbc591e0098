"""Writes a token store, chunk by chunk. `corpus.build_token_store` is how to use it."""

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from jaxtyping import Int32, Int64

from de_jax.data.batches.layout import end_to_end
from de_jax.data.text.tokenizing import Tokenizer
from de_jax.files import outputs
from de_jax.files.folders import Kind
from de_jax.settings import Maybe, NonNegativeInt, PositiveInt, Record, Size, list_of, some_text
from de_jax.types import InputError

TOKEN_STORE = Kind(
    "token store",
    Record(
        {
            "num_texts": Size,
            "num_tokens": Size,
            "token_dtype": Maybe(Literal["<i4", "<u2"], "<i4"),
            "vocab_size": PositiveInt,
            "prefix_ids": list_of(NonNegativeInt),
            "suffix_ids": list_of(NonNegativeInt),
            "tokenizer_fingerprint": some_text,
            "content_hash": some_text,
        }
    ),
    make="run the same command again, which builds it",
    mend="remove the token store and build it again",
)
ARRAYS = ("tokens.npy", "offsets.npy", "ids.npy", "id_order.npy")


class StoreWriter:
    """Appends chunks to the arrays of a store in the making; hashes them as they pass."""

    def __init__(self, directory: Path, add_tokens: Callable[[np.ndarray], None], tokenizer: Tokenizer, dtype: str) -> None:
        self._directory, self._add_tokens, self._tokenizer, self._dtype = directory, add_tokens, tokenizer, dtype
        self._lengths: list[np.ndarray] = []
        self._ids: list[np.ndarray] = []
        self._token_hash, self._id_hash = hashlib.sha256(), hashlib.sha256()
        self._num_tokens = 0
        self._skipped_ids: list[str] = []

    def skip(self, text_ids: list[str]) -> None:
        """Records texts that are left out."""
        self._skipped_ids += text_ids

    def append(self, text_ids: Sequence[str], encoded: list[np.ndarray]) -> None:
        self.write(text_ids, *end_to_end(text_ids, encoded, self._tokenizer))

    def write(self, text_ids: Sequence[str], tokens: Int32[np.ndarray, " t"], lengths: Int64[np.ndarray, " n"]) -> None:
        """Appends texts whose tokens stand end to end; a text may have none."""
        self._add_tokens(tokens)
        self._token_hash.update(tokens.tobytes())
        self._id_hash.update("".join(f"{text_id}\n" for text_id in text_ids).encode())
        self._lengths.append(lengths)
        self._ids.append(np.array([text_id.encode() for text_id in text_ids], dtype=bytes))
        self._num_tokens += tokens.size

    def finish(self) -> None:
        """Writes the other files, once that of the tokens is whole."""
        if not self._num_tokens:
            raise InputError("there is no text to tokenize.")
        ids = np.concatenate(self._ids)  # as wide as the longest id
        order = np.argsort(ids, kind="stable")
        ordered = ids[order]
        if (repeated := np.flatnonzero(ordered[1:] == ordered[:-1])).size:
            first, second = sorted(order[repeated[0] : repeated[0] + 2].tolist())
            text_id = ids[first].decode()
            raise InputError(f"{repeated.size} duplicate ids; '{text_id}' is the id of texts {first + 1} and {second + 1}.")
        lengths = np.concatenate(self._lengths)
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        arrays = {"offsets.npy": offsets, "ids.npy": ids, "id_order.npy": order}
        for name, array in arrays.items():
            outputs.save_array(self._directory / name, array)
        tokenizer = self._tokenizer
        hashes = [self._token_hash.hexdigest(), self._id_hash.hexdigest(), hashlib.sha256(lengths.tobytes()).hexdigest()]
        entries = {
            "num_texts": len(ids),
            "num_tokens": self._num_tokens,
            "token_dtype": self._dtype,
            "skipped_ids": self._skipped_ids,
            "file_sizes": {name: (self._directory / name).stat().st_size for name in ARRAYS},
            "content_hash": hashlib.sha256("\n".join([*hashes, tokenizer.fingerprint]).encode()).hexdigest(),
            "tokenizer_fingerprint": tokenizer.fingerprint,
            "vocab_size": tokenizer.vocab_size,
            "prefix_ids": list(tokenizer.prefix_ids),
            "suffix_ids": list(tokenizer.suffix_ids),
        }
        TOKEN_STORE.write_manifest(self._directory, entries)


@contextlib.contextmanager
def writing(directory: Path, tokenizer: Tokenizer, dtype: str = "<i4") -> Iterator[StoreWriter]:
    """A writer into an existing folder, which is a store once the block has ended."""
    with outputs.growing_array(directory / "tokens.npy", dtype) as add_tokens:
        writer = StoreWriter(directory, add_tokens, tokenizer, dtype)
        yield writer
    writer.finish()


@contextlib.contextmanager
def of_file(path: str | Path) -> Iterator[None]:
    """An `InputError` about ids or tokens, which a writer raises, gets the file that the texts come from before it."""
    try:
        yield
    except InputError as error:
        raise error if str(path) in str(error) else InputError(f"{path}: {error}") from None
