"""A BEIR folder as a trainer needs it: batches of its training pairs, and a dev set to score against."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from de_jax.data import batches as batches_
from de_jax.data import beir, curriculum_texts, files, input_policy
from de_jax.data.batches import DocTexts
from de_jax.data.corpus import TokenStore, cached_token_store
from de_jax.data.curriculum import Curriculum, ranked_pairs
from de_jax.data.negatives import MinedNegatives, TrainingTexts, follow
from de_jax.data.passages import PassageStore
from de_jax.data.relevance import MEASURES, MeasureName
from de_jax.data.text import PromptedTokenizer, Tokenizer, load_tokenizer
from de_jax.settings import NonNegativeInt, PositiveInt, Seed, checked
from de_jax.types import Batches, InputError

_SPELLING = "--gin.beir_pairs.{}=True"
"""How a recipe sets the options of `input_policy`."""


class DevSet(NamedTuple):
    """Queries with judgements, and the documents to find them among."""

    query_store: TokenStore
    query_rows: np.ndarray  # int64 [q]
    doc_store: TokenStore
    doc_rows: np.ndarray  # int64 [n]
    qrels: beir.Qrels
    drop_identical_ids: bool = True  # see `metrics.evaluate`


class QueriesForBoth(NamedTuple):
    """Queries that both towers embed, each by its own tokenizer, so that it can be told how far apart the towers are."""

    for_query_tower: TokenStore
    for_doc_tower: TokenStore
    rows: np.ndarray  # int64 [r] of both


class TrainingSet(NamedTuple):
    """What a trainer reads."""

    batches: Batches
    batch_size: int
    query_tokenizer: Tokenizer
    doc_tokenizer: Tokenizer
    max_query_length: int  # tokens
    max_doc_length: int  # tokens
    dev: DevSet | None
    query_ids: Sequence[str] | None = None  # by `Batch.query_id`, where that is a row of something
    doc_ids: Sequence[str] | None = None
    texts: TrainingTexts | None = None
    mined: MinedNegatives | None = None
    max_passages: int = 1  # of a document
    for_both: QueriesForBoth | None = None
    has_negatives: bool = False  # mined ones come with the batches


@checked
def beir_pairs(
    *,
    dataset_dir: str = "",
    tokenizer: str | Tokenizer = "",
    doc_tokenizer: str | Tokenizer | None = None,
    skip_empty: bool = False,
    keep_identical_ids: bool = False,
    batch_size: PositiveInt = 512,
    max_query_length: PositiveInt = 64,
    max_doc_length: PositiveInt = 256,
    max_passages: PositiveInt = 1,
    split: str = "train",
    dev_split: str | None = None,
    dev_max_queries: PositiveInt = 1000,
    dev_max_docs: NonNegativeInt = 20000,
    num_for_both: NonNegativeInt = 0,
    expansion: str = "",
    curriculum: Curriculum | None = None,
    relevance: MeasureName = "rouge_l",
    relevance_file: str = "",
    max_generated_length: PositiveInt = 32,
    seed: Seed = 0,
    unique_in_batch: bool = True,
    mask_positives: bool = False,
    pack: bool = True,
    length_multiple: PositiveInt = 32,
    negatives_dir: str = "",
    num_neg_docs: NonNegativeInt = 1,
    num_neg_queries: NonNegativeInt = 0,
    cache_dir: str = "",
    run_dir: str = "",
    row_multiple: PositiveInt = 1,
    host_index: NonNegativeInt = 0,
    num_hosts: PositiveInt = 1,
) -> TrainingSet:
    """Opens a BEIR folder for training; its texts are tokenized on first use and kept.

    Args:
        dataset_dir: holds corpus.jsonl, queries.jsonl (or .tsv, .gz) and qrels/.
        tokenizer: a sentencepiece model or tokenizer.json, or a folder with one; or a tokenizer itself.
        doc_tokenizer: the document tower's, where it differs.
        skip_empty: leave empty texts out instead of refusing them; no pair of theirs is trained on.
        keep_identical_ids: a document with the id of its query is ranked and mined like any other; otherwise it is left out of dev
            scores and of mined negatives, as BEIR leaves it out of its scores.
        batch_size: rows of the global batch.
        max_query_length, max_doc_length: tokens, special ones included.
        max_passages: how many passages of `max_doc_length` tokens a document is at most; it scores as its best one (ANCE's MaxP; 1
            is FirstP). See `DualEncoder.embed` for what that means for the losses.
        split: whose judgements are the training pairs.
        dev_split: whose judgements score checkpoints; None for no evaluation while training.
        dev_max_queries: a fixed random sample of the dev queries, so that an evaluation stays short.
        dev_max_docs: a fixed random sample of the corpus to search, to which every relevant document is added.
        num_for_both: queries that both towers embed where a run measures how far apart they are (`Alignment`): of `dev_split`, else
            of the folder's dev split, else of the training split.
        expansion: generated queries of the corpus, as `de-jax doc2query` writes them.
        curriculum: documents get one of them after their text, chosen so; None leaves documents as they are.
        relevance: by which a pair's generated queries are ranked, a name out of `relevance.MEASURES`.
        relevance_file: scores of another model for the pairs in its place, see `relevance.ScoreFile`.
        max_generated_length: tokens of a generated query, for which room is kept in `max_doc_length`.
        seed: of the shuffling.
        unique_in_batch: keep a query or document from standing twice in a batch.
        mask_positives: batches say which documents are judged relevant to their queries, so that losses with `mask_duplicates` take
            none of them for a negative, in the batch, mined or from a cache; for sets with many relevant documents a query.
        pack: lay several texts in a row instead of padding each; the numbers are the same, with much less work.
        length_multiple: without `pack`, texts are padded to multiples of this many tokens.
        negatives_dir: generations of hard negatives, see `negatives`; "{run_dir}" in it stands for the run's folder. "" for none.
        num_neg_docs, num_neg_queries: hard negatives in each row of a batch, drawn anew in every epoch.
        cache_dir: where token stores are kept; by default under `files.cache_dir()`.
        run_dir: where the run writes which generation it took from which step on; the trainer sets it.
        row_multiple, host_index, num_hosts: how rows are split over devices and hosts; the trainer sets them.

    Raises:
        InputError: anything in the folder that cannot be used; names the file and line.
    """
    for name, value in (("dataset_dir", dataset_dir), ("tokenizer", tokenizer)):
        if not value:
            raise InputError(f"beir_pairs.{name} is not set; add --gin.beir_pairs.{name}=<path>.")
    if curriculum:
        curriculum_texts.check(
            curriculum, expansion, relevance_file=relevance_file, has_negatives=bool(negatives_dir), max_passages=max_passages
        )
    query_tokenizer = _opened(tokenizer)
    tokenizers = {"query": query_tokenizer, "doc": _opened(doc_tokenizer) if doc_tokenizer else query_tokenizer}
    with input_policy.spelled(_SPELLING):
        stores = open_stores(dataset_dir, tokenizers["query"], tokenizers["doc"], cache_dir, skip_empty=skip_empty)
    pairs = batches_.qrel_pairs(_read_split(dataset_dir, split), *stores)
    passages = _passages(stores[1], tokenizers["doc"], max_doc_length, max_passages)
    doc_texts = DocTexts(passages, lambda docs, chosen, step: passages.of_docs(docs)) if passages else None
    if curriculum:
        ranked = ranked_pairs(dataset_dir, split, expansion, measure=relevance, score_file=relevance_file, skip_empty=skip_empty)
        texts_of_queries = dict(beir.iter_queries(beir.find_file(dataset_dir, "queries"), skip_empty=skip_empty))
        golds = [texts_of_queries[stores[0].ids[int(row)]] for row in pairs[:, 0]]
        expanded = curriculum_texts.open_expansion(
            expansion, stores[1], pairs, golds, ranked, curriculum, MEASURES[relevance],
            tokenizer=tokenizers["doc"], max_query_length=max_generated_length, cache_dir=store_dir(cache_dir),
        )  # fmt: skip
        doc_texts = DocTexts(expanded.store, expanded.rows_of)
    hashes = text_hashes(dataset_dir) if negatives_dir else {}
    texts = TrainingTexts(
        Path(dataset_dir).resolve().name, *stores, pairs, hashes, passages, drop_identical_ids=not keep_identical_ids
    )
    mined = None
    if negatives_dir:
        drawn = {"neg_docs": num_neg_docs, "neg_queries": num_neg_queries}
        mined = follow(negatives_dir, run_dir, texts, num_drawn=drawn, is_first=host_index == 0)
    batches = batches_.pair_batches(
        *stores,
        pairs,
        batch_size=batch_size,
        max_query_length=max_query_length,
        max_doc_length=max_doc_length,
        seed=seed,
        unique_in_batch=unique_in_batch,
        pack=pack,
        length_multiple=length_multiple,
        row_multiple=row_multiple,
        negatives=mined.at if mined else None,
        doc_texts=doc_texts,
        positives=batches_.positives_of(pairs, stores[0].num_texts) if mask_positives else None,
        host_index=host_index,
        num_hosts=num_hosts,
    )
    dev = None
    if dev_split is not None:
        with input_policy.spelled(_SPELLING):
            qrels = _read_split(dataset_dir, dev_split)
            dev = dev_set(qrels, *stores, dev_max_queries, dev_max_docs, keep_identical_ids=keep_identical_ids)
    return TrainingSet(
        batches=batches,
        batch_size=batch_size,
        query_tokenizer=tokenizers["query"],
        doc_tokenizer=tokenizers["doc"],
        max_query_length=max_query_length,
        max_doc_length=max_doc_length,
        dev=dev,
        query_ids=stores[0].ids,
        doc_ids=stores[1].ids,
        texts=texts,
        mined=mined,
        has_negatives=mined is not None,
        max_passages=max_passages,
        for_both=_for_both(
            dataset_dir,
            dev_split or beir.dev_split(dataset_dir) or split,
            tokenizers["doc"],
            stores[0],
            num_for_both,
            cache_dir,
            skip_empty=skip_empty,
        ),
    )


def _for_both(
    dataset_dir: str,
    split: str,
    doc_tokenizer: Tokenizer,
    queries: TokenStore,
    number: int,
    cache_dir: str,
    *,
    skip_empty: bool,
) -> QueriesForBoth | None:
    """A fixed random sample of a split's queries; None where none is asked for."""
    if number < 1:
        return None
    asked = _read_split(dataset_dir, split).keys() - set(queries.skipped_ids)
    sampled = sorted(asked, key=_hash)[:number]
    store = _store(dataset_dir, "queries", "queries", doc_tokenizer, cache_dir, skip_empty=skip_empty)
    return QueriesForBoth(queries, store, np.asarray([queries.row_of(query_id) for query_id in sampled], np.int64))


