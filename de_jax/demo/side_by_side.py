"""Results of several systems for one query, as plain data: rankings, scores, milliseconds, and the tokens that matter most."""

import bisect
import contextlib
import functools
import itertools
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from de_jax.data.stores.corpus import tokenized
from de_jax.data.text import beir, tokenizing
from de_jax.data.text.passages import passages_of
from de_jax.data.text.tokenizing import Span, field_of
from de_jax.evaluation import fusion, metrics
from de_jax.evaluation.saliency import token_saliency
from de_jax.evaluation.task import Policy
from de_jax.model import Model
from de_jax.retrieval.bm25 import BM25Index
from de_jax.retrieval.searcher import open_searcher
from de_jax.types import InputError

MAX_QUERY_CHARACTERS = 300
MAX_RESULTS, USUAL_RESULTS = 20, 5
NUM_EXAMPLES = 6
MAX_EXAMPLE_CHARACTERS = 120
MAX_MARKS = 12
LEAST_STRENGTH = 0.2
"""A marked word has at least this share of the strongest word's saliency."""
MAX_WORD = 30
"""Characters; longer runs of letters are of scripts without blanks, and are marked token by token."""
COMPILED_TOKENS = 64
"""Queries of up to so many tokens are compiled before the first one; few with `MAX_QUERY_CHARACTERS` are longer."""
ROWS_AT_ONCE, LENGTH_MULTIPLE = 4, 64
"""The shape of a batch of passages whose tokens are marked: how many, and of how many tokens a multiple."""


class Corpus(NamedTuple):
    """The documents of a data set, and some of its queries."""

    path: Path
    texts: dict[str, str]  # by document id, with `fields`
    examples: list[str]  # queries

    @property
    def name(self) -> str:
        return self.path.parent.resolve().name


class Mark(NamedTuple):
    """A part of a text that matters for its score."""

    begin: int  # characters
    end: int
    strength: float  # above 0; 1 for the strongest of the text


class Hit(NamedTuple):
    """A document in a ranking."""

    doc_id: str
    score: float
    title: str
    text: str  # begins with the title
    url: str  # from the corpus, or ""
    ranks: Mapping[str, int]  # in a fusion, the document's rank in the other systems that hold it
    marks: Sequence[Mark] = ()


class Column(NamedTuple):
    """One system's results."""

    system: str
    about: str
    milliseconds: float
    hits: Sequence[Hit]
    model: str | None = None  # whose saliency marks the texts; None for the words of the query


def open_corpus(dataset_dir: str | Path, *, skip_empty: bool = False) -> Corpus:
    """The documents of a BEIR folder or a table, and queries to try: those of the test split, if there is one."""
    path = beir.find_file(dataset_dir, "corpus")
    docs, _ = beir.read_texts(path, with_title=True, skip_empty=skip_empty)
    return Corpus(path, dict(zip(*docs, strict=True)), _examples(beir.folder_of(dataset_dir)))


