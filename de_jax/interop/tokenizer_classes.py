"""Tokenizer classes of transformers that build their steps themselves, whatever tokenizer.json says.

Such a class takes the entries of the vocabulary from tokenizer.json, and has a normalizer, a pre-tokenizer and settings of the
vocabulary's model of its own; some have tokens around a text of their own too. This library reads tokenizer.json as it stands, so
a folder where both differ is refused, unless they give the same ids: published files often reach them by other steps (spaces are
collapsed by a normalizer or by a pre-tokenizer). The forms are those of transformers 5; 4 read tokenizer.json.
"""

from __future__ import annotations

import itertools
import json
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from de_jax.types import InputError

Json = Mapping[str, Any]
AS_IT_STANDS = "PreTrainedTokenizerFast"
"""The class that reads tokenizer.json as it stands."""
OF_TYPES = {
    "bert": "Bert",
    "distilbert": "Bert",
    "nomic_bert": "Bert",
    "mpnet": "MPNet",
    "roberta": "Roberta",
    "xlm-roberta": "XLMRoberta",
    "gte": "XLMRoberta",
    "camembert": "Camembert",
    "t5": "T5",
    "mt5": "T5",
    "qwen2": "Qwen2",
    "qwen3": "Qwen2",
    "gemma3_text": "Gemma",
    "t5gemma": "Gemma",
}
"""The classes of model types where no file names one; further types have none."""
OF_ITS_OWN = {"qwen2": "Qwen2", "umt5": None, "modernbert": None, "mistral": None}
"""Model types whose class is this one whatever the files name; None reads tokenizer.json as it stands."""
_QWEN_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


PROBES = (
    "It's 12.5 % of Naïve co-operation, isn't it? (SEE: e.g. [3])",
    "two  spaces,\ttabs,\n\nlines",
    " a first space",
    "日本語 カタカナ ☃ 😀",
    "ÀÉÎÕÜ straße İstanbul ﬁ ½ ①",
    "www.example.org/a_b-c?d=1&e=2 #x @y $5.00 C++ {z} <b>",
    "don't WE'LL they've",
    "e\u0301 \u00a0 \u3000 \u200b x",
)
"""Texts on which steps differ.

None ends with a space. `Replace` of several spaces by one and `Metaspace` alone, as in published multilingual files, make a token
of that space, as transformers 4 does; their class drops it. Nothing else differs, so they are read.
"""
NUM_PROBED_PIECES = 2000


class Form(NamedTuple):
    """The steps of a class, as JSON, and the settings of the tokens that it puts around a text, with their defaults."""

    steps: Callable[[Json, Json], Json]  # from tokenizer_config.json and tokenizer.json
    ends: Mapping[str, str] | None = None  # None leaves those of tokenizer.json


