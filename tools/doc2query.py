"""`de-jax doc2query`: a query generator, and queries for the documents of a corpus."""

import dataclasses
import functools
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax

from de_jax import command
from de_jax.arguments import Shards
from de_jax.data.expansion.generated_queries import write_released
from de_jax.data.sources.training_set import store_dir
from de_jax.data.stores.corpus import cached_token_store
from de_jax.data.text import beir
from de_jax.data.text.tokenizing import load_tokenizer
from de_jax.doc2query.generate import generate_to_dir
from de_jax.doc2query.generator_run import GENERATOR_RUN, GeneratorRun, doc_query_pairs, held_out_pairs, train_generator
from de_jax.files import reading
from de_jax.files.outputs import progress_bar
from de_jax.flags import Line, like, rules
from de_jax.interop import generators
from de_jax.models import generator
from de_jax.models.decoding import Decoding
from de_jax.models.t5 import T5Config
from de_jax.settings import LocalPath, NonNegativeInt, PositiveFloat, PositiveInt, ShareBelowOne
from de_jax.training.mesh.distributed import StopOnSignal
from de_jax.training.optim.optimizer import OptimizerFn, adafactor, adamw, linear
from de_jax.training.run.settings import Logging, Optimization
from de_jax.types import Dtype, InputError

SIZES = {  # as in gin_configs/models/t5_1_1_*.gin
    "tiny": T5Config(model_dim=256, num_layers=2, num_heads=4, head_dim=32, mlp_dim=512),
    "small": T5Config(model_dim=512, num_layers=8, num_heads=6, head_dim=64, mlp_dim=1024),
    "base": T5Config(),
}
DEV_PAIRS = 1000
OPTIMIZERS: dict[str, OptimizerFn] = {"adafactor": adafactor, "adamw": adamw}


@dataclass(frozen=True)
class NewGenerator:
    """The generator.

    Attributes:
        run_dir: folder of the run; a run in it continues.
        init_from: a run of doc2query train, a folder of Hugging Face's T5 or a name on the hub.
        size: T5 1.1's size for a model with random parameters (default tiny).
        dropout_rate: share of activations that are dropped.
        dtype: type of matrix products.
        remat: rematerialisation of the encoder; see docs/scaling.md.
    """

    run_dir: LocalPath
    init_from: LocalPath | None = None
    size: Literal["tiny", "small", "base"] | None = None
    tokenizer: LocalPath | None = None
    dropout_rate: ShareBelowOne = 0.1
    dtype: Dtype = "bfloat16"
    remat: Literal["none", "dots", "full"] = "none"


@dataclass(frozen=True)
class TrainingLog:
    """Logging.

    Attributes:
        log_every_steps: updates between two lines of the log.
        save_every_steps: updates between two checkpoints.
        keep_checkpoints: how many are kept.
        evaluate_every_steps: updates between two dev losses (default 1000).
        early_stopping_patience: stop after this many dev losses in a row that are no lower than the lowest.
    """

    log_every_steps: PositiveInt = 50
    save_every_steps: PositiveInt = 500
    keep_checkpoints: PositiveInt = 2
    evaluate_every_steps: PositiveInt | None = None
    early_stopping_patience: PositiveInt | None = None


@rules(without={"method=sample": ("top_k", "top_p", "temperature"), "method=beam": ("num_beams", "length_penalty")})
@dataclass(frozen=True)
class Draws(Decoding):
    """The queries.

    Attributes:
        method: draw, take the likeliest token each time, or search with beams.
    """

    num_queries: PositiveInt = 10
    max_length: PositiveInt = 32


@rules(without={"dev_split": ("dev_max_pairs", "evaluate_every_steps", "early_stopping_patience")}, beside={"init_from": ("size",)})
@like("de_jax.doc2query.generator_run.doc_query_pairs")
def doc2query_train(
    of: NewGenerator,
    log: TrainingLog,
    *,
    dev_split: str | None = None,
    dev_max_pairs: PositiveInt | None = None,
    num_steps: PositiveInt = 4000,
    optimizer: Literal["adafactor", "adamw"] = "adafactor",
    learning_rate: PositiveFloat = 1e-3,
    warmup_steps: NonNegativeInt = 0,
    **of_pairs: Any,
) -> Iterator[dict[str, Any]]:
    """Trains a query generator on (document, query) pairs.

    de-jax doc2query train --dataset_dirs data/beir/medquad --init_from=google-t5/t5-small --run_dir=runs/doc2query

    Repeat the command to continue after a stop. Without --init_from, the model starts from random parameters, with --size and the
    vocabulary of --tokenizer. Prints one JSON object.

    Args:
        dev_split: split of held-out pairs; the checkpoint with the lowest loss on them is kept in best/ (--step=best).
        dev_max_pairs: a sample of so many dev pairs (default 1000).
        num_steps: updates.
        optimizer: adafactor or adamw.
        learning_rate: peak learning rate; falls to 0 linearly.
        warmup_steps: updates until the peak.
    """
    start = time.monotonic()
    run = _first_run(of, max_query_length=of_pairs["max_query_length"], max_doc_length=of_pairs["max_doc_length"])
    data = doc_query_pairs(tokenizer=run.tokenizer, **of_pairs)
    dev = None
    if dev_split:
        of_training = ("split", "seed", "length_multiple")
        texts = {name: value for name, value in of_pairs.items() if name not in of_training}
        dev = held_out_pairs(tokenizer=run.tokenizer, split=dev_split, max_pairs=dev_max_pairs or DEV_PAIRS, **texts)
    trained, stopped = train_generator(
        run,
        data,
        optimization=Optimization(
            optimizer=OPTIMIZERS[optimizer],
            schedule=functools.partial(linear, warmup_steps=warmup_steps),
            num_steps=num_steps,
            learning_rate=learning_rate,
        ),
        logging=Logging(**{name: value for name, value in vars(log).items() if value is not None}),
        seed=of_pairs["seed"],
        is_fresh=not of.init_from,
        dev=dev,
    )
    yield {
        "run_dir": of.run_dir,
        "step": trained.step,
        "num_pairs": data.counts[""]["pairs"],
        "num_parameters": sum(leaf.size for leaf in jax.tree.leaves(trained.params)),
        "seconds": round(time.monotonic() - start, 1),
        "stopped": stopped,
    }
    if stopped == StopOnSignal.REASON:
        sys.exit(command.EXIT_STOPPED)