class SideBySide:
    """BM25, dense retrieval by a model, the fusion of both, and dense retrieval by more models, over one corpus."""

    def __init__(self, corpus: Corpus, models: Mapping[str, Model], *, skip_empty: bool = False) -> None:
        self.corpus, self._models = corpus, dict(models)
        self._ids = list(corpus.texts)
        self._bm25 = BM25Index(list(corpus.texts.values()), self._ids)
        self._searchers = {
            name: open_searcher(model.encoding, corpus.path, corpus.texts, skip_empty=skip_empty) for name, model in models.items()
        }
        for model, searcher in zip(self._models.values(), self._searchers.values(), strict=True):
            searcher.compile(min(COMPILED_TOKENS, model.run.query.max_length))
            searcher.ranked(np.zeros((1, model.embedding_dim), np.float32), self._depth)
        with contextlib.suppress(InputError):  # compiles the marks, so that the first query does not wait for that
            first = next(iter([*corpus.examples, *corpus.texts.values()]))[:MAX_QUERY_CHARACTERS]
            self.marked(first, self.search(first, USUAL_RESULTS))

    def search(self, query: str, k: float) -> list[Column]:
        """The k best documents of each system, nothing marked; InputError for a query or a k that `checked` refuses.

        The time of a system is from the query to its ranking, that of the fusion includes both rankings.
        """
        query, num_hits = checked(query, k)
        bm25, bm25_ms = timed(self._bm25_ranking, query)
        dense = {name: timed(self._dense_ranking, name, query) for name in self._models}
        (first, (ranking, dense_ms)), *others = dense.items()
        fused, fusion_ms = timed(fusion.fuse, [{query: ranking}, {query: bm25}], depth=num_hits)
        ranks = {
            system: {doc_id: rank for rank, doc_id in enumerate(found, start=1)}
            for system, found in (("BM25", bm25), ("dense", ranking))
        }
        hits, all_ms = functools.partial(self._hits, num_hits), bm25_ms + dense_ms + fusion_ms
        return [
            Column("BM25", "words of the query", bm25_ms, hits(bm25)),
            Column("Dense", first, dense_ms, hits(ranking), first),
            Column("Fusion", "BM25 and dense, by reciprocal rank", all_ms, hits(fused[query], ranks), first),
            *(
                Column(f"Dense {number}", name, milliseconds, hits(found), name)
                for number, (name, (found, milliseconds)) in enumerate(others, start=2)
            ),
        ]

    def marked(self, query: str, columns: Sequence[Column]) -> list[Column]:
        """The same columns with the parts of each text that matter most; InputError as of `search`.

        They are the words of the query for BM25, and for the others the words with the largest `token_saliency` by the model; a
        fusion has the first model's.
        """
        query, _ = checked(query, 1)
        docs_of: dict[str, list[str]] = {name: [] for name in self._models}
        for column in columns:
            if column.model:
                docs_of[column.model] += [hit.doc_id for hit in column.hits]
        marks = {name: self._dense_marks(name, query, list(dict.fromkeys(docs))) for name, docs in docs_of.items()}

        def marks_of(column: Column, hit: Hit) -> list[Mark]:
            if column.model:
                return marks[column.model][hit.doc_id]
            return [Mark(begin, end, 1.0) for begin, end in self._bm25.matches(query, hit.text)]

        return [column._replace(hits=[hit._replace(marks=marks_of(column, hit)) for hit in column.hits]) for column in columns]

    @property
    def _depth(self) -> int:
        """Of the rankings that are fused."""
        return min(Policy().depth, len(self._ids))

    def _bm25_ranking(self, query: str) -> dict[str, float]:
        ranking = self._bm25.search([query], self._depth)
        return metrics.results_of(ranking, [query], self._ids, drop_identical_ids=False)[query]

    def _dense_ranking(self, name: str, query: str) -> dict[str, float]:
        searcher = self._searchers[name]
        return searcher.ranked(searcher.embedding(query), self._depth)[0]

    def _hits(self, k: int, ranking: Mapping[str, float], ranks: Mapping[str, Mapping[str, int]] | None = None) -> list[Hit]:
        hits = []
        for doc_id, score in itertools.islice(ranking.items(), k):
            text = self.corpus.texts[doc_id]
            own = {system: places[doc_id] for system, places in (ranks or {}).items() if doc_id in places}
            hits.append(Hit(doc_id, score, field_of(text, "title"), text, field_of(text, "url"), own))
        return hits

    def _dense_marks(self, name: str, query: str, doc_ids: Sequence[str]) -> dict[str, list[Mark]]:
        if not doc_ids:
            return {}
        texts = [self.corpus.texts[doc_id] for doc_id in doc_ids]
        found = doc_saliency(self._models[name], self._searchers[name].embedding(query), texts)
        spans = [tokenizing.spans(self._models[name].run.doc.tokenizer, text) for text in texts]
        return {
            doc_id: strongest(text, of_text[place : place + len(values)], values)
            for doc_id, text, of_text, (place, values) in zip(doc_ids, texts, spans, found, strict=True)
        }


