"""Batches from seqio tasks and mixtures: a task is read once, unshuffled, into a folder of pairs, from which training draws.

So there is one shuffling and batching, whatever the source (`batches.pair_batches`), and the step alone decides the batch.
`seqio_tasks` says what a task of pairs is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from de_jax.data import files, folders, input_policy, pair_store, seqio_tasks
from de_jax.data.curriculum import Curriculum
from de_jax.data.relevance import MeasureName
from de_jax.data.training_set import TrainingSet
from de_jax.settings import AnyPath, NonNegativeInt, PositiveInt, Seed, checked


@input_policy.spelled("--gin.seqio_pairs.{}=True")
@checked
def seqio_pairs(
    *,
    task: str = "",
    module: str = "",
    module_args: Mapping[str, Any] | None = None,
    split: str = "train",
    dev_task: str = "",
    dev_split: str | None = None,
    use_cached: bool = False,
    skip_empty: bool = False,
    task_cache_dirs: Sequence[AnyPath] = (),
    batch_size: PositiveInt = 512,
    max_query_length: PositiveInt = 64,
    max_doc_length: PositiveInt = 256,
    num_neg_docs: NonNegativeInt = 1,
    num_neg_queries: NonNegativeInt = 0,
    dev_max_queries: PositiveInt = 1000,
    dev_max_docs: NonNegativeInt = 20000,
    keep_identical_ids: bool = False,
    seed: Seed = 0,
    unique_in_batch: bool = True,
    pack: bool = True,
    length_multiple: PositiveInt = 32,
    negatives_dir: str = "",
    expansion: str = "",
    curriculum: Curriculum | None = None,
    relevance: MeasureName = "rouge_l",
    relevance_file: str = "",
    max_generated_length: PositiveInt = 32,
    cache_dir: str = "",
    run_dir: str = "",
    row_multiple: PositiveInt = 1,
    host_index: NonNegativeInt = 0,
    num_hosts: PositiveInt = 1,
) -> TrainingSet:
    """Opens a seqio task or mixture for training; it is read on first use and its tokens are kept.

    Args:
        task: the name of a task or mixture.
        module: the Python module that registers it.
        module_args: given to the module's `register(task, ...)`; without them, importing it is all.
        split: of the training pairs.
        dev_task, dev_split: score checkpoints; without a dev split there is no evaluation while training.
        use_cached: read what `seqio_cache_tasks` wrote.
        skip_empty: leave empty texts out instead of refusing them; no pair of theirs is trained on.
        task_cache_dirs: where to look for that, beside the folders that seqio knows.
        cache_dir: where folders of pairs are kept; by default under `files.cache_dir()`.

    The other arguments are those of `pair_store.stored_pairs`.

    Raises:
        InputError: an unknown task, features that do not fit, or whatever is wrong with its source.
    """
    seqio_tasks.load_tasks(task, module, module_args, task_cache_dirs, skip_empty=skip_empty)
    selection = seqio_tasks.Selection(task, split, dev_task, dev_split, use_cached, skip_empty)
    parent = Path(cache_dir) if cache_dir else files.cache_dir() / "pair_stores"
    made_from = seqio_tasks.fingerprint(selection, module, module_args)
    folder = parent / f"{task.replace(':', '_')}-{made_from[:16]}"
    folders.build_once(folder, pair_store.open_pair_store, lambda path: seqio_tasks.export(selection, path, made_from))
    return pair_store.stored_pairs(
        pairs_dir=str(folder),
        batch_size=batch_size,
        max_query_length=max_query_length,
        max_doc_length=max_doc_length,
        num_neg_docs=num_neg_docs,
        num_neg_queries=num_neg_queries,
        dev_max_queries=dev_max_queries,
        dev_max_docs=dev_max_docs,
        keep_identical_ids=keep_identical_ids,
        seed=seed,
        unique_in_batch=unique_in_batch,
        pack=pack,
        length_multiple=length_multiple,
        negatives_dir=negatives_dir,
        expansion=expansion,
        curriculum=curriculum,
        relevance=relevance,
        relevance_file=relevance_file,
        max_generated_length=max_generated_length,
        cache_dir=cache_dir,
        run_dir=run_dir,
        row_multiple=row_multiple,
        host_index=host_index,
        num_hosts=num_hosts,
    )
