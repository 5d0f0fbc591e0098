"""`python -m reproduction encode tokens`: a vocabulary to pretrain with, and texts as its tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from de_jax.data.stores.corpus import cached_token_store
from de_jax.data.text import beir, tokenizing, vocabulary_training
from de_jax.data.text.tokenizing import load_tokenizer
from de_jax.files import outputs, reading
from de_jax.flags import rules
from de_jax.settings import PositiveInt, Record, Seed
from de_jax.types import InputError


@rules(
    one_of=[("dataset_dir", "texts_file")],
    without={"texts_file": ("kind",), "train_vocab_size": ("wordpiece", "seed")},
)
def encode_tokens(
    *,
    tokenizer: Path,
    dataset_dir: Path | None = None,
    texts_file: Path | None = None,
    kind: Literal["docs", "queries"] = "docs",
    train_vocab_size: PositiveInt | None = None,
    wordpiece: bool = False,
    seed: Seed = 0,
    skip_empty: bool = False,
    out_dir: Path | None = None,
) -> dict[str, Any]:
    """Tokenizes a BEIR folder, or one file of texts, into token stores.

    With an existing vocabulary:

        python -m reproduction encode tokens --dataset_dir=data/beir/scifact --tokenizer=vocabularies/t5

    With a vocabulary trained on the documents first (sentencepiece, or WordPiece with --wordpiece), kept in the folder --tokenizer:

        python -m reproduction encode tokens --dataset_dir=data/pydocs --tokenizer=data/pydocs_vocabulary --train_vocab_size=8000

    By default the stores go into the cache that training reads, under names made from their content. Existing stores are reused.
    Prints one JSON object.

    Args:
        dataset_dir: a BEIR folder or a table; queries and corpus are tokenized.
        texts_file: one .jsonl or .tsv, plain or .gz.
        kind: content of --texts_file; docs have titles.
        train_vocab_size: train a vocabulary of this size on the documents, into the folder --tokenizer.
        wordpiece: train a WordPiece vocabulary with [CLS], [SEP] and [MASK].
        seed: seed of the sample for a vocabulary, beyond a million texts.
        out_dir: folder of the stores; default the cache of de_jax.
    """
    inputs: dict[str, tuple[Path, str]] = {}
    if dataset_dir:
        found = {"queries": "queries", "docs": "corpus"}
        inputs = {name: (beir.find_file(dataset_dir, file), name) for name, file in found.items()}
    elif texts_file and texts_file.is_file():
        inputs = {kind: (texts_file, kind)}
    else:
        raise InputError(f"{texts_file} does not exist; give texts in .jsonl or .tsv, plain or .gz.")
    if train_vocab_size is not None:
        texts, kind_of_texts = inputs.get("docs", next(iter(inputs.values())))
        trained: dict[str, Any] = {"vocab_size": train_vocab_size, "wordpiece": wordpiece, "seed": seed, "skip_empty": skip_empty}
        _train(texts, kind_of_texts, tokenizer, **trained)
    opened = load_tokenizer(tokenizer)
    stores: dict[str, Any] = {}
    for name, (texts, kind_of_texts) in inputs.items():
        cache_dir = out_dir or outputs.cache_dir() / "token_stores"
        store = cached_token_store(texts, opened, cache_dir, kind=kind_of_texts, skip_empty=skip_empty)
        stores[name] = {"store_dir": str(store.store_dir), "texts": store.num_texts, "tokens": len(store.tokens)}
    return {"tokenizer": str(tokenizer), "vocab_size": opened.vocab_size, **stores}


def _train(texts_file: Path, kind: str, folder: Path, *, vocab_size: int, wordpiece: bool, seed: int, skip_empty: bool) -> None:
    """Trains the vocabulary, unless the folder holds one made from these texts with this size."""
    if folder.is_file():
        raise InputError(f"{folder} is a file; with --train_vocab_size, --tokenizer names the folder to train into.")
    wanted = {"texts_sha256": reading.sha256_of(texts_file), "kind": kind, "skip_empty": skip_empty,
              "vocab_size": vocab_size, "seed": seed}  # fmt: skip
    if wordpiece:
        wanted["wordpiece"] = True
    names = (tokenizing.SENTENCEPIECE_FILE, tokenizing.TOKENIZER_JSON_FILE)
    record, model_file = folder / "training.json", folder / names[wordpiece]
    if record.is_file() and model_file.is_file() and reading.read_json(record, Record({})) == wanted:
        return
    if any((folder / name).exists() for name in names):
        raise InputError(f"{folder} holds another vocabulary; give another folder, or leave out --train_vocab_size.")
    read = beir.iter_docs if kind == "docs" else beir.iter_queries
    texts = (one for _, one in read(texts_file, skip_empty=skip_empty))
    # The record comes first: a vocabulary without one counts as another one.
    outputs.write_json(record, wanted)
    if wordpiece:
        vocabulary_training.train_wordpiece(texts, model_file, vocab_size=vocab_size)
    else:
        vocabulary_training.train_sentencepiece(texts, model_file, vocab_size=vocab_size, seed=seed)
