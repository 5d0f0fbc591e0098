"""A generator's run folder: training it, continuing it, loading it.

<run_dir>/generator.json      the model, its tokenizer's fingerprint and the maximum lengths
          training.json       how it is trained
          tokenizers/, checkpoints/<step>, metrics.jsonl, tensorboard/   as in every run (`run`)
"""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

from de_jax.data.text.tokenizing import Tokenizer, load_tokenizer
from de_jax.doc2query.doc_query_pairs import DocQueryPairs
from de_jax.files import schema
from de_jax.files.kind import Kind
from de_jax.files.outputs import write_json
from de_jax.models.generator import Generator
from de_jax.settings import bound, name_of
from de_jax.training.hooks.faults import Explanation
from de_jax.training.mesh import sharding, sharding_rules
from de_jax.training.run import model_schema, run_folder
from de_jax.training.run.loop import Training, session
from de_jax.training.run.run_folder import only_trainer, restore_params, tokenizer_dir
from de_jax.training.run.settings import Logging, Optimization
from de_jax.training.step import grad_norms
from de_jax.training.step.train_step import init_state, update_step
from de_jax.types import Array, Batch, Params, TrainState

SETTINGS_FILE = "training.json"
GENERATOR_RUN = Kind(
    "generator",
    {
        "model": model_schema.GENERATOR,
        "tokenizer": schema.file_name,
        "max_query_length": schema.integer(1, schema.MAX_SIZE),
        "max_doc_length": schema.integer(1, schema.MAX_SIZE),
    },
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
    data: DocQueryPairs,
    *,
    optimization: Optimization,
    logging: Logging,
    seed: int = 0,
    is_fresh: bool = False,
) -> tuple[GeneratorRun, str | None]:
    """Trains to the last step, from the newest checkpoint of the run's folder if there is one.

    Args:
        run: the folder, the model and where it starts; its `params` are not read where `is_fresh`.
        data: the training pairs.
        optimization: docTTTTTquery: Adafactor, 1e-3, constant (Nogueira and Lin 2019).
        logging: `evaluate_every_steps` and `collapse_alarm` are of embeddings, and have no effect.
        seed: of fresh parameters and of dropout.
        is_fresh: start from random parameters.

    Returns:
        The trained run, and why it stopped before its end, if it did.

    Raises:
        InputError: the folder holds another run, another trainer is at work there, or what `loop.session` raises.
    """

    def init() -> TrainState:
        return init_state(run.model, optimization.tx, jax.random.key(seed))

    def start_from(fresh: Params) -> Params:
        if is_fresh:
            return fresh
        shardings = jax.tree.map(lambda leaf: leaf.sharding, fresh)
        # A copy: the first update takes its arrays, and a fault may ask for the first parameters again.
        copied = jax.jit(lambda params: jax.tree.map(jnp.copy, params), out_shardings=shardings)
        placed: Params = copied(jax.device_put(run.params, shardings))
        return placed

    mesh = sharding.make_mesh()
    sharding.check_batch_size(data.batch_size, mesh)
    with only_trainer(run.source):
        _describe(run)
        _keep_settings(run.source, data.batch_size, optimization, logging, seed)
        abstract = jax.eval_shape(init)
        group_norms = grad_norms.group_norms(abstract.params, logging.grad_norm_groups)
        training = Training(
            init=init,
            start_from=start_from,
            step=update_step(run.model.loss, optimization.tx(abstract.params), group_norms),
            like=sharding_rules.with_shardings(abstract, sharding_rules.state_shardings(abstract, mesh)),
            mesh=mesh,
            batches=data.batches,
            batch_size=data.batch_size,
            optimization=optimization,
            logging=logging,
            explanation=_explanation(run, data),
        )
        with session(training, run.source) as begun:
            log = begun.log(begun.sinks())
            state, stop = begun.fit([log, *begun.profile(), begun.save(log)])
    return run._replace(step=int(state.step), params=state.params), stop.reason if stop else None


def _explanation(run: GeneratorRun, data: DocQueryPairs) -> Explanation:
    return Explanation(
        is_finite=functools.partial(_has_finite_logits, run.model),
        given="scores of tokens",
        lower="--learning_rate",
        memory={"--batch_size": data.batch_size, "--max_doc_length": run.max_doc_length, "--remat": run.model.t5.remat},
        devices="",
        num_steps="--num_steps",
        query_ids=data.query_ids,
        doc_ids=data.doc_ids,
    )


def _has_finite_logits(model: Generator, params: Params, batch: Batch) -> Array:
    return jnp.isfinite(model.logits(params, batch.doc, batch.query)).all(axis=(1, 2))


def _describe(run: GeneratorRun) -> None:
    description = {
        "model": run.model.to_json(),
        "tokenizer": run.tokenizer.fingerprint,
        "max_query_length": run.max_query_length,
        "max_doc_length": run.max_doc_length,
    }
    run_folder.describe(GENERATOR_RUN, run.source, description, Generator.from_json, [run.tokenizer])


def load_generator(run_dir: str | Path, step: int | None = None) -> GeneratorRun:
    """A generator with the parameters of one checkpoint, by default the newest, on the first device.

    Raises:
        InputError: no such run there, no such checkpoint, or a damaged one.
    """
    run_dir = Path(run_dir)
    description, model = model_schema.described(GENERATOR_RUN, run_dir, Generator.from_json)
    on_device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = jax.eval_shape(model.init, jax.eval_shape(lambda: jax.random.key(0)))
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=on_device), abstract)
    found, params = restore_params(run_dir, step, like)
    return GeneratorRun(
        source=run_dir,
        step=found,
        model=model,
        params=params,
        tokenizer=load_tokenizer(tokenizer_dir(run_dir, description["tokenizer"])),
        max_query_length=description["max_query_length"],
        max_doc_length=description["max_doc_length"],
    )


def _keep_settings(run_dir: Path, batch_size: int, optimization: Optimization, logging: Logging, seed: int) -> None:
    """Writes the settings beside the description; warns if a continued run has other settings."""
    settings = {
        "num_steps": optimization.num_steps,
        "batch_size": batch_size,
        "learning_rate": optimization.learning_rate,
        "warmup_steps": bound(optimization.schedule, "warmup_steps"),
        "optimizer": name_of(optimization.optimizer),
        "seed": seed,
        **{name: getattr(logging, name) for name in ("log_every_steps", "save_every_steps", "keep_checkpoints")},
    }
    file = run_dir / SETTINGS_FILE
    before = schema.read(file, schema.record({})) if file.is_file() else settings
    changed = [f"{name} = {value!r}" for name, value in settings.items() if before.get(name) != value]
    if changed:
        warnings.warn(f"{run_dir} continues with other settings than it had: {', '.join(changed)}.", stacklevel=3)
    write_json(file, settings)
