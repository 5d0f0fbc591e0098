"""The documents of training batches with generated queries after them, as a curriculum chooses them for every pair and step."""

import dataclasses
import functools
import hashlib
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int

from de_jax.data.batches.pair_batches import TrainingPairs, places_among_equals
from de_jax.data.expansion.curriculum import NONE, Curriculum, RankedQueries, rank_queries, ranked_texts
from de_jax.data.expansion.document_texts import TextsWithOneQuery
from de_jax.data.expansion.query_store import GeneratedQueries, gold_queries, open_queries
from de_jax.data.expansion.relevance import MEASURES, Measure
from de_jax.data.sources.options import PairsOptions
from de_jax.data.stores.corpus import TokenStore
from de_jax.types import PADDING_ID, InputError

_KEPT = 1 << 17
"""Orders of hard negatives' queries that are remembered."""


class CurriculumTexts:
    """Expanded positives and hard negatives (He et al. 2023, section 3.2), each with a generated query of its own.

    A hard negative's queries are ranked by their relevance to the query of its row, as those of the positive are.
    """

    def __init__(
        self,
        docs: TokenStore,
        pairs: Int[np.ndarray, "P 2"],
        queries: GeneratedQueries,
        golds: Sequence[str],
        ranked: RankedQueries | None,
        curriculum: Curriculum,
        measure: Measure,
        *,
        max_query_length: int = 32,
    ) -> None:
        """Lists the texts that may be asked for; nothing is copied."""
        self._queries, self._golds, self._ranked = queries, golds, ranked
        self._curriculum, self._measure = curriculum, measure
        self._of_negatives = dataclasses.replace(curriculum, seed=((curriculum.seed or 0) + 1) % 2**32)
        self.store = TextsWithOneQuery(docs, queries, max_query_length=max_query_length)
        self._gold_indices = places_among_equals(pairs[:, 1])
        self._order = functools.lru_cache(_KEPT)(self._order_of)

    def check_room(self, max_length: int) -> None:
        """Warns about the share of the generated queries without room in documents; `InputError` if it is all of them."""
        share = self.store.share_without_room(max_length)
        if share == 1:
            raise InputError(
                f"max_doc_length is {max_length}, in which no generated query has room beside a token of the document; raise it, "
                "or set max_generated_length lower."
            )
        if share:
            warnings.warn(
                f"{share:.0%} of the generated queries have no room in max_doc_length = {max_length} beside a token of the "
                "document, and are left out; raise it, or set max_generated_length lower.",
                stacklevel=2,
            )

    def rows_of(self, doc_rows: Int[np.ndarray, " B *N"], chosen: Int[np.ndarray, " B"], step: int) -> np.ndarray:
        """The rows of `store` for the pairs' documents [B], or their hard negatives [B, N], `PADDING_ID` if there are fewer."""
        if doc_rows.ndim == 1:
            indices = self._gold_indices[chosen] if self._ranked is None else self._curriculum.choose(self._ranked, chosen, step)
        else:
            indices = self._of_negatives.choose(self._ranked_negatives(doc_rows, chosen), np.arange(doc_rows.size), step)
            indices = indices.reshape(doc_rows.shape)
        rows = np.where(indices == NONE, 0, indices + 1) + self.store.bare[np.maximum(doc_rows, 0)]
        return np.where(doc_rows == PADDING_ID, PADDING_ID, rows).astype(np.int32)

    def _ranked_negatives(self, doc_rows: np.ndarray, chosen: np.ndarray) -> RankedQueries:
        nothing = np.zeros(0, np.int32)
        orders = [
            nothing if doc == PADDING_ID else self._order(int(pair), int(doc))
            for pair, docs in zip(chosen, doc_rows, strict=True)
            for doc in docs
        ]
        offsets = np.cumsum([0, *map(len, orders)])
        return RankedQueries(np.concatenate([nothing, *orders]), np.zeros(int(offsets[-1]), np.float32), offsets)

    def _order_of(self, pair: int, doc: int) -> np.ndarray:
        return rank_queries(self._golds, lambda _: self._queries.texts(doc), self._measure, range(pair, pair + 1)).order


def open_expansion(
    pairs: TrainingPairs, options: PairsOptions, curriculum: Curriculum, *, has_neg_docs: bool = False, cache_dir: Path
) -> CurriculumTexts:
    """The documents of a corpus with the queries that a curriculum chooses, which are tokenized on first use.

    With `has_neg_docs`, hard negatives are expanded too. Without them only queries of documents of the pairs become tokens.
    """
    assert pairs.own_queries is not None
    docs, golds, measure = pairs.doc_store, pairs.own_queries(), MEASURES[options.relevance]
    make = functools.partial(CurriculumTexts, docs, pairs.pairs, max_query_length=options.max_generated_length)
    docs_of = pairs.pairs[:, 1]
    if curriculum.strategy == "gold":
        return make(gold_queries(golds, docs_of, docs.num_texts, pairs.doc_tokenizer), golds, None, curriculum, measure)
    only = None if has_neg_docs else np.unique(docs_of)
    queries = open_queries(options.expansion, docs, pairs.doc_tokenizer, cache_dir, is_part=pairs.is_part, only=only)
    ranked = ranked_texts(
        lambda: (
            [(pairs.query_store.ids[query], docs.ids[doc]) for query, doc in pairs.pairs.tolist()],
            golds,
            lambda pair: queries.texts(int(docs_of[pair])),
        ),
        [pairs.fingerprint(None), hashlib.sha256("\n".join(golds).encode()).hexdigest()],
        options.expansion,
        measure=options.relevance,
        score_file=options.relevance_file,
    )
    return make(queries, golds, ranked, curriculum, measure)


def check(options: PairsOptions, *, has_neg_docs: bool) -> None:
    """Raises `InputError` where the settings of a curriculum do not go together."""
    assert options.curriculum is not None
    if options.max_passages > 1:
        raise InputError("a curriculum expands documents of one passage; set max_passages to 1.")
    if not options.expansion:
        raise InputError("the curriculum has no queries to choose from; also set `expansion` to the output of de-jax doc2query.")
    if options.curriculum.strategy == "gold" and has_neg_docs:
        raise InputError("Curriculum.strategy is 'gold', which has no query for hard negatives; train without them.")
    if options.relevance_file and has_neg_docs:
        raise InputError("a relevance_file has no scores for hard negatives; use relevance = 'rouge_l'.")
