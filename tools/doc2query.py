"""Trains a query generator, and generates queries for the documents of a corpus; prints one JSON object.

de-jax doc2query train --dataset_dirs data/beir/medquad --init_from=google-t5/t5-small --run_dir=runs/doc2query
de-jax doc2query generate --model=runs/doc2query --dataset_dir=data/beir/scifact --out_dir=queries/scifact --num_queries=20
de-jax doc2query import --predictions predicted_queries_*.txt* --dataset_dir=data/msmarco --out_dir=queries/msmarco

generate --engine=ray spreads the work over the machines of a Ray cluster, and --shard over jobs of any other kind.

Repeat a command to continue after a stop. --init_from and --model accept a run of `train`, a folder of Hugging Face's T5 or a name
on the hub. Without --init_from, the model starts from random parameters, with --size and the vocabulary of --tokenizer.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
import time
from pathlib import Path
from typing import Any

import jax

from de_jax import arguments, command
from de_jax.data.expansion.generated_queries import write_released
from de_jax.data.sources.training_set import store_dir
from de_jax.data.stores.corpus import cached_token_store
from de_jax.data.text import beir, input_policy
from de_jax.data.text.tokenizing import load_tokenizer
from de_jax.doc2query.doc_query_pairs import doc_query_pairs, held_out_pairs
from de_jax.doc2query.generate import generate_to_dir
from de_jax.doc2query.generator_run import GENERATOR_RUN, LOGGING, GeneratorRun, train_generator
from de_jax.files import reading
from de_jax.files.outputs import progress_bar
from de_jax.interop import generators
from de_jax.models.decoding import Decoding
from de_jax.models.generator import Generator
from de_jax.models.t5 import T5Config
from de_jax.settings import NonNegativeInt, PositiveFloat, PositiveInt, Seed, Share, ShareBelowOne, numeric
from de_jax.training.mesh.distributed import StopOnSignal
from de_jax.training.optim.optimizer import OptimizerFn, adafactor, adamw, linear
from de_jax.training.run.settings import Logging, Optimization
from de_jax.types import InputError

SIZES = {  # as in gin_configs/models/t5_1_1_*.gin
    "tiny": T5Config(model_dim=256, num_layers=2, num_heads=4, head_dim=32, mlp_dim=512),
    "small": T5Config(model_dim=512, num_layers=8, num_heads=6, head_dim=64, mlp_dim=1024),
    "base": T5Config(),
}
DEV_PAIRS = 1000
OPTIMIZERS: dict[str, OptimizerFn] = {"adafactor": adafactor, "adamw": adamw}


def main(argv: list[str] | None = None) -> None:
    """The command."""
    args = _parse_args(argv)
    if args.action == "generate" and arguments.by_engine(args, "de_jax.tools.doc2query", argv):
        return
    report = {"train": train, "generate": generate, "import": import_released}[args.action](args)
    print(json.dumps(report))
    if report.get("stopped") == StopOnSignal.REASON:
        sys.exit(command.EXIT_STOPPED)


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Trains on the pairs of BEIR folders."""
    start = time.monotonic()
    of_dev = {"--dev_max_pairs": args.dev_max_pairs, "--evaluate_every_steps": args.evaluate_every_steps}
    for flag, value in {**of_dev, "--early_stopping_patience": args.early_stopping_patience}.items():
        if value and not args.dev_split:
            raise InputError(f"{flag} is about the loss on held-out pairs; name their split with --dev_split.")
    run = _first_run(args)
    texts = {name: getattr(args, name) for name in ("batch_size", "max_query_length", "max_doc_length", "cache_dir", "skip_empty")}
    data = doc_query_pairs(
        args.dataset_dirs, run.tokenizer, split=args.split, seed=args.seed, length_multiple=args.length_multiple, **texts
    )
    dev = None
    if args.dev_split:
        max_pairs = args.dev_max_pairs or DEV_PAIRS
        dev = held_out_pairs(args.dataset_dirs, run.tokenizer, split=args.dev_split, max_pairs=max_pairs, **texts)
    trained, stopped = train_generator(
        run,
        data,
        optimization=Optimization(
            optimizer=OPTIMIZERS[args.optimizer],
            schedule=functools.partial(linear, warmup_steps=args.warmup_steps),
            num_steps=args.num_steps,
            learning_rate=args.learning_rate,
        ),
        logging=Logging(**{name: value for name in LOGGING if (value := getattr(args, name)) is not None}),
        seed=args.seed,
        is_fresh=not args.init_from,
        dev=dev,
    )
    return {
        "run_dir": args.run_dir,
        "step": trained.step,
        "num_pairs": data.num_pairs,
        "num_parameters": sum(leaf.size for leaf in jax.tree.leaves(trained.params)),
        "seconds": round(time.monotonic() - start, 1),
        "stopped": stopped,
    }


