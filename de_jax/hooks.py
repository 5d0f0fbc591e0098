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
from de_jax.training.run import run_log
from de_jax.training.run.checkpoint import Checkpoints
from de_jax.training.run.fit import Hook
from de_jax.training.run.loop import Session
from de_jax.training.run.run_folder import Run
from de_jax.types import Params


def make_hooks(recipe: Recipe, data: TrainingSet, run: Session, best: Checkpoints) -> list[Hook]:
    """What happens between updates of a run that begins or goes on; checkpoints are saved last.

    Args:
        recipe: what is asked for.
        data: what is trained on.
        run: the run with its first state.
        best: its folder for the best checkpoint.
    """
    logging, negatives, num_steps = recipe.logging, recipe.negatives, recipe.optimization.num_steps
    start_step, sinks = run.start_step, run.sinks()
    watch = None
    if logging.collapse_alarm:
        logged = run_log.read_metrics(run.run_dir / run_log.METRICS_FILE) if start_step and sinks else []
        watch = WatchForCollapse(logging.collapse_alarm, logged)
        sinks.append(watch.line)
    log = run.log(sinks)
    hooks: list[Hook] = [log, *([watch] if watch else [])]
    timed: dict[str, Any] = {"on_seconds": log.skip_time, "before": log.unfinished}
    run_at = functools.partial(run_of, recipe, run.run_dir, data)
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
        rank, begun = recipe.model.doc.embedding_rank, run.beside.get("alignment")
        aligned = StopWhenAligned(recipe.alignment, value_of, dim=rank, begun=begun, sinks=sinks, **timed)
        if not start_step:
            aligned.measure(0, run.state.params)
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
    save = run.save(
        log,
        beside=lambda: {
            "switches": data.mined.switches if data.mined else [],
            "alignment": aligned.progress() if aligned else None,
        },
        reasons=[one.reason for one in (aligned, watch) if one],
    )
    return [*hooks, *run.profile(), save]


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