def text_hashes(dataset_dir: str | Path) -> dict[str, str]:
    """What tells the texts of a BEIR folder from others: hex SHA-256 of the file of "queries" and of that of "docs"."""
    names = {"queries": "queries", "docs": "corpus"}
    return {kind: files.sha256_of(beir.find_file(dataset_dir, name)) for kind, name in names.items()}


def _passages(docs: TokenStore, tokenizer: Tokenizer, length: int, max_passages: int) -> PassageStore | None:
    """The passages of documents; None where each is one text."""
    if max_passages == 1:
        return None
    if isinstance(tokenizer, PromptedTokenizer):
        raise InputError("only a document's first passage would have the prompt; set beir_pairs.max_passages to 1.")
    return PassageStore(docs, length, max_passages=max_passages)


def _opened(tokenizer: str | Tokenizer) -> Tokenizer:
    return load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer


def open_stores(
    dataset_dir: str | Path,
    query_tokenizer: Tokenizer,
    doc_tokenizer: Tokenizer,
    cache_dir: str | Path = "",
    *,
    skip_empty: bool = False,
) -> tuple[TokenStore, TokenStore]:
    """The token stores of a BEIR folder's queries and documents, built if they are not there.

    Args:
        cache_dir: where stores are kept; by default under `files.cache_dir()`.
        skip_empty: pass over empty texts instead of refusing them.
    """
    store = functools.partial(_store, dataset_dir, cache_dir=cache_dir, skip_empty=skip_empty)
    return store("queries", "queries", query_tokenizer), store("corpus", "docs", doc_tokenizer)


