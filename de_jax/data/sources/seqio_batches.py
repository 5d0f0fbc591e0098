"""Batches from seqio tasks and mixtures: a task is read once, unshuffled, into a folder of pairs, from which training draws.

All sources share one shuffling and batching (`batches.pair_batches`), and the step alone decides the batch.
`seqio_tasks` defines a task of pairs. A task that is larger than disk or memory can be read as a stream instead
(`batches.window_batches`).
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from de_jax.data.batches.window_batches import window_batches
from de_jax.data.sources import pair_store, seqio_tasks
from de_jax.data.sources.options import PairsOptions, Share
from de_jax.data.sources.seqio_tasks import Selection
from de_jax.data.sources.training_set import TrainingSet, opened
from de_jax.data.text.tokenizing import Side
from de_jax.files import folders, outputs
from de_jax.settings import NonNegativeInt, checked
from de_jax.types import InputError

_NEED_ALL_TEXTS = (
    *("negatives_dir", "teacher_scores", "guide_dir", "expansion", "curriculum", "max_passages", "num_for_both"),
    *("query_prompt", "doc_prompt", "doc_fields", "trained_query_length", "trained_doc_length", "drop_query"),
)


@checked
def seqio_pairs(
    task: str = "",
    *,
    module: str = "",
    module_args: Mapping[str, Any] | None = None,
    split: str = "train",
    dev_task: str = "",
    use_cached: bool = False,
    skip_empty: bool = False,
    task_cache_dirs: Sequence[str] = (),
    window: NonNegativeInt = 0,
    options: PairsOptions = PairsOptions(),
    share: Share = Share(),
) -> TrainingSet:
    """Opens a seqio task or mixture for training; it is read on first use and its tokens are kept.

    Args:
        task: the name of a task or mixture.
        module: the Python module that registers it.
        module_args: given to the module's `register(task, ...)`; without them, importing it is all.
        split: of the training pairs.
        dev_task: scores checkpoints by its split `options.dev_split`; by default `task`.
        use_cached: read what `seqio_cache_tasks` wrote.
        skip_empty: leave empty texts out instead of refusing them; no pair of theirs is trained on.
        task_cache_dirs: where to look for that, beside seqio's own folders.
        window: read the task as a stream, and shuffle so many pairs together (`window_batches`); 0 reads all of it first.
        options, share: of `pair_store.stored_pairs`; folders of pairs are kept in `options.cache_dir`.

    Raises:
        InputError: an unknown task, features that do not fit, or whatever is wrong with its source.
    """
    selection = Selection(task, split, dev_task, options.dev_split, use_cached, skip_empty, module, module_args)
    seqio_tasks.load_tasks(selection, task_cache_dirs)
    parent = Path(options.cache_dir) if options.cache_dir else outputs.cache_dir() / "pair_stores"
    exported = functools.partial(_exported, parent=parent)
    if window:
        return _streamed(selection, exported, parent / "streams", window, options, share)
    return pair_store.stored_pairs(str(exported(selection)), options=options, share=share)


def _exported(selection: Selection, parent: Path) -> Path:
    """The folder of pairs of a selection, written if it is missing."""
    made_from = seqio_tasks.fingerprint(selection)
    folder = parent / f"{selection.task.replace(':', '_')}-{made_from[:16]}"
    folders.build_once(folder, pair_store.open_pair_store, lambda path: seqio_tasks.export(selection, path, made_from))
    return folder


def _streamed(
    selection: Selection, exported: Callable[[Selection], Path], sizes_dir: Path, window: int, options: PairsOptions, share: Share
) -> TrainingSet:
    """Training pairs as a stream; the dev split is read first, into a folder of its own."""
    plain = PairsOptions()
    changed = (name for name in _NEED_ALL_TEXTS if (getattr(options, name) or None) != (getattr(plain, name) or None))
    if wrong := next(changed, None):
        raise InputError(f"{wrong} is set, which a stream does not support; leave it out, or set seqio_pairs.window to 0.")
    if share.source:
        raise InputError(f"the source {share.source} is a stream, which a mixture does not support; set its window to 0.")
    max_lengths = {"query": options.max_query_length, "doc": options.max_doc_length}
    num_drawn = {"neg_doc": options.num_neg_docs, "neg_query": options.num_neg_queries}
    shards, tokenizers = seqio_tasks.open_stream(selection, max_lengths, sizes_dir, num_drawn)
    given = {"tokenizer": (options.tokenizer, "query"), "doc_tokenizer": (options.doc_tokenizer, "doc")}
    for name, (wanted, side) in given.items():
        if wanted and opened(wanted).fingerprint != tokenizers[side].fingerprint:
            raise InputError(f"the task '{selection.task}' has another {name}; leave {name} out.")
    dev = None
    if selection.dev_split is not None:
        of_dev = selection._replace(task=selection.dev_task or selection.task, split=selection.dev_split)
        alone = dataclasses.replace(share, is_joined=True)
        opened_dev = pair_store.stored_pairs(str(exported(of_dev)), options=options, share=alone)
        if any(getattr(opened_dev, side).tokenizer.fingerprint != tokenizers[side].fingerprint for side in tokenizers):
            raise InputError(f"the task '{of_dev.task}' has another vocabulary than '{selection.task}'; a tower has one.")
        dev = opened_dev.dev
    batches = window_batches(shards, tokenizers, window, options, share)
    query, doc = (Side(tokenizers[side], max_lengths[side]) for side in ("query", "doc"))
    return TrainingSet(batches, options.batch_size, query, doc, dev, texts_of_a_pair={"max_passages": 1})
