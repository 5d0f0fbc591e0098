"""The texts of a benchmark: as long as MS MARCO's and made of random token ids, so that it needs no download, or real ones.

The lengths are drawn from log-normal distributions, right-skewed as the real ones are, cut to a range and seeded:

    queries    median 8.05, sigma .40, 3 to 64 tokens     mean 8.7
    passages   median 67.3, sigma .40, 8 to 256 tokens    mean 73

In 512 of them the longest query has about 26 tokens and the longest passage about 220, so that a batch padded to its longest
texts computes some three times the useful work.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from de_jax.data.batches import layout
from de_jax.data.stores.corpus import TokenStore, tokenized
from de_jax.data.text import beir
from de_jax.data.text.tokenizing import Tokenizer
from de_jax.interop.fine_tuning import TowerName, pretrained_tokenizer
from de_jax.types import InputError

MEDIAN = {"query": 8.05, "doc": 67.3}
SIGMA = 0.40
RANGE = {"query": (3, 64), "doc": (8, 256)}
EOS_ID = 1
FIRST_ID = 3
"""0 to 2 are padding, end of text and unknown."""


class Texts:
    """Token ids as `de_jax.retrieval.encode` and `de_jax.data.batches.layout` ask for a token store."""

    def __init__(self, texts: list[np.ndarray]) -> None:
        self.texts = texts
        self.ids: Sequence[str] = [str(row) for row in range(len(texts))]
        self.num_texts = len(texts)
        self.content_hash = self.tokenizer_fingerprint = "in memory"
        self._lengths = np.array([len(text) for text in texts], np.int32)

    def lengths(self, max_length: int) -> np.ndarray:
        """Tokens of each text, int32 [n]; none is cut."""
        if max_length < int(self._lengths.max()):
            raise ValueError(f"max_length={max_length} would cut a text of {self._lengths.max()} tokens")
        return self._lengths

    def pad(self, rows: np.ndarray, max_length: int, pad_to: int) -> np.ndarray:
        """Token ids of some texts, zeros to the right, int32 [len(rows), pad_to]."""
        padded = np.zeros((len(rows), pad_to), np.int32)
        for place, row in enumerate(rows.tolist()):
            padded[place, : len(self.texts[row])] = self.texts[row]
        return padded


class RandomTexts(Texts):
    """Texts of given lengths.

    Args:
        lengths: tokens of each text, the final `</s>` included.
        vocab_size: token ids are drawn evenly below it.
        seed: of the token ids.
    """

    def __init__(self, lengths: np.ndarray, *, vocab_size: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        super().__init__([np.append(rng.integers(FIRST_ID, vocab_size, n - 1), EOS_ID).astype(np.int32) for n in lengths.tolist()])


def msmarco_like(kind: str, num_texts: int, seed: int) -> np.ndarray:
    """Lengths in tokens, int32 [num_texts], of "query" or "doc" texts."""
    rng = np.random.default_rng((seed, len(kind)))
    drawn = np.rint(MEDIAN[kind] * np.exp(SIGMA * rng.standard_normal(num_texts)))
    return np.clip(drawn, *RANGE[kind]).astype(np.int32)


def real_pairs(dataset_dir: str, model: str, num_pairs: int) -> dict[TowerName, TokenStore]:
    """Pairs of a BEIR folder, each query with the first document that is judged relevant to it, by the tokenizers of a model.

    Args:
        dataset_dir: the BEIR folder; of its splits "train" where there is one.
        model: a folder with a model and its tokenizers.
        num_pairs: the first so many.

    Raises:
        InputError: fewer pairs.
    """
    splits = beir.find_splits(dataset_dir)
    dataset = beir.read(dataset_dir, "train" if "train" in splits else min(splits))
    queries, docs = (dict(zip(texts.ids, texts.texts, strict=True)) for texts in (dataset.queries, dataset.docs))
    relevant = {query_id: [doc_id for doc_id, grade in judged.items() if grade > 0] for query_id, judged in dataset.qrels.items()}
    pairs = [(queries[query_id], docs[doc_ids[0]]) for query_id, doc_ids in relevant.items() if doc_ids][:num_pairs]
    if len(pairs) < num_pairs:
        raise InputError(f"{dataset_dir} has {len(pairs)} pairs, but {num_pairs} are asked for; give smaller or fewer batches.")
    sides: dict[TowerName, list[str]] = {"query": [query for query, _ in pairs], "doc": [doc for _, doc in pairs]}
    return {kind: tokenized(texts, _tokenizer(model, kind)) for kind, texts in sides.items()}


def real_texts(dataset_dir: str, model: str, kind: TowerName, num_texts: int) -> TokenStore:
    """The first documents or queries of a BEIR folder, by the tokenizer of a model in a folder."""
    file = beir.find_file(dataset_dir, "queries" if kind == "query" else "corpus")
    texts = beir.iter_queries(file) if kind == "query" else beir.iter_docs(file)
    return tokenized((text for _, text in itertools.islice(texts, num_texts)), _tokenizer(model, kind))


def ids_of(store: layout.Store, max_length: int) -> list[np.ndarray]:
    """The token ids of each text of a store, cut to so many tokens."""
    sizes = store.lengths(max_length)
    padded = store.pad(np.arange(len(sizes)), max_length, int(sizes.max()))
    return [row[:size] for row, size in zip(padded, sizes, strict=True)]


def _tokenizer(model: str, kind: TowerName) -> Tokenizer:
    if not Path(model).is_dir():
        raise InputError(f"--dataset_dir is for a model with a tokenizer, but --model is {model}; give a folder with a model.")
    return pretrained_tokenizer(source=model, tower=kind)()