@like("de_jax.doc2query.generate.generate_to_dir")
def doc2query_generate(
    shards: Shards,
    line: Line,
    decoding: Draws,
    *,
    model: LocalPath,
    dataset_dir: LocalPath,
    out_dir: LocalPath,
    step: str | None = None,
    tokenizer: LocalPath | None = None,
    max_doc_length: PositiveInt | None = None,
    dtype: Dtype | None = None,
    skip_empty: bool = False,
    cache_dir: LocalPath = "",
    **options: Any,
) -> Any:
    """Generates queries for every document of a corpus.

    de-jax doc2query generate --model=runs/doc2query --dataset_dir=data/beir/scifact --out_dir=queries/scifact --num_queries=20

    Repeat the command to continue after a stop. Prints one JSON object.

    Args:
        model: a run of doc2query train, a folder of Hugging Face's T5 or a name on the hub.
        tokenizer: vocabulary, if the model has none.
        dtype: type of matrix products; default the model's.
    """
    if GENERATOR_RUN.is_in(Path(model)):
        shards.check_step(step)
    part = shards.part()
    if (found := shards.by_engine(line)) is not None:
        return found
    corpus = beir.find_file(dataset_dir, "corpus")
    run = generators.read(model, step=step, tokenizer=load_tokenizer(tokenizer) if tokenizer else None)
    run = run._replace(max_doc_length=max_doc_length or run.max_doc_length)
    if dtype:
        run = run._replace(model=dataclasses.replace(run.model, t5=dataclasses.replace(run.model.t5, dtype=dtype)))
    store = cached_token_store(corpus, run.tokenizer, store_dir(cache_dir), skip_empty=skip_empty)
    start, done = time.monotonic(), []
    with progress_bar(total=store.num_texts, unit="doc", desc="generate") as bar:

        def progress(num_docs: int) -> None:
            done.append(num_docs)
            bar.update(num_docs)
            speed = sum(done) * decoding.num_queries / (time.monotonic() - start)
            bar.set_postfix({"queries/s": f"{speed:.4g}"}, refresh=False)

        about = {"corpus": {"name": corpus.parent.name, "sha256": reading.sha256_of(corpus)}}
        generate_to_dir(run, store, out_dir, decoding, **options, about=about, part=part, progress=progress)
    if part:
        return {"shard": str(part)}
    return {"out_dir": out_dir, "num_docs": store.num_texts, "seconds": round(time.monotonic() - start, 1)}


def doc2query_import(
    *,
    predictions: tuple[LocalPath, ...],
    dataset_dir: LocalPath,
    out_dir: LocalPath,
    docs_per_part: PositiveInt = 4096,
    skip_empty: bool = False,
) -> dict[str, Any]:
    """Imports predictions that others released.

    de-jax doc2query import --predictions predicted_queries_*.txt* --dataset_dir=data/msmarco --out_dir=queries/msmarco

    Prints one JSON object.

    Args:
        predictions: files: .jsonl, .tsv, or docTTTTTquery's text files.
        docs_per_part: documents per part; a stopped command continues with the next part.
    """
    corpus = beir.find_file(dataset_dir, "corpus")
    about = {"corpus": {"name": corpus.parent.name, "sha256": reading.sha256_of(corpus)}}
    options = {"docs_per_part": docs_per_part, "skip_empty": skip_empty}
    num_docs = write_released(list(predictions), corpus, out_dir, **options, about=about)
    return {"out_dir": out_dir, "num_docs": num_docs}


def _first_run(of: NewGenerator, **lengths: int) -> GeneratorRun:
    tokenizer = load_tokenizer(of.tokenizer) if of.tokenizer else None
    if of.init_from:
        run = generators.read(of.init_from, tokenizer=tokenizer)
        model = run.model
    elif tokenizer is None:
        raise InputError("--tokenizer is missing; give T5's spiece.model, or --init_from with a model that brings its own.")
    else:
        vocab_size = -(-tokenizer.vocab_size // 128) * 128  # T5's own 32,000 pieces have 32,128 rows
        model = generator.Generator(dataclasses.replace(SIZES[of.size or "tiny"], vocab_size=vocab_size))
        run = GeneratorRun(Path(), 0, model, {}, tokenizer, 0, 0)
    t5 = dataclasses.replace(model.t5, dtype=of.dtype, dropout_rate=of.dropout_rate, remat=of.remat)
    return run._replace(source=Path(of.run_dir), model=dataclasses.replace(model, t5=t5), **lengths)
