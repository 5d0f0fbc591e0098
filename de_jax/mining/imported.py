"""Hard negatives that others mined, as the lines of a generation: rows of a table with texts, or a TREC run with ids."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from de_jax.data.negatives.mined_pairs import Mined
from de_jax.data.sources import pair_store
from de_jax.data.sources.table_store import text_id
from de_jax.data.sources.training_set import text_hashes
from de_jax.data.text import beir
from de_jax.data.text.table_rows import Example
from de_jax.types import InputError

_Negatives = dict[str, None]
"""Ids of documents, each the first with its text."""


class Target(NamedTuple):
    """The training pairs that negatives are for, and their texts."""

    name: str
    pairs: Sequence[tuple[str, str]]  # (query id, document id), in order
    query_ids: Callable[[str], Sequence[str]]  # the ids of a text: several, or none if it is not there
    doc_ids: Callable[[str], Sequence[str]]
    first_query: Mapping[str, str]  # of each id the first one with its text
    first_doc: Mapping[str, str]
    facts: Mapping[str, str]

    def not_negative(self, *, keep_identical_ids: bool) -> dict[str, set[str]]:
        """By query, the first ids of its documents' texts, and of the document that has its id unless such documents are kept.

        Queries of equal text have the documents of both.
        """
        of_text: dict[str, set[str]] = {}
        for query_id, doc_id in self.pairs:
            own = of_text.setdefault(self.first_query.get(query_id, query_id), set())
            own.update(self.first_doc.get(one, one) for one in (doc_id, *([] if keep_identical_ids else [query_id])))
        return {query_id: of_text[self.first_query.get(query_id, query_id)] for query_id, _ in self.pairs}


def of_beir(dataset_dir: str | Path, split: str) -> Target:
    """The pairs that a split of a BEIR folder judges relevant."""
    qrels = beir.read_qrels(beir.find_qrels(dataset_dir, split))
    queries = _ids_by_text(beir.iter_queries(beir.find_file(dataset_dir, "queries"), skip_empty=True))
    docs = _ids_by_text(beir.iter_docs(beir.find_file(dataset_dir, "corpus"), skip_empty=True))
    first_query, first_doc = ({one: ids[0] for ids in found.values() for one in ids} for found in (queries, docs))
    pairs = [(query_id, doc_id) for query_id, judged in qrels.items() for doc_id, grade in judged.items() if grade > 0]
    by_text = {name: (lambda text, ids=ids: ids.get(text_id(text), ())) for name, ids in (("query", queries), ("doc", docs))}
    return Target(str(dataset_dir), pairs, by_text["query"], by_text["doc"], first_query, first_doc, text_hashes(dataset_dir))


def of_pair_store(pairs_dir: str | Path) -> Target:
    """The pairs of a folder that was made of a table, whose ids are those of their texts (`table_store.text_id`)."""
    store = pair_store.open_pair_store(pairs_dir)
    queries, docs = store.query_store, store.doc_store
    pairs = [(queries.ids[query], docs.ids[doc]) for query, doc in store.pairs.tolist()]
    first_query, first_doc = ({one: one for one in store.ids} for store in (queries, docs))

    def ids_in(known: Collection[str]) -> Callable[[str], Sequence[str]]:
        return lambda text: [found] if (found := text_id(text)) in known else []

    facts = {"queries": queries.content_hash, "docs": docs.content_hash}
    return Target(str(pairs_dir), pairs, ids_in(first_query), ids_in(first_doc), first_query, first_doc, facts)


def from_examples(
    examples: Iterable[Example], target: Target, *, skip_unknown: bool = False, keep_identical_ids: bool = False
) -> tuple[list[Mined], dict[str, int]]:
    """The negatives in a table's rows. They are for the row's pair, or for all pairs of its query if it has no document.

    Returns:
        A line for each pair with negatives, in the order of the pairs, and two counts: "unknown_pairs", rows that were left out as
        their pair is not a training pair, and "unknown_negatives", negatives that were left out.
    """
    of_pair: dict[tuple[str, str], _Negatives] = {pair: {} for pair in target.pairs}
    of_query: dict[str, _Negatives] = {query_id: {} for query_id, _ in target.pairs}
    counts = {"unknown_pairs": 0, "unknown_negatives": 0}
    for one in examples:
        negatives: _Negatives = {}
        for text in one.neg_docs:
            ids = target.doc_ids(text)
            if not ids and not skip_unknown:
                raise InputError(
                    f"the negative {text[:60]!r} is not among the documents of {target.name}; add it there, or leave such "
                    "negatives out with --skip_bad_rows."
                )
            negatives |= dict.fromkeys(ids[:1])
            counts["unknown_negatives"] += not ids
        places: list[_Negatives] = [of_query[query] for query in target.query_ids(one.query) if query in of_query]
        if one.docs:
            pairs = ((query, doc) for query in target.query_ids(one.query) for text in one.docs for doc in target.doc_ids(text))
            places = [of_pair[pair] for pair in pairs if pair in of_pair]
        counts["unknown_pairs"] += not places
        for place in places:
            place.update(negatives)
    excluded = target.not_negative(keep_identical_ids=keep_identical_ids)
    lines = (
        Mined(query, doc, [one for one in found | of_query[query] if one not in excluded[query]], [])
        for (query, doc), found in of_pair.items()
    )
    return _some(lines, target), counts


def from_ranking(
    ranking: Mapping[str, Iterable[str]], target: Target, *, first_rank: int = 1, depth: int, keep_identical_ids: bool = False
) -> tuple[list[Mined], dict[str, int]]:
    """The best ranked documents of each query that are not relevant to it, as negatives of all its pairs."""
    excluded = target.not_negative(keep_identical_ids=keep_identical_ids)
    chosen: dict[str, list[str]] = {}
    for query, docs in ranking.items():
        if query in excluded:
            distinct = dict.fromkeys(target.first_doc.get(doc, doc) for doc in docs)
            chosen[query] = [doc for doc in distinct if doc not in excluded[query]][first_rank - 1 : depth]
            if unknown := [doc for doc in chosen[query] if doc not in target.first_doc]:
                raise beir.unknown_ids(unknown, f"documents ranked for {query} that are not in {target.name}")
    lines = (Mined(query, doc, chosen.get(query, []), []) for query, doc in dict.fromkeys(target.pairs))
    return _some(lines, target), {"unknown_queries": sum(query not in excluded for query in ranking)}


def _some(lines: Iterable[Mined], target: Target) -> list[Mined]:
    found = [line for line in lines if line.neg_doc_ids]
    if not found:
        raise InputError(f"no training pair of {target.name} gets a negative; none is there, or they are of other texts or ids.")
    return found


def _ids_by_text(texts: Iterator[tuple[str, str]]) -> dict[str, list[str]]:
    """The ids of each text, by its `text_id`."""
    found: dict[str, list[str]] = {}
    for one, text in texts:
        found.setdefault(text_id(text), []).append(one)
    return found
