"""Trains a dual encoder from a gin recipe; the same command continues a run that was stopped.

de-jax train --gin_file=recipes/samtone_query.gin --gin.beir_pairs.dataset_dir=data/scifact \\
    --gin.beir_pairs.tokenizer=data/spiece.model --run_dir=runs/samtone
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gin
import jax
import numpy as np

from de_jax import command, configurables
from de_jax.data.batches import prefetch
from de_jax.data.files import atomic_file
from de_jax.data.passages import PassageStore
from de_jax.data.training_set import DevSet, TrainingSet
from de_jax.evaluation import metrics as metrics_
from de_jax.interop.fine_tuning import InitFrom, initial_params
from de_jax.models.dual_encoder import DualEncoder
from de_jax.retrieval import encode, maxp
from de_jax.retrieval.index import ExactIndex
from de_jax.training import distributed, faults, grad_norms, run_log, sharding, sharding_rules
from de_jax.training.checkpoint import Checkpoints, SaveCheckpoints
from de_jax.training.chunked import ChunkedModel
from de_jax.training.dev_evaluation import EvaluateOnDev
from de_jax.training.fit import Hook, fit
from de_jax.training.follow_negatives import FollowNegatives
from de_jax.training.optimizer import OptimizerFn, Schedule, make_optimizer
from de_jax.training.preemption import StopOnTerminate
from de_jax.training.profile import ProfileSteps
from de_jax.training.run import BEST_DIR, CHECKPOINTS_DIR, Run, describe_run
from de_jax.training.train_step import TrainStep, init_state, make_train_step
from de_jax.types import Batch, Batches, InputError, LossFn, Params, TrainState


class Recipe:
    """What gin configures under the name `train`; nothing is read or computed before a method is called.

    Args:
        model: both towers and what they share.
        loss: one of `de_jax.losses`, or a function of the same type.
        data: opens the training set, given `host_index`, `num_hosts`, `row_multiple` and `run_dir`.
        optimizer: `@adafactor`, `@adamw`, `@lamb`, `@ance_lamb` or a function of the same type.
        schedule: `@linear`, `@cosine` or `@rsqrt`; it is told the peak and the number of steps.
        mesh: gives the devices to train on.
        sharding_rules: mesh axes by pattern over parameter paths, beside `sharding_rules.DEFAULT_RULES`, such as
            {".*/mlp/wo/kernel": ("tensor", None)}.
        num_steps: updates of the whole run.
        learning_rate: the schedule's peak.
        num_chunks: how many pieces the towers take a batch in, to save memory; the loss sees all of it.
        clip_norm: largest global gradient norm; None for no limit.
        learning_rate_factors: factor by pattern over parameter paths, such as {"shared/projection/.*": 10.0}.
        frozen: patterns of parameters that keep their values.
        init_from: a run or a pretrained model whose parameters are the first ones here (PAIR's second stage), as
            `interop.checkpoints.read` knows them; or {"query": one, "doc": another}.
        init_new: patterns of parameters that start fresh although there is an `init_from`.
        seed: of the initial parameters and of dropout.
        grad_norm_groups: logs the norm of the gradient before clipping by group, see `grad_norms`: "thirds", or a pattern over
            parameter paths by name, such as {"bottom": ".*/layers_[0-3]/.*"}; None logs that of the whole only.
        log_every_steps: updates that one line of the log averages.
        save_every_steps: updates between checkpoints.
        evaluate_every_steps: updates between evaluations on the dev set.
        follow_every_steps: updates between two looks for newer hard negatives; None keeps those that the run began with.
        keep_checkpoints: how many of the newest stay; the best by the dev score is kept besides.
        profile_steps: (first, count): traces `count` updates from update `first` on, into `<run_dir>/profile`.
    """

    def __init__(
        self,
        *,
        model: DualEncoder,
        loss: LossFn,
        data: Callable[..., TrainingSet],
        optimizer: OptimizerFn,
        schedule: Callable[..., Schedule],
        mesh: Callable[..., jax.sharding.Mesh] = sharding.make_mesh,
        sharding_rules: sharding_rules.Rules | None = None,
        num_steps: int = 20000,
        learning_rate: float = 1e-3,
        num_chunks: int = 1,
        clip_norm: float | None = 1.0,
        learning_rate_factors: Mapping[str, float] | None = None,
        frozen: Sequence[str] = (),
        init_from: InitFrom | None = None,
        init_new: Sequence[str] = (),
        seed: int = 0,
        grad_norm_groups: Mapping[str, str] | str | None = None,
        log_every_steps: int = 50,
        save_every_steps: int = 1000,
        evaluate_every_steps: int = 1000,
        follow_every_steps: int | None = None,
        keep_checkpoints: int = 2,
        profile_steps: tuple[int, int] | None = None,
    ) -> None:
        if not isinstance(model, DualEncoder):
            raise InputError(f"train.model is {model!r}; it must be @DualEncoder().")
        for name, value in {"loss": loss, "data": data, "optimizer": optimizer, "schedule": schedule, "mesh": mesh}.items():
            if not callable(value):
                raise InputError(f"train.{name} is {value!r}; it must be a reference such as @{value}, without parentheses.")
        self.model, self.loss, self.data, self.mesh = model, loss, data, mesh
        self.trained = ChunkedModel(model, num_chunks) if num_chunks > 1 else model
        self.num_chunks, self.sharding_rules = num_chunks, sharding_rules
        self.schedule = schedule(peak=learning_rate, num_steps=num_steps)
        self.num_steps, self.seed, self.grad_norm_groups = num_steps, seed, grad_norm_groups
        self.init_from, self.init_new = init_from, init_new
        self.make_tx = functools.partial(
            make_optimizer,
            optimizer,
            self.schedule,
            clip_norm=clip_norm,
            learning_rate_factors=learning_rate_factors,
            frozen=frozen,
        )
        self.log_every_steps, self.save_every_steps = log_every_steps, save_every_steps
        self.evaluate_every_steps, self.keep_checkpoints = evaluate_every_steps, keep_checkpoints
        self.follow_every_steps, self.profile_steps = follow_every_steps, profile_steps

    def init(self) -> TrainState:
        """The state before the first step."""
        return init_state(self.model, self.make_tx, jax.random.key(self.seed))

    def train_step(self, params: Params) -> TrainStep:
        """One update of these parameters, arrays or their shapes; see `training.train_step`."""
        group_norms = grad_norms.group_norms(params, self.grad_norm_groups)
        return make_train_step(self.trained, self.loss, self.make_tx(params), group_norms)

    def memory_settings(self, batch_size: int) -> dict[str, Any]:
        """The settings that decide how much memory a step takes, by name."""
        settings = {
            f"{self.data.__name__}.batch_size": batch_size,
            "train.num_chunks": self.num_chunks,
            f"{type(self.model.doc.encoder).__name__}.remat": getattr(self.model.doc.encoder, "remat", None),
        }
        with contextlib.suppress(KeyError):  # a loss that is never computed block by block
            settings[f"{self.loss.__name__}.block_size"] = configurables.setting(self.loss, "block_size")
        return settings

    def check(self) -> TrainState:
        """The shapes of the state, after a step was traced without computing anything: what is wrong here raises here."""
        state = jax.eval_shape(self.init)
        num_rows = 8 * self.num_chunks
        shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, np.int32)  # noqa: E731
        ids, doc = shape(num_rows), shape(num_rows, *self._doc_shape())
        batch = Batch(shape(num_rows, 8), doc, ids, ids, **self._mined_shapes(num_rows))
        try:
            jax.eval_shape(self.train_step(state.params), state, batch)
        except ValueError as error:
            raise InputError(str(error)) from error
        return state

    def _doc_shape(self) -> tuple[int, ...]:
        """A document of a batch: its tokens, or those of its passages."""
        with contextlib.suppress(KeyError):  # a source of batches that knows no passages
            if (most := configurables.setting(self.data, "max_passages")) > 1:
                return most, 8
        return (8,)

    def _mined_shapes(self, num_rows: int) -> dict[str, Any]:
        """The hard negatives of a batch as shapes, where the data will have some."""
        shapes: dict[str, Any] = {}
        with contextlib.suppress(KeyError):  # a source of batches that knows none
            if configurables.setting(self.data, "negatives_dir"):
                for name, ids in (("neg_docs", "neg_doc_ids"), ("neg_queries", "neg_query_ids")):
                    if number := configurables.setting(self.data, f"num_{name}"):
                        text = self._doc_shape() if name == "neg_docs" else (8,)
                        shapes[name] = jax.ShapeDtypeStruct((num_rows, number, *text), np.int32)
                        shapes[ids] = jax.ShapeDtypeStruct((num_rows, number), np.int32)
        return shapes


def train(recipe: Recipe, run_dir: Path) -> dict[str, Any]:
    """Trains to the recipe's last step, from the newest checkpoint in `run_dir` if there is one; returns a summary."""
    start = time.monotonic()
    abstract, mesh = recipe.check(), recipe.mesh()  # what is wrong in the recipe shows before any text is tokenized
    shardings = sharding_rules.state_shardings(abstract, mesh, recipe.sharding_rules)
    host_index, num_hosts = sharding.host_share(mesh)
    row_multiple = sharding.num_row_shares(mesh) * recipe.num_chunks
    data = recipe.data(host_index=host_index, num_hosts=num_hosts, row_multiple=row_multiple, run_dir=str(run_dir))
    sharding.check_batch_size(data.batch_size, mesh, recipe.num_chunks)
    _check_texts_fit(recipe.model, data)
    configurables.check_all_used()
    _describe(recipe, run_dir, data)
    with (
        contextlib.closing(Checkpoints(run_dir / CHECKPOINTS_DIR, keep=recipe.keep_checkpoints)) as checkpoints,
        contextlib.closing(Checkpoints(run_dir / BEST_DIR, keep=1)) as best,
        StopOnTerminate() as terminate,
    ):
        like = sharding_rules.with_shardings(abstract, shardings)
        step_fn = sharding_rules.compiled_step(recipe.train_step(abstract.params), shardings, mesh)
        with _faults_explained(recipe, data, checkpoints, mesh, like, step_fn):
            state = _first_state(recipe, like, checkpoints)
            checkpoints.remove_old()
            best.remove_old()
            hooks = _hooks(recipe, run_dir, data, checkpoints, best, int(state.step), terminate)
            state, stop = fit(step_fn, state, _on_mesh(data.batches, mesh), num_steps=recipe.num_steps, hooks=hooks)
    return {
        "run_dir": str(run_dir),
        "step": int(state.step),
        "seconds": round(time.monotonic() - start, 1),
        "num_parameters": sum(leaf.size for leaf in jax.tree.leaves(state.params)),
        "stopped": stop.reason if stop else None,
    }


def main(argv: list[str] | None = None) -> None:
    """The command; prints a JSON object when the run is complete."""
    args, bindings = _parse_args(argv)
    process = {name: getattr(args, name) for name in ("coordinator_address", "num_processes", "process_id")}
    if distributed.is_asked_for(automatic=args.distributed, **process):
        command.go_on_in_child()
        distributed.join(**process, lost_after_seconds=args.lost_after_seconds)
    recipe = read_recipe(args.gin_file, bindings)
    if args.dry_run:
        params = recipe.check().params
        print(json.dumps({"num_parameters": sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(params))}))
    else:
        if not args.run_dir:
            raise InputError("--run_dir is missing; name the folder that checkpoints and logs go to.")
        summary = train(recipe, Path(args.run_dir))
        if distributed.is_first():
            print(json.dumps(summary))
        if summary["stopped"] == StopOnTerminate.REASON:
            sys.exit(command.EXIT_STOPPED)