def _store(
    dataset_dir: str | Path, name: str, kind: str, tokenizer: Tokenizer, cache_dir: str | Path, *, skip_empty: bool = False
) -> TokenStore:
    return cached_token_store(beir.find_file(dataset_dir, name), tokenizer, store_dir(cache_dir), kind=kind, skip_empty=skip_empty)


def store_dir(cache_dir: str | Path) -> Path:
    """Where token stores are kept: `cache_dir`, or where none is named a folder under `files.cache_dir()`."""
    return Path(cache_dir) if cache_dir else files.cache_dir() / "token_stores"


def _read_split(dataset_dir: str | Path, split: str) -> beir.Qrels:
    return beir.read_qrels(beir.find_qrels(dataset_dir, split))


def dev_set(
    qrels: beir.Qrels,
    queries: TokenStore,
    docs: TokenStore,
    max_queries: int,
    max_docs: int,
    *,
    keep_identical_ids: bool = False,
) -> DevSet:
    """A fixed random sample of judged queries, and of the documents beside every one that is relevant to them.

    Empty texts that the stores left out count as not found. Judgements that are dropped with identical ids are counted on stderr.
    """
    # Chosen by a hash of the id, so that the sample does not change with the order or the seed of a run.
    sampled = sorted(qrels, key=_hash)[:max_queries]
    qrels = {query_id: qrels[query_id] for query_id in sampled}
    pairs = batches_.qrel_pairs(qrels, queries, docs)
    relevant = np.unique(pairs[:, 1]).astype(np.int64)
    others = np.setdiff1d(np.arange(docs.num_texts), relevant)
    sample = np.random.default_rng(0).permutation(others)[: max(max_docs - len(relevant), 0)]
    if not keep_identical_ids:
        input_policy.tell_identical("dev split", qrels)
    empty = set(queries.skipped_ids)
    query_rows = np.asarray([queries.row_of(query_id) for query_id in sampled if query_id not in empty], np.int64)
    doc_rows = np.sort(np.concatenate([relevant, sample]))
    return DevSet(queries, query_rows, docs, doc_rows, qrels, not keep_identical_ids)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
