"""Text to token ids: sentencepiece models and `tokenizer.json` files behind one protocol, and the training of a vocabulary.

Id 0 is padding in every array of this library, so a vocabulary with another padding id is refused here.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from de_jax.data import files
from de_jax.types import InputError

PAD_ID = 0
SENTENCEPIECE_FILE = "spiece.model"
TOKENIZER_JSON_FILE = "tokenizer.json"

# The expectation step adds up floats thread by thread, so another number of threads is another vocabulary.
_TRAINING_THREADS = 4


@runtime_checkable
class Tokenizer(Protocol):
    """Maps texts to token ids. What surrounds every text (`[CLS]`, `</s>`) is kept apart, so that truncation spares it."""

    vocab_size: int
    prefix_ids: tuple[int, ...]
    suffix_ids: tuple[int, ...]
    fingerprint: str  # SHA-256 of the vocabulary file

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The int32 ids of each text, without special tokens and not truncated; several texts are encoded in parallel."""

    def save(self, directory: Path) -> None:
        """Writes the one file that `load_tokenizer` needs into an existing folder."""


class SentencePieceTokenizer:
    """A sentencepiece model as T5 uses it: no prefix, `</s>` at the end."""

    def __init__(self, path: Path) -> None:
        import sentencepiece

        self._model = path.read_bytes()
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=self._model)
        except RuntimeError:
            raise InputError(f"{path} is not a sentencepiece model.") from None
        _require_padding(path, self._processor.pad_id())
        eos_id = self._processor.eos_id()
        self.vocab_size = int(self._processor.get_piece_size())
        self.prefix_ids: tuple[int, ...] = ()
        self.suffix_ids: tuple[int, ...] = (eos_id,) if eos_id >= 0 else ()
        self.fingerprint = hashlib.sha256(self._model).hexdigest()

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.array(ids, dtype=np.int32) for ids in self._processor.encode(list(texts), out_type=int)]

    def save(self, directory: Path) -> None:
        with files.atomic_file(Path(directory) / SENTENCEPIECE_FILE) as temporary:
            temporary.write_bytes(self._model)


class JsonTokenizer:
    """A `tokenizer.json`; what its post-processor puts around a text becomes the prefix and the suffix.

    A special token spelt out in a text ("[SEP]") is encoded as the text it is, so that no document can forge one.
    """

    def __init__(self, path: Path) -> None:
        import tokenizers

        self._json = path.read_bytes()
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(self._json.decode("utf-8"))
        except Exception as error:  # the Rust library raises plain Exception
            raise InputError(f"{path} is not a tokenizer.json ({error}).") from None
        _require_padding(path, _json_pad_id(self._tokenizer))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())
        self.prefix_ids, self.suffix_ids = _surroundings(self._tokenizer)
        self.fingerprint = hashlib.sha256(self._json).hexdigest()

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]

    def save(self, directory: Path) -> None:
        with files.atomic_file(Path(directory) / TOKENIZER_JSON_FILE) as temporary:
            temporary.write_bytes(self._json)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer in a folder holding `tokenizer.json` or `spiece.model`, or in such a file itself.

    Where a folder holds both, `spiece.model` is the original and is taken.

    Raises:
        InputError: nothing there, an unreadable vocabulary, or one whose padding is not id 0.
    """
    path = Path(path)
    file = path
    if path.is_dir():
        found = [path / name for name in (SENTENCEPIECE_FILE, TOKENIZER_JSON_FILE) if (path / name).is_file()]
        if not found:
            raise InputError(f"{path} holds neither {SENTENCEPIECE_FILE} nor {TOKENIZER_JSON_FILE}.")
        file = found[0]
    if not file.is_file():
        raise InputError(f"{file} does not exist; give a {SENTENCEPIECE_FILE}, a {TOKENIZER_JSON_FILE}, or a folder with one.")
    return JsonTokenizer(file) if file.suffix == ".json" else SentencePieceTokenizer(file)


def train_sentencepiece(
    texts: Iterable[str], model_file: str | Path, *, vocab_size: int, seed: int = 0, max_texts: int = 1_000_000
) -> None:
    """Trains a unigram vocabulary in T5's layout (padding 0, `</s>` 1, `<unk>` 2, no begin symbol) and writes it to `model_file`.

    The same texts, size and seed give the same bytes, whatever the machine's number of processors.

    Args:
        texts: read once; beyond `max_texts` of them a random sample is used (at least 101).
        model_file: written by rename.
        vocab_size: pieces, the three special ones included.
        seed: of the sample.
        max_texts: the most texts held in memory.

    Raises:
        InputError: no text, or a size that these texts cannot fill or that cannot hold their characters.
    """
    import sentencepiece

    sentencepiece.set_random_generator_seed(seed)
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=model,
            model_type="unigram",
            vocab_size=vocab_size,
            pad_id=PAD_ID,
            eos_id=1,
            unk_id=2,
            bos_id=-1,
            byte_fallback=False,
            input_sentence_size=max_texts,
            shuffle_input_sentence=True,
            max_sentence_length=1 << 20,  # bytes; the default drops every text beyond 4,192
            num_threads=_TRAINING_THREADS,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise InputError(_training_fault(str(error), vocab_size)) from None
    with files.atomic_file(model_file) as temporary:
        temporary.write_bytes(model.getvalue())


def _training_fault(message: str, vocab_size: int) -> str:
    if too_high := re.search(r"value <= (\d+)", message):
        return f"a vocabulary of {vocab_size} pieces is more than these texts give; the most is {too_high[1]}."
    if too_low := re.search(r"required_chars\. \d+ vs (\d+)", message):
        return f"a vocabulary of {vocab_size} pieces is too small for these texts; the least is {too_low[1]}."
    if "sentences_.empty()" in message:
        return "no text to train a vocabulary on."
    return f"sentencepiece could not train a vocabulary of {vocab_size} pieces: {message}"


def _require_padding(path: Path, pad_id: int | None) -> None:
    if pad_id != PAD_ID:
        found = "none" if pad_id is None or pad_id < 0 else str(pad_id)
        raise InputError(
            f"{path}: the padding id must be {PAD_ID} and is {found}; take a vocabulary whose first piece is the padding."
        )


def _json_pad_id(tokenizer: Any) -> int | None:
    if tokenizer.padding:
        return int(tokenizer.padding["pad_id"])
    known = (tokenizer.token_to_id(name) for name in ("[PAD]", "<pad>"))
    return next((pad_id for pad_id in known if pad_id is not None), None)


def _surroundings(tokenizer: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(prefix ids, suffix ids): what stands around the ids of a text once special tokens are asked for."""
    body = tokenizer.encode("a", add_special_tokens=False).ids
    whole = tokenizer.encode("a", add_special_tokens=True).ids
    starts = range(len(whole) - len(body) + 1)
    start = next(start for start in starts if whole[start : start + len(body)] == body)
    return tuple(whole[:start]), tuple(whole[start + len(body) :])
