"""Several token stores as one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from de_jax.data.stores.corpus import TokenStore, open_token_store
from de_jax.data.stores.store_writer import TOKEN_STORE, writing
from de_jax.data.text.tokenizing import Tokenizer
from de_jax.files import folders

_CHUNK_TEXTS = 8192


def joined(stores: Sequence[TokenStore], tokenizer: Tokenizer, cache_dir: Path) -> TokenStore:
    """Stores as one, which is kept in the cache; the texts of a store follow those of the store before.

    Ids get their store's number before them, so that two data sets may use the same.
    """
    if len(stores) == 1:
        return stores[0]
    key = folders.key_of(*(store.content_hash for store in stores))

    def build(folder: Path) -> TokenStore:
        with TOKEN_STORE.writing(folder) as temporary, writing(temporary, tokenizer) as writer:
            for number, store in enumerate(stores):
                for start in range(0, store.num_texts, _CHUNK_TEXTS):
                    ids = [f"{number}/{text_id}" for text_id in store.ids[start : start + _CHUNK_TEXTS]]
                    ends = store.offsets[start : start + len(ids) + 1]
                    writer.append(ids, np.split(store.tokens[ends[0] : ends[-1]], ends[1:-1] - ends[0]))
        return open_token_store(folder)

    return folders.build_once(cache_dir / f"joined-{key}", open_token_store, build)