def parse_with_settings(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """The arguments that `parser` knows, and the recipe's settings, written --gin.NAME=VALUE, as "NAME=VALUE"."""
    parser.epilog = "--gin.NAME=VALUE sets any setting of the recipe, for example --gin.train.num_steps=100."
    args, rest = parser.parse_known_args(argv)
    for argument in rest:
        if not argument.startswith("--gin."):
            parser.error(f"unknown argument {argument}; settings are written --gin.name=value")
    return args, [argument.removeprefix("--gin.") for argument in rest]


def read_recipe(gin_files: Sequence[str], bindings: Sequence[str] = ()) -> Recipe:
    """The recipe that gin files and `name=value` settings describe.

    Raises:
        InputError: an unknown name, a missing setting, or values that do not fit together.
    """
    configurables.register(("train", Recipe))
    configurables.parse(gin_files, bindings)
    try:
        return gin.get_configurable("train")()
    except InputError:
        raise
    except (TypeError, RuntimeError, ValueError) as error:
        raise InputError(f"the recipe cannot be used: {' '.join(str(error).split())}") from error


def _describe(recipe: Recipe, run_dir: Path, data: TrainingSet) -> None:
    describe_run(
        run_dir,
        model=recipe.model,
        query_tokenizer=data.query_tokenizer,
        doc_tokenizer=data.doc_tokenizer,
        max_query_length=data.max_query_length,
        max_doc_length=data.max_doc_length,
        max_passages=data.max_passages,
    )
    settings, path = configurables.operative(), run_dir / "config.gin"
    before = path.read_text().splitlines() if path.exists() else settings.splitlines()
    changed = [line for line in settings.splitlines() if line not in before and not line.startswith("#")]
    if changed:
        warnings.warn(f"{run_dir} continues with other settings than it had: {'; '.join(changed)}.", stacklevel=2)
    if distributed.is_first():
        with atomic_file(path) as temporary:
            temporary.write_text(settings)


def _first_state(recipe: Recipe, like: TrainState, checkpoints: Checkpoints) -> TrainState:
    """The newest checkpoint, or a fresh state; each array lies on the mesh from the start as its counterpart in `like` says."""
    latest = checkpoints.latest_step()
    if latest is None:
        state = jax.jit(recipe.init, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, like))()
        if not recipe.init_from:
            return state
        return state._replace(params=initial_params(recipe.init_from, state.params, new=recipe.init_new))
    if latest > recipe.num_steps:
        raise InputError(f"the run is at step {latest} already, past train.num_steps = {recipe.num_steps}; raise it.")
    return checkpoints.restore(latest, like)


