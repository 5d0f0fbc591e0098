"""Readers of vocabularies: sentencepiece models and tokenizer.json."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers
from fuzz.reader import Reader, naive_bytes, naive_text, one_file, plain, strict_json
from sentencepiece import sentencepiece_model_pb2
from transformers import AutoTokenizer

from de_jax.data.text import tokenizing, vocabulary_training

PROBES = ("a text", "Hello  world", "zwei Wörter", "😀", "", "[PAD] a </s>")


def readers(folder: Path) -> list[Reader]:
    model, words = sentencepiece_model(), json_vocabulary()
    return [
        one_file(
            folder,
            "sentencepiece",
            "spiece.model",
            model,
            lambda path: probed(tokenizing.load_tokenizer(path)),
            naive_sentencepiece,
        ),
        one_file(
            folder,
            "tokenizer.json",
            "tokenizer.json",
            words,
            lambda path: probed(tokenizing.load_tokenizer(path)),
            naive_json_vocabulary,
            exact=True,
        ),
    ]


@functools.cache
def sentencepiece_model() -> bytes:
    """A small model in T5's layout."""
    with tempfile.TemporaryDirectory() as folder:
        words = ("a", "text", "of", "hello", "world", "zwei", "words")
        texts = [f"{one} {two} {three}" for one in words for two in words for three in words[:3]]
        vocabulary_training.train_sentencepiece(texts, f"{folder}/spiece.model", vocab_size=20)
        return Path(folder, "spiece.model").read_bytes()


@functools.cache
def json_vocabulary(pad_id: int = 0) -> str:
    """A vocabulary of words with BERT's special tokens."""
    words = ["[UNK]", "[CLS]", "[SEP]", "a", "text", "hello", "world", "of"]
    words.insert(pad_id, "[PAD]")
    found = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    found.add_special_tokens(words[:4])
    found.normalizer = tokenizers.normalizers.Lowercase()
    found.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    found.post_processor = tokenizers.processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    return str(found.to_str())


def probed(tokenizer: tokenizing.Tokenizer | None) -> Any:
    """What can be seen of a tokenizer: its ids of a few texts."""
    if tokenizer is None:
        return None
    around = [tokenizer.vocab_size, tokenizer.pad_id, tokenizer.prefix_ids, tokenizer.suffix_ids]
    return plain([*around, [ids.tolist() for ids in tokenizer.encode(PROBES)]])


def naive_tokenizer(folder: Path, prompt: str = "") -> Any:
    """What stands in a folder, as `probed` shows it."""
    if (folder / "spiece.model").is_file():
        return naive_sentencepiece(folder / "spiece.model", prompt)
    if not (folder / "tokenizer.json").is_file():
        return None
    settings = [folder / name for name in ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "config.json")]
    if any(file.is_file() for file in settings):
        # The class that they name, or that of the model, makes a vocabulary of its own of the file, with the tokens that they add.
        opened = AutoTokenizer.from_pretrained(folder)
        found = json.loads(opened.backend_tokenizer.to_str())
        roles = {"[UNK]", "[PAD]", "[CLS]", "[SEP]", *(one for one in opened.special_tokens_map.values() if isinstance(one, str))}
        for token in found["added_tokens"]:
            token["special"] &= token["content"] in roles  # others are found in texts
        return _naive_vocabulary(tokenizers.Tokenizer.from_str(json.dumps(found)), prompt)
    return naive_json_vocabulary(folder / "tokenizer.json", prompt)


def naive_sentencepiece(path: Path, prompt: str = "") -> Any:
    """By the library alone, of a model with all its parts. It has no checksum: another score of a piece is the file's value."""
    model: Any = sentencepiece_model_pb2.ModelProto.FromString(naive_bytes(path))  # type: ignore[attr-defined]
    if not model.HasField("trainer_spec") or not model.HasField("normalizer_spec"):
        raise ValueError("the model is not whole")
    found = sentencepiece.SentencePieceProcessor(model_proto=naive_bytes(path))
    around = [len(model.pieces), found.pad_id(), (), (found.eos_id(),) if found.eos_id() >= 0 else ()]
    return plain([*around, found.encode([prompt + one for one in PROBES])])


def naive_json_vocabulary(path: Path, prompt: str = "") -> Any:
    """By the library alone, which has padding as id 0 in these files."""
    return _naive_vocabulary(tokenizers.Tokenizer.from_str(json.dumps(strict_json(naive_text(path)))), prompt)


def _naive_vocabulary(found: Any, prompt: str) -> Any:
    pad_id = found.padding["pad_id"] if found.padding else found.token_to_id("[PAD]")
    if pad_id is None:
        raise ValueError("no padding")
    found.no_truncation()
    found.no_padding()
    found.encode_special_tokens = True
    turned = {pad_id: 0, 0: pad_id}
    body, whole = found.encode("a", add_special_tokens=False).ids, found.encode("a").ids
    start = next(start for start in range(len(whole) - len(body) + 1) if whole[start : start + len(body)] == body)
    around = [
        whole[:start],
        whole[start + len(body) :],
        *(found.encode(prompt + one, add_special_tokens=False).ids for one in PROBES),
    ]
    prefix, suffix, *ids = [[turned.get(index, index) for index in one] for one in around]
    return plain([1 + max(found.get_vocab().values()), pad_id, prefix, suffix, ids])
