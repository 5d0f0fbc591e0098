"""The files of DPR (Karpukhin et al. 2020): passages, training questions with their passages, and questions with answers.

Passages are a tsv with `id`, `text` and `title`, training questions a JSON array (or jsonl) of `question`, `positive_ctxs` and
`hard_negative_ctxs`, test questions a file without names: a question, a tab, and its answers as a list in Python's form.
"""

import ast
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from de_jax.data.text import beir, input_policy, table_files
from de_jax.data.text.tokenizing import document
from de_jax.files import folders, reading
from de_jax.settings import Maybe, Record, list_of, nullable, text_id
from de_jax.types import InputError

_ID = Maybe(nullable(lambda value: text_id(value) if value != "" else ""), None)
_PASSAGE = Record({"title": Maybe(nullable(str), None), "text": str, "passage_id": _ID, "psg_id": _ID})
_QUESTION = Record({"question": str, "positive_ctxs": list_of(_PASSAGE), "hard_negative_ctxs": Maybe(list_of(_PASSAGE), [])})
_COLUMNS = ("id", "title", "text")


class Passage(NamedTuple):
    """A passage beside a question."""

    passage_id: str  # "" if the file gives none
    text: str  # after its title


class Question(NamedTuple):
    """A training question."""

    place: str  # "nq.json, question 3"
    text: str
    positives: list[Passage]
    negatives: list[Passage]


def read_questions(path: str | Path) -> Iterator[Question]:
    """Yields the training questions of a file, plain or .gz; some have no positive passage."""
    for number, (_, record) in enumerate(reading.read_objects(path), start=1):
        place = f"{path}, question {number}"
        try:
            found = _QUESTION(record)
        except ValueError as error:
            raise InputError(f"{place}: {error}.") from None
        sides = (
            [Passage(one["passage_id"] or one["psg_id"] or "", document(one["title"] or "", one["text"])) for one in found[name]]
            for name in ("positive_ctxs", "hard_negative_ctxs")
        )
        yield Question(place, input_policy.shown(found["question"]), *sides)


def read_answers(path: str | Path) -> Iterator[tuple[str, list[str]]]:
    """Yields (question, its answers) of a file such as `nq-test.qa.csv`, plain or .gz."""
    for line, cells, fault in table_files.quoted_cells(Path(path), "\t"):
        try:
            question, answers = cells
            found = ast.literal_eval(answers)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            found = None
        if not (isinstance(found, list) and found and all(isinstance(one, str) for one in found) and input_policy.shown(question)):
            fault = fault or "not a question, a tab and a list of answers such as ['Paris']"
        if fault:
            raise InputError(f"{path}, line {line}: {fault}.")
        yield question.strip(), found


def read_passages(path: str | Path) -> Iterator[tuple[str, str, str]]:
    """Yields (id, title, text) of a table such as `psgs_w100.tsv.gz`. InputError: a missing column, or a row without an id."""

    def wanted(names: Sequence[str]) -> Sequence[str]:
        if missing := [name for name in _COLUMNS if name not in names]:
            raise InputError(f"{path} has no column {missing[0]}; DPR's passages have the columns id, text and title.")
        return _COLUMNS

    for row in table_files.read(table_files.Table(str(path)), wanted):
        fault = row.fault or ("" if row.is_csv else "not a line of a tsv or csv file, as passages have")
        if fault := fault or ("" if row.values["id"] else "the passage has no id"):
            raise InputError(f"{row.place}: {fault}.")
        yield row.values["id"], row.values["title"], row.values["text"]


def write_beir(
    out_dir: Path,
    *,
    passages: str | Path,
    questions: dict[str, Sequence[str | Path]],
    answers: Sequence[str | Path] = (),
    max_positives: int = 1,
) -> dict[str, int]:
    """Writes a BEIR folder of DPR's passages with their own ids; passages are streamed, ids of questions count them by split.

    Args:
        questions: files of training questions by the split that their judgements are for, `train` and perhaps `dev`. Questions
            without a positive passage are left out.
        answers: files of test questions, which get `answers.jsonl` and no judgements.
    """
    judged = {split: _judged(split, files, max_positives) for split, files in questions.items()}
    asked = list(itertools.chain.from_iterable(map(read_answers, answers)))
    counts = {"passages": 0, "test_questions": len(asked)}
    with folders.atomic_dir(out_dir, beir.BEIR_KIND) as folder:
        missing = {passage_id for pairs in judged.values() for _, ids in pairs for passage_id in ids}

        def docs() -> Iterator[tuple[str, str, str]]:
            for passage in read_passages(passages):
                missing.discard(passage[0])
                counts["passages"] += 1
                yield passage

        named = {split: {f"{split}-{number}": pair for number, pair in enumerate(pairs)} for split, pairs in judged.items()}
        texts = ((query_id, text) for pairs in named.values() for query_id, (text, _) in pairs.items())
        tests = [(f"test-{number}", *one) for number, one in enumerate(asked)]
        qrels = {split: {query_id: dict.fromkeys(ids, 1) for query_id, (_, ids) in pairs.items()} for split, pairs in named.items()}
        beir.write(folder, docs(), itertools.chain(texts, ((query_id, text) for query_id, text, _ in tests)), qrels)
        if missing:
            raise InputError(
                f"{passages} lacks {len(missing)} of the positive passages ({input_policy.examples(sorted(missing))}); give the "
                "passages that the questions were made with."
            )
        if tests:
            lines = (json.dumps({"_id": query_id, "answers": found}, ensure_ascii=False) + "\n" for query_id, _, found in tests)
            (folder / "answers.jsonl").write_text("".join(lines), encoding="utf-8")
    return counts | {f"{split}_pairs": sum(len(ids) for _, ids in pairs) for split, pairs in judged.items()}


def _judged(split: str, files: Sequence[str | Path], max_positives: int) -> list[tuple[str, list[str]]]:
    """(question, ids of its passages) of each question with one."""
    pairs = []
    for question in itertools.chain.from_iterable(map(read_questions, files)):
        if not question.text:
            raise InputError(f"{question.place}: the question is empty; remove it.")
        ids = list(dict.fromkeys(passage.passage_id for passage in question.positives[:max_positives]))
        if "" in ids:
            raise InputError(f"{question.place}: a positive passage has neither passage_id nor psg_id, which name it in a corpus.")
        if ids:
            pairs.append((question.text, ids))
    if not pairs:
        raise InputError(f"{', '.join(map(str, files))}: no question of {split} has a positive passage.")
    return pairs