@contextlib.contextmanager
def _faults_explained(
    recipe: Recipe, data: TrainingSet, checkpoints: Checkpoints, mesh: jax.sharding.Mesh, like: TrainState, step_fn: Any
) -> Iterator[None]:
    """Says which step and which pairs gave no finite number, or what to change where memory is short."""
    try:
        yield
    except faults.NonFiniteError as error:
        checkpoints.wait()
        before = functools.partial(_first_state, recipe, like, checkpoints)
        raise faults.non_finite(error, data, recipe.trained, mesh, before, checkpoints.latest_step()) from None
    except jax.errors.JaxRuntimeError as error:
        if not faults.is_out_of_memory(error):
            raise
        num_bytes = faults.bytes_of_step(step_fn, like, sharding.place(next(data.batches(0)), mesh))
        raise faults.out_of_memory(error, recipe.memory_settings(data.batch_size), mesh, num_bytes) from error


def _on_mesh(batches: Batches, mesh: jax.sharding.Mesh) -> Batches:
    return lambda start: sharding.placed(prefetch(batches(start)), mesh)


def _hooks(
    recipe: Recipe,
    run_dir: Path,
    data: TrainingSet,
    checkpoints: Checkpoints,
    best: Checkpoints,
    start_step: int,
    terminate: StopOnTerminate,
) -> list[Hook]:
    sinks: list[run_log.Sink] = []
    if distributed.is_first():
        sinks = [
            run_log.jsonl_sink(run_dir, start_step),
            run_log.tensorboard_sink(run_dir, start_step),
            run_log.progress_sink(recipe.num_steps, start_step),
        ]
    log = run_log.LogMetrics(
        sinks,
        every_steps=recipe.log_every_steps,
        num_steps=recipe.num_steps,
        pairs_per_step=data.batch_size,
        schedule=recipe.schedule,
        begun=checkpoints.beside(start_step) if start_step else None,
    )
    hooks: list[Hook] = [log]
    if (dev := data.dev) is not None:
        run = Run(
            run_dir,
            start_step,
            recipe.model,
            {},
            data.query_tokenizer,
            data.doc_tokenizer,
            data.max_query_length,
            data.max_doc_length,
            data.max_passages,
        )
        hooks.append(
            EvaluateOnDev(
                lambda params: score_dev(run._replace(params=params), dev),
                every_steps=recipe.evaluate_every_steps,
                num_steps=recipe.num_steps,
                best=best,
                sinks=sinks,
                on_seconds=log.skip_time,
                before=log.unfinished,
            )
        )
    if data.mined and recipe.follow_every_steps:
        hooks.append(FollowNegatives(data.mined, every_steps=recipe.follow_every_steps, sinks=sinks))
    if recipe.profile_steps:
        first, count = recipe.profile_steps
        hooks.append(ProfileSteps(run_dir / "profile", first=first, count=count, num_steps=recipe.num_steps))
    save = SaveCheckpoints(
        checkpoints,
        every_steps=recipe.save_every_steps,
        num_steps=recipe.num_steps,
        beside=log.unfinished,
        asked_to_stop=terminate.reason,
    )
    return [*hooks, save]


