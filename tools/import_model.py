"""Writes a model from elsewhere as a run, which every command takes by --run_dir and training by --gin.train.init_from.

de-jax import_model --from=all-MiniLM-L6-v2/ --run_dir=runs/minilm
de-jax import_model --from=simcse-bert-base/ --pooling=cls --run_dir=runs/simcse
de-jax import_model --from=intfloat/e5-base-v2 --query_prompt="query: " --doc_prompt="passage: " --run_dir=runs/e5

--from takes a folder of sentence-transformers, Hugging Face (T5, BERT, ModernBERT, Qwen3 and their kin) or T5X, another run, or a
name of the Hugging Face hub. Nothing is unpickled. An array that is missing or has no place is refused, and so is a setting without
a place.
"""

from __future__ import annotations

import argparse
import json
import sys

import jax

from de_jax import command
from de_jax.interop import any_model
from de_jax.interop.huggingface import POOLING
from de_jax.interop.pretrained import paired, side_of
from de_jax.models.tower import TowerConfig
from de_jax.training.run.run_folder import write_run


def main(argv: list[str] | None = None) -> None:
    """The command; prints what was written as a JSON object, and what was assumed on stderr too."""
    args = _parse_args(argv)
    pretrained = any_model.read(args.source, ignored=args.ignored, pooling=args.pooling)
    if args.doc_source:
        pretrained = paired(pretrained, any_model.read(args.doc_source, ignored=args.ignored, pooling=args.pooling))
    model = pretrained.model.with_dtype(args.dtype)
    lengths, prompts = (args.max_query_length, args.max_doc_length), (args.query_prompt, args.doc_prompt)
    query, doc = (
        side_of(pretrained, tower, tokenizer=args.tokenizer, max_length=max_length, prompt=prompt)
        for tower, max_length, prompt in zip(("query", "doc"), lengths, prompts, strict=True)
    )
    origin = list(filter(None, (args.source, args.doc_source)))
    write_run(args.run_dir, pretrained.params, model=model, query=query, doc=doc, origin=origin)
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
    parser.add_argument("--from", dest="source", required=True, help="a folder, or a name of the Hugging Face hub")
    parser.add_argument("--doc_from", dest="doc_source", help="the document tower's model, where it is another one")
    parser.add_argument(
        "--pooling",
        choices=tuple(POOLING),
        help="of an encoder of Hugging Face, which does not say; default mean, lasttoken of causal ones",
    )
    parser.add_argument("--run_dir", required=True, help="the new run's folder")
    parser.add_argument("--tokenizer", help="a spiece.model or tokenizer.json, where the model brings none")
    parser.add_argument("--query_prompt", type=str, help='before every query, such as "query: "; default the model\'s')
    parser.add_argument("--doc_prompt", type=str, help="before every document; default the model's")
    parser.add_argument("--max_query_length", type=int, help="tokens; default the model's")
    parser.add_argument("--max_doc_length", type=int, help="tokens; default the model's")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="of matrix products; default float32, a run's own")
    parser.add_argument("--ignored", nargs="+", default=[], help="regular expressions of arrays that may be left over")
    return parser.parse_args(argv)


if __name__ == "__main__":
    command.run(main)
