"""Mined negatives over the texts of another task: a folder of jsonl whose lines hold ids alone.

{"query_id": "q1", "doc_id": "d7", "neg_doc_ids": ["d3", "d9"], "neg_query_ids": []}
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import seqio

from de_jax.data.pair_writer import SIDES
from de_jax.data.reading import read_lines
from de_jax.tasks import registering
from de_jax.types import InputError


def register(name: str, *, negatives_dir: str, texts: str) -> None:
    """Registers `<name>` with the one split `train`.

    Args:
        name: of the task.
        negatives_dir: its files .jsonl, plain or .gz, are read in the order of their names.
        texts: a task registered before that has its texts apart (`<texts>_queries`, `<texts>_docs`), as `beir` and `msmarco` do.
    """
    paths = sorted([*Path(negatives_dir).glob("*.jsonl"), *Path(negatives_dir).glob("*.jsonl.gz")])
    if not paths:
        raise InputError(f"{negatives_dir} holds no .jsonl and no .jsonl.gz; give a folder of mined negatives.")
    vocabularies = {}
    for side, suffix in SIDES.items():
        if f"{texts}_{suffix}" not in seqio.TaskRegistry.names():
            raise InputError(f"no task '{texts}_{suffix}' is registered; register '{texts}' first, as de_jax.tasks.beir does.")
        task = seqio.TaskRegistry.get(f"{texts}_{suffix}")
        vocabularies[side] = task.output_features[side].vocabulary.sentencepiece_model_file
        # The same task under another name, so that a mixture of both holds every text once.
        seqio.TaskRegistry.remove(f"{name}_{suffix}")
        seqio.TaskRegistry.add_provider(f"{name}_{suffix}", task)
    features = ("query_id", "doc_id", "neg_doc_ids", "neg_query_ids")
    registering.add_task(
        name, _read, {"train": paths}, features, tokenizer=vocabularies["query"], doc_tokenizer=vocabularies["doc"]
    )


def _read(*paths: Path) -> Iterator[registering.Record]:
    for path in paths:
        for line, raw in read_lines(path):
            try:
                record = json.loads(raw)
                ids = {name: _one(record[name]) for name in ("query_id", "doc_id")}
                lists = {name: [_one(text_id) for text_id in record.get(name, [])] for name in ("neg_doc_ids", "neg_query_ids")}
            except (ValueError, KeyError, TypeError, AttributeError):
                raise InputError(
                    f"{path}, line {line}: expected query_id, doc_id and, as lists, neg_doc_ids and neg_query_ids; ids are strings."
                ) from None
            yield {**ids, **lists}


def _one(text_id: Any) -> str:
    if not isinstance(text_id, str) or not text_id:
        raise ValueError
    return text_id
