"""Training pairs as tokens in one folder: what a task looks like once it was read, and what a trainer needs in its stead.

queries/, docs/                    token stores; a text that is in many pairs is there once
query_tokenizer/, doc_tokenizer/   what they were tokenized with
pairs.npy                          int32 [P, 2], (query row, document row); the pairs of one task after another
neg_docs.npy, neg_queries.npy      int32 [P, mined], rows; -1 fills up; absent where nothing was mined
dev.tsv                            judgements for scoring checkpoints; absent without a dev split
manifest.json                      tasks with rates and counts, and what the folder was made from; written last
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from de_jax.data import batches as batches_
from de_jax.data import beir, curriculum_texts, files, folders, input_policy, schema
from de_jax.data.corpus import TokenStore, open_token_store
from de_jax.data.curriculum import Curriculum, ranked_texts
from de_jax.data.mixing import mixed_epochs
from de_jax.data.negatives import TrainingTexts, follow
from de_jax.data.reading import read_array
from de_jax.data.relevance import MEASURES, MeasureName
from de_jax.data.text import Tokenizer, load_tokenizer
from de_jax.data.training_set import TrainingSet, dev_set, store_dir
from de_jax.settings import NonNegativeInt, PositiveInt, Seed, checked
from de_jax.types import PADDING_ID, InputError

KIND = "pair store"
FORMAT = f"de_jax {KIND} 1"


class Part(NamedTuple):
    """One task of a mixture; a task that is used alone is the one part."""

    task: str
    rate: float
    num_pairs: int


MANIFEST = schema.record(
    {
        "format": schema.constant(FORMAT),
        "made_from": schema.text,
        "parts": schema.list_of(schema.of_class(Part, rate=schema.number(0), num_pairs=schema.integer(1)), least=1),
        "file_sizes": schema.record({"pairs.npy": schema.integer()}),
        "has_dev": schema.flag,
    }
)
_MEND = "remove the folder of pairs and write it again"


class PairStore(NamedTuple):
    """An open folder; arrays are memory-mapped."""

    query_store: TokenStore
    doc_store: TokenStore
    query_tokenizer: Tokenizer
    doc_tokenizer: Tokenizer
    parts: tuple[Part, ...]
    pairs: np.ndarray  # int32 [P, 2]
    neg_docs: np.ndarray | None  # int32 [P, mined]
    neg_queries: np.ndarray | None  # int32 [P, mined]
    dev_qrels: beir.Qrels | None
    made_from: str


@checked
def stored_pairs(
    *,
    pairs_dir: str = "",
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
    """Opens a folder of pairs for training, as `export_batches` writes it; nothing but numpy is needed.

    Args:
        pairs_dir: the folder.
        num_neg_docs, num_neg_queries: mined negatives in each row of a batch, drawn anew in every epoch, where there are any.
        negatives_dir: generations of negatives to take them from in the place of the folder's own.
        expansion, curriculum: as for `beir_pairs`; queries of documents that are not in the folder are passed over, and a
            pair's own query is what its tokens spell.
        cache_dir: where the tokens of generated queries are kept; by default under `files.cache_dir()`.

    The other arguments are those of `training_set.beir_pairs`. Where the folder holds several tasks, an epoch holds them by rate.

    Raises:
        InputError: no folder, a damaged one, or a batch that its pairs cannot fill.
    """
    if not pairs_dir:
        raise InputError("stored_pairs.pairs_dir is not set; add --gin.stored_pairs.pairs_dir=<folder written by export_batches>.")
    store = open_pair_store(pairs_dir)
    stores, drop = (store.query_store, store.doc_store), not keep_identical_ids
    texts = TrainingTexts(Path(pairs_dir).resolve().name, *stores, store.pairs, {}, drop_identical_ids=drop)
    mined = None
    if negatives_dir:
        drawn = {"neg_docs": num_neg_docs, "neg_queries": num_neg_queries}
        mined = follow(negatives_dir, run_dir, texts, num_drawn=drawn, is_first=host_index == 0)
    negatives = mined.at if mined else _always(store, num_neg_docs, num_neg_queries)
    doc_texts = None
    if curriculum:
        has_negatives = mined is not None or "neg_docs" in negatives(0)
        curriculum_texts.check(curriculum, expansion, relevance_file=relevance_file, has_negatives=has_negatives)
        golds = _query_texts(store)
        ranked = ranked_texts(
            lambda: (_ids_of_pairs(store), golds),
            [files.sha256_of(Path(pairs_dir) / "pairs.npy"), store.query_store.content_hash, store.doc_store.content_hash],
            expansion,
            measure=relevance,
            score_file=relevance_file,
        )
        expanded = curriculum_texts.open_expansion(
            expansion, store.doc_store, store.pairs, golds, ranked, curriculum, MEASURES[relevance],
            tokenizer=store.doc_tokenizer, max_query_length=max_generated_length, is_part=True,
            cache_dir=store_dir(cache_dir),
        )  # fmt: skip
        doc_texts = batches_.DocTexts(expanded.store, expanded.rows_of)
    sizes, rates = [part.num_pairs for part in store.parts], [part.rate for part in store.parts]
    batches = batches_.pair_batches(
        store.query_store,
        store.doc_store,
        store.pairs,
        batch_size=batch_size,
        max_query_length=max_query_length,
        max_doc_length=max_doc_length,
        seed=seed,
        unique_in_batch=unique_in_batch,
        pack=pack,
        length_multiple=length_multiple,
        row_multiple=row_multiple,
        negatives=negatives,
        doc_texts=doc_texts,
        epoch_order=mixed_epochs(sizes, rates, seed) if len(store.parts) > 1 else None,
        host_index=host_index,
        num_hosts=num_hosts,
    )
    dev = None
    if store.dev_qrels is not None:
        with input_policy.spelled("--gin.stored_pairs.{}=True"):
            limits = (dev_max_queries, dev_max_docs)
            dev = dev_set(store.dev_qrels, *stores, *limits, keep_identical_ids=keep_identical_ids)
    return TrainingSet(
        batches=batches,
        batch_size=batch_size,
        query_tokenizer=store.query_tokenizer,
        doc_tokenizer=store.doc_tokenizer,
        max_query_length=max_query_length,
        max_doc_length=max_doc_length,
        dev=dev,
        query_ids=store.query_store.ids,
        doc_ids=store.doc_store.ids,
        texts=texts,
        mined=mined,
        has_negatives=mined is not None or bool(negatives(0)),
    )


def save(
    folder: Path,
    *,
    parts: Sequence[Part],
    arrays: dict[str, np.ndarray],
    dev_qrels: beir.Qrels | None,
    made_from: str,
) -> None:
    """Completes a folder that holds the token stores and the tokenizers already.

    Args:
        folder: under a temporary name, see `folders.atomic_dir`.
        parts: the tasks, in the order of their pairs.
        arrays: "pairs", and "neg_docs" or "neg_queries" where anything was mined.
        dev_qrels: judgements, by id.
        made_from: equal for folders with equal content.
    """
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array.astype(np.int32), allow_pickle=False)
    if dev_qrels is not None:
        lines = (f"{query}\t{doc}\t{score}\n" for query, judged in dev_qrels.items() for doc, score in judged.items())
        (folder / "dev.tsv").write_text("".join(lines), encoding="utf-8")
    manifest = {
        "format": FORMAT,
        "made_from": made_from,
        "parts": [part._asdict() for part in parts],
        "file_sizes": {f"{name}.npy": (folder / f"{name}.npy").stat().st_size for name in arrays},
        "has_dev": dev_qrels is not None,
    }
    files.write_json(folder / "manifest.json", manifest)


def open_pair_store(pairs_dir: str | Path) -> PairStore:
    """Opens a folder of pairs, after checking that it is whole.

    Raises:
        InputError: not such a folder, another format, or files that do not fit the manifest.
    """
    folder = Path(pairs_dir)
    if not (folder / "manifest.json").is_file():
        raise InputError(f"{folder} is not a complete folder of pairs (no manifest.json); write one with tools.export_batches.")
    manifest = schema.read(folder / "manifest.json", MANIFEST, mend=_MEND)
    folders.check_small(folder)
    queries, docs = open_token_store(folder / "queries"), open_token_store(folder / "docs")
    for store in (queries, docs):
        input_policy.tell_skipped(store.store_dir, store.skipped_ids)
    parts = tuple(Part(**part) for part in manifest["parts"])
    arrays = _open_arrays(folder, list(manifest["file_sizes"]), sum(part.num_pairs for part in parts), queries, docs)
    return PairStore(
        queries,
        docs,
        load_tokenizer(folder / "query_tokenizer"),
        load_tokenizer(folder / "doc_tokenizer"),
        parts,
        arrays["pairs"],
        arrays.get("neg_docs"),
        arrays.get("neg_queries"),
        beir.read_qrels(folder / "dev.tsv") if manifest["has_dev"] else None,
        manifest["made_from"],
    )


def _always(store: PairStore, num_neg_docs: int, num_neg_queries: int) -> batches_.NegativesAt:
    """The folder's negatives, at every step."""
    mined = {"neg_docs": (store.neg_docs, num_neg_docs), "neg_queries": (store.neg_queries, num_neg_queries)}
    negatives = {name: batches_.Negatives(rows, drawn) for name, (rows, drawn) in mined.items() if rows is not None and drawn}
    return lambda step: negatives