def _word_pieces(settings: Json, vocabulary: Json) -> Json:
    normalizer = {
        "type": "BertNormalizer",
        "clean_text": True,
        "handle_chinese_chars": settings.get("tokenize_chinese_chars", True),
        "strip_accents": settings.get("strip_accents"),
        "lowercase": settings.get("do_lower_case", True),
    }
    unknown = _content(settings.get("unk_token", "[UNK]"))
    model = {"type": "WordPiece", "unk_token": unknown, "continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
    return {"normalizer": normalizer, "pre_tokenizer": {"type": "BertPreTokenizer"}, "model": model}


def _pieces(unk_id: int | None, takes_prefix_space: bool = True) -> Callable[[Json, Json], Json]:
    """unk_id: None looks for the entry of the setting unk_token."""

    def steps(settings: Json, vocabulary: Json) -> Json:
        maps = [step for step in parts(vocabulary.get("normalizer")) if step.get("type") == "Precompiled"]
        prepend = "always" if not takes_prefix_space or settings.get("add_prefix_space", True) else "never"
        words = [{"type": "WhitespaceSplit"}, {"type": "Metaspace", "replacement": "▁", "prepend_scheme": prepend, "split": True}]
        return {
            "normalizer": maps[0] if maps else None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": words},
            "model": {
                "type": "Unigram",
                "unk_id": _unk_id(settings, vocabulary) if unk_id is None else unk_id,
                "byte_fallback": False,
            },
        }

    return steps


def _unk_id(settings: Json, vocabulary: Json) -> int:
    unknown = _content(settings.get("unk_token", "<unk>"))
    entries = vocabulary["model"]["vocab"] if _kind(vocabulary["model"]) == "Unigram" else []
    return next((index for index, (piece, _) in enumerate(entries) if piece == unknown), 0)


def _bytes(settings: Json, vocabulary: Json) -> Json:
    words = {"type": "ByteLevel", "add_prefix_space": bool(settings.get("add_prefix_space")), "trim_offsets": True}
    return {"normalizer": None, "pre_tokenizer": words, "model": _bpe()}


def _qwen(settings: Json, vocabulary: Json) -> Json:
    words = [
        {"type": "Split", "pattern": {"Regex": _QWEN_WORDS}, "behavior": "Isolated", "invert": False},
        {**_bytes(settings, vocabulary)["pre_tokenizer"], "use_regex": False},
    ]
    return {
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": words},
        "model": _bpe(),
    }


def _llama(settings: Json, vocabulary: Json) -> Json:
    is_prefixed = settings.get("add_prefix_space") in (None, True)
    prepend = ("always" if settings.get("legacy") else "first") if is_prefixed else "never"
    words = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": prepend, "split": False}
    return {"normalizer": None, "pre_tokenizer": words, "model": _bpe(fuse_unk=True, byte_fallback=True)}


def _gemma(settings: Json, vocabulary: Json) -> Json:
    unknown = _content(settings.get("unk_token", "<unk>"))
    return {
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "pre_tokenizer": {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False},
        "model": _bpe(fuse_unk=True, byte_fallback=True, unk_token=unknown),
    }


def _bpe(**settings: Any) -> Json:
    usual = {"dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
    return {"type": "BPE", **usual, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False, **settings}


CLASSES = {
    "Bert": Form(_word_pieces, {"cls_token": "[CLS]", "sep_token": "[SEP]"}),
    "DistilBert": Form(_word_pieces, {"cls_token": "[CLS]", "sep_token": "[SEP]"}),
    "MPNet": Form(_word_pieces, {"cls_token": "<s>", "sep_token": "</s>"}),
    "XLMRoberta": Form(_pieces(3), {"bos_token": "<s>", "eos_token": "</s>"}),
    "Camembert": Form(_pieces(None), {"bos_token": "<s>", "eos_token": "</s>"}),
    "T5": Form(_pieces(2, takes_prefix_space=False), {"eos_token": "</s>"}),
    "Roberta": Form(_bytes, {"cls_token": "<s>", "sep_token": "</s>"}),
    "GPT2": Form(_bytes),
    "Qwen2": Form(_qwen),
    "Llama": Form(_llama),
    "Gemma": Form(_gemma),
}
"""By the name of the class in transformers, less Tokenizer or TokenizerFast."""


def check(file: Path, settings: Json, vocabulary: Json, config: Json, around: Callable[[], list[str]]) -> None:
    """Refuses a tokenizer.json that the class of its folder would read otherwise than it stands.

    Args:
        file: tokenizer_config.json, for messages.
        settings: its values.
        vocabulary: tokenizer.json.
        config: config.json beside both, as far as there is one.
        around: the special tokens that tokenizer.json puts around a text.

    Raises:
        InputError: another step, other tokens around a text, or a class that is unknown here.
    """
    name, whose = _class(settings, vocabulary, config)
    if name is None:
        return
    if name not in CLASSES:
        raise InputError(f"{file}: {whose} is unknown here; make it {AS_IT_STANDS!r} if tokenizer.json is right.")
    mend = "save the tokenizer again with transformers, so that both agree"
    if str(config.get("model_type")) not in OF_ITS_OWN:
        mend += f", or make tokenizer_class {AS_IT_STANDS!r} if tokenizer.json is right"
    form = CLASSES[name]
    steps = form.steps(settings, vocabulary)
    differences = list(_differences(steps, vocabulary))
    if differences and not _gives_same_ids(steps, vocabulary):
        step, expected, found = differences[0]
        raise InputError(f"{file}: {whose} has the {step} {expected}, but that of tokenizer.json is {found}; {mend}.")
    ends = [_content(settings.get(setting)) or default for setting, default in (form.ends or {}).items()]
    if form.ends and ends != (there := around()):
        raise InputError(f"{file}: {whose} puts {_listed(ends)} around a text, but tokenizer.json puts {_listed(there)}; {mend}.")


def _class(settings: Json, vocabulary: Json, config: Json) -> tuple[str | None, str]:
    """The class as transformers chooses it, in short, or None if it reads tokenizer.json as it stands; and a name for messages."""
    model_type = str(config.get("model_type"))
    named = settings.get("tokenizer_class") or config.get("tokenizer_class")
    name = str(named).removesuffix("Fast").removesuffix("Tokenizer") if named else OF_TYPES.get(model_type)
    whose = f"tokenizer_class {named!r}" if named else f"the {name}Tokenizer of model_type {model_type!r}"
    if model_type in OF_ITS_OWN:
        name = OF_ITS_OWN[model_type]
        whose = f"the {name}Tokenizer of model_type {model_type!r}"
    has_bytes = any(step.get("type") == "ByteLevel" for step in parts(vocabulary.get("pre_tokenizer")))
    reads_as_it_stands = name in ("PreTrained", "TokenizersBackend") or (name == "Llama" and has_bytes)
    return None if reads_as_it_stands else name, whose


def parts(step: Any) -> Iterator[dict[str, Any]]:
    """The steps of a normalizer or a pre-tokenizer in the order of their use."""
    if isinstance(step, dict) and step.get("type") == "Sequence":
        for part in step.get("normalizers") or step.get("pretokenizers") or []:
            yield from parts(part)
    elif isinstance(step, dict):
        yield step


def contents(value: Any) -> Iterator[str]:
    """The texts of tokens, which are written as texts, as objects with a "content", or as lists or objects of such."""
    if isinstance(value, str) and value:
        yield value
    elif isinstance(value, dict) and "content" in value:
        yield from contents(value["content"])
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from contents(part)


def _differences(form: Json, vocabulary: Json) -> Iterator[tuple[str, str, str]]:
    """What of a tokenizer.json changes ids and is not as in a form: a name, the value there and the value in tokenizer.json."""
    told, model = form["model"], vocabulary.get("model") or {}
    if told["type"] != (kind := _kind(model)):
        yield "vocabulary", told["type"], kind
    expected, found = _whole(form), _whole(vocabulary)
    for step in ("normalizer", "pre_tokenizer"):
        if expected[step] != found[step]:
            theirs, ours = (textwrap.shorten(" and ".join(steps[step]), 300) or "nothing" for steps in (expected, found))
            yield step, theirs, ours
    for name, value in list(told.items())[1:]:
        there = model.get(name)
        is_same = value == there or (not value and not there and name != "unk_id")
        if not is_same and not (name == "unk_token" and kind == "BPE" and _has_all_bytes(model)):
            yield f"setting {name}", repr(value), repr(there)


def _gives_same_ids(form: Json, vocabulary: Json) -> bool:
    """Whether the steps of a form read `PROBES`, and texts made of the vocabulary's own pieces, as a tokenizer.json does."""
    import tokenizers

    model = vocabulary.get("model") or {}
    if form["model"]["type"] != _kind(model):
        return False
    built = {**vocabulary, **form, "model": {**model, **form["model"]}}
    entries = [entry[0] for entry in model["vocab"]] if _kind(model) == "Unigram" else list(model["vocab"])
    step = max(1, len(entries) // NUM_PROBED_PIECES)
    words = [re.sub("[▁Ġ]|^##", " ", entry).strip() for entry in entries[::step]]
    pairs = [f"{first} {second}  {first.upper()}-{second.title()}, {first}{second}." for first, second in itertools.pairwise(words)]
    texts = [*PROBES, *pairs]
    ids = []
    for one in (vocabulary, built):
        tokenizer = tokenizers.Tokenizer.from_str(json.dumps(one))
        tokenizer.encode_special_tokens = True  # as texts are encoded here; before a token cut out, a text would end
        tokenizer.no_truncation()
        tokenizer.no_padding()
        ids.append([encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)])
    return ids[0] == ids[1]


def _whole(steps: Json) -> dict[str, list[str]]:
    """The normalizer and the pre-tokenizer as JSON of their steps with all defaults, less what changes no id."""
    import tokenizers

    blank = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}
    names = ("normalizer", "pre_tokenizer")
    whole = json.loads(tokenizers.Tokenizer.from_str(json.dumps({**blank, **{name: steps.get(name) for name in names}})).to_str())
    return {
        name: [json.dumps({key: value for key, value in step.items() if key != "trim_offsets"}) for step in parts(whole[name])]
        for name in names
    }


def _kind(model: Json) -> str:
    """The kind of a vocabulary, which older files leave out."""
    guess = "BPE" if "merges" in model else "WordPiece" if isinstance(model.get("vocab"), dict) else "Unigram"
    return str(model.get("type", guess))


def _has_all_bytes(model: Json) -> bool:
    """Whether no text has an unknown token, as a token stands for each byte."""
    import tokenizers

    fallback = [f"<0x{byte:02X}>" for byte in range(256)] if model.get("byte_fallback") else None
    return all(token in model["vocab"] for token in fallback or tokenizers.pre_tokenizers.ByteLevel.alphabet())


def _content(value: Any) -> str | None:
    return next(contents(value), None)


def _listed(tokens: list[str]) -> str:
    return " and ".join(map(repr, tokens)) or "nothing"
