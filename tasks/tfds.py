"""A TensorFlow dataset as pairs: which of its features are the query and the document."""

import functools
from collections.abc import Mapping
from typing import Any

import seqio
import tensorflow as tf

from de_jax.tasks import registering
from de_jax.types import InputError

_FEATURES = ("query", "doc", "query_id", "doc_id")


def register(
    name: str,
    *,
    tfds_name: str,
    features: Mapping[str, str],
    tokenizer: str,
    doc_tokenizer: str | None = None,
    splits: Mapping[str, str] | None = None,
    data_dir: str | None = None,
) -> None:
    """Registers `<name>`, whose texts stand in its pairs.

    Args:
        tfds_name: with its version, such as "squad:3.0.0".
        features: for `query` and `doc`, and `query_id` and `doc_id` if there are any, the dataset's feature; one inside another
            is written with a slash ("context/text"). A text without an id gets one made of the text.
        splits: the dataset's split (or slice of one) by the task's; by default its own.
        data_dir: where the dataset lies, if not where tfds looks.
    """
    if unknown := {*features} - {*_FEATURES}:
        raise InputError(f"the task {name} has no feature '{min(unknown)}'; they are {', '.join(_FEATURES)}.")
    if missing := {"query", "doc"} - {*features}:
        raise InputError(f"the task {name} needs a feature of {tfds_name} as its '{min(missing)}'; add it to features.")
    try:
        source = seqio.TfdsDataSource(tfds_name, splits=splits, tfds_data_dir=data_dir)
    except ValueError as error:
        raise InputError(f"the dataset {tfds_name} cannot be used: {error}.") from None
    pick = functools.partial(_pick, paths=dict(features))
    registering.add_source(name, source, _FEATURES, [pick], tokenizer=tokenizer, doc_tokenizer=doc_tokenizer)


def _pick(dataset: tf.data.Dataset, paths: Mapping[str, str]) -> tf.data.Dataset:
    @tf.autograph.experimental.do_not_convert
    def pick(example: Mapping[str, Any]) -> dict[str, tf.Tensor]:
        found = {name: _at(example, path) for name, path in paths.items()}
        for side in ("query", "doc"):
            number = tf.strings.as_string(tf.strings.to_hash_bucket_strong(found[side], 2**62, (1, 2)))
            found.setdefault(f"{side}_id", number)
            if found[f"{side}_id"].dtype != tf.string:
                found[f"{side}_id"] = tf.strings.as_string(found[f"{side}_id"])
        return found

    return dataset.map(pick, num_parallel_calls=tf.data.AUTOTUNE)


def _at(example: Any, path: str) -> tf.Tensor:
    for part in path.split("/"):
        if not isinstance(example, Mapping) or part not in example:
            there = ", ".join(example) if isinstance(example, Mapping) else "nothing"
            raise InputError(f"the dataset has no feature '{path}'; at '{part}' it has {there}.")
        example = example[part]
    return example