def doc_saliency(model: Model, query: Float[np.ndarray, "1 D"], texts: Sequence[str]) -> list[tuple[int, Float[np.ndarray, " t"]]]:
    """The `token_saliency` of each document for a query [1, D], of the best passage where a document is read as several.

    Returns:
        For each text the place of the first token that was read, among those of the whole text, and the saliency from there on,
        without special tokens.
    """
    run, side = model.run, model.run.doc
    store = tokenized(texts, side.tokenizer)
    passages = passages_of(store, side)
    read = passages or store
    doc_rows = passages.doc_rows if passages else np.arange(store.num_texts)
    before, after = len(side.tokenizer.prefix_ids), len(side.tokenizer.suffix_ids)
    lengths = read.lengths(side.max_length)
    best: dict[int, tuple[float, int, np.ndarray]] = {}
    by_length = np.argsort(-lengths, kind="stable")
    for start in range(0, len(by_length), ROWS_AT_ONCE):
        rows = np.full(ROWS_AT_ONCE, -1)
        rows[: len(by_length) - start] = by_length[start : start + ROWS_AT_ONCE]
        width = -(-int(lengths[rows[0]]) // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
        tokens = read.pad(rows, side.max_length, width)
        others = np.repeat(query, ROWS_AT_ONCE, axis=0)
        scores, saliency = (np.asarray(found) for found in token_saliency(run.model, run.params, "doc", tokens, others))
        for row, score, values in zip(rows.tolist(), scores.tolist(), saliency, strict=True):
            if row < 0:
                continue
            doc = int(doc_rows[row])
            if doc not in best or score > best[doc][0]:
                first = int(np.searchsorted(doc_rows, doc))
                place = (row - first) * (side.max_length - before - after)
                best[doc] = score, place, values[before : int(lengths[row]) - after]
    return [best[doc][1:] for doc in range(len(texts))]


def strongest(text: str, spans: Sequence[Span], saliency: Sequence[float] | np.ndarray) -> list[Mark]:
    """The words with the largest saliency, in the order of the text; that of a word is the L2 norm of its tokens'.

    Example:
        >>> strongest("a redder fox", [(0, 1), (1, 5), (5, 8), (8, 12)], [0.1, 0.3, 0.4, 1.0])
        [Mark(begin=2, end=8, strength=0.5), Mark(begin=9, end=12, strength=1.0)]
    """
    squares: dict[Span, float] = {}
    words = [match.span() for match in re.finditer(rf"(?<!\w)\w{{1,{MAX_WORD}}}(?!\w)", text)]
    for (begin, end), value in zip(spans, saliency, strict=True):
        token = text[begin:end]
        begin, end = begin + len(token) - len(token.lstrip()), end - len(token) + len(token.rstrip())
        if begin < end:
            place = bisect.bisect_right(words, (begin, len(text))) - 1
            span = words[place] if place >= 0 and end <= words[place][1] else (begin, end)
            squares[span] = squares.get(span, 0.0) + float(value) ** 2
    largest = max(squares.values(), default=0.0)
    marks: list[Mark] = []
    for span in sorted(sorted(squares, key=lambda span: -squares[span])[:MAX_MARKS]):
        strength = math.sqrt(squares[span] / largest) if largest else 0.0
        if strength >= LEAST_STRENGTH and (not marks or span[0] >= marks[-1].end):
            marks.append(Mark(*span, strength))
    return marks


def checked(query: str, k: float) -> tuple[str, int]:
    """A query without blanks around it, and the number of results; InputError: empty or too long, or k out of range."""
    query = query.strip() if isinstance(query, str) else ""
    if not query:
        raise InputError("the query is empty; give some words to search for.")
    if len(query) > MAX_QUERY_CHARACTERS:
        raise InputError(f"the query has {len(query)} characters; give at most {MAX_QUERY_CHARACTERS}.")
    if not isinstance(k, int | float) or not 1 <= k <= MAX_RESULTS or k != int(k):
        raise InputError(f"the number of results is {k!r:.20}; give 1 to {MAX_RESULTS}.")
    return query, int(k)


def timed(work: Callable[..., Any], *arguments: Any, **options: Any) -> tuple[Any, float]:
    """The result of a function, and the milliseconds that it took."""
    start = time.perf_counter()
    found = work(*arguments, **options)
    return found, 1000 * (time.perf_counter() - start)


def _examples(folder: Path) -> list[str]:
    """Short queries of the test split, or of all; few, and none where the folder has no queries."""
    if not any(folder.glob("queries.*")):
        return []
    splits = beir.find_splits(folder)
    judged = beir.read_qrels(splits["test"]) if "test" in splits else None
    queries = beir.iter_queries(beir.find_file(folder, "queries"), skip_empty=True)
    short = (text for query_id, text in queries if len(text) <= MAX_EXAMPLE_CHARACTERS and (judged is None or query_id in judged))
    return list(itertools.islice(short, NUM_EXAMPLES))
