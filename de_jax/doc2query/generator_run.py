"""A generator's run folder: training it, continuing it, loading it.

<run_dir>/generator.json      the model, its tokenizer's fingerprint and the maximum lengths
          training.json       how it is trained
          tokenizers/, checkpoints/<step>, metrics.jsonl, tensorboard/   as in every run (`run`)
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax

from de_jax.data.batches.pair_batches import prefetch
from de_jax.data.text.tokenizing import Tokenizer, load_tokenizer
from de_jax.files import schema
from de_jax.files.outputs import write_json
from de_jax.models.generator import Generator
from de_jax.training.hooks.faults import NonFiniteError
from de_jax.training.hooks.preemption import StopOnTerminate
from de_jax.training.mesh import sharding, sharding_rules
from de_jax.training.optim import optimizer as optimizers
from de_jax.training.run import model_schema, run_log
from de_jax.training.run.checkpoint import Checkpoints, SaveCheckpoints
from de_jax.training.run.fit import fit
from de_jax.training.run.run_folder import (
    CHECKPOINTS_DIR,
    check_same,
    keep_tokenizer,
    only_trainer,
    restore_params,
    tokenizer_dir,
)
from de_jax.training.step.train_step import init_state, update_step
from de_jax.types import Batches, InputError, Params

FORMAT = 1
DESCRIPTION_FILE, PLAN_FILE = "generator.json", "training.json"
DESCRIPTION = schema.record(
    {
        "format": schema.constant(FORMAT),
        "model": model_schema.GENERATOR,
        "tokenizer": schema.file_name,
        "max_query_length": schema.integer(1, schema.MAX_SIZE),
        "max_doc_length": schema.integer(1, schema.MAX_SIZE),
    }
)
OPTIMIZERS: dict[str, optimizers.OptimizerFn] = {"adafactor": optimizers.adafactor, "adamw": optimizers.adamw}


class GeneratorRun(NamedTuple):
    """A generator with all that is needed to write queries with it."""

    source: Path
    step: int
    model: Generator
    params: Params
    tokenizer: Tokenizer
    max_query_length: int  # tokens
    max_doc_length: int  # tokens


class Plan(NamedTuple):
    """How a generator is trained; docTTTTTquery: 1e-3, constant (Nogueira and Lin 2019)."""

    num_steps: int
    batch_size: int
    learning_rate: float = 1e-3
    warmup_steps: int = 0
    optimizer: str = "adafactor"
    seed: int = 0
    log_every_steps: int = 50
    save_every_steps: int = 500
    keep_checkpoints: int = 2


def train_generator(run: GeneratorRun, batches: Batches, plan: Plan, *, is_fresh: bool = False) -> tuple[GeneratorRun, str | None]:
    """Trains to the plan's last step, from the newest checkpoint of the run's folder if there is one.

    Args:
        run: the folder, the model and where it starts; its `params` are not read where `is_fresh`.
        batches: padded (document, query) pairs.
        plan: the settings.
        is_fresh: start from random parameters.

    Returns:
        The trained run, and why it stopped before its end, if it did.

    Raises:
        InputError: the folder holds another run, another trainer is at work there, or a loss that is not finite.
    """
    mesh = sharding.make_mesh()
    sharding.check_batch_size(plan.batch_size, mesh)
    with only_trainer(run.source):
        return _train(run, batches, plan, mesh, is_fresh=is_fresh)


def _train(
    run: GeneratorRun, batches: Batches, plan: Plan, mesh: jax.sharding.Mesh, *, is_fresh: bool
) -> tuple[GeneratorRun, str | None]:
    describe(run)
    _keep_plan(run.source, plan)
    schedule = optimizers.linear(peak=plan.learning_rate, num_steps=plan.num_steps, warmup_steps=plan.warmup_steps)

    def make_tx(params: Params) -> Any:
        return optimizers.make_optimizer(OPTIMIZERS[plan.optimizer], schedule, params)

    def init() -> Any:
        return init_state(run.model, make_tx, jax.random.key(plan.seed))

    abstract = jax.eval_shape(init)
    shardings = sharding_rules.state_shardings(abstract, mesh)
    like = sharding_rules.with_shardings(abstract, shardings)
    step_fn = sharding_rules.compiled_step(update_step(run.model.loss, make_tx(abstract.params)), shardings, mesh)
    with (
        contextlib.closing(Checkpoints(run.source / CHECKPOINTS_DIR, keep=plan.keep_checkpoints)) as checkpoints,
        StopOnTerminate() as terminate,
        _explained(run.source),
    ):
        latest = checkpoints.latest_step()
        if latest is not None:
            state = checkpoints.restore(latest, like)
        else:
            state = jax.jit(init, out_shardings=shardings)()
            if not is_fresh:
                state = state._replace(params=jax.device_put(run.params, shardings.params))
        start = int(state.step)
        checkpoints.remove_old()
        log = _log(run.source, plan, schedule, start, checkpoints)
        save = SaveCheckpoints(
            checkpoints,
            every_steps=plan.save_every_steps,
            num_steps=plan.num_steps,
            beside=lambda: {"log": log.unfinished()},
            asked_to_stop=terminate.reason,
        )
        placed = lambda first: sharding.placed(prefetch(batches(first)), mesh)  # noqa: E731
        state, stop = fit(step_fn, state, placed, num_steps=plan.num_steps, hooks=[log, save])
    return run._replace(step=int(state.step), params=state.params), stop.reason if stop else None


def describe(run: GeneratorRun) -> None:
    """Writes `generator.json` and the tokenizer, or checks that an existing description says the same.

    Raises:
        InputError: the folder holds another run.
    """
    description = {
        "format": FORMAT,
        "model": run.model.to_json(),
        "tokenizer": run.tokenizer.fingerprint,
        "max_query_length": run.max_query_length,
        "max_doc_length": run.max_doc_length,
    }
    file = run.source / DESCRIPTION_FILE
    if file.is_file():
        there, model = _read_description(run.source)
        return check_same(run.source, {**there, "model": model.to_json()}, description)
    keep_tokenizer(run.source, run.tokenizer)
    write_json(file, description)


def is_generator_run(folder: Path) -> bool:
    """Whether a folder is the run of a generator."""
    return (folder / DESCRIPTION_FILE).is_file()


def load_generator(run_dir: str | Path, step: int | None = None) -> GeneratorRun:
    """A generator with the parameters of one checkpoint, by default the newest, on the first device.

    Raises:
        InputError: no such run there, no such checkpoint, or a damaged one.
    """
    run_dir = Path(run_dir)
    if not is_generator_run(run_dir):
        raise InputError(f"{run_dir} holds no {DESCRIPTION_FILE}; give a folder that de-jax doc2query train made.")
    description, model = _read_description(run_dir)
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


def _read_description(run_dir: Path) -> tuple[dict[str, Any], Generator]:
    """What `generator.json` says, with the model that it describes."""
    file = run_dir / DESCRIPTION_FILE
    description: dict[str, Any] = schema.read(file, DESCRIPTION)
    return description, model_schema.built(file, Generator.from_json, description["model"])


def _keep_plan(run_dir: Path, plan: Plan) -> None:
    """Writes the settings beside the description; warns where the run goes on with others than it had."""
    file = run_dir / PLAN_FILE
    before = schema.read(file, schema.record({})) if file.is_file() else plan._asdict()
    changed = [f"{name} = {value!r}" for name, value in plan._asdict().items() if before.get(name) != value]
    if changed:
        warnings.warn(f"{run_dir} continues with other settings than it had: {', '.join(changed)}.", stacklevel=3)
    write_json(file, plan._asdict())


def _log(run_dir: Path, plan: Plan, schedule: optimizers.Schedule, start: int, checkpoints: Checkpoints) -> run_log.LogMetrics:
    sinks = [
        run_log.jsonl_sink(run_dir, start),
        run_log.tensorboard_sink(run_dir, start),
        run_log.progress_sink(plan.num_steps, start),
    ]
    return run_log.LogMetrics(
        sinks,
        every_steps=plan.log_every_steps,
        num_steps=plan.num_steps,
        pairs_per_step=plan.batch_size,
        schedule=schedule,
        begun=checkpoints.beside(start).get("log") if start else None,
    )


@contextlib.contextmanager
def _explained(run_dir: Path) -> Iterator[None]:
    try:
        yield
    except NonFiniteError as error:
        raise InputError(f"{error}, in {run_dir}; continue with a lower learning rate.") from None
