"""Settings beside a vocabulary by which transformers uses it.

tokenizer_config.json, added_tokens.json, special_tokens_map.json

The vocabulary itself (`data.text`) is read without them, so a setting that says otherwise than the vocabulary is refused.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from de_jax.data.text.tokenizing import SENTENCEPIECE_FILE, TOKENIZER_JSON_FILE, rust_errors_named
from de_jax.files import schema
from de_jax.files.reading import is_there
from de_jax.interop import config_keys, tokenizer_classes
from de_jax.types import InputError

FILE = "tokenizer_config.json"
UNKNOWN_LENGTH = 10**9
"""transformers writes 10^30 for an unknown length."""
CONFIG_FILE = "config.json"
ADDED_FILE, SPECIALS_FILE = "added_tokens.json", "special_tokens_map.json"
BERT_SETTINGS = {"do_lower_case": "lowercase", "strip_accents": "strip_accents", "tokenize_chinese_chars": "handle_chinese_chars"}
"""Settings by their names in a BertNormalizer, which transformers rebuilds from them."""
_NO_WORD = re.compile(r"[<\[{|]")
"""What marks a special token as something that ordinary texts do not hold."""


class TokenizerSettings(NamedTuple):
    """The tokenizer settings that an importer needs."""

    max_length: int | None  # tokens, where it is told
    special_tokens: frozenset[str]  # transformers finds them within texts too
    is_padded_left: bool


def read(folder: Path) -> TokenizerSettings:
    """The settings beside a vocabulary.

    Raises:
        InputError: a setting with which texts are tokenized differently than by the vocabulary alone.
    """
    file = folder / FILE
    values, vocabulary = _object(file), _object(folder / TOKENIZER_JSON_FILE)
    config_keys.account(file, values, config_keys.TOKENIZER)
    for name, part in (("truncation", "truncation_side"), ("padding", "padding_side")):
        side = (vocabulary.get(name) or {}).get("direction", "Right")
        config_keys.account(folder / TOKENIZER_JSON_FILE, {part: side} if part not in values else {}, config_keys.TOKENIZER)
    names = values.get("model_input_names", ["attention_mask"])
    if not isinstance(names, list) or "attention_mask" not in names:
        raise InputError(f"{file}: model_input_names is {names!r}; without 'attention_mask' padding would count as text.")
    _check_normalizer(file, values, vocabulary)
    _check_ends(file, values, folder / TOKENIZER_JSON_FILE)
    if vocabulary:
        config, around = _object(folder / CONFIG_FILE), functools.partial(_around, folder / TOKENIZER_JSON_FILE)
        with rust_errors_named(folder / TOKENIZER_JSON_FILE):
            tokenizer_classes.check(file, values, vocabulary, config, around)
    if vocabulary or is_there(folder / SENTENCEPIECE_FILE):
        _check_added_tokens(folder, values, vocabulary)
    padding_side = values.get("padding_side", (vocabulary.get("padding") or {}).get("direction", "Right"))
    specials = frozenset(_special_tokens(folder, values, vocabulary))
    if word := next((token for token in sorted(specials) if not _NO_WORD.search(token)), None):
        raise InputError(
            f"{folder}: the special token {word!r} is an ordinary word, at which transformers would cut each text with it; take it "
            f"out of the settings of the tokenizer, or write it as no text does, '<{word}>'."
        )
    return TokenizerSettings(_max_length(values), specials, str(padding_side).lower() == "left")


def check_prompt(file: Path, folder: Path, prompt: str) -> None:
    """Refuses a prompt that holds a special token, which transformers would find in it and this library reads as plain text.

    Args:
        file: where the prompt stands, for the message.
        folder: with the vocabulary.
        prompt: the text before each text.
    """
    special = next((token for token in sorted(read(folder).special_tokens) if token in prompt), None) if prompt else None
    if special is not None:
        raise InputError(
            f"{file}: the prompt {prompt!r} holds the special token {special!r}, which is read as plain text here; leave it out."
        )


def _max_length(values: dict[str, Any]) -> int | None:
    told = values.get("model_max_length", values.get("max_len"))
    if not isinstance(told, int | float) or isinstance(told, bool) or not 1 <= told < UNKNOWN_LENGTH:
        return None
    return int(told)


def _check_normalizer(file: Path, values: dict[str, Any], vocabulary: dict[str, Any]) -> None:
    """transformers rebuilds these steps from the settings, whatever tokenizer.json says."""
    for step in tokenizer_classes.parts(vocabulary.get("normalizer")):
        if step.get("type") == "BertNormalizer":
            _check_equal(file, values, step, BERT_SETTINGS)
    for step in tokenizer_classes.parts(vocabulary.get("pre_tokenizer")):
        spaced = {name: values[name] for name in ("add_prefix_space",) if values.get(name) is not None}
        if step.get("type") == "ByteLevel":
            _check_equal(file, spaced, step, {"add_prefix_space": "add_prefix_space"})
        if step.get("type") == "Metaspace":
            _check_equal(
                file, spaced, {"prepend_scheme": step.get("prepend_scheme") != "never"}, {"add_prefix_space": "prepend_scheme"}
            )


def _check_ends(file: Path, values: dict[str, Any], vocabulary: Path) -> None:
    """Tokens around a text are those of tokenizer.json, as in transformers 5; 4 added them for some classes by these settings."""
    names = [name for name in ("bos", "eos") if values.get(f"add_{name}_token")]
    asked = {name: next(tokenizer_classes.contents(values.get(f"{name}_token")), None) for name in names}
    if not any(asked.values()) or not is_there(vocabulary):
        return
    around = _around(vocabulary)
    for name, token in asked.items():
        if token is not None and token not in around:
            raise InputError(
                f"{file}: add_{name}_token is true, but {TOKENIZER_JSON_FILE} puts no {token!r} around a text, and neither does "
                f"transformers 5; add it to the post_processor there, or set add_{name}_token to false."
            )


def _around(vocabulary: Path) -> list[str]:
    """The special tokens that a tokenizer.json puts around a text."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(vocabulary))
    tokenizer.no_padding()
    found = tokenizer.encode("")
    return [token for token, is_special in zip(found.tokens, found.special_tokens_mask, strict=True) if is_special]