def generate(args: argparse.Namespace) -> dict[str, Any]:
    """Writes an expansion of a corpus."""
    decoding = Decoding(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Decoding) if field.name in args})
    part = arguments.shard(args, is_run=GENERATOR_RUN.is_in(Path(args.model)))
    corpus = beir.find_file(args.dataset_dir, "corpus")
    run = generators.read(args.model, step=args.step, tokenizer=load_tokenizer(args.tokenizer) if args.tokenizer else None)
    run = run._replace(max_doc_length=args.max_doc_length or run.max_doc_length)
    if args.dtype:
        run = run._replace(model=dataclasses.replace(run.model, t5=dataclasses.replace(run.model.t5, dtype=args.dtype)))
    store = cached_token_store(corpus, run.tokenizer, store_dir(args.cache_dir), skip_empty=args.skip_empty)
    start, done = time.monotonic(), []
    with progress_bar(total=store.num_texts, unit="doc", desc="generate") as bar:

        def progress(num_docs: int) -> None:
            done.append(num_docs)
            bar.update(num_docs)
            speed = sum(done) * decoding.num_queries / (time.monotonic() - start)
            bar.set_postfix({"queries/s": f"{speed:.4g}"}, refresh=False)

        options = {name: getattr(args, name) for name in ("seed", "min_distinct", "docs_per_batch", "docs_per_part")}
        about = {"corpus": {"name": corpus.parent.name, "sha256": reading.sha256_of(corpus)}}
        generate_to_dir(run, store, args.out_dir, decoding, **options, about=about, part=part, progress=progress)
    if part:
        return {"shard": str(part)}
    return {"out_dir": args.out_dir, "num_docs": store.num_texts, "seconds": round(time.monotonic() - start, 1)}


def import_released(args: argparse.Namespace) -> dict[str, Any]:
    """Writes an expansion of predictions that others released."""
    corpus = beir.find_file(args.dataset_dir, "corpus")
    about = {"corpus": {"name": corpus.parent.name, "sha256": reading.sha256_of(corpus)}}
    options = {"docs_per_part": args.docs_per_part, "skip_empty": args.skip_empty}
    num_docs = write_released(args.predictions, corpus, args.out_dir, **options, about=about)
    return {"out_dir": args.out_dir, "num_docs": num_docs}


