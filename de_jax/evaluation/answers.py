"""Open-domain questions: a passage is relevant when one of the question's answers stands in it, word by word."""

import functools
import re
import sys
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path

from de_jax.data.text.beir import Qrels
from de_jax.evaluation.metrics import Results
from de_jax.files import reading
from de_jax.settings import Record, list_of, text_id
from de_jax.types import InputError

MEASURES = ("Success@20", "Success@100")
"""Top-20 and Top-100 coverage: the share of questions with an answer in the first so many passages."""

_ANSWERS = Record({"_id": text_id, "answers": list_of(str, least=1)})
Answers = dict[str, list[str]]
"""The strings that answer a question, by its id."""


def read(path: str | Path) -> Answers:
    """The answers in a jsonl file, plain or .gz: `_id` of the question and `answers`, at least one."""
    path = Path(path)
    answers: Answers = {}
    for line, record in reading.read_records(path, _ANSWERS):
        question_id, found = record["_id"], record["answers"]
        if question_id in answers:
            raise InputError(f"{path}, line {line}: the question {question_id} was answered before.")
        if empty := [one for one in found if not words(one).strip()]:
            raise InputError(f"{path}, line {line}: the answer {empty[0]!r} has no word; remove it.")
        answers[question_id] = found
    if not answers:
        raise InputError(f"{path} holds no answer.")
    return answers


def judge(results: Results, texts: Mapping[str, str], answers: Answers) -> Qrels:
    """Judges a ranking's passages: 1 where one of the question's answers stands in the text, else 0.

    `texts` are of the passages by id, without titles. Every question of `answers` counts, results or not.
    """
    passages: dict[str, str] = {}
    qrels: Qrels = {}
    for question_id, strings in answers.items():
        wanted = [words(one) for one in strings]
        qrels[question_id] = {"": 0}  # a question without results counts too, as not covered
        for doc_id in results.get(question_id, {}):
            if doc_id not in passages:
                passages[doc_id] = words(texts.get(doc_id, ""))
            qrels[question_id][doc_id] = int(any(one in passages[doc_id] for one in wanted))
    return qrels


def words(text: str) -> str:
    """A text's words and signs in lower case, with a blank before, between and after, so that `in` compares whole words.

    As DPR (Karpukhin et al. 2020) normalises: canonical decomposition, then runs of letters, numbers and marks, and every other
    visible character alone.

    Example:
        >>> words("Röntgen's 2nd") == f" ro{chr(0x308)}ntgen ' s 2nd "
        True
    """
    found: Sequence[str] = _pattern().findall(unicodedata.normalize("NFD", text))
    return f" {' '.join(found).lower()} "


@functools.cache
def _pattern() -> re.Pattern[str]:
    """`re` has no Unicode categories, so their characters are listed."""
    spans: dict[str, list[tuple[int, int]]] = {"word": [], "hidden": []}
    for code in range(sys.maxunicode + 1):
        category = unicodedata.category(chr(code))[0]
        kind = "word" if category in "LNM" else "hidden" if category in "ZC" else None
        if kind and spans[kind] and spans[kind][-1][1] == code - 1:
            spans[kind][-1] = (spans[kind][-1][0], code)
        elif kind:
            spans[kind].append((code, code))
    word, hidden = ("".join(f"\\U{first:08x}-\\U{last:08x}" for first, last in spans[kind]) for kind in spans)
    return re.compile(f"[{word}]+|[^{word}{hidden}]")
