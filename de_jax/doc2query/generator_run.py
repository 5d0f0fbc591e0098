"""A generator's run folder: training it, continuing it, loading it.

<run_dir>/generator.json      the model, its tokenizer's fingerprint and the maximum lengths
          training.json       how it is trained
          tokenizers/, checkpoints/<step>, metrics.jsonl, tensorboard/   as in every run (`run`)
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from de_jax.data.sources.training_set import TrainingSet
from de_jax.data.text.tokenizing import Tokenizer
from de_jax.doc2query.doc_query_pairs import HeldOutPairs
from de_jax.files import reading
from de_jax.files.folders import Kind
from de_jax.files.outputs import write_json
from de_jax.models.generator import DESCRIPTION, Generator
from de_jax.settings import PositiveInt, Record, bound, file_name, name_of
from de_jax.training.hooks.faults import Explanation, pair_name
from de_jax.training.mesh import sharding
from de_jax.training.run import run_folder
from de_jax.training.run.language_model import restored, train_language_model
from de_jax.training.run.run_folder import kept_tokenizer, only_trainer
from de_jax.training.run.settings import Logging, Optimization
from de_jax.types import Array, Batch, InputError, Params

SETTINGS_FILE = "training.json"
LOGGING = ("log_every_steps", "save_every_steps", "keep_checkpoints", "evaluate_every_steps", "early_stopping_patience")
GENERATOR_RUN = Kind(
    "generator",
    Record({"model": DESCRIPTION, "tokenizer": file_name, "max_query_length": PositiveInt, "max_doc_length": PositiveInt}),
    make="give a folder that de-jax doc2query train made",
    otherwise="use the options it was started with, or another run_dir",
    file="generator.json",
    is_bare=True,
)


class GeneratorRun(NamedTuple):
    """A generator with all that is needed to write queries with it."""

    source: Path
    step: int
    model: Generator
    params: Params
    tokenizer: Tokenizer
    max_query_length: int  # tokens
    max_doc_length: int  # tokens


def train_generator(
    run: GeneratorRun,
    data: TrainingSet,
    *,
    optimization: Optimization,
    logging: Logging,
    seed: int = 0,
    is_fresh: bool = False,
    dev: HeldOutPairs | None = None,
) -> tuple[GeneratorRun, str | None]:
    """Trains to the last step, from the newest checkpoint of the run's folder if there is one.

    Args:
        run: the folder, the model and where it starts; its `params` are not read where `is_fresh`.
        data: the training pairs.
        optimization: docTTTTTquery: Adafactor, 1e-3, constant (Nogueira and Lin 2019).
        logging: `evaluate_every_steps` and `early_stopping_patience` are of `dev`; `collapse_alarm` is of embeddings.
        dev: pairs whose loss chooses the best checkpoint, and ends the run where it no longer falls.

    Returns:
        The trained run, and why it stopped before its end, if it did.
    """

    def start_from(fresh: Params) -> Params:
        if is_fresh:
            return fresh
        shardings = jax.tree.map(lambda leaf: leaf.sharding, fresh)
        # A copy: the first update takes its arrays, and a fault may ask for the first parameters again.
        copied = jax.jit(lambda params: jax.tree.map(jnp.copy, params), out_shardings=shardings)
        placed: Params = copied(jax.device_put(run.params, shardings))
        return placed

    if logging.early_stopping_patience and not dev:
        raise InputError("early_stopping_patience needs the loss on held-out pairs; give `dev`.")
    mesh = sharding.make_mesh()
    sharding.check_batch_size(data.batch_size, mesh)
    with only_trainer(run.source):
        describe(run)
        _keep_settings(run.source, data.batch_size, optimization, logging, seed, dev)
        state, stop = train_language_model(
            run.source,
            run.model,
            batches=data.batches,
            batch_size=data.batch_size,
            optimization=optimization,
            logging=logging,
            mesh=mesh,
            explanation=_explanation(run, data),
            seed=seed,
            start_from=start_from,
            dev_loss=functools.partial(mean_loss, run.model, dev.batches, mesh) if dev else None,
        )
    return run._replace(step=int(state.step), params=state.params), stop.reason if stop else None


def mean_loss(model: Generator, batches: Sequence[Batch], mesh: jax.sharding.Mesh, params: Params) -> float:
    """The mean negative log-likelihood of all tokens of these queries, in nats, without dropout."""
    sums = [(float(_loss(model, params, sharding.place(batch, mesh))), int((batch.query != 0).sum())) for batch in batches]
    return sum(loss * count for loss, count in sums) / sum(count for _, count in sums)


@functools.partial(jax.jit, static_argnums=0)
def _loss(model: Generator, params: Params, batch: Batch) -> Array:
    return model.loss(params, batch)[0]


def _explanation(run: GeneratorRun, data: TrainingSet) -> Explanation:
    return Explanation(
        is_finite=functools.partial(has_finite_logits, run.model),
        given="scores of tokens",
        lower="--learning_rate",
        memory={"--batch_size": data.batch_size, "--max_doc_length": run.max_doc_length, "--remat": run.model.t5.remat},
        devices="",
        num_steps="--num_steps",
        name=functools.partial(pair_name, data.query_ids, data.doc_ids),
    )


def has_finite_logits(model: Generator, params: Params, batch: Batch) -> Array:
    """`Explanation.is_finite` of a generator."""
    return jnp.isfinite(model.logits(params, batch.doc, batch.query)).all(axis=(1, 2))


def describe(run: GeneratorRun) -> None:
    """As `run_folder.describe`, for the run of a generator."""
    description = {
        "model": run.model.to_json(),
        "tokenizer": run.tokenizer.fingerprint,
        "max_query_length": run.max_query_length,
        "max_doc_length": run.max_doc_length,
    }
    run_folder.describe(GENERATOR_RUN, run.source, description, Generator.from_json, [run.tokenizer])


def load_generator(run_dir: str | Path, step: int | str | None = None, *, only_sizes: bool = False) -> GeneratorRun:
    """A generator with the parameters of a checkpoint: the newest, `step`, or for "best" that of the lowest dev loss."""
    run_dir = Path(run_dir)
    description, model = run_folder.described(GENERATOR_RUN, run_dir, Generator.from_json)
    found, params = restored(run_dir, step, model, only_sizes=only_sizes)
    return GeneratorRun(
        source=run_dir,
        step=found,
        model=model,
        params=params,
        tokenizer=kept_tokenizer(run_dir, description["tokenizer"]),
        max_query_length=description["max_query_length"],
        max_doc_length=description["max_doc_length"],
    )


def _keep_settings(
    run_dir: Path, batch_size: int, optimization: Optimization, logging: Logging, seed: int, dev: HeldOutPairs | None
) -> None:
    """Writes the settings beside the description; warns if a continued run has other settings."""
    settings = {
        "num_steps": optimization.num_steps,
        "batch_size": batch_size,
        "learning_rate": optimization.learning_rate,
        "warmup_steps": bound(cast(Any, optimization.schedule), "warmup_steps"),
        "optimizer": name_of(optimization.optimizer),
        "seed": seed,
        **{name: getattr(logging, name) for name in LOGGING},
        "dev": dev.about if dev else None,
    }
    file = run_dir / SETTINGS_FILE
    before = reading.read_json(file, Record({})) if file.is_file() else settings
    changed = [f"{name} = {value!r}" for name, value in settings.items() if before.get(name, value) != value]
    if changed:
        warnings.warn(f"{run_dir} continues with other settings than it had: {', '.join(changed)}.", stacklevel=3)
    write_json(file, settings)