def score_dev(run: Run, dev: DevSet) -> dict[str, float]:
    """nDCG@10, MRR@10 and Recall@100 of a run's parameters on the dev set."""
    queries = encode.queries(run, dev.query_store, rows=dev.query_rows)
    store, rows = maxp.passages_of(run, dev.doc_store) or dev.doc_store, dev.doc_rows
    if isinstance(store, PassageStore):
        passages = store.of_docs(rows)
        rows = passages[passages >= 0]
    row_ids = [store.ids[int(row)] for row in rows]
    index, doc_ids = maxp.of_docs(ExactIndex(encode.docs(run, store, rows=rows), row_ids), row_ids)
    query_ids = [dev.query_store.ids[int(row)] for row in dev.query_rows]
    ranking = index.search(queries, k=min(101, len(doc_ids)))
    return metrics_.evaluate(ranking, query_ids, doc_ids, dev.qrels)


def _check_texts_fit(model: DualEncoder, data: TrainingSet) -> None:
    """Whether both towers have vectors for every token and position."""
    for tower in ("query", "doc"):
        model.check_vocabulary(tower, getattr(data, f"{tower}_tokenizer").vocab_size)
        model.check_length(tower, getattr(data, f"max_{tower}_length"))


def _parse_args(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gin_file", action="append", default=[], required=True, help="a recipe; may be given several times")
    parser.add_argument("--run_dir", help="folder of checkpoints and logs; if it holds a run, that run continues")
    parser.add_argument("--dry_run", action="store_true", help="check the recipe and count its parameters, without data")
    processes = parser.add_argument_group("several processes", "the same command on every host, but for --process_id")
    processes.add_argument("--distributed", action="store_true", help="join the processes that a TPU pod, SLURM or MPI started")
    processes.add_argument("--coordinator_address", help="host:port of process 0, where nothing knows it by itself")
    processes.add_argument("--num_processes", type=int)
    processes.add_argument("--process_id", type=int, help="0 to num_processes - 1; process 0 writes the logs")
    processes.add_argument(
        "--lost_after_seconds", type=int, default=60, help="a process that is silent for so long is lost, and the others end"
    )
    return parse_with_settings(parser, argv)


if __name__ == "__main__":
    command.run(main)
