"""Training data of a generator: the (document, query) pairs of BEIR folders, padded, as batches."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from de_jax.data.batches.pair_batches import pair_batches, qrel_pairs
from de_jax.data.sources.training_set import open_stores, store_dir
from de_jax.data.stores.joining import joined
from de_jax.data.text import beir
from de_jax.data.text.tokenizing import Tokenizer
from de_jax.types import Batch, Batches, InputError


class DocQueryPairs(NamedTuple):
    """Training pairs of a generator."""

    batches: Batches  # endless and resumable
    batch_size: int
    num_pairs: int
    query_ids: Sequence[str]  # by `Batch.query_id`
    doc_ids: Sequence[str]

    def first(self, num_pairs: int) -> list[Batch]:
        """The first whole batches of up to this many of the pairs, at least one; always the same."""
        return list(itertools.islice(self.batches(0), max(1, min(num_pairs, self.num_pairs) // self.batch_size)))


def doc_query_pairs(
    dataset_dirs: Sequence[str | Path],
    tokenizer: Tokenizer,
    *,
    batch_size: int = 32,
    max_query_length: int = 32,
    max_doc_length: int = 256,
    split: str = "train",
    seed: int = 0,
    length_multiple: int = 64,
    cache_dir: str | Path = "",
    skip_empty: bool = False,
) -> DocQueryPairs:
    """The pairs of all folders, shuffled together.

    Args:
        dataset_dirs: BEIR folders, each with judgements of the split.
        tokenizer: of documents and queries; it must end texts, since a generator learns from that where to stop.
        batch_size: pairs of a batch; a query or document may stand in it twice.
        max_query_length, max_doc_length: tokens, the end included.
        split: whose judgements are the pairs.
        seed: of the shuffling.
        length_multiple: a batch is as wide as its longest text, rounded up to a multiple of this.
        cache_dir: where token stores are kept; by default under `files.cache_dir()`.
        skip_empty: leave empty texts and their pairs out instead of refusing them.

    Raises:
        InputError: anything in the folders that cannot be used.
    """
    if not tokenizer.suffix_ids:
        raise InputError("the tokenizer adds no end token, so a generator could not learn to stop; use T5's.")
    stores, pairs = [], []
    for folder in dataset_dirs:
        qrels = beir.read_qrels(beir.find_qrels(folder, split))
        stores.append(open_stores(folder, tokenizer, tokenizer, cache_dir, skip_empty=skip_empty))
        pairs.append(qrel_pairs(qrels, *stores[-1]))
    query_store, doc_store = (joined(own, tokenizer, store_dir(cache_dir)) for own in zip(*stores, strict=True))
    firsts = np.cumsum([(0, 0), *((queries.num_texts, docs.num_texts) for queries, docs in stores)], axis=0)
    all_pairs = np.concatenate([own + first for own, first in zip(pairs, firsts, strict=False)]).astype(np.int32)
    batches = pair_batches(
        query_store,
        doc_store,
        all_pairs,
        batch_size=batch_size,
        max_query_length=max_query_length,
        max_doc_length=max_doc_length,
        seed=seed,
        unique_in_batch=False,
        pack=False,
        length_multiple=length_multiple,
    )
    return DocQueryPairs(batches, batch_size, len(all_pairs), query_store.ids, doc_store.ids)