def _first_run(args: argparse.Namespace) -> GeneratorRun:
    tokenizer = load_tokenizer(args.tokenizer) if args.tokenizer else None
    lengths = {"max_query_length": args.max_query_length, "max_doc_length": args.max_doc_length}
    if args.init_from:
        if args.size:
            raise InputError("--size is of a model with random parameters; leave it or --init_from out.")
        run = generators.read(args.init_from, tokenizer=tokenizer)
        model = run.model
    elif tokenizer is None:
        raise InputError("--tokenizer is missing; give T5's spiece.model, or --init_from with a model that brings its own.")
    else:
        vocab_size = -(-tokenizer.vocab_size // 128) * 128  # T5's own 32,000 pieces have 32,128 rows
        model = Generator(dataclasses.replace(SIZES[args.size or "tiny"], vocab_size=vocab_size))
        run = GeneratorRun(Path(), 0, model, {}, tokenizer, 0, 0)
    t5 = dataclasses.replace(model.t5, dtype=args.dtype, dropout_rate=args.dropout_rate, remat=args.remat)
    return run._replace(source=Path(args.run_dir), model=dataclasses.replace(model, t5=t5), **lengths)


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = command.Parser(description=__doc__)
    actions = parser.add_subparsers(dest="action", required=True)
    _add_train(actions.add_parser("train", help="train on (document, query) pairs"))
    _add_generate(actions.add_parser("generate", help="write queries for every document"))
    released = actions.add_parser("import", help="import released predictions")
    released.add_argument("--predictions", nargs="+", required=True, help="files: .jsonl, .tsv, or docTTTTTquery's text files")
    for action in actions.choices.values():
        input_policy.add_flags(action)
        if "--dataset_dirs" not in action._option_string_actions:
            action.add_argument("--dataset_dir", required=True, help="a BEIR folder or a table")
            action.add_argument("--out_dir", required=True, help="folder of the expansion")
            action.add_argument(
                "--docs_per_part", type=int, default=4096, help="documents per part; a stopped command continues with the next part"
            )
    return parser.parse_args(argv)


def _add_train(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dataset_dirs", nargs="+", required=True, help="BEIR folders or tables")
    parser.add_argument("--split", default="train", help="split of the training pairs")
    parser.add_argument("--run_dir", required=True, help="folder of the run; a run in it continues")
    parser.add_argument("--init_from", help="a run, a folder or a name on the hub")
    parser.add_argument("--size", choices=SIZES, help="T5 1.1's size for a model with random parameters (default tiny)")
    parser.add_argument("--tokenizer", help="a spiece.model or tokenizer.json")
    parser.add_argument("--num_steps", type=numeric(PositiveInt), default=4000)
    parser.add_argument("--batch_size", type=numeric(PositiveInt), default=32, help="pairs")
    parser.add_argument("--max_query_length", type=int, default=32, help="tokens")
    parser.add_argument("--max_doc_length", type=int, default=256, help="tokens")
    parser.add_argument(
        "--length_multiple",
        type=int,
        default=64,
        help="the batch width is a multiple of this; smaller computes less, compiles more",
    )
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adafactor")
    parser.add_argument(
        "--learning_rate", type=numeric(PositiveFloat), default=1e-3, help="peak learning rate; falls to 0 linearly"
    )
    parser.add_argument("--warmup_steps", type=numeric(NonNegativeInt), default=0)
    parser.add_argument("--dropout_rate", type=numeric(ShareBelowOne), default=0.1)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="type of matrix products")
    parser.add_argument(
        "--remat", choices=("none", "dots", "full"), default="none", help="rematerialisation of the encoder; see docs/scaling.md"
    )
    parser.add_argument("--seed", type=numeric(Seed), default=0)
    parser.add_argument("--log_every_steps", type=numeric(PositiveInt), default=50)
    parser.add_argument("--save_every_steps", type=numeric(PositiveInt), default=500)
    parser.add_argument("--keep_checkpoints", type=numeric(PositiveInt), default=2)
    parser.add_argument(
        "--dev_split", help="split of held-out pairs; the checkpoint with the lowest loss on them is kept in best/ (--step=best)"
    )
    parser.add_argument("--dev_max_pairs", type=numeric(PositiveInt), help=f"a sample of so many dev pairs (default {DEV_PAIRS})")
    parser.add_argument("--evaluate_every_steps", type=numeric(PositiveInt), help="updates between two dev losses (default 1000)")
    parser.add_argument(
        "--early_stopping_patience",
        type=numeric(PositiveInt),
        help="stop after this many dev losses in a row that are no lower than the lowest",
    )
    parser.add_argument("--cache_dir", default="", help="folder of tokenized texts; default $DE_JAX_CACHE")


def _add_generate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="a run, a folder or a name on the hub")
    parser.add_argument("--step", help="checkpoint of a run: a step, or best; default the newest")
    parser.add_argument("--tokenizer", help="vocabulary, if the model has none")
    parser.add_argument("--method", choices=("sample", "greedy", "beam"), default="sample")
    parser.add_argument("--num_queries", type=int, default=10, help="queries per document")
    parser.add_argument(
        "--min_distinct",
        type=numeric(NonNegativeInt),
        default=0,
        help="different queries per document at least: more draws replace repeated ones (default 0: as drawn)",
    )
    parser.add_argument("--max_length", type=int, default=32, help="tokens of a query")
    parser.add_argument("--max_doc_length", type=int, help="tokens; default the model's")
    parser.add_argument(
        "--top_k", type=numeric(NonNegativeInt), default=10, help="draw from the most likely tokens only; 0 for all"
    )
    parser.add_argument(
        "--top_p",
        type=numeric(Share),
        default=1.0,
        help="draw from the most likely tokens with this total probability",
    )
    parser.add_argument("--temperature", type=numeric(PositiveFloat), default=1.0)
    parser.add_argument("--num_beams", type=int, default=4)
    parser.add_argument("--length_penalty", type=float, default=1.0)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="type of matrix products; default the model's")
    parser.add_argument("--seed", type=numeric(Seed), default=0)
    parser.add_argument("--docs_per_batch", type=int, default=16, help="documents per device at a time")
    arguments.add_shard(parser)
    parser.add_argument("--cache_dir", default="", help="folder of tokenized texts; default $DE_JAX_CACHE")


if __name__ == "__main__":
    command.run(main)
