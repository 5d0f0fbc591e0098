"""Writes a seqio task or mixture as tokens, for training without TensorFlow; prints one JSON object to stdout.

de-jax export_batches --task=scifact --module=de_jax.tasks.beir --module_arg dataset_dir=data/beir/scifact \\
    --module_arg tokenizer=data/t5/spiece.model --dev_split=test --out_dir=data/scifact_pairs

A recipe trains from the folder with `Recipe.data = @stored_pairs` and `stored_pairs.pairs_dir = "data/scifact_pairs"`. Existing
parts are reused.
"""

from __future__ import annotations

import argparse
import ast
import json
from pathlib import Path
from typing import Any

from de_jax import command
from de_jax.data.sources import pair_store, seqio_tasks
from de_jax.data.text import input_policy
from de_jax.types import InputError


def main(argv: list[str] | None = None) -> None:
    """The command; prints the folder's counts."""
    args = _parse_args(argv)
    module_args = dict(map(_argument, args.module_arg)) or None
    seqio_tasks.load_tasks(args.task, args.module, module_args, args.task_cache_dir, skip_empty=args.skip_empty)
    selection = seqio_tasks.Selection(args.task, args.split, args.dev_task, args.dev_split, args.use_cached, args.skip_empty)
    made_from = seqio_tasks.fingerprint(selection, args.module, module_args)
    is_there = pair_store.PAIR_STORE.is_in(args.out_dir)
    store = pair_store.open_pair_store(args.out_dir) if is_there else seqio_tasks.export(selection, args.out_dir, made_from)
    if store.made_from != made_from:
        raise InputError(
            f"{args.out_dir} holds data of another task, or of another version of it; choose another folder, or remove it."
        )
    report: dict[str, Any] = {"pairs_dir": str(args.out_dir), "pairs": len(store.pairs)}
    report |= {"tasks": {part.task: part.num_pairs for part in store.parts}}
    for name, texts in (("queries", store.query_store), ("docs", store.doc_store)):
        report[name] = {"texts": texts.num_texts, "tokens": len(texts.tokens)}
    for name, mined in (("neg_docs", store.neg_docs), ("neg_queries", store.neg_queries)):
        report[name] = 0 if mined is None else mined.shape[1]
    print(json.dumps(report | {"dev_queries": len(store.dev_qrels or {})}))


def _argument(setting: str) -> tuple[str, Any]:
    name, separator, value = setting.partition("=")
    if not separator:
        raise InputError(f"--module_arg {setting!r} has no value; write name=value.")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = command.Parser(description=__doc__)
    parser.add_argument("--task", required=True, help="a seqio task or mixture")
    parser.add_argument("--module", default="", help="the Python module that registers the task")
    parser.add_argument(
        "--module_arg", action="append", default=[], metavar="NAME=VALUE", help="an argument of the module's register(); repeatable"
    )
    parser.add_argument("--split", default="train", help="split of the training pairs (default train)")
    parser.add_argument("--dev_task", default="", help="the task that scores checkpoints; default --task")
    parser.add_argument("--dev_split", help="split of the pairs that score checkpoints; default without such pairs")
    input_policy.add_flags(parser)
    parser.add_argument("--use_cached", action="store_true", help="read the cache of seqio_cache_tasks")
    parser.add_argument("--task_cache_dir", type=str, action="append", default=[], help="folder of that cache; repeatable")
    parser.add_argument("--out_dir", type=Path, required=True, help="the folder to write")
    return parser.parse_args(argv)


if __name__ == "__main__":
    command.run(main)
