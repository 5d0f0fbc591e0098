"""Training of language models by the loop of every run; the folder is a generator's, see `doc2query.generator_run`."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import jax

from de_jax.training.hooks.dev_evaluation import EvaluateOnDev, ended_early
from de_jax.training.hooks.faults import Explanation
from de_jax.training.mesh import sharding
from de_jax.training.run import run_folder
from de_jax.training.run.checkpoint import Checkpoints
from de_jax.training.run.fit import Stop
from de_jax.training.run.loop import Training, session
from de_jax.training.run.settings import Logging, Optimization
from de_jax.training.step import grad_norms
from de_jax.training.step.train_step import Initialisable, init_state, update_step
from de_jax.types import Array, Batches, Metrics, Params, TrainState


class LanguageModel(Initialisable, Protocol):
    """A model that `train_language_model` trains, such as `Generator`."""

    def loss(self, params: Params, batch: Any, rng: Array | None = None) -> tuple[Array, Metrics]:
        """The loss of a batch, in nats, and its parts; dropout is on exactly when `rng` is given."""


def train_language_model(
    run_dir: Path,
    model: LanguageModel,
    *,
    batches: Batches,
    batch_size: int,
    optimization: Optimization,
    logging: Logging,
    mesh: jax.sharding.Mesh,
    explanation: Explanation,
    seed: int,
    start_from: Callable[[Params], Params] = lambda fresh: fresh,
    begin: Callable[[], object] = lambda: None,
    dev_loss: Callable[[Params], float] | None = None,
) -> tuple[TrainState, Stop | None]:
    """Trains to the last step, from the newest checkpoint of the folder if there is one.

    The caller holds the folder (`run_folder.only_trainer`) and has described it. Arguments and errors are those of `loop.Training`
    and `loop.session`, beside these.

    Args:
        seed: of fresh parameters and of dropout.
        logging: without `dev_loss`, `evaluate_every_steps` and `early_stopping_patience` have no effect; `collapse_alarm` has none.
        begin: called once the run's state is there, before the first update.
        dev_loss: the loss on held-out texts; the checkpoint with the lowest one is kept in `best/`, and the end is at
            `early_stopping_patience` or the last update.
    """
    init = lambda: init_state(model, optimization.tx, jax.random.key(seed))  # noqa: E731
    abstract = jax.eval_shape(init)
    group_norms = grad_norms.group_norms(abstract.params, logging.grad_norm_groups)
    training = Training(
        init=init,
        start_from=start_from,
        step=update_step(model.loss, optimization.tx(abstract.params), group_norms),
        like=sharding.with_shardings(abstract, sharding.state_shardings(abstract, mesh)),
        mesh=mesh,
        batches=batches,
        batch_size=batch_size,
        optimization=optimization,
        logging=logging,
        explanation=explanation,
    )
    with session(training, run_dir) as begun:
        begin()
        sinks = begun.sinks()
        log = begun.log(sinks)
        if dev_loss is None:
            return begun.fit([log, *begun.profile(), begun.save(log)])
        progress = begun.beside.get("dev")
        if ended := ended_early(progress, logging.early_stopping_patience):
            return begun.state, Stop(ended)
        with contextlib.closing(Checkpoints(run_dir / run_folder.BEST_DIR, keep=1)) as best:
            best.remove_old()
            evaluated = EvaluateOnDev(
                lambda params: {"loss": dev_loss(params)},
                metric="loss",
                every_steps=logging.evaluate_every_steps,
                num_steps=optimization.num_steps,
                best=best,
                patience=logging.early_stopping_patience,
                begun=progress,
                start_step=begun.start_step,
                sinks=sinks,
                paused=log.paused,
            )
            save = begun.save(log, beside=lambda: {"dev": evaluated.progress()}, reasons=[evaluated.reason])
            return begun.fit([log, evaluated, *begun.profile(), save])


def restored(run_dir: Path, step: int | str | None, model: Initialisable) -> tuple[int, Params]:
    """The step and parameters of a language model's checkpoint, on the process's first device."""
    like = run_folder.on_first_device(jax.eval_shape(model.init, jax.eval_shape(lambda: jax.random.key(0))))
    return run_folder.restore_params(run_dir, step, like)
