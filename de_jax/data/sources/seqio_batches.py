"""Batches from seqio tasks and mixtures: a task is read once, unshuffled, into a folder of pairs, from which training draws.

All sources share one shuffling and batching (`batches.pair_batches`), and the step alone decides the batch.
`seqio_tasks` defines a task of pairs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from de_jax.data.sources import pair_store, seqio_tasks
from de_jax.data.sources.options import PairsOptions, Share
from de_jax.data.sources.training_set import TrainingSet
from de_jax.data.text import input_policy
from de_jax.files import folders, outputs
from de_jax.settings import AnyPath, checked


@input_policy.spelled("--gin.seqio_pairs.{}=True")
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
    task_cache_dirs: Sequence[AnyPath] = (),
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
        task_cache_dirs: where to look for that, beside the folders that seqio knows.
        options, share: of `pair_store.stored_pairs`; folders of pairs are kept in `options.cache_dir`.

    Raises:
        InputError: an unknown task, features that do not fit, or whatever is wrong with its source.
    """
    seqio_tasks.load_tasks(task, module, module_args, task_cache_dirs, skip_empty=skip_empty)
    selection = seqio_tasks.Selection(task, split, dev_task, options.dev_split, use_cached, skip_empty)
    parent = Path(options.cache_dir) if options.cache_dir else outputs.cache_dir() / "pair_stores"
    made_from = seqio_tasks.fingerprint(selection, module, module_args)
    folder = parent / f"{task.replace(':', '_')}-{made_from[:16]}"
    folders.build_once(folder, pair_store.open_pair_store, lambda path: seqio_tasks.export(selection, path, made_from))
    return pair_store.stored_pairs(str(folder), options=options, share=share)