def _check_equal(file: Path, values: dict[str, Any], step: dict[str, Any], names: dict[str, str]) -> None:
    for name, theirs in names.items():
        if name in values and values[name] != step.get(theirs):
            raise InputError(
                f"{file}: {name} is {values[name]!r}, but {TOKENIZER_JSON_FILE} has {theirs} {step.get(theirs)!r}; save the "
                "tokenizer again with transformers, so that both agree."
            )


def _check_added_tokens(folder: Path, values: dict[str, Any], vocabulary: dict[str, Any]) -> None:
    """Words that were added to a vocabulary must be in the file that texts are tokenized with."""
    added = {token["content"]: (str(token["id"]), token.get("special")) for token in vocabulary.get("added_tokens") or []}
    told = {
        token["content"]: (index, token.get("special"))
        for index, token in (values.get("added_tokens_decoder") or {}).items()
        if isinstance(token, dict) and isinstance(token.get("content"), str)
    }
    specials = set(_special_tokens(folder, values, vocabulary))
    told = {**{word: (str(index), word in specials) for word, index in _object(folder / ADDED_FILE).items()}, **told}
    known, used = added, TOKENIZER_JSON_FILE
    if is_there(folder / SENTENCEPIECE_FILE):
        known, used, told = {}, SENTENCEPIECE_FILE, {**added, **told}
    for word, (index, is_special) in told.items():
        if not is_special and word not in specials and known.get(word, (None,))[0] != index:
            raise InputError(
                f"{folder}: the added token {word!r} ({index}) is missing from {used}, which texts are tokenized with."
            )


def _special_tokens(folder: Path, values: dict[str, Any], vocabulary: dict[str, Any]) -> Iterator[str]:
    decoder = values.get("added_tokens_decoder") or {}
    yield from (token["content"] for token in decoder.values() if isinstance(token, dict) and token.get("special"))
    for settings in (values, _object(folder / SPECIALS_FILE)):
        for name, value in settings.items():
            if name.endswith(("_token", "special_tokens")):
                yield from tokenizer_classes.contents(value)
    yield from (token["content"] for token in vocabulary.get("added_tokens") or [] if token.get("special"))


def _object(file: Path) -> dict[str, Any]:
    values: dict[str, Any] = schema.read(file, schema.record({})) if is_there(file) else {}
    return values
