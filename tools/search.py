"""Searches a corpus with a trained run: one query to a JSON object, or a prompt to try many.

python -m tools.search --run_dir=runs/sde --dataset_dir=data/beir/scifact --query "does vitamin D prevent colds?"
python -m tools.search --run_dir=runs/sde --dataset_dir=data/beir/scifact

The corpus is encoded the first time and kept under <run_dir>/embeddings/, so that the next search starts at once.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

from tqdm import tqdm

from de_jax import command
from de_jax.data import beir, files
from de_jax.data.corpus import build_token_store, cached_token_store
from de_jax.retrieval import encode
from de_jax.retrieval.index import ExactIndex
from de_jax.training.run import Run, load_run
from de_jax.types import InputError

SNIPPET_CHARACTERS = 300


class Searcher:
    """A run, the embeddings of a corpus by it, and the texts."""

    def __init__(self, run: Run, ids: list[str], embeddings: Any, texts: dict[str, str]) -> None:
        self._run, self._ids, self._texts = run, ids, texts
        self._index = ExactIndex(embeddings, ids)

    def search(self, query: str, k: int) -> list[dict[str, Any]]:
        """The k best documents: rank, score, id and the beginning of the text."""
        with tempfile.TemporaryDirectory() as folder:
            store = build_token_store([("query", query)], self._run.query_tokenizer, Path(folder) / "query", progress=False)
            # One row of one length: a single query need not fill a micro-batch.
            embedding = encode.queries(self._run, store, tokens_per_batch=1)
        ranking = self._index.search(embedding, k)
        found = [
            (self._ids[row], score) for row, score in zip(ranking.doc_rows[0], ranking.scores[0].tolist(), strict=True) if row >= 0
        ]
        return [
            {"rank": rank, "score": round(score, 6), "id": doc_id, "text": _snippet(self._texts[doc_id])}
            for rank, (doc_id, score) in enumerate(found, start=1)
        ]


def main(argv: list[str] | None = None) -> None:
    """The command."""
    args = _parse_args(argv)
    if args.k < 1:
        raise InputError(f"--k is {args.k}; ask for at least 1 document.")
    if args.query is not None and not args.query.strip():
        raise InputError("--query is empty; give some words to search for.")
    corpus = beir.find_file(args.dataset_dir, "corpus")
    texts = dict(beir.iter_docs(corpus))
    searcher = _open(load_run(args.run_dir, args.step), corpus, texts, args)
    if args.query is None:
        _prompt(searcher, args.k, len(texts))
    else:
        print(json.dumps({"query": args.query, "results": searcher.search(args.query, args.k)}, ensure_ascii=False))


def _open(run: Run, corpus: Path, texts: dict[str, str], args: argparse.Namespace) -> Searcher:
    if args.embeddings_dir:
        ids, embeddings, manifest = encode.open_embeddings(args.embeddings_dir)
        if manifest["model"] != encode.model_hash(run, "doc"):
            raise InputError(f"{args.embeddings_dir} is not by step {run.step} of {args.run_dir}; run encode_corpus with it again.")
    else:
        store = cached_token_store(corpus, run.doc_tokenizer, files.cache_dir() / "token_stores")
        with tqdm(total=store.num_texts, desc="encode", unit=" docs") as bar:
            ids, embeddings = encode.cached_docs(run, store, Path(args.dataset_dir).resolve().name, progress=bar.update)
    beir.require_known(ids, texts, f"{args.embeddings_dir or run.run_dir}: documents that are not in {corpus}")
    return Searcher(run, ids, embeddings, texts)


def _snippet(text: str) -> str:
    """The beginning of a text, on one line."""
    text = " ".join(text.split())
    return text if len(text) <= SNIPPET_CHARACTERS else text[: SNIPPET_CHARACTERS - 1].rstrip() + "…"


def _prompt(searcher: Searcher, k: int, num_docs: int) -> None:
    """Asks for queries until an empty line or the end of the input."""
    print(f"{num_docs} documents. Type a query; an empty line ends.", file=sys.stderr)
    while query := _ask():
        try:
            results = searcher.search(query, k)
        except InputError as error:
            print(f"error: {error}", file=sys.stderr)
            continue
        width = min(shutil.get_terminal_size().columns, 110)
        for result in results:
            print(f"{result['rank']:>3}  {result['score']:.4f}  {result['id']}")
            print(textwrap.fill(result["text"], width, initial_indent=" " * 5, subsequent_indent=" " * 5))
        print(flush=True)


def _ask() -> str:
    try:
        return input("query> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return ""


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run_dir", required=True, help="the run that searches")
    parser.add_argument("--dataset_dir", required=True, help="a BEIR folder; its corpus is searched")
    parser.add_argument("--query", help="one query; without it a prompt asks")
    parser.add_argument("--k", type=int, default=10, help="documents to show (default 10)")
    parser.add_argument("--step", help="checkpoint: a step, or best; default the newest")
    parser.add_argument("--embeddings_dir", help="embeddings that encode_corpus made; default the run's own")
    return parser.parse_args(argv)


if __name__ == "__main__":
    command.run(main)
