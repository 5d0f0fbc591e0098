"""Training data of a generator: the (document, query) pairs of BEIR folders, padded, as batches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int32

from de_jax.data.batches.joined import JoinedStore
from de_jax.data.batches.pair_batches import PairBatches, TrainingPairs
from de_jax.data.sources.options import PairsOptions
from de_jax.data.sources.training_set import TrainingSet, open_stores, qrel_pairs
from de_jax.data.text import beir
from de_jax.data.text.tokenizing import Side, Tokenizer
from de_jax.settings import LARGEST, PositiveInt, Seed
from de_jax.types import PADDING_ID, Batch, InputError


class HeldOutPairs(NamedTuple):
    """Pairs whose loss is watched while a generator is trained on others."""

    batches: list[Batch]  # all of one shape; a row without a query has no part in a loss
    about: str  # what they are, for a run's settings


def doc_query_pairs(
    dataset_dirs: Sequence[str | Path],
    tokenizer: Tokenizer,
    *,
    batch_size: PositiveInt = 32,
    max_query_length: PositiveInt = 32,
    max_doc_length: PositiveInt = 256,
    split: str = "train",
    seed: Seed = 0,
    length_multiple: PositiveInt = 64,
    cache_dir: str | Path = "",
    skip_empty: bool = False,
) -> TrainingSet:
    """The training pairs of a generator: those of all folders, shuffled together.

    Args:
        dataset_dirs: BEIR folders or tables, each with judgements of the split.
        tokenizer: of documents and queries; it must end texts, since a generator learns from that where to stop.
        batch_size: pairs of a batch; a query or document may stand in it twice.
        max_query_length, max_doc_length: tokens, the end included.
        length_multiple: a batch is as wide as its longest text, rounded up to a multiple of this; smaller ones compile more.
        cache_dir: where token stores are kept; by default under `files.cache_dir()`.
        skip_empty: leave empty texts and their pairs out instead of refusing them.
    """
    query_store, doc_store, all_pairs = _opened(dataset_dirs, tokenizer, split, cache_dir, skip_empty=skip_empty)
    options = PairsOptions(
        batch_size=batch_size,
        max_query_length=max_query_length,
        max_doc_length=max_doc_length,
        seed=seed,
        unique_in_batch=False,
        pack=False,
        length_multiple=length_multiple,
    )
    batches = PairBatches(TrainingPairs("documents and queries", query_store, doc_store, all_pairs), options)
    query, doc = Side(tokenizer, max_query_length), Side(tokenizer, max_doc_length)
    return TrainingSet(batches, batch_size, query, doc, None, query_store.ids, doc_store.ids)


def held_out_pairs(
    dataset_dirs: Sequence[str | Path],
    tokenizer: Tokenizer,
    *,
    split: str,
    max_pairs: int,
    batch_size: int = 32,
    max_query_length: int = 32,
    max_doc_length: int = 256,
    cache_dir: str | Path = "",
    skip_empty: bool = False,
) -> HeldOutPairs:
    """A fixed random sample of a split's pairs, of all folders together; the last batch is filled up with rows without a query."""
    query_store, doc_store, pairs = _opened(dataset_dirs, tokenizer, split, cache_dir, skip_empty=skip_empty)
    sample = np.random.default_rng(0).permutation(pairs)[:max_pairs]
    batches = []
    for start in range(0, len(sample), batch_size):
        queries, docs = sample[start : start + batch_size].T
        missing = batch_size - len(docs)
        queries, doc_ids = np.pad(queries, (0, missing), constant_values=PADDING_ID), np.pad(docs, (0, missing), mode="edge")
        texts = query_store.pad(queries, max_query_length, max_query_length), doc_store.pad(doc_ids, max_doc_length, max_doc_length)
        batches.append(Batch(*texts, queries, doc_ids))
    return HeldOutPairs(batches, f"{len(sample)} pairs of {split}")


def _opened(
    dataset_dirs: Sequence[str | Path], tokenizer: Tokenizer, split: str, cache_dir: str | Path, *, skip_empty: bool
) -> tuple[Any, Any, Int32[np.ndarray, "P 2"]]:
    """The queries and documents of all folders, and the pairs of a split as their rows."""
    if not tokenizer.suffix_ids:
        raise InputError("the tokenizer adds no end token, so a generator could not learn to stop; use T5's.")
    stores, pairs = [], []
    for folder in dataset_dirs:
        qrels = beir.read_qrels(beir.find_qrels(folder, split))
        stores.append(open_stores(folder, tokenizer, tokenizer, cache_dir, skip_empty=skip_empty))
        pairs.append(qrel_pairs(qrels, *stores[-1]))
    if len(stores) == 1:
        return *stores[0], pairs[0]
    queries, docs = (JoinedStore({str(n): (one, LARGEST) for n, one in enumerate(own)}) for own in zip(*stores, strict=True))
    firsts = zip(queries.firsts, docs.firsts, strict=True)
    return queries, docs, np.concatenate([own + first for own, first in zip(pairs, firsts, strict=True)]).astype(np.int32)
