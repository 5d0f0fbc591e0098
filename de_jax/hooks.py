"""What happens between the updates of a run, as its recipe asks: logs, evaluations, mining, checkpoints, reasons to end."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from de_jax.data.sources.training_set import TrainingSet
from de_jax.evaluation.dev_scores import divergence, score_dev
from de_jax.mining.follow_negatives import FollowNegatives
from de_jax.mining.mining_run import MineNegatives
from de_jax.recipe import Recipe
from de_jax.training.hooks.alignment import KL, Alignment, StopWhenAligned
from de_jax.training.hooks.collapse import WatchForCollapse
from de_jax.training.hooks.dev_evaluation import EvaluateOnDev
from de_jax.training.hooks.preemption import StopOnTerminate
from de_jax.training.hooks.profile import ProfileSteps
from de_jax.training.mesh import distributed
from de_jax.training.run import run_log
from de_jax.training.run.checkpoint import Checkpoints, SaveCheckpoints
from de_jax.training.run.fit import Hook
from de_jax.training.run.run_folder import Run
from de_jax.types import Params, TrainState


def make_hooks(
    recipe: Recipe,
    run_dir: Path,
    data: TrainingSet,
    checkpoints: Checkpoints,
    best: Checkpoints,
    state: TrainState,
    terminate: StopOnTerminate,
) -> list[Hook]:
    """What happens between updates of a run that begins or goes on with `state`; checkpoints are saved last.

    Args:
        recipe: what is asked for.
        run_dir: gets the logs.
        data: what is trained on.
        checkpoints, best: the run's folders of checkpoints.
        state: the first one.
        terminate: whether the run was asked to stop.
    """
    logging, negatives, num_steps = recipe.logging, recipe.negatives, recipe.optimization.num_steps
    start_step, sinks = int(state.step), list[run_log.Sink]()
    beside = checkpoints.beside(start_step) if start_step else {}
    if distributed.is_first():
        sinks = [
            run_log.jsonl_sink(run_dir, start_step),
            run_log.tensorboard_sink(run_dir, start_step),
            run_log.progress_sink(num_steps, start_step),
        ]
    watch = None
    if logging.collapse_alarm:
        logged = run_log.read_metrics(run_dir / run_log.METRICS_FILE) if start_step and sinks else []
        watch = WatchForCollapse(logging.collapse_alarm, logged)
        sinks.append(watch.line)
    log = run_log.LogMetrics(
        sinks,
        every_steps=logging.log_every_steps,
        num_steps=num_steps,
        pairs_per_step=data.batch_size,
        schedule=recipe.optimization.rates(),
        begun=beside.get("log"),
    )
    hooks: list[Hook] = [log, *([watch] if watch else [])]
    timed: dict[str, Any] = {"on_seconds": log.skip_time, "before": log.unfinished}
    run_at = functools.partial(run_of, recipe, run_dir, data)
    if (dev := data.dev) is not None:
        hooks.append(
            EvaluateOnDev(
                lambda params: score_dev(run_at(start_step, params), dev),
                every_steps=logging.evaluate_every_steps,
                num_steps=num_steps,
                best=best,
                sinks=sinks,
                **timed,
            )
        )
    aligned = None
    if recipe.alignment:
        value_of = _measure_of_alignment(recipe.alignment, data, functools.partial(run_at, start_step))
        rank, begun = recipe.model.doc.embedding_rank, beside.get("alignment")
        aligned = StopWhenAligned(recipe.alignment, value_of, dim=rank, begun=begun, sinks=sinks, **timed)
        if not start_step:
            aligned.measure(0, state.params)
        hooks.append(aligned)
    if data.mined and negatives.miner and negatives.mine_every_steps:
        hooks.append(
            MineNegatives(
                run_at,
                data.mined,
                negatives.miner,
                every_steps=negatives.mine_every_steps,
                num_steps=num_steps,
                **timed,
            )
        )
    if data.mined and (between := negatives.steps_between_looks()):
        hooks.append(FollowNegatives(data.mined, every_steps=between, sinks=sinks))
    if logging.profile_steps:
        first, count = logging.profile_steps
        hooks.append(ProfileSteps(run_dir / "profile", first=first, count=count, num_steps=num_steps))
    enders = [one for one in (aligned, watch) if one]
    save = SaveCheckpoints(
        checkpoints,
        every_steps=logging.save_every_steps,
        num_steps=num_steps,
        beside=lambda: {
            "log": log.unfinished(),
            "switches": data.mined.switches if data.mined else [],
            "alignment": aligned.progress() if aligned else None,
        },
        asked_to_stop=lambda step: next(filter(None, [terminate.reason(step), *(one.reason() for one in enders)]), None),
    )
    return [*hooks, save]


def _measure_of_alignment(alignment: Alignment, data: TrainingSet, run_at: Callable[[Params], Run]) -> Callable[[Params], float]:
    """What `StopWhenAligned` asks of parameters."""
    dev, queries, measure = data.dev, data.for_both, alignment.measure
    if measure == KL:
        assert queries is not None  # the trainer has checked it
        return lambda params: divergence(run_at(params), queries)
    assert dev is not None
    return lambda params: score_dev(run_at(params), dev)[measure]


def run_of(recipe: Recipe, run_dir: Path, data: TrainingSet, step: int, params: Params) -> Run:
    """What is trained, as the tools know it."""
    return Run(run_dir, step, recipe.model, params, data.query, data.doc)
