"""Searches a corpus with a trained run: prints one query's hits as a JSON object, or opens a prompt.

de-jax search --run_dir=runs/sde --dataset_dir=data/beir/scifact --query "does vitamin D prevent colds?"
de-jax search --run_dir=runs/sde --dataset_dir=data/beir/scifact

The first search encodes the corpus and keeps it, with a FAISS index if used, in <run_dir>/embeddings/. Later searches start at
once.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import textwrap

from de_jax import arguments, command
from de_jax.data.text import beir, input_policy
from de_jax.retrieval import faiss_index
from de_jax.retrieval.searcher import Searcher, open_searcher, printable
from de_jax.types import InputError


def main(argv: list[str] | None = None) -> None:
    """The command."""
    args = _parse_args(argv)
    if args.query is not None and not args.query.strip():
        raise InputError("--query is empty; give some words to search for.")
    build_index = faiss_index.index_builder(args.index, arguments.search_options(args))
    corpus = beir.find_file(args.dataset_dir, "corpus")
    docs, _ = beir.read_texts(corpus, with_title=True, skip_empty=args.skip_empty)
    texts = dict(zip(*docs, strict=True))
    searcher = open_searcher(
        arguments.model(args),
        corpus,
        texts,
        build_index=build_index,
        embeddings_dir=args.embeddings_dir,
        skip_empty=args.skip_empty,
    )
    if args.query is None:
        _prompt(searcher, args.k, len(texts))
    else:
        found = json.dumps({"query": args.query, "results": searcher.search(args.query, args.k)}, ensure_ascii=False)
        print(re.sub(r"[\x7f-\x9f]", lambda control: f"\\u{ord(control[0]):04x}", found))  # JSON escapes the others


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
            print(f"{result['rank']:>3}  {result['score']:.4f}  {printable(result['id'])}")
            print(textwrap.fill(result["text"], width, initial_indent=" " * 5, subsequent_indent=" " * 5))
        print(flush=True)


def _ask() -> str:
    try:
        return input("query> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return ""


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = command.Parser(description=__doc__)
    arguments.add_model(parser, "to search with")
    parser.add_argument("--dataset_dir", required=True, help="a BEIR folder or a table with the corpus")
    parser.add_argument("--query", type=str, help="one query; default a prompt")
    parser.add_argument("--k", type=int, default=10, help="documents to show (default 10)")
    input_policy.add_flags(parser)
    parser.add_argument("--embeddings_dir", help="embeddings from encode_corpus; default the run's own")
    arguments.add_search(parser)
    return parser.parse_args(argv)


if __name__ == "__main__":
    command.run(main)
