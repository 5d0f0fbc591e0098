"""Turns a model of another library into a run, for --run_dir of every command and for --gin.Initialization.init_from.

de-jax import_model --from=all-MiniLM-L6-v2 --run_dir=runs/minilm
de-jax import_model --from=simcse-bert-base/ --pooling=cls --run_dir=runs/simcse
de-jax import_model --from=intfloat/e5-base-v2 --query_prompt="query: " --doc_prompt="passage: " --run_dir=runs/e5

--from accepts a folder of sentence-transformers, Hugging Face (T5, BERT, ModernBERT, Qwen3 and related models) or T5X, another run,
or a name on the Hugging Face hub. Nothing is unpickled. Missing arrays, and arrays or settings without a place, are refused.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import get_args

import jax

from de_jax import command
from de_jax.interop import any_model
from de_jax.interop.foreign_tokenizers import SpecialTokens
from de_jax.interop.huggingface import POOLING
from de_jax.interop.pretrained import paired, side_of
from de_jax.models.tower import TowerConfig
from de_jax.training.run.run_folder import write_run


def main(argv: list[str] | None = None) -> None:
    """The command; prints the written run and all assumptions as a JSON object, and the assumptions also on stderr."""
    args = _parse_args(argv)
    options = {name: getattr(args, name) for name in ("ignored", "pooling", "special_tokens")}
    pretrained = any_model.read(args.source, **options)
    if args.doc_source:
        pretrained = paired(pretrained, any_model.read(args.doc_source, **options))
    model = pretrained.model.with_dtype(args.dtype)
    lengths, prompts = (args.max_query_length, args.max_doc_length), (args.query_prompt, args.doc_prompt)
    query, doc = (
        side_of(pretrained, tower, tokenizer=args.tokenizer, max_length=max_length, prompt=prompt)
        for tower, max_length, prompt in zip(("query", "doc"), lengths, prompts, strict=True)
    )
    origin = list(filter(None, (args.source, args.doc_source)))
    write_run(args.run_dir, pretrained.params, model=model, query=query, doc=doc, origin=origin, unused=pretrained.unused)
    report = {
        "run_dir": args.run_dir,
        "num_parameters": sum(leaf.size for leaf in jax.tree.leaves(pretrained.params)),
        "embedding_dim": model.query.embedding_dim,
        "shared": model.shared,
        "pooling": {"query": _pooling_of(model.query), "doc": _pooling_of(model.doc)},
        "prompts": {"query": query.prompt, "doc": doc.prompt},
        "max_query_length": query.max_length,
        "max_doc_length": doc.max_length,
    }
    for note in pretrained.notes:
        print(note, file=sys.stderr)
    print(json.dumps({**report, "notes": pretrained.notes}))


def _pooling_of(tower: TowerConfig) -> str:
    return next(name for name, ours in POOLING.items() if ours == tower.pooling)


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = command.Parser(description=__doc__)
    parser.add_argument("--from", dest="source", required=True, help="a folder, or a name on the Hugging Face hub")
    parser.add_argument("--doc_from", dest="doc_source", help="another model for the document tower")
    parser.add_argument(
        "--pooling",
        choices=tuple(POOLING),
        help="pooling of a Hugging Face encoder; default lasttoken for causal encoders, otherwise mean",
    )
    parser.add_argument("--run_dir", required=True, help="the new run's folder")
    parser.add_argument("--tokenizer", help="a spiece.model or tokenizer.json, if the model has none")
    parser.add_argument(
        "--special_tokens",
        choices=get_args(SpecialTokens),
        default="text",
        help="[SEP] in a text is text (default), or the special token, for Hugging Face and sentence-transformers",
    )
    parser.add_argument("--query_prompt", type=str, help='text before every query, such as "query: "; default the model\'s')
    parser.add_argument("--doc_prompt", type=str, help="text before every document; default the model's")
    parser.add_argument("--max_query_length", type=int, help="tokens; default the model's")
    parser.add_argument("--max_doc_length", type=int, help="tokens; default the model's")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="type of matrix products; default float32, or the run's")
    parser.add_argument("--ignored", nargs="+", default=[], help="regular expressions of arrays that may be left over")
    return parser.parse_args(argv)


if __name__ == "__main__":
    command.run(main)
