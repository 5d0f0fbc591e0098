"""A vocabulary is read as the class of its folder in transformers reads it, or it is refused."""

import json

import pytest
import transformers
from pretrained_folders import TEXTS, write

from de_jax.data.text.tokenizing import load_tokenizer
from de_jax.interop import tokenizer_settings
from de_jax.interop.tokenizer_classes import CLASSES
from de_jax.types import InputError

ODD = ["It's 12.5 Naïve  words\n日本語 ☃ ", " leading", "`` ''"]


def save(folder, name):
    """A small vocabulary as a class of transformers saves it."""
    padding = {"pad_token": "<pad>"} if name in ("Llama", "Qwen2", "GPT2") else {}
    blank = getattr(transformers, f"{name}Tokenizer")(**padding)
    blank.train_new_from_iterator([*TEXTS, *ODD], 320).save_pretrained(folder)


def change(file, **values):
    write(file, {**json.loads(file.read_text()), **values})


def ids_of_both(folder, texts=(*TEXTS, *ODD)):
    ours, theirs = load_tokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)
    rows = [[*ours.prefix_ids, *row.tolist(), *ours.suffix_ids] for row in ours.encode(texts)]
    swapped = {ours.pad_id: 0, 0: ours.pad_id}  # 0 is padding here
    return [[swapped.get(token, token) for token in row] for row in rows], theirs(list(texts))["input_ids"]


@pytest.mark.parametrize("name", CLASSES)
def test_another_class_than_the_one_that_saved_a_vocabulary_gives_the_same_ids_or_is_refused(tmp_path, name):
    save(tmp_path, name)
    taken = []
    for other in [*CLASSES, "Albert", "PreTrained"]:
        change(tmp_path / "tokenizer_config.json", tokenizer_class=f"{other}TokenizerFast")
        try:
            tokenizer_settings.read(tmp_path)
        except InputError:
            continue
        ours, theirs = ids_of_both(tmp_path)
        assert ours == theirs, other
        taken.append(other)
    assert {name, "PreTrained"} <= set(taken) < {*CLASSES, "PreTrained"}


@pytest.mark.parametrize(
    ("name", "vocabulary", "settings", "message"),
    [
        (
            "Bert",
            {"normalizer": None},
            {},
            r"'BertTokenizer' has the normalizer \{.*BertNormalizer.* of tokenizer\.json is nothing;",
        ),
        ("Bert", {}, {"unk_token": "[MASK]"}, r"the setting unk_token '\[MASK\]', .* is '\[UNK\]'"),
        ("T5", {"pre_tokenizer": {"type": "Whitespace"}}, {}, r"the pre_tokenizer \{.*Metaspace.* is \{\"type\": \"Whitespace\"\}"),
        ("MPNet", {}, {"cls_token": "<pad>"}, r"puts '<pad>' and '</s>' around a text, but tokenizer\.json puts '<s>' and"),
        ("Roberta", {}, {"tokenizer_class": "AlbertTokenizer"}, r"tokenizer_class 'AlbertTokenizer' is unknown here"),
    ],
)
def test_steps_that_a_class_would_not_build_are_refused(tmp_path, name, vocabulary, settings, message):
    save(tmp_path, name)
    change(tmp_path / "tokenizer.json", **vocabulary)
    change(tmp_path / "tokenizer_config.json", **settings)
    with pytest.raises(InputError, match=message):
        tokenizer_settings.read(tmp_path)


def test_steps_of_other_forms_that_give_the_same_ids_are_read(tmp_path):
    """As in many published multilingual models, whose normalizer collapses spaces in the place of a pre-tokenizer."""
    save(tmp_path, "XLMRoberta")
    spaces = [
        {"type": "Replace", "pattern": {"Regex": r"\s+"}, "content": " "},
        {"type": "Strip", "strip_left": False, "strip_right": True},
    ]
    change(
        tmp_path / "tokenizer.json",
        normalizer={"type": "Sequence", "normalizers": spaces},
        pre_tokenizer={"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
    )
    tokenizer_settings.read(tmp_path)
    ours, theirs = ids_of_both(tmp_path)
    assert ours == theirs


def test_steps_that_differ_only_by_a_space_at_the_end_of_a_text_are_read(tmp_path):
    save(tmp_path, "XLMRoberta")
    change(
        tmp_path / "tokenizer.json",
        normalizer={"type": "Replace", "pattern": {"Regex": r"\s{2,}|\s"}, "content": " "},
        pre_tokenizer={"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
    )
    tokenizer_settings.read(tmp_path)
    ours, theirs = ids_of_both(tmp_path, [text.rstrip() for text in (*TEXTS, *ODD)])
    assert ours == theirs
    ours, theirs = ids_of_both(tmp_path, ["one "])
    assert len(ours[0]) == len(theirs[0]) + 1


@pytest.mark.parametrize(
    ("model_type", "tokenizer_class", "message"),
    [
        ("modernbert", "BertTokenizer", None),  # reads tokenizer.json as it stands
        ("eurobert", None, None),
        ("qwen2", "PreTrainedTokenizerFast", "the Qwen2Tokenizer of model_type 'qwen2' has the normalizer"),
        ("bert", None, "the BertTokenizer of model_type 'bert' has the vocabulary WordPiece, but that of tokenizer.json is BPE"),
    ],
)
def test_the_model_type_has_a_say_in_the_class(tmp_path, model_type, tokenizer_class, message):
    save(tmp_path, "Roberta")
    write(tmp_path / "config.json", {"model_type": model_type})
    change(tmp_path / "tokenizer_config.json", tokenizer_class=tokenizer_class)
    if message:
        with pytest.raises(InputError, match=message):
            tokenizer_settings.read(tmp_path)
    else:
        tokenizer_settings.read(tmp_path)
        ours, theirs = ids_of_both(tmp_path)
        assert ours == theirs
