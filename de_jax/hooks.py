"""What happens between the updates of a run, as its recipe asks: logs, evaluations, mining, checkpoints, reasons to end."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

from de_jax.data.sources.training_set import QueriesForBoth, TrainingSet, of_source
from de_jax.evaluation.dev_scores import divergence
from de_jax.evaluation.verdict import DevScores
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
from de_jax.training.run.run_log import Sink
from de_jax.types import Params


def make_hooks(recipe: Recipe, data: TrainingSet, run: Session, best: Checkpoints) -> list[Hook]:
    """The actions between updates of a new or continued run; checkpoints are saved last.

    Args:
        recipe: the run's recipe.
        data: the training data.
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
    log = run.log(sinks, data.source_of)
    hooks: list[Hook] = [log, *([watch] if watch else [])]
    run_at = {name: functools.partial(run_of, recipe, run.run_dir, part) for name, part in data.parts.items()}
    dev_scores = DevScores(data, {name: functools.partial(at, start_step) for name, at in run_at.items()}, run.run_dir)
    evaluated = None
    if data.dev_sets:
        evaluated = EvaluateOnDev(
            dev_scores,
            every_steps=logging.evaluate_every_steps,
            num_steps=num_steps,
            best=best,
            patience=logging.early_stopping_patience,
            begun=run.beside.get("dev"),
            start_step=start_step,
            sinks=[*sinks, dev_scores.keep] if sinks else [],
            paused=log.paused,
        )
        hooks.append(evaluated)
        if not start_step and recipe.initialization.init_from and logging.evaluate_start:
            first = dev_scores(run.state.all_params)
            for sink in sinks:
                sink(0, {f"dev/{name}": value for name, value in first.items()})
            if sinks:
                dev_scores.keep_first()
    aligned = None
    if recipe.alignment:
        run_now = functools.partial(run_of, recipe, run.run_dir, data, start_step)
        value_of = _measure_of_alignment(recipe.alignment, data.for_both, run_now, dev_scores)
        rank, begun = recipe.model.doc.embedding_rank, run.beside.get("alignment")
        aligned = StopWhenAligned(recipe.alignment, value_of, dim=rank, begun=begun, sinks=sinks, paused=log.paused)
        if not start_step:
            aligned.measure(0, run.state.all_params)
        hooks.append(aligned)
    for name, mined in data.all_mined.items():
        mines_in = None
        if negatives.miner and negatives.mine_every_steps:
            mines_in = run.run_dir
            hooks.append(
                MineNegatives(
                    run_at[name],
                    mined,
                    negatives.miner,
                    every_steps=negatives.mine_every_steps,
                    num_steps=num_steps,
                    source=name,
                    paused=log.paused,
                )
            )
        if between := negatives.steps_between_looks():
            own_sinks = [_naming(name, sink) for sink in sinks]
            hooks.append(FollowNegatives(mined, every_steps=between, run_dir=mines_in, sinks=own_sinks))
    save = run.save(
        log,
        beside=lambda: {
            "switches": [],
            **{of_source("switches", name): mined.switches for name, mined in data.all_mined.items()},
            "alignment": aligned.progress() if aligned else None,
            "dev": evaluated.progress() if evaluated else None,
        },
        reasons=[one.reason for one in (aligned, evaluated, watch) if one],
    )
    return [*hooks, *run.profile(), save]


def _naming(source: str, sink: Sink) -> Sink:
    """A sink whose numbers are one source's."""
    return lambda step, scalars: sink(step, {of_source(name, source): value for name, value in scalars.items()})


def _measure_of_alignment(
    alignment: Alignment,
    queries: QueriesForBoth | None,
    run_at: Callable[[Params], Run],
    dev_scores: Callable[[Params], dict[str, float]],
) -> Callable[[Params], float]:
    """What `StopWhenAligned` asks of parameters."""
    measure = alignment.measure
    if measure == KL:
        assert queries is not None  # the trainer has checked it
        return lambda params: divergence(run_at(params), queries)
    return lambda params: dev_scores(params)[measure]


def run_of(recipe: Recipe, run_dir: Path, data: TrainingSet, step: int, params: Params) -> Run:
    """The trained model in the form of `load_run`; `params` are all of a state's."""
    return Run(run_dir, step, recipe.model, recipe.merged(params), data.query, data.doc)
