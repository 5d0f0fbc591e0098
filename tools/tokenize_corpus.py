"""Tokenizes a BEIR folder, or one file of texts, into token stores; prints one JSON object to stdout.

With an existing vocabulary:

    de-jax tokenize_corpus --dataset_dir=data/beir/scifact --tokenizer=vocabularies/t5

With a vocabulary trained on the documents first (sentencepiece, or WordPiece with --wordpiece), kept in the folder --tokenizer:

    de-jax tokenize_corpus --dataset_dir=data/pydocs --tokenizer=data/pydocs_vocabulary --train_vocab_size=8000

By default the stores go into the cache that training reads, under names made from their content. Existing stores are reused.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from de_jax import command
from de_jax.data.stores.corpus import cached_token_store
from de_jax.data.text import beir, input_policy, tokenizing, vocabulary_training
from de_jax.files import outputs, reading
from de_jax.settings import Record, Seed, numeric
from de_jax.types import InputError


def main(argv: list[str] | None = None) -> None:
    """The command; prints the vocabulary and each store's folder and size as a JSON object."""
    args = _parse_args(argv)
    inputs = _inputs(args)
    if args.train_vocab_size is not None:
        texts_file, kind = inputs.get("docs", next(iter(inputs.values())))
        _train(texts_file, kind, args)
    tokenizer = tokenizing.load_tokenizer(args.tokenizer)
    cache_dir = args.out_dir or outputs.cache_dir() / "token_stores"
    stores: dict[str, Any] = {}
    for name, (texts_file, kind) in inputs.items():
        store = cached_token_store(texts_file, tokenizer, cache_dir, kind=kind, skip_empty=args.skip_empty)
        stores[name] = {"store_dir": str(store.store_dir), "texts": store.num_texts, "tokens": len(store.tokens)}
    print(json.dumps({"tokenizer": str(args.tokenizer), "vocab_size": tokenizer.vocab_size, **stores}))


def _inputs(args: argparse.Namespace) -> dict[str, tuple[Path, str]]:
    """(file, kind of its texts) by the name it has in the output; all are looked for before any work begins."""
    if args.dataset_dir is not None:
        return {"queries": (beir.find_file(args.dataset_dir, "queries"), "queries"),
                "docs": (beir.find_file(args.dataset_dir, "corpus"), "docs")}  # fmt: skip
    if not args.texts_file.is_file():
        raise InputError(f"{args.texts_file} does not exist; give texts in .jsonl or .tsv, plain or .gz.")
    return {args.kind: (args.texts_file, args.kind)}


def _train(texts_file: Path, kind: str, args: argparse.Namespace) -> None:
    """Trains the vocabulary, unless the folder holds one made from these texts with this size."""
    if args.tokenizer.is_file():
        raise InputError(f"{args.tokenizer} is a file; with --train_vocab_size, --tokenizer names the folder to train into.")
    wanted = {"texts_sha256": reading.sha256_of(texts_file), "kind": kind, "skip_empty": args.skip_empty,
              "vocab_size": args.train_vocab_size, "seed": args.seed}  # fmt: skip
    if args.wordpiece:
        wanted["wordpiece"] = True
    names = (tokenizing.SENTENCEPIECE_FILE, tokenizing.TOKENIZER_JSON_FILE)
    record, model_file = args.tokenizer / "training.json", args.tokenizer / names[args.wordpiece]
    if record.is_file() and model_file.is_file() and reading.read_json(record, Record({})) == wanted:
        return
    if any((args.tokenizer / name).exists() for name in names):
        raise InputError(f"{args.tokenizer} holds another vocabulary; give another folder, or leave out --train_vocab_size.")
    read = beir.iter_docs if kind == "docs" else beir.iter_queries
    texts = (one for _, one in read(texts_file, skip_empty=args.skip_empty))
    # The record comes first: a vocabulary without one is taken for somebody else's.
    outputs.write_json(record, wanted)
    if args.wordpiece:
        vocabulary_training.train_wordpiece(texts, model_file, vocab_size=args.train_vocab_size)
    else:
        vocabulary_training.train_sentencepiece(texts, model_file, vocab_size=args.train_vocab_size, seed=args.seed)


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = command.Parser(description=__doc__)
    inputs = parser.add_mutually_exclusive_group(required=True)
    inputs.add_argument("--dataset_dir", type=Path, help="a BEIR folder or a table; queries and corpus are tokenized")
    inputs.add_argument("--texts_file", type=Path, help="one .jsonl or .tsv, plain or .gz")
    parser.add_argument("--kind", choices=("docs", "queries"), default="docs", help="content of --texts_file; docs have titles")
    parser.add_argument("--tokenizer", type=Path, required=True, help="spiece.model, tokenizer.json, or a folder with either")
    parser.add_argument(
        "--train_vocab_size", type=int, help="train a vocabulary of this size on the documents, into the folder --tokenizer"
    )
    parser.add_argument("--wordpiece", action="store_true", help="train a WordPiece vocabulary with [CLS], [SEP] and [MASK]")
    parser.add_argument("--seed", type=numeric(Seed), default=0, help="seed of the sample for a vocabulary, beyond a million texts")
    parser.add_argument("--out_dir", type=Path, help="folder of the stores; default the cache of de_jax")
    input_policy.add_flags(parser)
    return parser.parse_args(argv)


if __name__ == "__main__":
    command.run(main)