def _query_texts(store: PairStore) -> list[str]:
    """Each pair's query."""
    tokens, offsets = store.query_store.tokens, store.query_store.offsets
    texts = store.query_tokenizer.decode([tokens[start:end] for start, end in itertools.pairwise(offsets.tolist())])
    return [texts[row] for row in store.pairs[:, 0].tolist()]


def _ids_of_pairs(store: PairStore) -> list[tuple[str, str]]:
    return [(store.query_store.ids[query], store.doc_store.ids[doc]) for query, doc in store.pairs.tolist()]


def _open_arrays(
    folder: Path, names: Sequence[str], num_pairs: int, queries: TokenStore, docs: TokenStore
) -> dict[str, np.ndarray]:
    """The arrays by name, which hold rows of the two stores alone."""
    widths = {"pairs": 2, "neg_docs": None, "neg_queries": None}
    arrays = {
        name: read_array(folder / f"{name}.npy", "<i4", (num_pairs, width), rebuild=_MEND)
        for name, width in widths.items()
        if f"{name}.npy" in names
    }
    arrays["pairs"] = np.asarray(arrays["pairs"])
    num_rows = {"pairs": (queries.num_texts, docs.num_texts), "neg_docs": docs.num_texts, "neg_queries": queries.num_texts}
    for name, array in arrays.items():
        least = 0 if name == "pairs" else PADDING_ID
        if (array < least).any() or (array >= num_rows[name]).any():
            raise InputError(f"{folder / name}.npy is damaged: it refers to a text that is not there; {_MEND}.")
    return arrays
