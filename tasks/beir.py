"""Any folder in the BEIR layout: the judgements of each split as pairs of ids, queries and corpus as tasks of texts."""

import functools
from collections.abc import Iterator
from pathlib import Path

from de_jax.data.text import beir
from de_jax.tasks import registering


def register(
    name: str,
    *,
    dataset_dir: str,
    tokenizer: str,
    doc_tokenizer: str | None = None,
    min_relevance: int = 1,
    skip_empty: bool = False,
) -> None:
    """Registers `<name>`, `<name>_queries` and `<name>_docs`; the splits are those of `qrels/`.

    Args:
        dataset_dir: holds corpus.jsonl, queries.jsonl (or .tsv, .gz) and qrels/; or a table of queries and documents.
        min_relevance: pairs judged lower are left out.
        skip_empty: yield empty texts instead of refusing them, for `seqio_pairs` or `import task` to leave out.
    """
    queries, docs = beir.find_file(dataset_dir, "queries"), beir.find_file(dataset_dir, "corpus")
    qrels = {split: [path] for split, path in beir.find_splits(dataset_dir).items()}
    if not qrels:
        beir.find_qrels(dataset_dir, "train")  # raises
    of_queries, of_docs = (functools.partial(read, skip_empty=skip_empty) for read in (read_queries, read_docs))
    registering.add_texts(name, "query", of_queries, [queries], tokenizer=tokenizer)
    registering.add_texts(name, "doc", of_docs, [docs], tokenizer=doc_tokenizer or tokenizer)
    read = functools.partial(read_qrels, min_relevance=min_relevance)
    registering.add_task(name, read, qrels, ("query_id", "doc_id", "relevance"), tokenizer=tokenizer, doc_tokenizer=doc_tokenizer)


def read_queries(path: Path, *, skip_empty: bool = False) -> Iterator[registering.Record]:
    """The queries of a jsonl or tsv file; see `beir.iter_all`."""
    texts = beir.iter_all(path, with_title=False, skip_empty=skip_empty)
    return ({"query_id": query_id, "query": query} for query_id, query in texts)


def read_docs(path: Path, *, skip_empty: bool = False) -> Iterator[registering.Record]:
    """The documents of a jsonl or tsv file; a title stands before its text."""
    return ({"doc_id": doc_id, "doc": doc} for doc_id, doc in beir.iter_all(path, with_title=True, skip_empty=skip_empty))


def read_qrels(path: Path, *, min_relevance: int = 1) -> Iterator[registering.Record]:
    """The pairs of a qrels file, BEIR's or TREC's, judged at least `min_relevance`."""
    for query_id, judged in beir.read_qrels(path).items():
        for doc_id, relevance in judged.items():
            if relevance >= min_relevance:
                yield {"query_id": query_id, "doc_id": doc_id, "relevance": relevance}
