"""Open-domain questions in DPR's form: a JSON array (or jsonl) of `question`, `positive_ctxs` and `hard_negative_ctxs`."""

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from de_jax.data.text import dpr
from de_jax.tasks import registering
from de_jax.types import InputError


def register(
    name: str,
    *,
    files: Mapping[str, str],
    tokenizer: str,
    doc_tokenizer: str | None = None,
    max_positives: int = 1,
    max_negatives: int = 0,
    skip_empty: bool = False,
) -> None:
    """Registers `<name>`, with questions in its pairs, and `<name>_docs`: the passages that are used, once each.

    Args:
        files: plain or .gz, by split.
        max_positives: pairs of one question, from its first positive passages on.
        max_negatives: its first hard negatives, as `neg_doc_ids`.
    """
    registering.require_files(*files.values())
    splits = {split: [Path(path)] for split, path in files.items()}
    options = {"max_positives": max_positives, "max_negatives": max_negatives, "skip_empty": skip_empty}
    doc_paths = [path for paths in splits.values() for path in paths]
    read_docs = functools.partial(_read_docs, **options)
    registering.add_texts(name, "doc", read_docs, doc_paths, tokenizer=doc_tokenizer or tokenizer)
    features = ("query", "query_id", "doc_id", "neg_doc_ids")
    registering.add_task(
        name, functools.partial(_read_pairs, **options), splits, features, tokenizer=tokenizer, doc_tokenizer=doc_tokenizer
    )


def _read_pairs(path: Path, **options: Any) -> Iterator[registering.Record]:
    for question, positives, negatives in _questions(path, **options):
        query_id = registering.text_id(question)
        for doc_id, _ in positives:
            yield {"query": question, "query_id": query_id, "doc_id": doc_id, "neg_doc_ids": [one for one, _ in negatives]}


def _read_docs(*paths: Path, **options: Any) -> Iterator[registering.Record]:
    seen = set()
    for path in paths:
        for _, positives, negatives in _questions(path, **options):
            for doc_id, text in [*positives, *negatives]:
                if doc_id not in seen:
                    seen.add(doc_id)
                    yield {"doc_id": doc_id, "doc": text}


def _questions(
    path: Path, *, max_positives: int, max_negatives: int, skip_empty: bool
) -> Iterator[tuple[str, list[Any], list[Any]]]:
    """Yields (question, positives, negatives), passages as (id, text); questions without a positive passage are passed over."""
    for question in dpr.read_questions(path):
        try:
            registering.require_text(question.text, "the question", skip_empty)
            positives = [_identified(passage, skip_empty) for passage in question.positives[:max_positives]]
            negatives = [_identified(passage, skip_empty) for passage in question.negatives[:max_negatives]]
        except ValueError as error:
            raise InputError(f"{question.place}: {error}.") from None
        if positives:
            yield question.text, positives, negatives


def _identified(passage: dpr.Passage, skip_empty: bool) -> tuple[str, str]:
    registering.require_text(passage.text, "a passage", skip_empty)
    return passage.passage_id or registering.text_id(passage.text), passage.text
