"""Tokens of mined negatives within the examples of a task, for trainers that read seqio tasks and have no stores of texts.

query, doc       int32 [tokens], as in any task of pairs
neg_docs         int32 [num_neg_docs, tokens] of the first ids of `neg_doc_ids`; rows of zeros where a pair has fewer
neg_queries      int32 [num_neg_queries, tokens] of `neg_query_ids`

The lengths of a trainer name both dimensions: {"query": 64, "doc": 256, "neg_docs": (4, 256)}. Texts that some line names are held
in memory as tokens.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import seqio
import tensorflow as tf

from de_jax.data.sources.pair_writer import MINED, SIDES
from de_jax.data.sources.seqio_tasks import TEXTS_SPLIT
from de_jax.types import InputError

_Lookup = Callable[[str, Sequence[bytes]], list[np.ndarray]]


def add_tokens(name: str, *, num_neg_docs: int, num_neg_queries: int) -> None:
    """Replaces a task of ids by one with tokens too; `<name>_queries` and `<name>_docs` have the texts.

    Raises:
        InputError: a negative number.
    """
    counts = {"neg_docs": num_neg_docs, "neg_queries": num_neg_queries}
    for kind, count in counts.items():
        if count < 0:
            raise InputError(f"num_{kind} is {count}; give 0 or more.")
    task = seqio.TaskRegistry.get(name)
    features = dict(task.output_features)
    features |= {side: dataclasses.replace(features[side], required=True) for side in SIDES}
    vocabularies = {side: features[side].vocabulary for side in SIDES}
    for kind, count in counts.items():
        if count:
            features[kind] = seqio.Feature(vocabularies[MINED[kind][1]], add_eos=False, dtype=tf.int32, rank=2)
    eos_ids = {kind: vocabularies[MINED[kind][1]].eos_id for kind, count in counts.items() if count}
    seqio.TaskRegistry.remove(name)
    seqio.TaskRegistry.add(
        name,
        source=task.source,
        output_features=features,
        preprocessors=[
            functools.partial(_with_tokens, look_up=_texts_of(name, task.source), counts=counts),
            seqio.CacheDatasetPlaceholder(),
            seqio.preprocessors.append_eos_after_trim,
            functools.partial(_trimmed_negatives, eos_ids=eos_ids),
        ],
    )


def _texts_of(name: str, source: seqio.DataSource) -> _Lookup:
    """Gives the tokens of texts of one side by their ids; the tasks of texts are read at the first call."""

    @functools.cache
    def tokens() -> Mapping[str, Mapping[bytes, np.ndarray]]:
        wanted: dict[str, set[bytes]] = {side: set() for side in SIDES}
        for example in source.get_dataset("train", shuffle=False).as_numpy_iterator():
            for side in SIDES:
                wanted[side].add(example[f"{side}_id"])
            for feature, side in MINED.values():
                wanted[side].update(example[feature].tolist())
        return {side: _read_texts(f"{name}_{suffix}", side, wanted[side]) for side, suffix in SIDES.items()}

    def look_up(side: str, text_ids: Sequence[bytes]) -> list[np.ndarray]:
        return [tokens()[side][text_id] for text_id in text_ids]

    return look_up


def _read_texts(task: str, side: str, wanted: set[bytes]) -> Mapping[bytes, np.ndarray]:
    """Those texts of a task, without their end."""
    eos_id = seqio.TaskRegistry.get(task).output_features[side].vocabulary.eos_id
    dataset = seqio.TaskRegistry.get(task).get_dataset(sequence_length=None, split=TEXTS_SPLIT, shuffle=False)
    found = {example[f"{side}_id"]: example[side] for example in dataset.as_numpy_iterator() if example[f"{side}_id"] in wanted}
    if missing := sorted(wanted - found.keys()):
        examples = ", ".join(text_id.decode() for text_id in missing[:3])
        raise InputError(f"{len(missing)} mined ids have no text in the task '{task}' ({examples}); mine again.")
    return {text_id: text[:-1] if len(text) and text[-1] == eos_id else text for text_id, text in found.items()}


def _with_tokens(dataset: tf.data.Dataset, *, look_up: _Lookup, counts: Mapping[str, int]) -> tf.data.Dataset:
    def of_one(text_id: bytes, side: str) -> np.ndarray:
        return look_up(side, [text_id])[0].astype(np.int32)

    def of_list(text_ids: np.ndarray, side: str, count: int) -> np.ndarray:
        rows = look_up(side, text_ids.tolist()[:count])
        padded = np.zeros((count, max(map(len, rows), default=0)), np.int32)
        for place, row in enumerate(rows):
            padded[place, : len(row)] = row
        return padded

    @tf.autograph.experimental.do_not_convert
    def add(example: dict[str, Any]) -> dict[str, Any]:
        added = {}
        for side in SIDES:
            added[side] = tf.numpy_function(functools.partial(of_one, side=side), [example[f"{side}_id"]], tf.int32)
            added[side].set_shape([None])
        for kind, count in counts.items():
            if count:
                feature, side = MINED[kind]
                added[kind] = tf.numpy_function(functools.partial(of_list, side=side, count=count), [example[feature]], tf.int32)
                added[kind].set_shape([count, None])
        return {**example, **added}

    return dataset.map(add)


def _trimmed_negatives(
    dataset: tf.data.Dataset, sequence_length: Mapping[str, Any] | None, *, eos_ids: Mapping[str, int]
) -> tf.data.Dataset:
    """Ends every text with `</s>`, within the length of a trainer."""
    lengths = {kind: (sequence_length or {}).get(kind) for kind in eos_ids}
    for kind, given in lengths.items():
        if given is not None and not (isinstance(given, Sequence) and len(given) == 2):
            raise InputError(f"the length of '{kind}' is {given}; give two, how many texts and how many tokens, such as (4, 256).")

    def end(rows: tf.Tensor, eos_id: int, given: Sequence[int] | None) -> tf.Tensor:
        rows = rows if given is None else rows[:, : given[1] - 1]
        sizes = tf.reduce_sum(tf.cast(rows != 0, tf.int32), axis=1, keepdims=True)
        is_end = (tf.range(tf.shape(rows)[1] + 1)[None, :] == sizes) & (sizes > 0)  # a row of zeros is no text
        return tf.where(is_end, eos_id, tf.pad(rows, [(0, 0), (0, 1)]))

    @tf.autograph.experimental.do_not_convert
    def ended(example: dict[str, Any]) -> dict[str, Any]:
        return {**example, **{kind: end(example[kind], eos_id, lengths[kind]) for kind, eos_id in eos_ids.items()}}

    return dataset.map(ended)
